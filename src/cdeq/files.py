"""Files that are either whole or absent: atomic writes, checksums, and what two descriptions differ in."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY_SUFFIX = ".tmp"
MARK_BYTES = 4  # random, so that two writers never share a temporary file


def atomic_write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file so that a crash at any instant leaves the old content or the new, never a part.

    The content is flushed to the disk before it gets its name, and the name before this returns.
    """
    atomic_write_all({Path(path): content})


def atomic_write_all(contents: dict[Path, bytes]) -> None:
    """The same for several files: all content is on the disk, which may be full, before the first gets its name."""
    temporary: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            name = f"{path.name}.{secrets.token_hex(MARK_BYTES)}{TEMPORARY_SUFFIX}"
            temporary[path] = path.with_name(name)
            with naming(path), open(temporary[path], "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path in contents:
            os.replace(temporary[path], path)
    except BaseException:
        for leftover in temporary.values():
            leftover.unlink(missing_ok=True)
        raise
    for folder in {path.parent for path in contents}:
        _flush_folder(folder)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an error says which file was to be written: that of a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


def atomic_write_text(path: str | Path, content: str) -> None:
    """`atomic_write_bytes` for text: UTF-8, newlines untouched."""
    atomic_write_bytes(path, content.encode())


def remove_leftovers(folder: str | Path, pattern: str) -> None:
    """Delete what interrupted writes of the files that match `pattern` left behind, and nothing else."""
    mark = "[0-9a-f]" * (2 * MARK_BYTES)
    for path in Path(folder).glob(f"{pattern}.{mark}{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def sha256_of_file(path: str | Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differences(
    recorded: dict[str, Any], given: dict[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Where two nested descriptions differ: dotted name -> (recorded, given)."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*recorded, *given}):
        ours, theirs = recorded.get(key), given.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found |= differences(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs:
            found[prefix + key] = (ours, theirs)
    return found


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

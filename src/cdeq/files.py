"""Files that are either whole or absent: atomic writes and checksums."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"


def atomic_write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file so that a crash at any instant leaves the old content or the new, never a part.

    The content is flushed to the disk before it gets its name, and the name before this returns.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def atomic_write_text(path: str | Path, content: str) -> None:
    """`atomic_write_bytes` for text: UTF-8, newlines untouched."""
    atomic_write_bytes(path, content.encode())


def remove_leftovers(folder: str | Path, pattern: str = "*") -> None:
    """Delete what interrupted writes of the files that match `pattern` left behind."""
    for path in Path(folder).glob(f"{pattern}.*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def sha256_of_file(path: str | Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

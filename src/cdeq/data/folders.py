"""Where data sets lie on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def data_folder(given: str | Path | None = None) -> Path:
    """The folder given; else that in CDEQ_DATA; else `cdeq` in the user's cache folder. It need not exist."""
    if given is not None:
        return Path(given).expanduser()
    if named := os.environ.get("CDEQ_DATA"):
        return Path(named).expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is to be ignored.
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "cdeq"


class MissingDataError(FileNotFoundError):
    """Files of a data set are not where they were looked for."""


def require_in_folder(
    name: str, files: Sequence[str], home: str, folder: str | Path | None
) -> None:
    """A `MissingDataError` that says what to do, if `files` of a data set are not in the data folder."""
    place = data_folder(folder)
    missing = [file for file in files if not (place / file).is_file()]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise MissingDataError(
            f"{name} needs the file {missing[0]}{more}, looked for in {place}. Get it from "
            f"{home}. Point --data-dir or CDEQ_DATA at the folder that holds "
            f"{missing[0].partition('/')[0]}/."
        )


def as_path(name: str | Path) -> Path | None:
    """The path that a name is; None if it is a plain name."""
    separators = [mark for mark in (os.sep, os.altsep) if mark]
    if isinstance(name, Path) or name in (".", "..", "~") or any(m in name for m in separators):
        return Path(name).expanduser()
    return None

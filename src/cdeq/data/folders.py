"""Where data sets lie on disk."""

from __future__ import annotations

import os
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

"""Cells: pieces of work kept by the hash of their whole configuration, so that each is done once.

A cell is a folder. Training in it goes on from its last checkpoint; a measurement in it is one JSON file, there or
not there. Tables that need the same teacher find the same folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from cdeq.evaluation import described
from cdeq.files import atomic_write_text
from cdeq_experiments.options import ExperimentError

CONFIG = "cell.json"
RESULT = "result.json"
CLAIM = ".claim"


@dataclass(frozen=True)
class Cells:
    """All cells below one folder."""

    folder: Path

    def place(self, name: str, config: dict[str, Any]) -> Path:
        """The folder of the cell with this configuration, which is written there for people to read."""
        text = json.dumps(described(config), indent=1, sort_keys=True)
        place = self.folder / f"{name}-{digest(config)}"
        place.mkdir(parents=True, exist_ok=True)
        if not (place / CONFIG).exists():
            atomic_write_text(place / CONFIG, text + "\n")
        return place

    def result(self, name: str, config: dict[str, Any], work: Callable[[], Any]) -> Any:
        """What `work()` gives, as plain JSON: from the cell if it was done before, done now otherwise."""
        path = self.place(name, config) / RESULT
        if not path.exists():
            with claimed(path.parent):
                if not path.exists():
                    atomic_write_text(path, json.dumps(work(), indent=1) + "\n")
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ExperimentError(
                f"{path} is damaged ({error}): remove it to do its work again"
            ) from None


def claimed(folder: Path | None) -> AbstractContextManager[object]:
    """The folder for this process alone: another one that needs its work waits, and then finds it done.

    A process that is killed has let go of it.
    """
    return nullcontext() if folder is None else FileLock(folder / CLAIM)


def digest(config: dict[str, Any]) -> str:
    """A name for a configuration that no other one has."""
    text = json.dumps(described(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

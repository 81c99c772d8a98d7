"""What a run shows: a JSON line every few updates, and a progress bar for those who ask for one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from cdeq.files import atomic_write_text

LOG = "log.jsonl"


Progress = Callable[[int, int | None, dict[str, float]], None]
"""Told now and then how far a run is: how many of how many (None if unknown) are done, and what it measures."""


class JsonLines:
    """A log of one JSON object a line, cut back on resuming to what the checkpoint knows of."""

    def __init__(self, path: Path, keep_below: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        kept = [line for line in _whole_lines(path) if line["update"] < keep_below]
        atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, entry: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a log; a line cut short by a kill is left out."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


class ProgressBar:
    """A bar with the current distance (or loss) and the time left; use it as a context manager.

    It is drawn on standard error, and not at all where that is no terminal.
    """

    def __init__(self, title: str):
        console = Console(stderr=True)
        self.bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            transient=True,
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(title, total=None, shown="")

    def __call__(self, done: int, total: int | None, metrics: dict[str, float]) -> None:
        name = "distance" if "distance" in metrics else "loss"
        shown = f"{name} {metrics[name]:.4f}" if name in metrics else ""
        self.bar.update(self.task, completed=done, total=total, shown=shown)

    def __enter__(self) -> ProgressBar:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()


@contextmanager
def shown_progress(progress: bool | Progress | None, title: str) -> Iterator[Progress | None]:
    """Whoever is told of the progress: a bar with this title for True, the function given, or nobody."""
    if callable(progress):
        yield progress
    elif progress:
        with ProgressBar(title) as bar:
            yield bar
    else:
        yield None

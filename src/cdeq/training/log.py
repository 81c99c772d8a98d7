"""What a run shows: a JSON line every few updates, and a progress bar if one is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from cdeq.files import atomic_write_text, naming

LOG = "log.jsonl"


Progress = Callable[[int, int | None, dict[str, float]], None]
"""Called now and then as (done, total, metrics): how far a run is, total None if unknown, and what it measures."""


class JsonLines:
    """A log with one JSON object in each line; on resuming it is cut back to where the checkpoint is."""

    def __init__(self, path: Path, keep_below: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        kept = [line for line in _whole_lines(path) if line["update"] < keep_below]
        atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, entry: dict[str, Any]) -> None:
        with naming(self.path), self.path.open("a") as file:
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

    It is drawn on standard error, if that is a terminal.
    """

    def __init__(self, title: str):
        # Here, not above: `import cdeq` would pay for it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

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
    """What to call with the progress: a bar with this title for True, the function given, or nothing."""
    if callable(progress):
        yield progress
    elif progress:
        with ProgressBar(title) as bar:
            yield bar
    else:
        yield None

"""What every experiment is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdeq.placement import ON_CPU, Placement
from cdeq.training.log import ProgressBar


class ExperimentError(ValueError):
    """An experiment that cannot be run as asked; the message is all that a user needs."""


def silent(line: str) -> None:
    """Says nothing; a function with a name, so that options can be sent to another process."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The scale, where data are, where work is kept and pages go, the seeds, which data sets alone.

    `train_teachers`: also where the zoo has the teacher. `students_only`: without models that are trained for
    themselves. `methods`: these rows alone. `add`: beside what a page has.

    `jobs` are done at a time, each in a process of its own with `threads` threads (default: as many as torch
    chooses, divided among them). `progress` draws bars on standard error; `say` is given a line now and then.
    `placement`: the device of everything, and the precision that models are trained in.
    """

    scale: str
    data: Path | None
    runs: Path
    out: Path
    seeds: tuple[int, ...]
    only: tuple[str, ...] = ()
    train_teachers: bool = False
    students_only: bool = False
    methods: tuple[str, ...] = ()
    add: bool = False
    placement: Placement = ON_CPU
    jobs: int = 1
    threads: int | None = None
    progress: bool = False
    say: Callable[[str], None] = silent

    def bar(self, title: str) -> AbstractContextManager[ProgressBar | None]:
        """A bar with this title, if bars are asked for."""
        return ProgressBar(title) if self.progress else nullcontext()

    def __getstate__(self) -> dict[str, Any]:
        """As it is sent to another process: without bars and lines."""
        return {**vars(self), "progress": False, "say": silent}

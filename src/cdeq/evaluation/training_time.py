"""How long a training took, over all the runs that it was spread on; kept beside its checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cdeq.evaluation.environment import current_commit
from cdeq.evaluation.plain import json_text
from cdeq.files import atomic_write_text
from cdeq.training.checkpoint import CHECKPOINT
from cdeq.training.log import Progress

TRAINING = "training.json"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training took and the commits it ran at; `seconds` is None where they were not recorded."""

    seconds: float | None = 0.0
    commits: tuple[str, ...] = ()
    finished: bool = False

    def after(self, seconds: float | None) -> Training:
        """This training together with what was done before it."""
        known = self.seconds is not None and seconds is not None
        return replace(self, seconds=(self.seconds or 0) + (seconds or 0) if known else None)


def read_training(folder: Path) -> Training:
    """The record beside the checkpoint in `folder`; without a checkpoint everything starts again."""
    if not (folder / CHECKPOINT).exists():
        return Training()
    try:
        kept = json.loads((folder / TRAINING).read_text())
        return Training(
            seconds=kept["seconds"], commits=tuple(kept["commits"]), finished=kept["finished"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Training(seconds=None, commits=("unknown",))


class TrainingClock:
    """Adds the seconds and the commit of this run to the record beside the checkpoint."""

    def __init__(self, folder: Path | None):
        self.folder, self.commit, self.began = folder, current_commit(), time.perf_counter()
        self.before = Training() if folder is None else read_training(folder)

    def keep(self, *, finished: bool = False) -> Training:
        """The record as of now, written; one that is finished stays as it is."""
        if self.before.finished:
            return self.before
        seconds = self.before.seconds
        now = Training(
            seconds=None if seconds is None else seconds + time.perf_counter() - self.began,
            commits=tuple(dict.fromkeys((*self.before.commits, self.commit))),
            finished=finished,
        )
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self.folder / TRAINING, json_text(asdict(now)))
        return now


def timed_training(
    folder: Path | None, train: Callable[[Progress], object], progress: Progress | None = None
) -> Training:
    """What `train(progress)` takes, together with earlier runs of it that were cut short; it must call `progress`."""
    clock = TrainingClock(folder)

    def tick(done: int, total: int | None, metrics: dict[str, float]) -> None:
        clock.keep()
        if progress is not None:
            progress(done, total, metrics)

    train(tick)
    return clock.keep(finished=True)

"""How teachers and students were made: settings, seconds and commits, for the report and recipes.json."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from cdeq.consistency.recipes import recipe_named
from cdeq.demo.task import Task
from cdeq.evaluation.results import current_commit
from cdeq.evaluation.table import seconds_text, style
from cdeq.files import atomic_write_text
from cdeq.training.checkpoint import CHECKPOINT
from cdeq.training.loop import FitConfig

TRAINING = "training.json"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training took, over all the runs it was spread on; `seconds` is None where nobody knows."""

    seconds: float | None = 0.0
    commits: tuple[str, ...] = ()
    finished: bool = False

    def after(self, seconds: float | None) -> Training:
        """This training together with what was done before it."""
        known = self.seconds is not None and seconds is not None
        return replace(self, seconds=(self.seconds or 0) + (seconds or 0) if known else None)


def read_training(folder: Path) -> Training:
    """The record beside the checkpoint in `folder`; without a checkpoint everything starts anew."""
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
    """Adds this run's seconds and commit to the record beside the checkpoint, whenever it is told to."""

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
            atomic_write_text(self.folder / TRAINING, json.dumps(asdict(now), indent=1) + "\n")
        return now


def peak_megabytes() -> float:
    """The most memory that this process has held since it began, or since `begin_peak`.

    Linux's ru_maxrss of a new process is at least what its parent held: there the process's own mark is read.
    """
    own = _status_megabytes("VmHWM")
    if own is not None:
        return own
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def begin_peak() -> float:
    """What this process holds now, which is its peak from here on where the system lets a peak be forgotten."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status_megabytes("VmRSS") or peak_megabytes()


def _status_megabytes(field: str) -> float | None:
    """A field of Linux's /proc/self/status; None elsewhere."""
    with suppress(OSError):
        found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) / 1024 if found else None
    return None


def described(value: Any) -> Any:
    """Settings as plain JSON: a dataclass becomes its fields under the name of its type."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: described(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **named}
    if isinstance(value, dict):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def recipes_of(task: Task, teacher: nn.Module, training: Training) -> dict[str, Any]:
    """All settings of a task's teacher and students, as plain JSON."""
    return {
        "task": task.name,
        "teacher": {
            "class": type(teacher).__name__,
            "config": described(getattr(teacher, "config", None)),
            "training": described(task.teach),
            "train_seconds": training.seconds,
            "commits": list(training.commits),
        },
        "recorded": {"max_steps": task.distill_steps, "tol": task.distill_tol},
        "students": {
            name: {
                "changes": described(plan.changes),
                "recipe": described(recipe_named(name, **plan.changes)),
                "training": described(plan.fit),
            }
            for name, plan in task.plans.items()
        },
    }


def making_notes(task: Task, teacher: nn.Module, training: Training) -> list[str]:
    """How the teacher and each student were trained, a sentence each."""
    notes = [_teacher_note(task, teacher, training)]
    for name, plan in task.plans.items():
        changed = ", ".join(f"{field}={value!r}" for field, value in plan.changes.items())
        how = f"with {changed}, set for this task" if changed else "as it stands"
        notes.append(f"{style(name).name} student: recipe {name} {how}; {_fit_text(plan.fit)}.")
    return notes


def _teacher_note(task: Task, teacher: nn.Module, training: Training) -> str:
    teach = task.teach
    low, high = teach.depths
    parts = [
        _fit_text(teach.fit),
        f"{teach.solver!r} with {low} to {high} steps to a residual of {teach.tol:g}",
        f"gradient {teach.gradient!r}",
    ]
    if teach.penalty:
        parts.append(f"Jacobian penalty {teach.penalty:g}")
    if teach.pretrain:
        parts.append(f"the first {teach.pretrain} updates with {teach.pretrain_depth} plain steps")
    took = (
        "in a time not recorded"
        if training.seconds is None
        else f"in {seconds_text(training.seconds)}"
    )
    where = " and ".join(training.commits)
    return (
        f"Teacher {type(teacher).__name__}: {'; '.join(parts)}. Trained {took} at commit {where}."
    )


def _fit_text(fit: FitConfig) -> str:
    text = f"{fit.updates} updates at a learning rate of {fit.learning_rate:g}"
    if fit.warmup:
        text += f" after {fit.warmup} of warm-up"
    return f"{text}, weight decay {fit.weight_decay:g}" if fit.weight_decay else text

"""A demo's task: a teacher, data and a metric, with all settings of its training and distillation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cdeq.consistency.recipes import Recipe
from cdeq.evaluation import Batch, Metric, Training, described, seconds_text, style
from cdeq.training.loop import FitConfig
from cdeq.training.teaching import TeachConfig


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """How one recipe is run on a task: fields of the recipe that the task changes, and the training."""

    fit: FitConfig
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a demo runs on.

    `build()` makes an untrained teacher, `teaching(update)` gives its batches. `distilling`, `valid` and `test` are
    fixed lists of batches; nothing is trained on those of `test` (a graph shares its nodes, not its test labels).
    """

    name: str
    dataset: str
    build: Callable[[], nn.Module]
    teach: TeachConfig
    teaching: Callable[[int], Batch]
    distilling: list[Batch]
    valid: list[Batch]
    test: list[Batch]
    metric: Metric
    students: dict[str, StudentConfig]
    distill_steps: int = 40
    distill_tol: float = 1e-4


def settings_of(task: Task, teacher: nn.Module, training: Training) -> dict[str, Any]:
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
                "changes": described(config.changes),
                "recipe": described(Recipe.from_name(name, **config.changes)),
                "training": described(config.fit),
            }
            for name, config in task.students.items()
        },
    }


def training_notes(task: Task, teacher: nn.Module, training: Training) -> list[str]:
    """How the teacher and each student were trained, one sentence for each."""
    notes = [_teacher_note(task, teacher, training)]
    for name, config in task.students.items():
        changed = ", ".join(f"{field}={value!r}" for field, value in config.changes.items())
        how = f"with {changed}, set for this task" if changed else "without changes"
        notes.append(f"{style(name).name} student: recipe {name} {how}; {_fit_text(config.fit)}.")
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
    if teach.pretrain_updates:
        parts.append(
            f"the first {teach.pretrain_updates} updates with {teach.pretrain_depth} plain steps"
        )
    took = "in an unknown time"
    if training.seconds is not None:
        took = f"in {seconds_text(training.seconds)}"
    where = " and ".join(training.commits)
    return (
        f"Teacher {type(teacher).__name__}: {'; '.join(parts)}. Trained {took} at commit {where}."
    )


def _fit_text(fit: FitConfig) -> str:
    text = f"{fit.updates} updates at a learning rate of {fit.learning_rate:g}"
    if fit.warmup_updates:
        text += f" after {fit.warmup_updates} of warm-up"
    return f"{text}, weight decay {fit.weight_decay:g}" if fit.weight_decay else text

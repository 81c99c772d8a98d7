"""Teachers and students of a task: trained, resumed where they were cut short, and timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from cdeq.consistency.distillation import distill
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.student import Student
from cdeq.demo.task import Task
from cdeq.evaluation import Equilibria, parameter_count
from cdeq.evaluation import Training, TrainingClock
from cdeq.evaluation import TeacherResult
from cdeq.gradients import Gradient, Phantom, Unrolled
from cdeq.models.learned_solvers import LearnedSolver, SolverLossWeights, SolverObjective
from cdeq.solvers import Picard
from cdeq.training.log import Progress
from cdeq.training.loop import FitConfig, fit
from cdeq.training.teaching import TeachConfig, teach
from cdeq.trajectories import TrajectoryBatch, TrajectoryStore
from cdeq_experiments.cells import claimed


def timed(
    folder: Path | None, progress: Progress | None, run: Callable[[Progress], None]
) -> Training:
    """Train by `run(progress)`, the seconds of all its runs kept beside the checkpoint in `folder`."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with claimed(folder):
        clock = TrainingClock(folder)

        def tick(done: int, total: int, metrics: dict[str, float]) -> None:
            clock.keep()
            if progress is not None:
                progress(done, total, metrics)

        run(tick)
        return clock.keep(finished=True)


Built = TypeVar("Built")


def built(build: Callable[[], Built], seed: int) -> Built:
    """What `build()` makes with the random numbers of a seed; the caller's stay as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def train_teacher(
    task: Task, folder: Path | None, seed: int, progress: Progress | None
) -> tuple[nn.Module, Training]:
    """A trained teacher, resumed from `folder` if it was cut short, and what its training took in all."""
    teacher = built(task.build, seed)
    identity = {
        "task": task.name,
        "seed": seed,
        "teach": repr(task.teach),
        "model": getattr(teacher, "config", None),
    }
    training = timed(
        folder,
        progress,
        lambda tick: teach(
            teacher, task.teaching, task.teach, folder=folder, identity=identity, progress=tick
        ),
    )
    return teacher.requires_grad_(False), training


SOLVER_DEPTH = 6
"""Steps that a learned solver is trained for."""


def train_solver(
    solver: LearnedSolver,
    teacher: nn.Module,
    batches: TrajectoryStore | list[TrajectoryBatch],
    config: FitConfig,
    *,
    weights: SolverLossWeights,
    folder: Path,
    seed: int,
    progress: Progress | None,
) -> Training:
    """Train a learned solver of the teacher in place, on recorded equilibria, one batch after another."""
    training = timed(
        folder,
        progress,
        lambda tick: fit(
            SolverObjective(solver, teacher, SOLVER_DEPTH, weights).train(),
            lambda update: batches[update % len(batches)],
            config,
            folder=folder,
            identity={"solver": solver.config, "depth": SOLVER_DEPTH, "seed": seed},
            progress=tick,
        ),
    )
    solver.eval().requires_grad_(False)
    return training


PHANTOM_STEPS = 5
"""Evaluations that a few-step model's gradient reaches back through."""


def few_step_teaching(config: TeachConfig, steps: int) -> TeachConfig:
    """How to train a model that is good after `steps` Picard steps: with the phantom gradient of the last five.

    Up to five steps that gradient reaches back to the start: it is the unrolled one.
    """
    gradient: Gradient = Unrolled(steps=steps)
    if steps > PHANTOM_STEPS:
        gradient = Phantom(steps=PHANTOM_STEPS, damping=1.0)
    before = max(steps - PHANTOM_STEPS, 1)
    return replace(config, solver=Picard(), gradient=gradient, tol=0.0, depths=(before, before))


def distil_student(
    task: Task, teacher: nn.Module, name: str, folder: Path | None, seed: int, progress: bool
) -> Student:
    """The task's student by a recipe."""
    plan = task.plans[name]
    return distill(
        teacher,
        task.distilling,
        recipe=Recipe.from_name(name, **plan.changes),
        fit=plan.fit,
        folder=folder,
        max_steps=task.distill_steps,
        tol=task.distill_tol,
        seed=seed,
        progress=progress,
    )


def teacher_result(
    task: Task, model: nn.Module, known: Equilibria, training: Training
) -> TeacherResult:
    """A trained model at its equilibrium."""
    return TeacherResult(
        dataset=task.dataset,
        name=type(model).__name__,
        parameters=parameter_count(model),
        metric_name=task.metric.name,
        metric=known.metric,
        higher_is_better=task.metric.higher_is_better,
        steps=known.steps,
        residual=known.residual,
        train_seconds=training.seconds,
    )

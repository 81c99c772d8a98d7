"""The demo: train a small teacher, distil it with both recipes, compare everything in one table."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from cdeq.consistency.distill import distill
from cdeq.consistency.recipes import RECIPES, recipe_named
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import check_contract
from cdeq.experiments.compare import (
    compare,
    parameter_count,
    reference,
    solver_method,
    student_method,
)
from cdeq.experiments.plots import plot_results
from cdeq.experiments.report import write_report
from cdeq.experiments.results import (
    Results,
    TeacherResult,
    current_command,
    current_commit,
    current_hardware,
)
from cdeq.experiments.task import Task
from cdeq.solvers import Anderson, Broyden, Picard, Solver
from cdeq.training.log import Progress
from cdeq.training.teach import teach

ProgressFactory = Callable[[str], AbstractContextManager[Progress]]


def train_teacher(
    task: Task, folder: Path | None, seed: int, progress: Progress | None
) -> tuple[nn.Module, float]:
    """A trained teacher and the seconds its training took, resumed from `folder` if it was cut short."""
    began = time.perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        teacher = task.build()
    identity = {
        "task": task.name,
        "seed": seed,
        "teach": repr(task.teach),
        "model": getattr(teacher, "config", None),
    }
    teach(teacher, task.teaching, task.teach, folder=folder, identity=identity, progress=progress)
    return teacher.requires_grad_(False), time.perf_counter() - began


def distil_student(
    task: Task, teacher: nn.Module, name: str, folder: Path | None, seed: int, progress: bool
) -> Student:
    """The task's student by a recipe."""
    plan = task.plans[name]
    return distill(
        teacher,
        task.distilling,
        recipe=recipe_named(name, **plan.changes),
        fit_config=plan.fit,
        folder=folder,
        max_steps=task.distill_steps,
        tol=task.distill_tol,
        seed=seed,
        progress=progress,
    )


def run_demo(
    task: Task,
    folder: Path,
    *,
    seed: int = 0,
    progress: ProgressFactory,
    say: Callable[[str], None],
) -> Results:
    """Everything the demo makes, in `folder`: students, results.json, plots, report.html."""
    with progress(f"train teacher ({task.name})") as bar:
        teacher, seconds = train_teacher(task, folder / "teacher", seed, bar)
    say(f"teacher trained: {type(teacher).__name__}, {seconds:.0f} s")
    students: dict[str, Student] = {}
    for name in RECIPES:
        began = time.perf_counter()
        students[name] = distil_student(
            task, teacher, name, folder / f"distil-{name}", seed, progress=True
        )
        students[name].save(folder / f"student-{name}")
        say(f"student distilled: {name}, {time.perf_counter() - began:.0f} s")

    model = check_contract(teacher)
    known = reference(model, task.test, task.metric)
    solvers: dict[str, Solver] = {"picard": Picard(), "anderson": Anderson(), "broyden": Broyden()}
    methods = {name: solver_method(model, solver) for name, solver in solvers.items()}
    methods |= {name: student_method(student) for name, student in students.items()}
    rows = compare(
        methods,
        model,
        task.test,
        known.states,
        task.metric,
        dataset=task.dataset,
        seed=seed,
    )
    results = Results(
        experiment=f"demo-{task.name}",
        scale="tiny",
        commit=current_commit(),
        command=current_command(),
        hardware=current_hardware(),
        teachers=(
            TeacherResult(
                dataset=task.dataset,
                name=type(teacher).__name__,
                parameters=parameter_count(teacher),
                metric_name=task.metric.name,
                metric=known.metric,
                higher_is_better=task.metric.higher_is_better,
                steps=known.steps,
                residual=known.residual,
                train_seconds=seconds,
            ),
        ),
        rows=tuple(rows),
    )
    results.to_json(folder / "results.json")
    figures = plot_results(results, task.dataset, folder)
    write_report(results, folder / "report.html", figures={task.dataset: figures})
    return results

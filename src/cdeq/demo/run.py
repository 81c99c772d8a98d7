"""The demo: train a small teacher, distil it with both recipes, compare everything in one table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from torch import nn

from cdeq.consistency.recipes import RECIPES
from cdeq.consistency.student import Student
from cdeq.demo.task import Task
from cdeq.equilibrium.contract import check_contract
from cdeq.evaluation.certified import CertifiedComparison, compare_certified
from cdeq.evaluation.comparison import (
    SOLVERS,
    compare,
    find_equilibria,
    solver_method,
    student_method,
)
from cdeq.evaluation.provenance import Training, making_notes, recipes_of
from cdeq.evaluation.results import (
    Results,
    current_command,
    current_commit,
    current_hardware,
)
from cdeq.evaluation.table import seconds_text, style
from cdeq.files import atomic_write_text
from cdeq.training.log import ProgressBar
from cdeq_experiments.plots import plot_results
from cdeq_experiments.report import write_report
from cdeq_experiments.train import distil_student, teacher_result, train_teacher

CERTIFIED = "anchored"
"""The recipe whose certified solve the demo shows: the default one."""


def measure_all(
    task: Task, teacher: nn.Module, students: dict[str, Student], seed: int, training: Training
) -> Results:
    """Every solver and student on the test data, in one run."""
    model = check_contract(teacher)
    known = find_equilibria(model, task.test, task.metric)
    methods = {name: solver_method(model, solver) for name, solver in SOLVERS.items()}
    methods |= {name: student_method(student) for name, student in students.items()}
    rows = compare(
        methods, model, task.test, known.states, task.metric, dataset=task.dataset, seed=seed
    )
    return Results(
        experiment=f"demo-{task.name}",
        scale="tiny",
        commit=current_commit(),
        command=current_command(),
        hardware=current_hardware(),
        teachers=(teacher_result(task, teacher, known, training),),
        rows=tuple(rows),
    )


def run_demo(
    task: Task,
    folder: Path,
    *,
    seed: int = 0,
    progress: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Results, CertifiedComparison]:
    """Everything the demo makes, in `folder`: students, results.json, recipes.json, plots, report.html.

    `progress` draws bars on standard error; `say` is given a line now and then.
    """
    with ProgressBar(f"train teacher ({task.name})") if progress else nullcontext() as bar:
        teacher, training = train_teacher(task, folder / "teacher", seed, bar)
    say(f"teacher trained: {type(teacher).__name__}, {seconds_text(training.seconds)}")
    students: dict[str, Student] = {}
    for name in RECIPES:
        began = time.perf_counter()
        students[name] = distil_student(
            task, teacher, name, folder / f"distil-{name}", seed, progress
        )
        students[name].save(folder / f"student-{name}")
        say(f"student distilled: {name}, {time.perf_counter() - began:.0f} s")

    results = measure_all(task, teacher, students, seed, training)
    certified = compare_certified(students[CERTIFIED], task.test[0][0])
    results.to_json(folder / "results.json")
    recipes = recipes_of(task, teacher, training) | {"certified": {CERTIFIED: asdict(certified)}}
    atomic_write_text(folder / "recipes.json", json.dumps(recipes, indent=1) + "\n")
    notes = [certified_line(certified), *making_notes(task, teacher, training)]
    figures = plot_results(results, task.dataset, folder)
    write_report(results, folder / "report.html", figures={task.dataset: figures}, notes=notes)
    return results, certified


def certified_line(found: CertifiedComparison) -> str:
    """The certified solve of the demo's student, in one line."""
    return f"{style(CERTIFIED).name} student, first test batch, {found.text()}."

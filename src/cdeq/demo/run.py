"""The demo: train a small teacher, distil it with four recipes, compare everything in one table."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from filelock import FileLock
from torch import nn

from cdeq.consistency.certificate import fewest_samples
from cdeq.consistency.distillation import distill
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.student import Student
from cdeq.demo.task import Task, settings_of, training_notes
from cdeq.equilibrium.contract import check_contract
from cdeq.evaluation import (
    SOLVERS,
    CertifiedComparison,
    Results,
    Training,
    compare,
    compare_certified,
    find_equilibria,
    json_text,
    plot_certificate,
    plot_results,
    provenance,
    seconds_text,
    solver_method,
    student_method,
    style,
    teacher_result,
    timed_training,
    true_distances,
)
from cdeq.evaluation.findings import findings
from cdeq.evaluation.page import write_page
from cdeq.files import atomic_write_text
from cdeq.placement import ON_CPU, Placement, beside
from cdeq.training.log import Progress, shown_progress
from cdeq.training.teaching import teach

CERTIFIED = "corrected"
"""The recipe whose certified solve the demo shows: the default one."""
CONFIDENCE = 0.95
"""Of the bound that is drawn."""


def train_teacher(
    task: Task,
    folder: Path | None,
    seed: int,
    progress: bool | Progress | None = None,
    placement: Placement = ON_CPU,
) -> tuple[nn.Module, Training]:
    """A trained teacher, resumed from `folder` if it was cut short, and what its training took in all."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        teacher = task.build()
    identity = {
        "task": task.name,
        "seed": seed,
        "teach": repr(task.teach),
        "model": getattr(teacher, "config", None),
    }

    def train(tick: Progress) -> None:
        teach(
            teacher,
            task.teaching,
            task.teach,
            folder=folder,
            identity=identity,
            device=placement.device,
            precision=placement.precision,
            progress=tick,
        )

    with shown_progress(progress, f"train teacher ({task.name})") as told:
        training = timed_training(folder, train, told)
    return teacher.requires_grad_(False), training


def distil_student(
    task: Task,
    teacher: nn.Module,
    name: str,
    folder: Path | None,
    seed: int,
    progress: bool,
    placement: Placement = ON_CPU,
) -> Student:
    """The task's student by the recipe of this name."""
    config = task.students[name]
    return distill(
        teacher,
        task.distilling,
        recipe=Recipe.from_name(name, **config.changes),
        fit=config.fit,
        folder=folder,
        max_steps=task.distill_steps,
        tol=task.distill_tol,
        seed=seed,
        precision=placement.precision,
        progress=progress,
    )


def compare_all(
    task: Task, teacher: nn.Module, students: dict[str, Student], seed: int, training: Training
) -> Results:
    """Every solver and student on the test data, in one run, in single precision."""
    model, test = check_contract(teacher), beside(teacher, task.test)
    found = find_equilibria(model, test, task.metric)
    methods = {name: solver_method(model, solver) for name, solver in SOLVERS.items()}
    methods |= {name: student_method(student) for name, student in students.items()}
    rows = compare(methods, model, test, found.states, task.metric, dataset=task.dataset, seed=seed)
    return Results(
        experiment=f"demo-{task.name}",
        scale="tiny",
        teachers=(teacher_result(task.dataset, model, task.metric, found, training.seconds),),
        rows=tuple(rows),
        **provenance(),
    )


def run_demo(
    task: Task,
    folder: Path,
    *,
    seed: int = 0,
    placement: Placement = ON_CPU,
    progress: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Results:
    """Everything the demo makes, in `folder`: students, results.json, recipes.json, plots, report.html.

    `progress` draws bars on standard error; `say` is given a line now and then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(
        folder / ".lock"
    ):  # a second demo in the same folder waits, and finds the work done
        teacher, training = train_teacher(task, folder / "teacher", seed, progress, placement)
        say(f"teacher trained: {type(teacher).__name__}, {seconds_text(training.seconds)}")
        students: dict[str, Student] = {}
        for name in task.students:
            began = time.perf_counter()
            students[name] = distil_student(
                task, teacher, name, folder / f"distil-{name}", seed, progress, placement
            )
            students[name].save(folder / f"student-{name}")
            say(f"student distilled: {name}, {time.perf_counter() - began:.0f} s")

        results = compare_all(task, teacher, students, seed, training)
        certified = compare_certified(students[CERTIFIED], beside(teacher, task.test[0][0]))
        said = (*findings(results, task.dataset), certified_line(certified))
        results = replace(results, findings=said)
        results.to_json(folder / "results.json")
        settings = settings_of(task, teacher, training)
        settings["certified"] = {CERTIFIED: asdict(certified)}
        atomic_write_text(folder / "recipes.json", json_text(settings))
        plots = draw_certificate(students[CERTIFIED], task, folder)
        plots += plot_results(results, task.dataset, folder)
        notes = training_notes(task, teacher, training)
        write_page(results, folder / "report.html", plots={task.dataset: plots}, notes=notes)
    return results


def draw_certificate(student: Student, task: Task, folder: Path) -> list[Path]:
    """What a solve knows of its error beside the true distance, as certificate.png and .svg.

    Where batches have samples, and enough of them, the bound is calibrated, on the validation data.
    """
    if student.batched and sum(len(y) for _, y in task.valid) >= fewest_samples(CONFIDENCE):
        student.calibrate(task.valid, confidence=CONFIDENCE)
    x = beside(student, task.test[0][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of inputs unlike the others: the truth is drawn beside
        result, true = student.solve(x), true_distances(student, x)
    paths = [folder / f"certificate.{kind}" for kind in ("png", "svg")]
    return [plot_certificate(result, path, distances=true) for path in paths]


def certified_line(found: CertifiedComparison) -> str:
    """The certified solve of the demo's student, in one line."""
    return f"{style(CERTIFIED).name} student, first test batch, {found.text()}."

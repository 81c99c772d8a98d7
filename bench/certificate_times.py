"""What certified solving costs: against Anderson's method alone, with rows left out, and inside a training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch import nn

import cdeq
from cdeq.consistency.student import Student
from cdeq.data import MissingDataError
from cdeq.data.image_sets import load_images
from cdeq.data.images import Images
from cdeq.demo import tasks
from cdeq.demo.run import distil_student, train_teacher
from cdeq.evaluation import Batch, Metric, accuracy, compare_certified, median_seconds
from cdeq.training.images import ImageBatches, in_order
from cdeq_experiments.configs.images import CIFAR_10
from certificate_cases import Case
from certificate_coverage import TOLERANCES


def solving(case: Case, repeats: int) -> list[dict[str, Any]]:
    """To the same residual as Anderson's method alone: ratios of time and evaluations, and who finished."""
    rows = []
    for tol in TOLERANCES:
        found = compare_certified(
            case.student, case.test[0], tol=tol, max_steps=500, repeats=repeats
        )
        rows.append(
            {
                "tol": tol,
                "time_ratio": found.student_seconds / found.solver_seconds,
                "cpu_ratio": found.student_cpu_seconds / found.solver_cpu_seconds,
                "seconds": [found.student_seconds, found.solver_seconds],
                "evaluations": [found.student_evaluations, found.solver_evaluations],
                "converged": [found.student_converged, found.solver_converged],
                "by_student": found.finished_by_student,
            }
        )
    return rows


def compaction(repeats: int, width: int = 256, batch: int = 128) -> dict[str, Any]:
    """A batch of which a tenth needs about five times the evaluations: time with rows left out over time without."""
    g = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(width, width, generator=g))
    rate = torch.full((batch, 1, 1), 0.3)
    rate[: batch // 10] = 0.85
    context = {"x": 0.1 * torch.randn(batch, 32, width, generator=g), "rate": rate}
    model = cdeq.from_functions(
        lambda z, c: c["rate"] * torch.tanh(z @ q) + c["x"],
        start=lambda c: torch.zeros_like(c["x"]),
    )
    given = {"tol": 1e-4, "max_steps": 400}
    works: dict[str, Callable[[], object]] = {
        "compact": lambda: cdeq.solve_model(model, context, **given),
        "whole": lambda: cdeq.solve_model(model, context, compact=False, **given),
    }
    seconds = median_seconds(works, repeats)
    steps = cdeq.solve_model(model, context, **given).steps.double()
    hard, easy = float(steps[: batch // 10].mean()), float(steps[batch // 10 :].mean())
    return {"time_ratio": seconds["compact"] / seconds["whole"], "evaluations": [easy, hard]}


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A training that goes on: the model as it is, a student of that, what is to come, and what to score it by."""

    model: nn.Module
    student: Student
    teach: cdeq.TeachConfig
    batch_at: Callable[[int], Batch]
    test: list[Batch]
    metric: Metric


def training(repeats: int) -> list[dict[str, Any]]:
    """Trainings that go on, with Anderson's method and with a student of the model as it was inside.

    Both begin with the same weights and see the same batches. The student knows nothing of the updates since. At every
    tenth update both methods solve the next batch with the weights of that moment, in turns.
    """
    rows = []
    for name, make in LESSONS.items():
        try:
            lesson = make()
        except MissingDataError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        solvers = {"anderson": cdeq.Anderson(), "student": lesson.student.as_solver()}
        rows += [
            {"task": name, "solver": one, **taught(lesson, one, solvers, repeats)}
            for one in solvers
        ]
    return rows


def demo_lesson() -> Lesson:
    """The second half of the training of the images demo, whose first half is shallow for the most part."""
    task = tasks.images(0)
    half = task.teach.fit.updates // 2
    teach = replace(task.teach, fit=replace(task.teach.fit, updates=half))
    teacher, _ = train_teacher(replace(task, teach=teach), None, 0)
    return Lesson(
        model=teacher,
        student=distil_student(task, teacher, "corrected", None, 0, False),
        teach=teach,
        batch_at=lambda update: task.teaching(half + update),
        test=task.test,
        metric=task.metric,
    )


def zoo_lesson(updates: int = 40, tested: int = 1024) -> Lesson:
    """The model of CIFAR-10 trained on, at a tenth of its learning rate."""
    student, images = cdeq.load_pretrained(CIFAR_10.pretrained), load_images("cifar-10")
    teach, standard, batch = CIFAR_10.teacher.teaching, images.standard(), CIFAR_10.data.batch
    slower = {"learning_rate": teach.fit.learning_rate / 10, "warmup_updates": 0}
    test = Images(pixels=images.test.pixels[:tested], labels=images.test.labels[:tested])
    return Lesson(
        model=student.methods.model,
        student=student,
        teach=replace(teach, fit=replace(teach.fit, updates=updates, **slower)),
        batch_at=ImageBatches(images=images.train, standard=standard, batch=batch).at,
        test=in_order(test, standard, batch),
        metric=accuracy(),
    )


LESSONS = {"demo images": demo_lesson, "zoo CIFAR-10": zoo_lesson}


def taught(lesson: Lesson, name: str, solvers: dict[str, Any], repeats: int) -> dict[str, Any]:
    """What a training took whose equilibria are found by one of the solvers, and what it led to."""
    model: Any = copy.deepcopy(lesson.model).requires_grad_(True)
    teach, seen = lesson.teach, list[dict[str, float]]()
    forward: dict[str, list[float]] = {one: [] for one in solvers}

    def solve(solver: Any, x: Any) -> object:
        context = model.inject(x)
        return cdeq.solve_model(model, context, solver, tol=teach.tol, max_steps=max(teach.depths))

    def watch(done: int, total: int, metrics: dict[str, float]) -> None:
        seen.append(metrics)
        if done % 10 == 1:
            model.eval()
            x, _ = lesson.batch_at(done)
            works = {one: partial(solve, solver, x) for one, solver in solvers.items()}
            for one, took in median_seconds(works, repeats).items():
                forward[one].append(took)
            model.train()

    fit = replace(teach.fit, log_every=1)
    config = replace(teach, fit=fit, solver=solvers[name], pretrain_updates=0)
    cdeq.teach(model, lesson.batch_at, config, progress=watch)
    return {
        "updates": fit.updates,
        "evaluations": mean(one["evaluations"] for one in seen),
        "last_evaluations": mean(one["evaluations"] for one in seen[-10:]),
        "residual": mean(one["residual"] for one in seen),
        "forward": {one: median(took) for one, took in forward.items()},
        "score": test_score(model, lesson),
    }


@torch.no_grad()
def test_score(model: Any, lesson: Lesson) -> float:
    """At equilibria that Anderson's method finds, whatever the training used."""
    parts = []
    for x, y in lesson.test:
        context = model.inject(x)
        found = cdeq.solve_model(model, context, tol=1e-4, max_steps=100)
        parts.append(lesson.metric.part(model.readout(found.state, context), y))
    return lesson.metric.score(parts)

"""Figures that are no grid: residuals against steps, cost, overhead of trajectories, certified solving."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from cdeq.consistency.distillation import distill
from cdeq.equilibrium.contract import is_batched
from cdeq.equilibrium.memory import Memory, Segment
from cdeq.equilibrium.states import relative_distance
from cdeq.evaluation import compare_certified
from cdeq.evaluation import (
    SOLVERS,
    Method,
    learned_solver_method,
    parameter_count,
    solver_method,
    student_method,
)
from cdeq.evaluation import begin_peak, peak_megabytes
from cdeq.evaluation import Results, Row, provenance
from cdeq.solvers import Anderson, solve_model
from cdeq.training.log import LOG
from cdeq.trajectories.capture import measure_residual
from cdeq_experiments.figure_pages import (
    write_certified,
    write_cost,
    write_overhead,
    write_residuals,
)
from cdeq_experiments.graph_cells import GraphCell
from cdeq_experiments.graph_rivals import train_ignn_solver
from cdeq_experiments.graph_subject import GraphSubject
from cdeq_experiments.graph_tasks import SCALES as GRAPHS
from cdeq_experiments.grid_run import subjects_of, teacher_score
from cdeq_experiments.grids import KINDS
from cdeq_experiments.image_cells import ImageCell
from cdeq_experiments.model_cells import ModelCell, trained_hyperdeq
from cdeq_experiments.options import Options
from cdeq_experiments.subjects import (
    Subject,
    Teacher,
    recorded,
    student_config,
    teacher_result,
    trained_student,
)
from cdeq_experiments.text_cells import TextCell

STEPS = tuple(range(1, 13))
PROBED = {"text": 6, "images": 2}
"""Test batches that residuals are measured on."""
TOLERANCES = (1e-2, 1e-3, 1e-4)
RECIPES = ("paper", "anchored")


def probes(subject: Subject, teacher: Teacher) -> Iterator[Any]:
    """Some test inputs; a text's segments with the memory that the converged teacher leaves."""
    if isinstance(subject, TextCell):
        memory: Memory = ()
        for tokens, _ in subject.test_segments[: PROBED["text"]]:
            x = Segment(tokens, memory)
            yield x
            context = teacher.inject(x)
            z = solve_model(teacher, context, Anderson(), tol=1e-4, max_steps=60).state
            memory = teacher.remember(z, context)
    elif isinstance(subject, ImageCell):
        for images, _ in islice(subject.data.test(), PROBED["images"]):
            yield images
    else:
        yield subject.timed_input()


def learned_solver(subject: Subject, teacher: Teacher) -> tuple[str, Method]:
    """The learned solver that the paper compares with, and its name."""
    if isinstance(subject, ModelCell):
        solver: Any = trained_hyperdeq(subject, teacher, 0)[0]
        return "hyperdeq", learned_solver_method(teacher, solver)
    assert isinstance(subject, GraphSubject)
    store, _ = recorded(subject, teacher, "endpoint")
    folder = GraphCell(plan=subject.plan, seed=0, options=subject.options).place("figure-solver")
    with subject.bar("IGNN-Solver") as bar:
        solver, _ = train_ignn_solver(teacher, store, subject.plan, folder, 0, bar)
    return "ignn_solver", learned_solver_method(teacher, solver)


def _named(name: str, subject: Subject) -> dict[str, Any]:
    """What makes a figure's measurement: students, numbers of steps."""
    return {
        "figure": name,
        "students": {n: subject.students[n] for n in RECIPES},
        "fit": {n: subject.student_fit(n) for n in RECIPES},
        "steps": STEPS,
    }


def _finished(
    experiment: str, options: Options, subjects: list[Subject], rows: list[Row]
) -> Results:
    return Results(
        experiment=experiment,
        scale=options.scale,
        **provenance(),
        teachers=tuple(teacher_result(subject, teacher_score(subject)) for subject in subjects),
        rows=tuple(rows),
    )


def _row(subject: Subject, method: str, steps: int | None, **fields: Any) -> Row:
    usual = dict.fromkeys(("metric", "distance", "residual", "seconds", "f_equivalents"))
    whole: dict[str, Any] = {**usual, "seed": 0, "parameters": 0, **fields}
    return Row(dataset=subject.plan.title, method=method, steps=steps, **whole)


# Residuals.


@torch.no_grad()
def residual_curve(
    subject: Subject, teacher: Teacher, method: Method
) -> dict[int, tuple[float, float]]:
    """Mean residual |f(z) - z| / |z| and distance to the equilibrium after each number of steps."""
    found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {k: [] for k in STEPS}
    for x in probes(subject, teacher):
        context = teacher.inject(x)
        star = solve_model(teacher, context, Anderson(), tol=1e-5, max_steps=100).state
        for k, z in enumerate(method.states(x, max(STEPS))):
            if k in found:
                gap = relative_distance(z, star, is_batched(teacher))
                found[k].append((measure_residual(teacher, z, context), gap))
    return {
        k: (
            float(torch.cat([r for r, _ in parts]).mean()),
            float(torch.cat([d for _, d in parts]).mean()),
        )
        for k, parts in found.items()
    }


def residuals(options: Options) -> Results:
    """The relative residual against steps: solver, learned solver, both recipes; the paper's Figure 2."""
    subjects = list(subjects_of(options, KINDS).values())
    if len(GRAPHS[options.scale]) > 1 and any(isinstance(s, GraphSubject) for s in subjects):
        second = GraphSubject(plan=GRAPHS[options.scale][1], options=options)
        second.plan.require(options.data)
        subjects.append(second)
    rows: list[Row] = []
    for subject in subjects:
        teacher_score(subject)
        found = subject.result(
            "figure", _named("residuals", subject), partial(_residuals_of, subject)
        )
        rows += [
            _row(subject, method, int(k), residual=r, distance=d)
            for method, curve in found.items()
            for k, (r, d) in curve.items()
        ]
    results = _finished("residuals", options, subjects, rows)
    write_residuals(results, options.out)
    return results


def _residuals_of(subject: Subject) -> dict[str, dict[int, tuple[float, float]]]:
    teacher, _ = subject.trained_teacher()
    methods = {"anderson": solver_method(teacher, SOLVERS["anderson"])}
    methods |= dict([learned_solver(subject, teacher)])
    for name in RECIPES:
        student, _ = trained_student(subject, teacher, subject.students[name], 0)
        methods[name] = student_method(student)
    subject.say("residuals")
    return {name: residual_curve(subject, teacher, method) for name, method in methods.items()}


# Cost.


def cost(options: Options) -> Results:
    """Training time of the teacher and of its students, recording included; the paper's Table 7."""
    subjects = list(subjects_of(options, KINDS).values())
    rows = []
    for subject in subjects:
        teacher_score(subject)
        teacher, _ = subject.trained_teacher()
        for name in RECIPES:
            student, training = trained_student(subject, teacher, subject.students[name], 0)
            rows.append(
                _row(
                    subject,
                    name,
                    None,
                    train_seconds=training.seconds,
                    parameters=parameter_count(student),
                )
            )
    results = _finished("cost", options, subjects, rows)
    write_cost(results, options.out)
    return results


# Overhead.


def overhead(options: Options) -> Results:
    """What trajectories cost: storage, generation, points, an update, peak memory; the paper's Table 8."""
    subjects = list(subjects_of(options, KINDS).values())
    rows = []
    for subject in subjects:
        teacher_score(subject)
        for name in RECIPES:
            found = subject.result(
                f"figure-{name}",
                _named("overhead", subject),
                partial(_in_new_process, _overhead_of, subject, name),
            )
            rows.append(_row(subject, name, None, figures=found))
    results = _finished("overhead", options, subjects, rows)
    write_overhead(results, options.out)
    return results


def _in_new_process(work: Callable[..., Any], subject: Subject, *arguments: Any) -> Any:
    """In a fresh process, whose peak memory is its own."""
    threads = partial(torch.set_num_threads, torch.get_num_threads())
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=threads) as pool:
        return pool.submit(work, subject.quiet(), *arguments).result()


def _overhead_of(subject: Subject, name: str) -> dict[str, float]:
    plan = subject.students[name]
    teacher, _ = subject.trained_teacher()
    trained_student(subject, teacher, plan, 0)
    store, seconds = recorded(subject, teacher, plan.whole.store_mode)
    before = begin_peak()
    fit_config = replace(subject.student_fit(plan.recipe), updates=4, warmup=0)
    distill(
        teacher,
        store,
        recipe=plan.whole,
        fit=fit_config,
        task_loss=subject.task_loss(teacher),
    )
    peak = peak_megabytes()
    return {
        "storage, MB a batch": stored_megabytes(store.folder) / len(store),
        "generation, s a batch": seconds / len(store),
        "points": float(store.manifest.steps + 1 if plan.whole.store_mode == "full" else 1),
        "update, s": update_seconds(subject, name),
        "memory of updates, MB": peak - before,
        "peak memory, MB": peak,
    }


def stored_megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def update_seconds(subject: Subject, name: str) -> float:
    """Median seconds of an update, from the log of the student's training."""
    plan = subject.students[name]
    folder = subject.place(plan.recipe, student_config(subject, plan, 0))
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    gaps = [
        (b["seconds"] - a["seconds"]) / (b["update"] - a["update"])
        for a, b in pairwise(lines)
        if b["update"] > a["update"] and b["seconds"] > a["seconds"]
    ]
    return statistics.median(gaps) if gaps else float("nan")


# Certified solving.


def certified(options: Options) -> Results:
    """Evaluations and seconds to a tolerance: the solver alone, and the certified student."""
    subjects = list(subjects_of(options, KINDS).values())
    rows = []
    for subject in subjects:
        teacher_score(subject)
        found = subject.result(
            "figure",
            {**_named("certified", subject), "tolerances": TOLERANCES},
            partial(_certified_of, subject),
        )
        for tol, pair in found.items():
            for method, figures in pair.items():
                rows.append(
                    _row(
                        subject,
                        f"{method} to {tol}",
                        None,
                        seconds=figures["seconds"],
                        f_equivalents=figures["evaluations"],
                        figures={k: figures[k] for k in ("converged", "by the student")},
                    )
                )
    results = _finished("certified", options, subjects, rows)
    write_certified(results, options.out)
    return results


def _certified_of(subject: Subject) -> dict[str, dict[str, dict[str, float]]]:
    teacher, _ = subject.trained_teacher()
    student, _ = trained_student(subject, teacher, subject.students["anchored"], 0)
    *_, x = probes(subject, teacher)
    if isinstance(subject, ImageCell):
        x = x[: subject.plan.batch]
    found = {}
    for tol in TOLERANCES:
        both = compare_certified(student, x, tol=tol, max_steps=80)
        found[f"{tol:g}"] = {
            "solver": {
                "evaluations": both.solver_evaluations,
                "seconds": both.solver_seconds,
                "converged": both.solver_converged,
                "by the student": 0.0,
            },
            "certified": {
                "evaluations": both.student_evaluations,
                "seconds": both.student_seconds,
                "converged": both.student_converged,
                "by the student": both.finished_by_student,
            },
        }
    subject.say("certified")
    return found

"""What is not a table: residuals against steps, training time, what trajectories cost, certified solving."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from cdeq import evaluation
from cdeq.consistency import distill
from cdeq.evaluation import SOLVERS, Row
from cdeq.solvers import Anderson, solve_model
from cdeq.training.log import LOG
from cdeq_experiments.configs import figure_configs
from cdeq_experiments.configs.base import SuiteConfig
from cdeq_experiments.jobs import Job, run_jobs
from cdeq_experiments.options import Options
from cdeq_experiments.suites.base import Suite
from cdeq_experiments.tables import Experiment, Part, make_part

STEPS = tuple(range(1, 13))
TOLERANCES = (1e-2, 1e-3, 1e-4)
RECIPES = ("paper", "anchored", "warm_start", "corrected")
Measured = Callable[[Suite], Iterable[Row]]


def measure_figure(
    name: str, figure: Measured, alone: bool, suites: Sequence[Suite], options: Options
) -> Iterator[list[Part]]:
    """`figure(suite)` gives the rows of one data set; `alone`: it measures seconds, or memory."""
    run_jobs([suite.equilibria() for suite in suites], options)
    jobs = []
    for suite in suites:
        config = suite.config
        key = {**suite.teacher_key, "students": config.students, "recording": config.recording}
        key |= {"solver": config.learned_solver, "steps": STEPS, "tolerances": TOLERANCES}
        work = partial(_part, figure, suite)
        jobs.append(Job(f"{suite.title}: {name}", suite.run(name, key), work))
    yield run_jobs(jobs, options, alone=alone)


def _part(figure: Measured, suite: Suite) -> Part:
    return make_part(suite, list(figure(suite)))


def _row(suite: Suite, method: str, steps: int | None = None, **fields: Any) -> Row:
    usual = dict.fromkeys(("metric", "distance", "residual", "seconds", "f_equivalents"))
    whole: dict[str, Any] = {**usual, "seed": 0, "parameters": 0, **fields}
    return Row(dataset=suite.config.title, method=method, steps=steps, **whole)


# Residuals: the paper's Figure 2.


def residuals(suite: Suite) -> Iterable[Row]:
    """Residual |f(z) - z| / |z| and distance of the solver, the learned solver and all recipes at each step."""
    teacher, learned = suite.teacher, suite.config.learned_solver
    assert learned is not None
    methods = {"anderson": evaluation.solver_method(teacher, SOLVERS["anderson"])}
    solver, _ = suite.train_learned_solver(0)
    methods[learned.name] = evaluation.learned_solver_method(teacher, solver)
    for name in RECIPES:
        student, _ = suite.train_student(suite.config.students[name], 0)
        methods[name] = evaluation.student_method(student)
    data = [(x, None) for x in suite.probes(teacher)]
    solve = partial(solve_model, teacher, solver=Anderson(), tol=1e-5, max_steps=100)
    with torch.no_grad():
        states = [solve(teacher.inject(x)).state for x, _ in data]
    for name, method in methods.items():
        found = evaluation.measure_quality(method, teacher, data, states, None, STEPS)
        for k, one in found.items():
            yield _row(suite, name, k, residual=one.residual, distance=one.distance)


def residual_configs(scale: str) -> list[SuiteConfig]:
    """As for all figures, and a second graph where there is one."""
    return figure_configs(scale) + figure_configs(scale, ("graph",), place=1)


# Training time: the paper's Table 7.


def cost(suite: Suite) -> Iterable[Row]:
    """Seconds of training of all recipes, recording included."""
    for name in RECIPES:
        student, training = suite.train_student(suite.config.students[name], 0)
        size = evaluation.parameter_count(student)
        yield _row(suite, name, train_seconds=training.seconds, parameters=size)


# What trajectories cost: the paper's Table 8.


def overhead(suite: Suite) -> Iterable[Row]:
    """Each recipe in a fresh process, whose peak memory is its own."""
    for name in RECIPES:
        threads = partial(torch.set_num_threads, torch.get_num_threads())
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=threads) as pool:
            found = pool.submit(overhead_of, suite, name).result()
        yield _row(suite, name, figures=found)


def overhead_of(suite: Suite, name: str) -> dict[str, float]:
    """Storage, time and memory of one recipe."""
    config = suite.config.students[name]
    recipe, teacher = config.resolve(), suite.teacher
    suite.train_student(config, 0)
    store, seconds = suite.record(recipe.store_mode)
    before = evaluation.begin_peak()
    fit, loss = replace(config.fit, updates=4, warmup_updates=0), suite.task_loss(teacher)
    distill(teacher, store, recipe=recipe, fit=fit, task_loss=loss)
    peak = evaluation.peak_megabytes()
    files = [path for path in store.folder.rglob("*") if path.is_file()]
    return {
        "storage, MB per batch": sum(path.stat().st_size for path in files) / 2**20 / len(store),
        "generation, s per batch": seconds / len(store),
        "points": float(store.manifest.steps + 1 if recipe.store_mode == "full" else 1),
        "update, s": update_seconds(suite.student_run(config, 0).folder / LOG),
        "memory of updates, MB": peak - before,
        "peak memory, MB": peak,
    }


def update_seconds(log: Path) -> float:
    """Median seconds of an update, from the log of a training."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    pairs = [(b["seconds"] - a["seconds"], b["update"] - a["update"]) for a, b in pairwise(lines)]
    # The seconds begin anew where a training was resumed.
    return statistics.median([s / n for s, n in pairs if s > 0] or [float("nan")])


# Certified solving.


def certified(suite: Suite) -> Iterable[Row]:
    """Evaluations and seconds to each tolerance: the solver alone, and the certified student."""
    student, _ = suite.train_student(suite.config.students["corrected"], 0)
    x = suite.certified_input(suite.teacher)
    for tol in TOLERANCES:
        both = asdict(evaluation.compare_certified(student, x, tol=tol, max_steps=80))
        for method, prefix in (("solver", "solver"), ("certified", "student")):
            by_student = both["finished_by_student"] if method == "certified" else 0.0
            shares = {"converged": both[f"{prefix}_converged"], "by the student": by_student}
            yield _row(
                suite,
                f"{method} to {tol:g}",
                seconds=both[f"{prefix}_seconds"],
                f_equivalents=both[f"{prefix}_evaluations"],
                figures=shares,
            )


def _figure(
    name: str, figure: Measured, configs: Any = figure_configs, alone: bool = False
) -> Experiment:
    measure = partial(measure_figure, name, figure, alone)
    return Experiment(name=name, layout=name, configs=configs, measure=measure)


FIGURES = (
    _figure("residuals", residuals, residual_configs),
    _figure("cost", cost),
    _figure("overhead", overhead, alone=True),
    _figure("certified", certified, alone=True),
)

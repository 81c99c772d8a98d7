"""All methods on one task in one run: quality at every step count, and what each costs.

A method is a way from an input to states z_0, z_1, ...; z_k has cost k evaluations of f.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import EquilibriumModel, is_batched
from cdeq.equilibrium.states import State, relative_distance
from cdeq.experiments.metrics import Metric
from cdeq.experiments.results import Row
from cdeq.experiments.task import Batch
from cdeq.solvers import Anderson, Solver, solve_model
from cdeq.trajectories.capture import measure

STEPS = (1, 2, 3, 5, 8, 12)


@dataclass(frozen=True, kw_only=True)
class Method:
    """`states(x, steps)` passes through z_0 ... z_steps; `output(x, steps)` is the whole way to an output.

    `extra(x)` does what a method does once an input, injection included, beside its steps.
    """

    states: Callable[[Any, int], Iterator[State]]
    output: Callable[[Any, int], Tensor]
    parameters: int
    extra: Callable[[Any], object] | None = None


def solver_method(teacher: EquilibriumModel, solver: Solver) -> Method:
    """A plain solver, its whole budget spent."""

    def states(x: Any, steps: int) -> Iterator[State]:
        seen: list[State] = []
        solve_model(
            teacher,
            teacher.inject(x),
            solver,
            tol=0.0,
            max_steps=steps,
            callback=lambda k, z: seen.append(z),
        )
        # A solve that stopped early, at an exact equilibrium or past hope, stays where it is.
        yield from seen + seen[-1:] * (steps + 1 - len(seen))

    def output(x: Any, steps: int) -> Tensor:
        context = teacher.inject(x)
        return teacher.readout(
            solve_model(teacher, context, solver, tol=0.0, max_steps=steps).state, context
        )

    return Method(states=states, output=output, parameters=parameter_count(teacher))


def student_method(student: Student) -> Method:
    """A student, with the cost of its start network and its second injection."""
    return Method(
        states=lambda x, steps: student.rollout(student.prepare(x), steps),
        output=lambda x, steps: student(x, steps=steps),
        parameters=parameter_count(student),
        extra=lambda x: student.begin(student.prepare(x)),
    )


def parameter_count(model: Any) -> int:
    """Weights of a model; a student counts its frozen teacher's too, since it runs with both."""
    return sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0


@dataclass(frozen=True)
class Reference:
    """The teacher's equilibria on the test batches, and what reaching them took."""

    states: list[State]
    metric: float
    steps: float
    residual: float


@torch.no_grad()
def reference(
    teacher: EquilibriumModel, batches: list[Batch], metric: Metric, *, budget: int = 150
) -> Reference:
    """Equilibria to a residual of 1e-5 (or the best reached); the teacher's score where 1e-4 is met."""
    states, parts, steps, residuals = [], [], [], []
    for x, y in batches:
        context = teacher.inject(x)
        usual = solve_model(teacher, context, Anderson(), tol=1e-4, max_steps=budget)
        parts.append(metric.part(teacher.readout(usual.state, context), y))
        steps.append(usual.steps.double())
        residuals.append(usual.residual.double())
        states.append(
            solve_model(
                teacher, context, Anderson(), z0=usual.state, tol=1e-5, max_steps=budget
            ).state
        )
    return Reference(
        states,
        metric.score(parts),
        float(torch.cat(steps).mean()),
        float(torch.cat(residuals).mean()),
    )


@dataclass(frozen=True)
class Quality:
    """Scores of one method at one step count, averaged over samples."""

    metric: float
    distance: float
    residual: float


@torch.no_grad()
def quality(
    method: Method,
    teacher: EquilibriumModel,
    batches: list[Batch],
    stars: list[State],
    metric: Metric,
    counts: tuple[int, ...] = STEPS,
) -> dict[int, Quality]:
    """Metric, distance to the equilibrium and teacher's residual (an evaluation that is not part of the cost)."""
    parts: dict[int, list[tuple[float, int]]] = {k: [] for k in counts}
    distances: dict[int, list[Tensor]] = {k: [] for k in counts}
    residuals: dict[int, list[Tensor]] = {k: [] for k in counts}
    batched = is_batched(teacher)
    for (x, y), star in zip(batches, stars, strict=True):
        context = teacher.inject(x)
        for k, z in enumerate(method.states(x, max(counts))):
            if k not in parts:
                continue
            parts[k].append(metric.part(teacher.readout(z, context), y))
            distances[k].append(relative_distance(z, star, batched))
            residuals[k].append(measure(teacher, z, context))
    return {
        k: Quality(
            metric.score(parts[k]),
            float(torch.cat(distances[k]).mean()),
            float(torch.cat(residuals[k]).mean()),
        )
        for k in counts
    }


@torch.no_grad()
def median_times(
    works: dict[Any, Callable[[], Callable[[], object]]], repeats: int
) -> dict[Any, tuple[float, float]]:
    """Median wall and CPU seconds of what each `works[name]()` returns; making it ready is not timed.

    They take turns, so that a busy moment hits them all.
    """
    times: dict[Any, list[tuple[float, float]]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, ready in works.items():
            work = ready()
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            spent = (time.perf_counter() - wall, time.process_time() - cpu)
            if repeat:  # the first round warms up
                times[name].append(spent)
    return {
        name: (statistics.median(w for w, _ in found), statistics.median(c for _, c in found))
        for name, found in times.items()
    }


def median_seconds(works: dict[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    """Median wall seconds of each piece of work, in turns."""
    ready: dict[Any, Callable[[], Callable[[], object]]] = {
        name: partial(lambda work: work, work) for name, work in works.items()
    }
    return {name: wall for name, (wall, _) in median_times(ready, repeats).items()}


def compare(
    methods: dict[str, Method],
    teacher: EquilibriumModel,
    batches: list[Batch],
    stars: list[State],
    metric: Metric,
    *,
    dataset: str,
    seed: int,
    counts: tuple[int, ...] = STEPS,
    repeats: int = 7,
) -> list[Row]:
    """One row a method and step count."""
    x = batches[0][0]
    with torch.no_grad():
        context = teacher.inject(x)
        z = teacher.step(teacher.start(context), context)
    works: dict[Any, Callable[[], object]] = {
        (name, k): partial(method.output, x, k) for name, method in methods.items() for k in counts
    }
    works |= {
        (name, "extra"): partial(m.extra, x) for name, m in methods.items() if m.extra is not None
    }
    works |= {"step": lambda: teacher.step(z, context), "inject": lambda: teacher.inject(x)}
    seconds = median_seconds(works, repeats)
    rows = []
    for name, method in methods.items():
        scores = quality(method, teacher, batches, stars, metric, counts)
        extra = (
            max(seconds[name, "extra"] - seconds["inject"], 0.0)
            if method.extra is not None
            else 0.0
        )
        rows += [
            Row(
                dataset=dataset,
                seed=seed,
                method=name,
                steps=k,
                metric=scores[k].metric,
                distance=scores[k].distance,
                residual=scores[k].residual,
                seconds=seconds[name, k],
                f_equivalents=k + extra / seconds["step"],
                parameters=method.parameters,
            )
            for k in counts
        ]
    return rows

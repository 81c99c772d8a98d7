"""All methods on one task in one run: quality at every step count, and what each costs.

A method is a way from an input to states z_0, z_1, ...; z_k has cost k evaluations of f.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cdeq.consistency.student import Student
from cdeq.demo.task import Batch
from cdeq.equilibrium.contract import EquilibriumModel, is_batched
from cdeq.equilibrium.states import State, relative_distance
from cdeq.evaluation.metrics import Metric
from cdeq.evaluation.results import Row
from cdeq.models.learned_solvers import LearnedSolver
from cdeq.solvers import Anderson, Broyden, Picard, Solver, solve_model
from cdeq.trajectories.capture import measure_residual

STEPS = (1, 2, 3, 5, 8, 12)
SOLVERS: dict[str, Solver] = {"picard": Picard(), "anderson": Anderson(), "broyden": Broyden()}
"""The plain solvers that every student is compared with."""
SLOW = 3.0
"""Seconds above which a piece of work is timed once."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """`states(x, steps)` passes through z_0 ... z_steps; `output(x, steps)` is the whole way to an output.

    `extra(x)` does what a method does once an input, injection included, beside its steps.
    `own` is the equilibrium it seeks, where that is not the compared teacher's: its readout, its distance and
    its residual are measured there. `counts`, where a method is made for certain step counts alone; `label`
    names its rows, where several such methods share one name.
    """

    states: Callable[[Any, int], Iterator[State]]
    output: Callable[[Any, int], Tensor]
    parameters: int
    extra: Callable[[Any], object] | None = None
    own: Target | None = None
    counts: tuple[int, ...] | None = None
    label: str | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model and its equilibria on the test batches, where they are known."""

    model: EquilibriumModel
    stars: list[State]


@dataclass(frozen=True, kw_only=True)
class Explicit:
    """A model without an equilibrium: `output(x)` is all there is to it."""

    output: Callable[[Any], Tensor]
    parameters: int


def solver_method(teacher: EquilibriumModel, solver: Solver, **fields: Any) -> Method:
    """A plain solver, its whole budget spent; `fields` are further ones of the method."""

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

    return Method(states=states, output=output, parameters=parameter_count(teacher), **fields)


def learned_solver_method(teacher: EquilibriumModel, solver: LearnedSolver) -> Method:
    """A learned solver of the teacher; its weights count beside the teacher's."""

    def output(x: Any, steps: int) -> Tensor:
        context = teacher.inject(x)
        *_, z = solver.rollout(teacher, context, steps)
        return teacher.readout(z, context)

    return Method(
        states=lambda x, steps: solver.rollout(teacher, teacher.inject(x), steps),
        output=output,
        parameters=parameter_count(teacher) + parameter_count(solver),
        extra=lambda x: solver.initial(teacher.inject(x)),
    )


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
class Equilibria:
    """The teacher's equilibria on the test batches, and what reaching them took."""

    states: list[State]
    metric: float
    steps: float
    residual: float


@torch.no_grad()
def find_equilibria(
    teacher: EquilibriumModel, batches: list[Batch], metric: Metric, *, budget: int = 150
) -> Equilibria:
    """Target to a residual of 1e-5 (or the best reached); the teacher's score where 1e-4 is met."""
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
    return Equilibria(
        states,
        metric.score(parts),
        float(torch.cat(steps).mean()),
        float(torch.cat(residuals).mean()),
    )


@dataclass(frozen=True)
class Quality:
    """Scores of one method at one step count, averaged over samples."""

    metric: float
    distance: float | None
    residual: float | None
    top5: float | None = None


@torch.no_grad()
def measure_quality(
    method: Method,
    teacher: EquilibriumModel,
    batches: list[Batch],
    stars: Sequence[State] | None,
    metric: Metric,
    counts: tuple[int, ...] = STEPS,
    *,
    top5: Metric | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, Quality]:
    """Metric, distance to the equilibrium and teacher's residual (an evaluation that is not part of the cost).

    Without `stars` neither of the last two is measured. `top5` is a metric beside the first.
    """
    parts: dict[int, list[tuple[float, int]]] = {k: [] for k in counts}
    beside: dict[int, list[tuple[float, int]]] = {k: [] for k in counts}
    distances: dict[int, list[Tensor]] = {k: [] for k in counts}
    residuals: dict[int, list[Tensor]] = {k: [] for k in counts}
    batched = is_batched(teacher)
    for number, (x, y) in enumerate(batches):
        context = teacher.inject(x)
        star = None if stars is None else stars[number]
        for k, z in enumerate(method.states(x, max(counts))):
            if k not in parts:
                continue
            output = teacher.readout(z, context)
            parts[k].append(metric.part(output, y))
            if top5 is not None:
                beside[k].append(top5.part(output, y))
            if star is not None:
                distances[k].append(relative_distance(z, star, batched))
                residuals[k].append(measure_residual(teacher, z, context))
        if progress is not None:
            progress(number + 1, len(batches))
    return {
        k: Quality(
            metric.score(parts[k]),
            _mean(distances[k]),
            _mean(residuals[k]),
            None if top5 is None else top5.score(beside[k]),
        )
        for k in counts
    }


def _mean(found: list[Tensor]) -> float | None:
    return float(torch.cat(found).mean()) if found else None


@torch.no_grad()
def median_times(
    works: dict[Any, Callable[[], Callable[[], object]]], repeats: int
) -> dict[Any, tuple[float, float]]:
    """Median wall and CPU seconds of what each `works[name]()` returns; making it ready is not timed.

    They take turns, so that a busy moment hits them all. The first round warms up, and is all there is for
    work of more than `SLOW` seconds, beside which warming up is nothing.
    """
    times: dict[Any, list[tuple[float, float]]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, ready in works.items():
            if times[name] and times[name][0][0] > SLOW:
                continue
            work = ready()
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            spent = (time.perf_counter() - wall, time.process_time() - cpu)
            if repeat == 1 and times[name]:
                times[name].clear()
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
    timed: tuple[int, ...] | None = None,
    repeats: int = 7,
    explicit: dict[str, Explicit] | None = None,
) -> list[Row]:
    """One row a method and step count, and one an explicit model; seconds at the counts `timed`, default all."""
    explicit = explicit or {}
    compared = Target(model=teacher, stars=stars)
    seconds = measure_seconds(
        methods, teacher, batches[0][0], timed or counts, explicit=explicit, repeats=repeats
    )
    rows = []
    for name, method in methods.items():
        own, at = method.own or compared, method.counts or counts
        scores = measure_quality(method, own.model, batches, own.stars, metric, at)
        rows += method_rows(name, method, scores, seconds, dataset=dataset, seed=seed)
    return rows + [
        explicit_row(
            name,
            model,
            _explicit_score(model, batches, metric),
            seconds,
            dataset=dataset,
            seed=seed,
        )
        for name, model in explicit.items()
    ]


Seconds = dict[Any, float]
"""Of (method, count), (method, "extra"), (method, "step") and (explicit model, None); of "step" and "inject"."""


def measure_seconds(
    methods: dict[str, Method],
    teacher: EquilibriumModel,
    x: Any,
    counts: tuple[int, ...],
    *,
    explicit: dict[str, Explicit],
    repeats: int,
    others: dict[str, Explicit] | None = None,
) -> Seconds:
    """Median seconds of all methods on one input, in turns; a method made for certain counts at those alone.

    `others` have no step count, as explicit models have none, but take their turns among the methods.
    """
    works: dict[Any, Callable[[], object]] = {
        (name, None): partial(other.output, x) for name, other in (others or {}).items()
    }
    for name, method in methods.items():
        works |= {
            (name, k): partial(method.output, x, k) for k in method.counts or counts if k in counts
        }
        if method.extra is not None:
            works[name, "extra"] = partial(method.extra, x)
        if method.own is not None:
            works[name, "step"] = _step_of(method.own.model, x)
    works |= {"step": _step_of(teacher, x), "inject": lambda: teacher.inject(x)}
    seconds = median_seconds(works, repeats)
    # Apart from the rest: a large one leaves nothing of the others in the processor's caches.
    return seconds | median_seconds(
        {(name, None): partial(model.output, x) for name, model in explicit.items()}, repeats
    )


def method_rows(
    name: str,
    method: Method,
    scores: dict[int, Quality],
    seconds: Seconds,
    *,
    dataset: str,
    seed: int,
    train_seconds: float | None = None,
) -> list[Row]:
    """A method's rows, one a step count."""
    step = seconds[name, "step"] if method.own is not None else seconds["step"]
    extra = 0.0
    if method.extra is not None:
        extra = max(seconds[name, "extra"] - seconds["inject"], 0.0)
    return [
        Row(
            dataset=dataset,
            seed=seed,
            method=method.label or name,
            steps=k,
            metric=score.metric,
            distance=score.distance,
            residual=score.residual,
            seconds=seconds.get((name, k)),
            f_equivalents=(k * step + extra) / seconds["step"],
            parameters=method.parameters,
            train_seconds=train_seconds,
            top5=score.top5,
        )
        for k, score in scores.items()
    ]


def explicit_row(
    name: str,
    model: Explicit,
    score: float,
    seconds: Seconds,
    *,
    dataset: str,
    seed: int,
    train_seconds: float | None = None,
) -> Row:
    """The row of a model without an equilibrium."""
    return Row(
        dataset=dataset,
        seed=seed,
        method=name,
        steps=None,
        metric=score,
        distance=None,
        residual=None,
        seconds=seconds[name, None],
        f_equivalents=seconds[name, None] / seconds["step"],
        parameters=model.parameters,
        train_seconds=train_seconds,
    )


@torch.no_grad()
def _step_of(model: EquilibriumModel, x: Any) -> Callable[[], object]:
    """One evaluation of a model's map, at a state that is not zero."""
    context = model.inject(x)
    z = model.step(model.start(context), context)
    return lambda: model.step(z, context)


@torch.no_grad()
def _explicit_score(model: Explicit, batches: list[Batch], metric: Metric) -> float:
    return metric.score([metric.part(model.output(x), y) for x, y in batches])

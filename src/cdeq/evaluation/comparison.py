"""All methods on one task in one run, as rows: quality at every step count, and what each costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from cdeq.consistency.copying import frozen_copy
from cdeq.consistency.student import Student
from cdeq.data.pyg import is_pyg
from cdeq.equilibrium.contract import EquilibriumModel, check_contract
from cdeq.equilibrium.states import State
from cdeq.evaluation.environment import provenance
from cdeq.evaluation.methods import (
    SOLVERS,
    Explicit,
    Method,
    Target,
    parameter_count,
    solver_method,
    student_method,
)
from cdeq.evaluation.metrics import Metric
from cdeq.evaluation.quality import (
    STEPS,
    Batch,
    Equilibria,
    Quality,
    find_equilibria,
    measure_quality,
    score_explicit,
)
from cdeq.evaluation.results import Results, Row, TeacherResult
from cdeq.evaluation.timing import ROLLED, Seconds, measure_seconds
from cdeq.placement import beside
from cdeq.trajectories.fingerprint import teacher_fingerprint
from cdeq.trajectories.nesting import check_loader, split_batch


def evaluate(
    model: EquilibriumModel | Student | Mapping[str, Student],
    batches: Iterable[Any],
    *,
    metric: Metric | None = None,
    steps: Sequence[int] = STEPS,
    methods: Mapping[str, Method] | None = None,
    name: str = "test data",
    max_steps: int = 150,
    repeats: int = 7,
) -> Results:
    """Picard, Anderson, Broyden and students on your own model, at equal evaluations, as rows of a table.

    `model`: an equilibrium model, for its solvers alone; a student of one; or several students of the same one, by
        name.
    `batches`: test inputs `x` or `(x, y)`, as for `distill`; all are kept in memory, on the model's device.
    `metric`: scores outputs against `y`, as `cdeq.evaluation.accuracy()` does; without it there are only
        distances, residuals and seconds.
    `methods`: others to compare with, such as `learned_solver_method(model, solver)`.
    `max_steps`: what solving for the equilibria, to which distances are measured, may take.
    Seconds are medians of `repeats` on the first batch.

    `results.table()` is a table for the terminal or a notebook, `results.plot(folder)` draws the curves,
    `results.to_json(path)` keeps the rows.
    """
    students = _named_students(model)
    teacher = next(iter(students.values())).teacher if students else check_contract(model)
    if not students and isinstance(model, nn.Module):
        teacher = check_contract(frozen_copy(model))  # in evaluation mode
    if metric is not None and not isinstance(metric, Metric):
        raise TypeError(
            f"metric is one of cdeq.evaluation, such as accuracy() or perplexity(), not {metric!r}"
        )
    check_loader(batches)
    data = [_placed(batch, teacher) for batch in batches]
    if not data:
        raise ValueError("there is nothing to evaluate on: `batches` is empty")
    if metric is not None and any(y is None for _, y in data):
        raise ValueError(f"{metric.name} needs labels: give batches as pairs (x, y)")
    if not steps or min(steps) < 1:
        raise ValueError(f"steps must be one or more counts of at least 1, not {tuple(steps)}")
    found = find_equilibria(teacher, data, metric, max_steps=max_steps)
    compared = {name: solver_method(teacher, solver) for name, solver in SOLVERS.items()}
    compared |= {name: student_method(student) for name, student in students.items()}
    compared |= methods or {}
    rows = compare(
        compared,
        teacher,
        data,
        found.states,
        metric,
        dataset=name,
        seed=0,
        counts=tuple(sorted(set(steps))),
        repeats=repeats,
    )
    return Results(
        experiment="evaluation",
        scale="",
        teachers=(teacher_result(name, teacher, metric, found),),
        rows=tuple(rows),
        **provenance(),
    )


def _named_students(
    model: EquilibriumModel | Student | Mapping[str, Student],
) -> dict[str, Student]:
    if isinstance(model, Student):
        return {model.recipe.name: model}
    if not isinstance(model, Mapping):
        return {}
    students = dict(model)
    if not students or not all(isinstance(student, Student) for student in students.values()):
        raise TypeError("expected students by name, as {'anchored': student}")
    if len({teacher_fingerprint(student.teacher)["sha256"] for student in students.values()}) > 1:
        raise ValueError("these students have different teachers: evaluate those of one at a time")
    return students


def _placed(batch: Any, model: Any) -> Batch:
    """The input and labels of a batch, where the model's weights are."""
    if is_pyg(batch) and getattr(batch, "train_mask", None) is not None:
        raise ValueError(
            "a graph with a train_mask: say which nodes to score, as [task.labelled(task.test)] with "
            "task = cdeq.data.from_pyg(data)"
        )
    x, y = split_batch(batch)
    return beside(model, (x, y))


def compare(
    methods: dict[str, Method],
    teacher: EquilibriumModel,
    batches: Sequence[Batch],
    equilibria: list[State],
    metric: Metric | None,
    *,
    dataset: str,
    seed: int,
    counts: tuple[int, ...] = STEPS,
    timed: tuple[int, ...] | None = None,
    repeats: int = 7,
    explicit: dict[str, Explicit] | None = None,
) -> list[Row]:
    """A row for each method and step count, and one for each explicit model.

    Seconds are measured on the first batch at the counts `timed`, default all.
    """
    explicit = explicit or {}
    compared = Target(model=teacher, equilibria=equilibria)
    seconds = measure_seconds(
        methods, teacher, batches[0][0], timed or counts, explicit=explicit, repeats=repeats
    )
    rows = []
    for name, method in methods.items():
        own, at = method.own or compared, method.counts or counts
        scores = measure_quality(method, own.model, batches, own.equilibria, metric, at)
        rows += method_rows(name, method, scores, seconds, dataset=dataset, seed=seed)
    for name, model in explicit.items():
        score = None if metric is None else score_explicit(model, batches, metric)
        rows.append(explicit_row(name, model, score, seconds, dataset=dataset, seed=seed))
    return rows


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
    """A row for each step count."""
    step = seconds[name, "step"] if method.own is not None else seconds["step"]
    extra = 0.0
    if method.extra is not None:
        extra = max(seconds[name, "extra"] - seconds["inject"], 0.0)
        # An evaluation, and what a student adds to it: mixing, a correction.
        step = max((seconds[name, "rolled"] - seconds[name, "extra"]) / ROLLED, step)
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
    score: float | None,
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


def teacher_result(
    dataset: str,
    model: EquilibriumModel,
    metric: Metric | None,
    found: Equilibria,
    train_seconds: float | None = None,
) -> TeacherResult:
    """The converged teacher on its test data."""
    return TeacherResult(
        dataset=dataset,
        name=type(model).__name__,
        parameters=parameter_count(model),
        metric_name="score" if metric is None else metric.name,
        metric=found.metric,
        higher_is_better=metric is None or metric.higher_is_better,
        steps=found.steps,
        residual=found.residual,
        converged=found.converged,
        train_seconds=train_seconds,
    )

"""Calibration on held-out data: the bound of certified solving, and the clock that suits a trained student best."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from cdeq.consistency.certify import plan_handover
from cdeq.consistency.scores import certificate_on
from cdeq.equilibrium.states import State, relative_distance
from cdeq.placement import beside
from cdeq.solvers.anderson import Anderson
from cdeq.solvers.loop import solve_model
from cdeq.trajectories.nesting import split_batch

if TYPE_CHECKING:
    from cdeq.consistency.parts import Prepared, StepMemory
    from cdeq.consistency.student import Student

    Run = tuple[Prepared, State, State, StepMemory | None]

STRENGTHS = (
    1.0,
    0.9,
    0.8,
    0.7,
    0.6,
    0.5,
    0.4,
    0.3,
    0.2,
    0.14,
    0.1,
    0.07,
    0.05,
    0.03,
    0.02,
    0.01,
    0.0,
)
"""Candidates for the student's share c_out at a step."""


@torch.no_grad()
def calibrate(
    student: Student,
    loader: Iterable[Any],
    *,
    steps: int = 8,
    max_batches: int | None = None,
    confidence: float | None = 0.99,
    tol: float = 1e-4,
    max_steps: int = 100,
) -> tuple[float, ...]:
    """Calibrate the bound of `student.solve` at this confidence and, for recipes that have one, the clock.

    Without a confidence no bound is calibrated.
    Sets `student.certificate` (None, with a warning, if there are too few samples), `student.calibrated` (the clock as
    fractions of solver time, also returned) and `student.plan`, which says when a student with changed weights hands
    over to the solver. The bound holds for inputs drawn like those of the loader, which must not be those that the
    student was trained on.
    """
    if confidence is not None and not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    inputs: list[Any] = []
    for i, batch in enumerate(loader):
        if max_batches is not None and i >= max_batches:
            break
        x, _ = split_batch(batch)
        inputs.append(beside(student.methods, x))
    if not inputs:
        raise ValueError("calibration needs at least one batch of held-out data")
    if student.recipe.schedule != "leap":
        student.calibrated = _chosen_clock(student, inputs, steps, tol, max_steps)
    student.plan = plan_handover(student, inputs)
    student.certificate = None
    if confidence is not None:
        student.certificate = certificate_on(student, inputs, confidence)
    return student.calibrated


def _chosen_clock(
    student: Student, inputs: list[Any], steps: int, tol: float, max_steps: int
) -> tuple[float, ...]:
    """Step by step, the time point whose result is nearest to the equilibrium.

    The clock never runs backwards. If the student's own clock does better over all steps, it stays.
    """
    runs: list[Run] = []
    for x in inputs:
        prepared = student.prepare(x)
        star = solve_model(
            student.teacher, prepared.base, Anderson(), tol=tol, max_steps=max_steps
        ).state
        runs.append((prepared, star, student.begin(prepared), None))
    usual = _trained_clock(student, steps)
    usual_error, usual_runs = 0.0, runs
    for fraction in usual:
        error, usual_runs = _advanced(student, fraction, usual_runs)
        usual_error += error
    chosen: list[float] = []
    chosen_error = 0.0
    for _ in range(steps):
        candidates = _fractions(student.recipe.gamma, chosen[-1] if chosen else 0.0)
        results = [_advanced(student, fraction, runs) for fraction in candidates]
        errors = [error for error, _ in results]
        best = errors.index(min(errors))
        chosen.append(candidates[best])
        chosen_error += errors[best]
        runs = results[best][1]
    # The best step now is not always the best for the steps after it.
    return tuple(chosen if chosen_error <= usual_error else usual)


def _advanced(student: Student, fraction: float, runs: list[Run]) -> tuple[float, list[Run]]:
    """The mean log distance after a step at this fraction of solver time, and the runs after it."""
    after: list[Run] = []
    error = 0.0
    for prepared, star, z, memory in runs:
        z, memory = student.advance(z, student.time_point_at(fraction), memory, prepared)
        error += float(relative_distance(z, star, student.batched).log().mean())
        after.append((prepared, star, z, memory))
    return math.inf if math.isnan(error) else error / len(runs), after


def _trained_clock(student: Student, steps: int) -> list[float]:
    """The fractions of solver time of the clock that the student was trained with."""
    times = [student.trained_time_point(j).time for j in range(steps)]
    return [(t - student.recipe.eps) / (student.recipe.end - student.recipe.eps) for t in times]


def _fractions(gamma: float, earliest: float) -> list[float]:
    """The candidates for a step as fractions of solver time, none before `earliest`."""
    fractions = [(1.0 - c) ** (1.0 / gamma) for c in STRENGTHS]
    return [earliest, *(f for f in fractions if f > earliest)]

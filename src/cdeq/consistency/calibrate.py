"""Calibration: the clock that suits a trained student best, chosen on held-out data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from cdeq.consistency.certify import plan_handover
from cdeq.equilibrium.states import State, relative_distance
from cdeq.solvers.anderson import Anderson
from cdeq.solvers.loop import solve_model
from cdeq.trajectories.nesting import split_batch

if TYPE_CHECKING:
    from cdeq.consistency.history import Evaluation
    from cdeq.consistency.student import Prepared, Student

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
    tol: float = 1e-4,
    max_steps: int = 100,
) -> tuple[float, ...]:
    """Choose, step by step, the moment whose result is nearest the equilibrium on the loader's data.

    The clock never runs backwards. Sets `student.calibrated` (fractions of solver time, also returned) and
    `student.plan`, which says for certified solving when to hand over to the solver.
    """
    student.calibrated = ()
    inputs: list[Any] = []
    runs: list[tuple[Prepared, State, State, list[Evaluation]]] = []
    for i, batch in enumerate(loader):
        if max_batches is not None and i >= max_batches:
            break
        x, _ = split_batch(batch)
        inputs.append(x)
        prepared = student.prepare(x)
        star = solve_model(
            student.teacher, prepared.base, Anderson(), tol=tol, max_steps=max_steps
        ).state
        runs.append((prepared, star, student.begin(prepared), []))
    if not runs:
        raise ValueError("calibration needs at least one batch of held-out data")

    chosen: list[float] = []
    for _ in range(steps):
        best: tuple[float, float, list[Any]] | None = None
        for fraction in _fractions(student.recipe.gamma, chosen[-1] if chosen else 0.0):
            moment = student.moment_at(fraction)
            after, error = [], 0.0
            for prepared, star, z, evaluations in runs:
                z, evaluations = student.advance(z, moment, evaluations, prepared)
                error += float(relative_distance(z, star, student.batched).log().mean())
                after.append((prepared, star, z, evaluations))
            if best is None or error < best[0]:
                best = (error, fraction, after)
        assert best is not None
        chosen.append(best[1])
        runs = best[2]
    student.calibrated = tuple(chosen)
    student.plan = plan_handover(student, inputs)
    return student.calibrated


def _fractions(gamma: float, earliest: float) -> list[float]:
    """The candidates for a step as fractions of solver time, none before `earliest`."""
    fractions = [(1.0 - c) ** (1.0 / gamma) for c in STRENGTHS]
    return [earliest, *(f for f in fractions if f > earliest)]

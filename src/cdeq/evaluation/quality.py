"""How good states are: the score of their output, their distance to the equilibrium, their residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdeq.equilibrium.contract import EquilibriumModel, is_batched
from cdeq.equilibrium.states import State, relative_distance
from cdeq.evaluation.methods import Explicit, Method
from cdeq.evaluation.metrics import Metric
from cdeq.solvers import Anderson, solve_model
from cdeq.trajectories.capture import measure_residual

Batch = tuple[Any, Any]
"""An input and its labels."""
CONVERGED = 1e-3
"""The residual that a sample of a teacher with an equilibrium reaches."""
STEPS = (1, 2, 3, 5, 8, 12)
"""The step counts that methods are compared at by default."""


@dataclass(frozen=True)
class Equilibria:
    """A teacher's equilibria, one for each batch; its score there; the steps and the residual, means over samples.

    `converged`: the share of samples with a residual of at most `CONVERGED`.
    """

    states: list[State]
    metric: float | None
    steps: float
    residual: float
    converged: float


@torch.no_grad()
def find_equilibria(
    teacher: EquilibriumModel,
    batches: Sequence[Batch],
    metric: Metric | None,
    *,
    tol: float = 1e-4,
    max_steps: int = 150,
) -> Equilibria:
    """Solve for every batch with Anderson.

    Score, steps and residual are those where `tol` is met; the states go on to a tenth of it (or to the best that
    `max_steps` more evaluations reach), since distances are measured to them.
    """
    states, parts, steps, residuals = [], [], [], []
    for x, y in batches:
        context = teacher.inject(x)
        usual = solve_model(teacher, context, Anderson(), tol=tol, max_steps=max_steps)
        if metric is not None:
            parts.append(metric.part(teacher.readout(usual.state, context), y))
        steps.append(usual.steps.double())
        residuals.append(usual.residual.double())
        exact = solve_model(
            teacher, context, Anderson(), z0=usual.state, tol=tol / 10, max_steps=max_steps
        )
        states.append(exact.state)
    return Equilibria(
        states,
        None if metric is None else metric.score(parts),
        float(torch.cat(steps).mean()),
        float(torch.cat(residuals).mean()),
        float((torch.cat(residuals) <= CONVERGED).double().mean()),
    )


@dataclass(frozen=True)
class Quality:
    """One method at one step count; distance and residual are means over samples. None: not measured."""

    metric: float | None
    distance: float | None
    residual: float | None
    top5: float | None = None


@torch.no_grad()
def measure_quality(
    method: Method,
    teacher: EquilibriumModel,
    batches: Sequence[Batch],
    equilibria: Sequence[State] | None,
    metric: Metric | None,
    counts: tuple[int, ...] = STEPS,
    *,
    top5: Metric | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, Quality]:
    """Score, distance to the equilibrium and teacher's residual at each step count.

    Without `equilibria` neither distance nor residual is measured. Measuring a residual is an evaluation that is
    not part of the method's cost. `top5` is a second metric.
    """
    parts: dict[int, list[tuple[float, int]]] = {k: [] for k in counts}
    second: dict[int, list[tuple[float, int]]] = {k: [] for k in counts}
    distances: dict[int, list[Tensor]] = {k: [] for k in counts}
    residuals: dict[int, list[Tensor]] = {k: [] for k in counts}
    batched = is_batched(teacher)
    for number, (x, y) in enumerate(batches):
        context = teacher.inject(x)
        for k, z in enumerate(method.states(x, max(counts))):
            if k not in parts:
                continue
            for one, found in ((metric, parts), (top5, second)):
                if one is not None:
                    found[k].append(one.part(teacher.readout(z, context), y))
            if equilibria is not None:
                distances[k].append(relative_distance(z, equilibria[number], batched))
                residuals[k].append(measure_residual(teacher, z, context))
        if progress is not None:
            progress(number + 1, len(batches))
    return {
        k: Quality(
            None if metric is None else metric.score(parts[k]),
            mean_of(distances[k]),
            mean_of(residuals[k]),
            None if top5 is None else top5.score(second[k]),
        )
        for k in counts
    }


@torch.no_grad()
def score_explicit(model: Explicit, batches: Sequence[Batch], metric: Metric) -> float:
    """The score of a model without an equilibrium."""
    return metric.score([metric.part(model.output(x), y) for x, y in batches])


def mean_of(found: list[Tensor]) -> float | None:
    """The mean over all samples of all batches, each (B,); None without any."""
    return float(torch.cat(found).mean()) if found else None

"""Language models scored as the field does it: every token of the test text once, in order, with memory.

A text is read in segments. The memory that a method meets is its own: what it left of the segments before, after as
many steps as it takes. Shapes: B streams, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdeq.equilibrium.contract import EquilibriumModel, is_batched
from cdeq.equilibrium.memory import Memory, Segment, require_memory
from cdeq.equilibrium.states import State, relative_distance
from cdeq.evaluation.methods import Method
from cdeq.evaluation.metrics import Metric
from cdeq.evaluation.quality import CONVERGED, Equilibria, Quality, mean_of
from cdeq.solvers import Anderson, solve_model
from cdeq.trajectories.capture import measure_residual

Segments = Sequence[tuple[Tensor, Tensor]]
"""Consecutive (tokens, targets), each (B, L); a negative target counts for nothing."""


def score_part(model: Any, features: Tensor, targets: Tensor) -> tuple[float, int]:
    """The summed negative log-likelihood of the targets, and how many there are."""
    nll = model.words.nll(features, targets)
    return float(nll.double().sum()), int((targets >= 0).sum())


@torch.no_grad()
def find_text_equilibria(
    model: EquilibriumModel,
    segments: Segments,
    metric: Metric,
    *,
    tol: float = 1e-4,
    max_steps: int = 80,
) -> tuple[Equilibria, Segment]:
    """The converged model on the whole text, its equilibria kept; and its last full segment, to time methods on."""
    memory: Memory = ()
    states, parts, steps, residuals = [], [], [], []
    timed: Segment | None = None
    for tokens, targets in segments:
        x = Segment(tokens, memory)
        if timed is None or tokens.shape == timed.tokens.shape:
            timed = x
        context = model.inject(x)
        found = solve_model(model, context, Anderson(), tol=tol, max_steps=max_steps)
        parts.append(score_part(model, model.readout(found.state, context), targets))
        states.append(found.state)
        steps.append(found.steps.double())
        residuals.append(found.residual.double())
        memory = require_memory(model).remember(found.state, context)
    if timed is None:
        raise ValueError("there is no text: `segments` is empty")
    equilibria = Equilibria(
        states,
        metric.score(parts),
        float(torch.cat(steps).mean()),
        float(torch.cat(residuals).mean()),
        float((torch.cat(residuals) <= CONVERGED).double().mean()),
    )
    return equilibria, timed


@torch.no_grad()
def measure_text_quality(
    method: Method,
    model: EquilibriumModel,
    segments: Segments,
    equilibria: Sequence[State] | None,
    metric: Metric,
    counts: tuple[int, ...],
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, Quality]:
    """Score and, if `equilibria` are known, distance to them and residual; the text is read once for each count.

    As for other data, measuring a residual is an evaluation that is not part of the method's cost.
    """
    batched, remembering = is_batched(model), require_memory(model)
    found = {}
    for number, k in enumerate(counts):
        memory: Memory = ()
        parts, distances, residuals = [], [], []
        for place, (tokens, targets) in enumerate(segments):
            x = Segment(tokens, memory)
            context = model.inject(x)
            *_, z = method.states(x, k)
            parts.append(score_part(model, model.readout(z, context), targets))
            if equilibria is not None:
                distances.append(relative_distance(z, equilibria[place], batched))
                residuals.append(measure_residual(model, z, context))
            memory = remembering.remember(z, context)
            if progress is not None:
                progress(number * len(segments) + place + 1, len(counts) * len(segments))
        found[k] = Quality(metric.score(parts), mean_of(distances), mean_of(residuals))
    return found


@torch.no_grad()
def score_explicit_text(model: nn.Module, segments: Segments, metric: Metric) -> float:
    """An explicit language model on the whole text, its memory carried along."""
    memory: Memory | None = None
    parts = []
    for tokens, targets in segments:
        features, memory = model(tokens, memory)
        parts.append(score_part(model, features, targets))
    return metric.score(parts)

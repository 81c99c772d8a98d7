"""How far off the estimated errors of a student are, on inputs whose equilibria are solved for much more tightly.

Shapes: B samples, K states on the way of a solve.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cdeq.consistency.certificate import (
    FLOOR,
    Certificate,
    conformal_quantile,
    features_of,
    fewest_samples,
)
from cdeq.consistency.copying import copy_of
from cdeq.consistency.solver import finite_or
from cdeq.equilibrium.contract import Input
from cdeq.equilibrium.states import State, map_state, relative_distance, sample_norms, tensors_of
from cdeq.equilibrium.trees import map_tensors
from cdeq.solvers.anderson import Anderson
from cdeq.solvers.loop import solve_model

if TYPE_CHECKING:
    from cdeq.consistency.student import Student

LONGEST = 300
"""Evaluations of a solve that is scored."""
EXACT, EXACT_STEPS = 1e-9, 3000
"""Estimated error and budget of the equilibria that distances are measured to."""
EXACT_SOLVERS = (Anderson(window=10), Anderson(window=30, mixing=0.5))
"""Where the first does not get there the second takes over: it is slow, and finds some where the first goes round."""

KEPT = 257
"""Quantiles of each feature that are kept, smallest and largest among them."""


class Scored(NamedTuple):
    """A batch of solves: what was estimated and what was true after each evaluation, (K, B), and its features."""

    error: Tensor
    distance: Tensor
    features: dict[str, Tensor]


class Exact:
    """Equilibria of a student's teacher, in double precision where the teacher can be copied to it."""

    def __init__(self, student: Student):
        self.student = student
        try:
            self.double: Any = copy_of(student.methods.model).double()
        except (RuntimeError, TypeError, ValueError):
            self.double = None

    def equilibrium(self, x: Input, near: State) -> tuple[State, Tensor]:
        """The equilibrium next to a state, and its own estimated error (B,), infinite where it was not found."""
        if self.double is not None:
            try:
                return self._solved(
                    self.double, map_tensors(_doubled, x), map_state(Tensor.double, near)
                )
            except (RuntimeError, TypeError, ValueError):
                self.double = None  # parts of it stay in single precision
        return self._solved(self.student.teacher, x, near)

    def _solved(self, model: Any, x: Input, near: State) -> tuple[State, Tensor]:
        context = model.inject(x)
        start, batched = model.start(context), self.student.batched
        first = sample_norms(map_state(torch.sub, model.step(start, context), start), batched)
        for solver in EXACT_SOLVERS:
            found = solve_model(
                model,
                context,
                solver,
                z0=near,
                tol=EXACT,
                max_steps=EXACT_STEPS,
                measure="error",
                measured_only=True,
            )
            assert found.error is not None
            near, error = found.state, found.error
            # Far away any step is small beside its state: that of an equilibrium is also small beside the first one.
            last = found.residual * sample_norms(near, batched)
            near_it = (error <= FLOOR) & ((last < first / 2) | (first == 0))
            if bool(near_it.all()):
                break
        return near, torch.where(near_it, error, torch.inf)


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@torch.no_grad()
def score(student: Student, x: Input, exact: Exact, ahead: int = 0) -> Scored:
    """Follow the solve of an input, after `ahead` planned steps, and compare its estimates with the truth."""
    prepared = student.prepare(x)
    teacher, plain = student.teacher, student.teacher.start(prepared.base)
    *_, start = student.rollout(prepared, ahead)
    start = finite_or(start, plain, student.batched)

    def solved(callback: Any = None) -> Any:
        return solve_model(
            teacher,
            prepared.base,
            student.as_solver() if student.is_solver else Anderson(),
            z0=start,
            tol=FLOOR,
            max_steps=LONGEST,
            measure="error",
            measured_only=True,
            callback=callback,
        )

    star, off = exact.equilibrium(x, solved().state)
    distances: list[Tensor] = []

    def compare(k: int, z: State) -> None:
        z = map_state(lambda part: part.to(tensors_of(star)[0].dtype), z)
        distances.append(relative_distance(z, star, student.batched))

    found = solved(compare)
    error = found.value_history[:, :, 0].double()
    # Whatever the equilibrium itself is off by counts against the estimate.
    distance = torch.stack(distances[: len(error)]).double() + off.double()
    features = features_of(found.history[0], prepared.base, start, student.batched)
    return Scored(error, distance, features)


class Scores(NamedTuple):
    """Of held-out samples: the score of each, (n,), and what the inputs were like."""

    ratios: Tensor
    features: dict[str, Tensor]

    def certificate(self, confidence: float) -> Certificate | None:
        """The bound at this confidence; None where the samples are too few."""
        factor = conformal_quantile(self.ratios, confidence)
        if not math.isfinite(factor):
            return None
        known = {name: _quantiles(values) for name, values in self.features.items()}
        return Certificate(
            confidence=confidence,
            samples=len(self.ratios),
            factor=factor,
            quantiles={name: tuple(values.tolist()) for name, values in known.items()},
        )


def _quantiles(values: Tensor) -> Tensor:
    """The values in order, or as many quantiles as are worth keeping."""
    if len(values) > KEPT:
        values = values.quantile(
            torch.linspace(0, 1, KEPT, dtype=values.dtype, device=values.device)
        )
    return values.sort().values


def scores_on(student: Student, inputs: list[Any]) -> Scores:
    """The scores of inputs; those of a student with a plan count for all numbers of steps that it plans."""
    exact = Exact(student)
    planned = [0] if student.is_solver else sorted(set(student.plan.values())) or [0]
    ratios: list[Tensor] = []
    features: dict[str, list[Tensor]] = {}
    for x in inputs:
        found = [score(student, x, exact, ahead) for ahead in planned]
        ratios.append(torch.stack([_largest_ratio(one) for one in found]).amax(dim=0))
        for name, values in found[0].features.items():
            features.setdefault(name, []).append(values)
    return Scores(torch.cat(ratios), {name: torch.cat(parts) for name, parts in features.items()})


def certificate_on(student: Student, inputs: list[Any], confidence: float) -> Certificate | None:
    """The bound at this confidence for inputs like these; None, with a warning, where they are too few."""
    scores = scores_on(student, inputs)
    certificate = scores.certificate(confidence)
    if certificate is None:
        _warn_of_no_bound(scores.ratios, confidence)
    return certificate


def _largest_ratio(scored: Scored) -> Tensor:
    """The score of each sample (B,): the largest distance over estimate, wherever its solve might stop."""
    ratio = scored.distance / scored.error.clamp_min(FLOOR)
    return torch.where(ratio.isnan(), torch.inf, ratio).amax(dim=0)


def _warn_of_no_bound(ratios: Tensor, confidence: float) -> None:
    needed, lost = fewest_samples(confidence), int(ratios.isinf().sum())
    why = f"a bound at a confidence of {confidence:g} needs {needed}"
    if lost:
        why += f", and of {lost} no equilibrium was found"
    warnings.warn(
        f"no bound was calibrated on {len(ratios)} samples: {why}. Give more held-out inputs, or a lower confidence.",
        UserWarning,
        stacklevel=5,
    )

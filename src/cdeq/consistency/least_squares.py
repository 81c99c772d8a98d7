"""The linear part of a correction, fitted in closed form: from residuals to what is missing to the equilibrium.

Along a rollout the states z_j, their residuals r_j = f(z_j) - z_j and their errors e_j = z* - z_j are known. The linear
N with r + N(r) nearest to e, all errors at the same scale, is a ridge regression. Gradient descent alone would need
very many updates for it: where f contracts by a factor 0.999, N has entries near 1000.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cdeq.consistency.groups import joined
from cdeq.equilibrium.contract import Context
from cdeq.equilibrium.states import State, map_state, sample_norms
from cdeq.placement import in_single

if TYPE_CHECKING:
    from cdeq.consistency.parts import Prepared
    from cdeq.consistency.student import Student
    from cdeq.trajectories import TrajectoryBatch

RIDGES = (1e-8, 1e-6, 1e-4, 1e-2, 1.0)
"""Ridges to choose from, relative to the mean square of the inputs."""
MOST_ROWS = 65_536
"""Positions of one state that take part; more are drawn from evenly."""


class Regression:
    """Sums of products of inputs (rows, K) and targets (rows, F), all that a ridge regression needs."""

    def __init__(self) -> None:
        self.inputs: Tensor | float = 0.0
        self.products: Tensor | float = 0.0
        self.targets: Tensor | float = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        stride = max(len(x) // MOST_ROWS, 1)
        x, y = x[::stride].double(), y[::stride].double()
        self.inputs = self.inputs + x.mT @ x
        self.products = self.products + x.mT @ y
        self.targets = self.targets + y.square().sum()

    def solve(self, ridge: float) -> Tensor:
        """The weight (F, K) of the regression with a relative ridge."""
        assert isinstance(self.inputs, Tensor)
        assert isinstance(self.products, Tensor)
        scale = self.inputs.diagonal().mean().clamp_min(1e-300)
        eye = torch.eye(len(self.inputs), dtype=self.inputs.dtype, device=self.inputs.device)
        return torch.linalg.solve(self.inputs + ridge * scale * eye, self.products).mT

    def loss(self, weight: Tensor) -> float:
        """The sum of squares that a weight leaves."""
        fitted = (weight @ self.inputs * weight).sum() - 2 * (weight * self.products.mT).sum()  # type: ignore[union-attr]
        return float(fitted + self.targets)


def residuals_along(student: Student, prepared: Prepared, count: int) -> list[tuple[State, State]]:
    """(z, r) of the first states of a rollout, r = f(z) - z; a step that has evaluated f itself is not repeated."""
    images: list[State | None] = []

    def call(c: float | Tensor, z: State, context: Context) -> State:
        image = in_single(prepared.call(c, z, context))
        images.append(image if float(c) == 0.0 else None)  # a leap is another map's
        return image

    *states, _ = student.rollout(prepared._replace(call=call), count)
    return [
        (z, map_state(torch.sub, in_single(prepared.step(z, 0.0)) if f is None else f, z))
        for z, f in zip(states, images, strict=True)
    ]


@torch.no_grad()
def fit_correction(
    student: Student, batches: Iterable[TrajectoryBatch], *, steps: int, floor: float
) -> None:
    """Fit the linear part of the student's correction on its own rollouts, before it is trained further.

    Errors below `floor`, relative to the equilibrium, are scaled as if they were that large: they are no better known.
    A quarter of the batches chooses the ridge; where no ridge helps, the correction stays zero.
    """
    correction: Any = student.correction
    if not hasattr(correction, "blocks"):
        return  # one of the user's own, which gradients alone train
    fits = [(Regression(), Regression()) for _ in correction.blocks]
    for number, batch in enumerate(batches):
        kept = 1 if number % 4 == 3 else 0
        for r, missing in _pairs(student, batch, steps, floor):
            for pair, group, block in zip(fits, correction.groups, correction.blocks, strict=True):
                pair[kept].add(
                    block.inputs(joined(group, r)), block.outputs(joined(group, missing))
                )
    for (fit, held_out), block in zip(fits, correction.blocks, strict=True):
        if not getattr(block, "dense", True):
            continue  # too many features for a map between all of them
        judge = held_out if isinstance(held_out.inputs, Tensor) else fit
        weights = [fit.solve(ridge) for ridge in RIDGES]
        best = min(weights, key=judge.loss)
        if judge.loss(best) < float(judge.targets):
            block.set_linear(best)


def _pairs(
    student: Student, batch: TrajectoryBatch, steps: int, floor: float
) -> Iterable[tuple[State, State]]:
    """(r, e - r) of each state of a rollout, divided by the size of its error."""
    prepared = student.prepare(batch.x)
    star = batch.endpoint
    scale = sample_norms(star, student.batched)
    for z, r in residuals_along(student, prepared, steps + 1):
        error = map_state(torch.sub, star, z)
        size = torch.maximum(sample_norms(error, student.batched), floor * scale)
        size = size.clamp_min(torch.finfo(size.dtype).tiny)

        def scaled(part: Tensor, size: Tensor = size) -> Tensor:
            shape = [-1, *(1 for _ in part.shape[1:])] if student.batched else [1] * part.ndim
            return part / size.reshape(shape).to(part.dtype)

        yield map_state(scaled, r), map_state(scaled, map_state(torch.sub, error, r))

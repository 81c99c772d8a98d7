"""What is linear in a student, fitted in closed form: the last layers of its start, and part of its correction.

Both are ridge regressions onto what is missing to the equilibrium. A start is missing
z* - z_0, and its last layers see what the layers before them make of the context.

A correction sees residuals. Along a rollout the states z_j, their residuals r_j = f(z_j) - z_j and their errors
e_j = z* - z_j are known. The linear N with r + N(r) nearest to e, all errors at the same scale, is the one that is
fitted. Gradient descent alone would need very many updates for it: where f contracts by a factor 0.999, N has entries
near 1000.

Shapes: rows are positions, K what a linear map sees at one, F features that it gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.consistency.groups import joined
from cdeq.equilibrium.contract import Context
from cdeq.equilibrium.states import (
    State,
    map_state,
    sample_norms,
    sizes_to_measure_by,
    tensors_of,
)
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


def best_fit(fit: Regression, held_out: Regression) -> Tensor | None:
    """The weight (F, K) whose ridge leaves least on what was held out, if any was; None where none helps."""
    judge = held_out if isinstance(held_out.inputs, Tensor) else fit
    best = min((fit.solve(ridge) for ridge in RIDGES), key=judge.loss)
    return best if judge.loss(best) < float(judge.targets) else None


@torch.no_grad()
def fit_start(student: Student, batches: Iterable[TrajectoryBatch]) -> None:
    """Fit the last layers of a start network that names them, `output_layers()`, on top of those before them.

    A quarter of the batches chooses the ridge; where no ridge helps, the layers stay as they are.
    """
    network: Any = student.start_network
    if not hasattr(network, "output_layers"):
        return  # one of the user's own, which gradients alone train
    parts: list[list[nn.Module]] = network.output_layers()
    fits = [(Regression(), Regression()) for _ in parts]
    for number, batch in enumerate(batches):
        context = student.prepare(batch.x).base
        start = in_single(student.teacher.start(context))
        with _inputs_of(parts) as seen:
            student.changed_start(start, context)
        scale = sizes_to_measure_by(sample_norms(batch.endpoint, student.batched))
        missing = _divided(map_state(torch.sub, batch.endpoint, start), scale, student.batched)
        groups = getattr(network, "groups", None)
        targets = tensors_of(missing) if groups is None else [joined(g, missing) for g in groups]
        for pair, layers, target in zip(fits, parts, targets, strict=True):
            x = [_layer_inputs(layer, seen[layer], target) for layer in layers]
            one = torch.ones_like(_along_features(layers[0], target)[:, :1])
            if student.batched:
                repeats = len(one) // len(scale)
                one = one / scale.repeat_interleave(repeats)[:, None].to(one.dtype)
            else:
                one = one / scale.to(one.dtype)
            rows = torch.cat([torch.cat(x, dim=1) * one, one], dim=1)
            pair[number % 4 == 3].add(rows, _along_features(layers[0], target))
    for pair, layers in zip(fits, parts, strict=True):
        weight = best_fit(*pair)
        if weight is not None:
            _set_layers(layers, weight)


@contextmanager
def _inputs_of(parts: list[list[nn.Module]]) -> Iterator[dict[nn.Module, Tensor]]:
    """What each of the layers is given while a network runs."""
    seen: dict[nn.Module, Tensor] = {}

    def keep(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen[layer] = given[0]

    hooks = [layer.register_forward_pre_hook(keep) for layers in parts for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _along_features(layer: nn.Module, y: Tensor) -> Tensor:
    """Rows (positions, F) of what a layer gives."""
    axis = 1 if isinstance(layer, nn.Conv2d) else getattr(layer, "axis", -1)
    return y.movedim(axis, -1).flatten(0, -2)


def _layer_inputs(layer: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Rows (positions, K) of what a layer sees; at a coarser resolution than its target's, once for each position."""
    if not isinstance(layer, nn.Conv2d):
        return _along_features(layer, x)
    side = layer.kernel_size[0]
    if side > 1:
        x = F.unfold(x, side, padding=side // 2).unflatten(2, x.shape[2:])
    if x.shape[2:] != target.shape[2:]:
        x = F.interpolate(x, size=target.shape[2:])
    return _along_features(layer, x)


def _set_layers(layers: list[nn.Module], weight: Tensor) -> None:
    """Take over a linear map (F, K), its last column the bias, which only the first layer has, if any."""
    inner: list[Any] = [getattr(layer, "linear", layer) for layer in layers]
    sizes = [layer.weight[0].numel() for layer in inner]
    *blocks, bias = weight.split([*sizes, 1], dim=1)
    for layer, block in zip(inner, blocks, strict=True):
        layer.weight.data.copy_(block.reshape(layer.weight.shape))
    if inner[0].bias is not None:
        inner[0].bias.data.copy_(bias[:, 0])


def _divided(state: State, sizes: Tensor, batched: bool) -> State:
    """A state with each sample divided by a number (B,), or (1,) where all of it is one sample."""

    def divide(part: Tensor) -> Tensor:
        shape = [-1, *(1 for _ in part.shape[1:])] if batched else [1] * part.ndim
        return part / sizes.reshape(shape).to(part.dtype)

    return map_state(divide, state)


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
    parts = [
        (block, number, member)
        for number, block in enumerate(correction.blocks)
        for member in range(len(correction.members[number]))
        if getattr(
            block, "dense", True
        )  # else it has too many features for a map between all of them
    ]
    fits = [(Regression(), Regression()) for _ in parts]
    for place, batch in enumerate(batches):
        kept = 1 if place % 4 == 3 else 0
        for r, missing in _pairs(student, batch, steps, floor):
            seen, wanted = correction.arrays(r), correction.arrays(missing)
            for pair, (block, number, member) in zip(fits, parts, strict=True):
                inputs = block.inputs(seen[number], member)
                pair[kept].add(inputs, block.outputs(wanted[number], member))
    for pair, (block, _, member) in zip(fits, parts, strict=True):
        best = best_fit(*pair)
        if best is not None:
            block.set_linear(best, member)


def _pairs(
    student: Student, batch: TrajectoryBatch, steps: int, floor: float
) -> Iterable[tuple[State, State]]:
    """(r, e - r) of each state of a rollout, divided by the size of its error."""
    prepared = student.prepare(batch.x)
    star = batch.endpoint
    scale = sizes_to_measure_by(sample_norms(star, student.batched))
    for z, r in residuals_along(student, prepared, steps + 1):
        error = map_state(torch.sub, star, z)
        size = torch.maximum(sample_norms(error, student.batched), floor * scale)
        size = size.clamp_min(torch.finfo(size.dtype).tiny)
        missing = map_state(torch.sub, error, r)
        yield _divided(r, size, student.batched), _divided(missing, size, student.batched)

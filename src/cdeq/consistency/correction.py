"""Learned corrections of a residual: N(r), linear in r, so that N(0) = 0 and the equilibrium stays where it is.

A corrected step goes to z + r + N(r), r = f(z) - z under the teacher's own weights. The best N is (I - J)^-1 - I, J the
Jacobian of f: then one step is Newton's. N sees what is cheap to see: the features of one position, and for images
their means over squares of several sizes, as a multigrid method does. Gates, from the context and the start, let it
depend on the input; they are computed once for each input. Shapes: B samples, F features, h gated features.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.consistency.features import FeatureLinear
from cdeq.consistency.groups import Group, groups_of, joined, seen, state_like
from cdeq.consistency.start import pooled, zeroed
from cdeq.equilibrium.contract import Context
from cdeq.equilibrium.states import State

LARGEST_DENSE = 1024
"""Features up to which each may correct every other; beyond that a correction is of low rank."""


class Block(Protocol):
    """The correction of one group of a state."""

    def gate(self, u: Tensor) -> Any: ...

    def __call__(self, r: Tensor, gate: Any) -> Tensor: ...

    def inputs(self, r: Tensor) -> Tensor:
        """Rows (positions, K) of all that the linear part sees at each position."""

    def outputs(self, r: Tensor) -> Tensor:
        """Rows (positions, F), in the same order."""

    def set_linear(self, weight: Tensor) -> None:
        """Take over a linear map (F, K) from `inputs` to the correction."""


class LearnedCorrection(nn.Module):
    """N(r) = W r + V (gate * U r), group by group; zero before it is fitted."""

    def __init__(self, groups: list[dict[str, Any]]):
        super().__init__()
        self.config = {"groups": groups}
        self.groups = [Group.from_dict(group) for group in groups]
        self.blocks = nn.ModuleList(
            ImageBlock(group) if group.is_image else PointwiseBlock(group) for group in self.groups
        )

    @classmethod
    def matching(
        cls, context: Context, state: State, axes: list[int], shared: Collection[int] = ()
    ) -> LearnedCorrection:
        """The network for contexts and states like these; it does not see what of the context is `shared`."""
        return cls([group.to_dict() for group in groups_of(context, state, axes, shared)])

    def gate(self, context: Context, start: State) -> list[Any]:
        """What of the correction depends on the input alone."""
        return [
            block.gate(seen(group, context, start))  # type: ignore[operator]
            for group, block in zip(self.groups, self.blocks, strict=True)
        ]

    def forward(self, r: State, gates: list[Any]) -> State:
        parts = [
            block(joined(group, r), gate)
            for group, block, gate in zip(self.groups, self.blocks, gates, strict=True)
        ]
        return state_like(r, self.groups, parts)


def gated_features(width: int) -> int:
    return min(max(width // 4, 8), 64)


class PointwiseBlock(nn.Module):
    """Each position by itself: W r + V (gate * U r)."""

    def __init__(self, group: Group):
        super().__init__()
        width, axis = group.width, group.axis
        hidden = gated_features(width)
        self.axis, self.dense = axis, width <= LARGEST_DENSE
        self.linear = zeroed(FeatureLinear(width, width if self.dense else 1, axis, bias=False))
        self.enter = FeatureLinear(width, hidden, axis, bias=False)
        self.leave = zeroed(FeatureLinear(hidden, width, axis, bias=False))
        self.gates = FeatureLinear(group.source_features + width, hidden, axis)

    def gate(self, u: Tensor) -> Tensor:
        return torch.tanh(self.gates(u))

    def forward(self, r: Tensor, gate: Tensor) -> Tensor:
        gated = self.leave(gate * self.enter(r))
        return gated + self.linear(r) if self.dense else gated

    def inputs(self, r: Tensor) -> Tensor:
        return r.movedim(self.axis, -1).reshape(-1, r.shape[self.axis])

    outputs = inputs

    def set_linear(self, weight: Tensor) -> None:
        self.linear.linear.weight.data.copy_(weight)


class ImageBlock(nn.Module):
    """Convolutions of the residual and of its means over squares of several sides, each gated.

    A state of many channels has a pointwise map at full resolution, so that the whole is cheap beside a step; one of
    few channels, where convolutions cost little, sees its neighbours there too.
    """

    def __init__(self, group: Group):
        super().__init__()
        width = group.width
        few = width <= 4
        self.sides = (1, 2, 4, 8) if few else (1, 4)
        hidden = gated_features(width)
        kernels = [3 if few or side > 1 else 1 for side in self.sides]

        def convolution(inputs: int, outputs: int, kernel: int) -> nn.Conv2d:
            return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)

        self.kernels = kernels
        self.linear = nn.ModuleList(zeroed(convolution(width, width, k)) for k in kernels)
        self.enter = nn.ModuleList(convolution(width, hidden, k) for k in kernels)
        self.leave = nn.ModuleList(zeroed(convolution(hidden, width, k)) for k in kernels)
        seen_features = group.source_features + width
        self.gates = nn.ModuleList(
            nn.Conv2d(seen_features, hidden, k, padding=k // 2) for k in kernels
        )

    def gate(self, u: Tensor) -> list[Tensor]:
        return [
            torch.tanh(layer(pooled(u, side) if side > 1 else u))
            for side, layer in zip(self.sides, self.gates, strict=True)
        ]

    def forward(self, r: Tensor, gate: list[Tensor]) -> Tensor:
        total: Tensor | None = None
        for i, side in enumerate(self.sides):
            x = pooled(r, side) if side > 1 else r
            part = self.linear[i](x) + self.leave[i](gate[i] * self.enter[i](x))
            part = F.interpolate(part, size=r.shape[2:]) if side > 1 else part
            total = part if total is None else total + part
        assert total is not None
        return total

    def inputs(self, r: Tensor) -> Tensor:
        levels = []
        for side, kernel in zip(self.sides, self.kernels, strict=True):
            x = pooled(r, side) if side > 1 else r
            patches = F.unfold(x, kernel, padding=kernel // 2).unflatten(2, x.shape[2:])
            levels.append(F.interpolate(patches, size=r.shape[2:]) if side > 1 else patches)
        return torch.cat(levels, dim=1).permute(0, 2, 3, 1).flatten(0, 2)

    def outputs(self, r: Tensor) -> Tensor:
        return r.permute(0, 2, 3, 1).flatten(0, 2)

    def set_linear(self, weight: Tensor) -> None:
        layers: list[Any] = list(self.linear)
        sizes = [layer.weight[0].numel() for layer in layers]
        for layer, part in zip(layers, weight.split(sizes, dim=1), strict=True):
            layer.weight.data.copy_(part.reshape(layer.weight.shape))

"""Learned corrections of a residual: N(r), linear in r, so that N(0) = 0 and the equilibrium stays where it is.

A corrected step goes to z + r + N(r), r = f(z) - z under the teacher's own weights. The best N is (I - J)^-1 - I, J the
Jacobian of f: then one step is Newton's. N sees what is cheap to see: the features of one position, and for images
their means over squares of several sizes, as a multigrid method does. Gates let it depend on the input and on the
state, as J does. They follow the state for the first steps and then stay as they are: where a correction went on
changing with the state, r + N(r; z) = 0 could have other solutions than r = 0. Shapes: B samples, F features, h gated
features.
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
FOLLOWED = 3
"""Steps at which gates follow the state."""
FEW_CHANNELS = 4
"""Channels of an image up to which convolutions at full resolution cost little."""


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

    def gate(self, context: Context, z: State) -> list[Any]:
        """The gates at a state."""
        return [
            block.gate(seen(group, context, z))  # type: ignore[operator]
            for group, block in zip(self.groups, self.blocks, strict=True)
        ]

    def forward(self, r: State, gates: list[Any]) -> State:
        parts = [
            block(joined(group, r), gate)
            for group, block, gate in zip(self.groups, self.blocks, gates, strict=True)
        ]
        return state_like(r, self.groups, parts)


def gated_features(width: int) -> int:
    return min(max(width // 2, 8), 64)


class PointwiseBlock(nn.Module):
    """Each position by itself: W r + V (gate * U r), gate = relu(G u): which parts of f are active there."""

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
        return F.relu(self.gates(u))

    def forward(self, r: Tensor, gate: Tensor) -> Tensor:
        gated = self.leave(gate * self.enter(r))
        return gated + self.linear(r) if self.dense else gated

    def inputs(self, r: Tensor) -> Tensor:
        return r.movedim(self.axis, -1).reshape(-1, r.shape[self.axis])

    outputs = inputs

    def set_linear(self, weight: Tensor) -> None:
        self.linear.linear.weight.data.copy_(weight)


class ImageBlock(nn.Module):
    """Convolutions of the residual and of its means over squares of several sides, gated.

    A state of many channels has a pointwise map without gates at full resolution, so that the whole is cheap beside a
    step; one of few channels, where convolutions cost little, sees its neighbours there too.
    """

    def __init__(self, group: Group):
        super().__init__()
        width = group.width
        few = width <= FEW_CHANNELS
        self.sides = (1, 2, 4, 8) if few else (1, 4)
        self.kernels = [3 if few or side > 1 else 1 for side in self.sides]
        hidden = gated_features(width)

        def convolution(inputs: int, outputs: int, kernel: int, bias: bool = False) -> nn.Conv2d:
            return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=bias)

        def gated(inputs: int, outputs: int, bias: bool = False) -> nn.ModuleList:
            """A convolution for each side but those that have no gates."""
            kernel = 3 if few else 1
            layers: list[Any] = [convolution(inputs, outputs, kernel, bias) for _ in self.sides]
            layers[0] = layers[0] if few else None
            return nn.ModuleList(layers)

        self.linear = nn.ModuleList(
            zeroed(convolution(width, width, kernel)) for kernel in self.kernels
        )
        self.enter = gated(width, hidden)
        self.leave = gated(hidden, width)
        self.gates = gated(group.source_features + width, hidden, bias=True)
        for layer in self.leave:
            if layer is not None:
                zeroed(layer)

    def gate(self, u: Tensor) -> list[Tensor | None]:
        return [
            None if layer is None else F.relu(layer(pooled(u, side)))
            for side, layer in zip(self.sides, self.gates, strict=True)
        ]

    def forward(self, r: Tensor, gate: list[Tensor | None]) -> Tensor:
        total = self._level(0, r, gate[0])
        for i, side in enumerate(self.sides[1:], 1):
            total = add_squares(total, self._level(i, pooled(r, side), gate[i]), side)
        return total

    def _level(self, i: int, x: Tensor, gate: Tensor | None) -> Tensor:
        """The correction at one of the sides."""
        if gate is None:
            # Pointwise: as a product of matrices it is faster on CPU than as a convolution.
            weight: Any = self.linear[i].weight
            rows = weight.flatten(1).expand(x.shape[0], -1, -1)  # not len(x): traced, a number
            return torch.bmm(rows, x.flatten(2)).unflatten(2, x.shape[2:])
        return self.linear[i](x) + self.leave[i](gate * self.enter[i](x))

    def inputs(self, r: Tensor) -> Tensor:
        levels = []
        for side, kernel in zip(self.sides, self.kernels, strict=True):
            x = pooled(r, side)
            patches = F.unfold(x, kernel, padding=kernel // 2).unflatten(2, x.shape[2:])
            spread = patches.new_zeros(*patches.shape[:2], *r.shape[2:])
            levels.append(add_squares(spread, patches, side))
        return torch.cat(levels, dim=1).permute(0, 2, 3, 1).flatten(0, 2)

    def outputs(self, r: Tensor) -> Tensor:
        return r.permute(0, 2, 3, 1).flatten(0, 2)

    def set_linear(self, weight: Tensor) -> None:
        layers: list[Any] = list(self.linear)
        sizes = [layer.weight[0].numel() for layer in layers]
        for layer, part in zip(layers, weight.split(sizes, dim=1), strict=True):
            layer.weight.data.copy_(part.reshape(layer.weight.shape))


def add_squares(total: Tensor, part: Tensor, side: int) -> Tensor:
    """Images (B, C, H, W) with each number of `part` (B, C, H / side, W / side) added on its square, in place."""
    rows, columns = total.shape[2:]
    wide = part.repeat_interleave(side, dim=3)[..., :columns]
    if rows % side:
        return total.add_(wide.repeat_interleave(side, dim=2)[:, :, :rows])
    total.unflatten(2, (rows // side, side)).add_(wide[:, :, :, None])
    return total

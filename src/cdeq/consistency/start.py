"""A learned start for any teacher: the teacher's own start and a small network's change of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.consistency.features import FeatureLinear
from cdeq.consistency.groups import Group, groups_of, seen, state_like
from cdeq.equilibrium.contract import Context
from cdeq.equilibrium.states import State

SMALLEST_HIDDEN = 32
"""Hidden features of a start, at least: they do not follow a state of one channel."""
LARGEST_HIDDEN = 256


class LearnedStart(nn.Module):
    """z_0 = start + s(context, start), from what the context and the teacher's start are at each position.

    Images are seen through convolutions at three resolutions, all else one position at a time, which is causal where
    the teacher is. Before training s is zero.
    """

    takes_start = True
    """It is called with the context and the teacher's start; a network of a teacher's own, with the context alone."""

    def __init__(self, groups: list[dict[str, Any]]):
        super().__init__()
        self.config = {"groups": groups}
        self.groups = [Group.from_dict(group) for group in groups]
        self.networks = nn.ModuleList(
            ImageChange(group) if group.is_image else PointwiseChange(group)
            for group in self.groups
        )

    @classmethod
    def matching(
        cls, context: Context, state: State, axes: list[int], shared: Collection[int] = ()
    ) -> LearnedStart:
        """The network for contexts and states like these; it does not see what of the context is `shared`."""
        return cls([group.to_dict() for group in groups_of(context, state, axes, shared)])

    def output_layers(self) -> list[list[nn.Module]]:
        """The linear layers at the end, for each group."""
        return [[network.outer] for network in self.networks]  # type: ignore[list-item]

    def forward(self, context: Context, start: State) -> State:
        changes = [
            network(seen(group, context, start))
            for group, network in zip(self.groups, self.networks, strict=True)
        ]
        return state_like(start, self.groups, changes)


def hidden_features(group: Group) -> int:
    return min(max(2 * group.width, SMALLEST_HIDDEN), LARGEST_HIDDEN)


def zeroed(layer: Any) -> Any:
    """A linear layer that gives zero before training."""
    inner = getattr(layer, "linear", layer)
    nn.init.zeros_(inner.weight)
    if inner.bias is not None:
        nn.init.zeros_(inner.bias)
    return layer


class PointwiseChange(nn.Module):
    """V gelu(U u) at each position."""

    def __init__(self, group: Group):
        super().__init__()
        hidden = hidden_features(group)
        self.inner = FeatureLinear(group.source_features + group.width, hidden, group.axis)
        self.outer = zeroed(FeatureLinear(hidden, group.width, group.axis))

    def forward(self, u: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner(u)))


class ImageChange(nn.Module):
    """Convolutions at full, half and quarter resolution, the coarser added to the finer."""

    def __init__(self, group: Group):
        super().__init__()
        hidden = min(max(group.width, 24), 64)
        self.enter = nn.Conv2d(group.source_features + group.width, hidden, 3, padding=1)
        self.middle = nn.Conv2d(hidden, hidden, 3, padding=1)
        self.coarse = nn.Conv2d(hidden, hidden, 3, padding=1)
        self.outer = zeroed(
            nn.Conv2d(hidden, group.width, 3 if group.width < 8 else 1, padding="same")
        )

    def forward(self, u: Tensor) -> Tensor:
        full = F.gelu(self.enter(u))
        half = F.gelu(self.middle(pooled(full, 2)))
        quarter = F.gelu(self.coarse(pooled(half, 2)))
        half = half + F.interpolate(quarter, size=half.shape[2:])
        return self.outer(full + F.interpolate(half, size=full.shape[2:]))


def pooled(x: Tensor, side: int) -> Tensor:
    """Means over squares; a margin that is no whole square counts with what there is of it."""
    if side == 1:
        return x
    if x.shape[2] % side or x.shape[3] % side:
        return F.avg_pool2d(x, side, ceil_mode=True, count_include_pad=False)
    if torch.compiler.is_compiling():
        return F.avg_pool2d(x, side)
    # Eager, rows first, then columns: sums of whole tensors are several times faster on CPU than reductions of an axis.
    rows = added(x.unflatten(2, (-1, side)).unbind(3))
    return added(rows.unflatten(3, (-1, side)).unbind(4)).div_(side**2)


def added(parts: Sequence[Tensor]) -> Tensor:
    """The sum of two or more tensors, with one new tensor in all."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total

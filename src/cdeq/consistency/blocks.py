"""The correction of a part of a state: what every one has, and the pointwise one; `image_blocks` has those of images.

What each is, `correction.py` says. Beside N(r), as it is trained, each has `corrected`, which writes r + N(r) without
gradients: in a rollout a pass over a large state costs as much as arithmetic, so it makes few of them, a few samples at
a time. A block has one or several groups of a state's tensors, and is given one array for each of them. Shapes: B
samples, F features, h gated features.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.consistency.features import FeatureLinear
from cdeq.consistency.groups import Group
from cdeq.consistency.start import zeroed

LARGEST_DENSE = 1024
"""Features up to which each may correct every other; beyond that a correction is of low rank."""
CACHE = 1 << 20
"""Bytes of a state that are corrected at a time."""


class Block(Protocol):
    """The correction of some groups of a state; all lists have an array for each of them."""

    def share(self, sources: list[list[Tensor]]) -> Any:
        """What the context has in the gates."""

    def gate(self, z: list[Tensor], share: Any) -> Any:
        """The gates at a state."""

    def __call__(self, r: list[Tensor], gate: Any) -> list[Tensor]: ...

    def corrected(
        self,
        z: list[Tensor],
        f: list[Tensor],
        gate: Any,
        gain: Tensor,
        out: list[Tensor],
        image: list[Tensor],
    ) -> None:
        """Write p = r + gain N(r) of r = f - z to `out`, and z + p to `image`."""

    def inputs(self, r: list[Tensor], member: int = 0) -> Tensor:
        """Rows (positions, K) of all that the linear part sees at each position of a group."""

    def outputs(self, r: list[Tensor], member: int = 0) -> Tensor:
        """Rows (positions, F), in the same order."""

    def set_linear(self, weight: Tensor, member: int = 0) -> None:
        """Take over a linear map (F, K) from `inputs` to the correction of a group."""


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

    def share(self, sources: list[list[Tensor]]) -> Tensor | None:
        [own] = sources
        if not own:
            return None
        context = own[0] if len(own) == 1 else torch.cat(own, dim=self.axis)
        return self.gates.part(context, 0, self.gates.linear.bias)

    def gate(self, z: list[Tensor], share: Tensor | None) -> Tensor:
        if share is None:
            return F.relu(self.gates(z[0]))
        own = self.gates.part(z[0], self.gates.linear.in_features - z[0].shape[self.axis])
        return own.add_(share).relu_()

    def forward(self, r: list[Tensor], gate: Tensor) -> list[Tensor]:
        gated = self.leave(gate * self.enter(r[0]))
        return [gated + self.linear(r[0]) if self.dense else gated]

    def corrected(
        self,
        z: list[Tensor],
        f: list[Tensor],
        gate: Tensor,
        gain: Tensor,
        out: list[Tensor],
        image: list[Tensor],
    ) -> None:
        weight = beside_identity(self.linear.linear.weight, gain) if self.dense else None
        leave = gain * self.leave.linear.weight
        parts: Any = [(*z, *f, gate, *out, *image)]
        if self.axis != 0:
            parts = zip(*(t.split(in_cache(z[0])) for t in parts[0]), strict=True)
        for z_, f_, gate_, out_, image_ in parts:
            rows, place = self._rows(torch.sub(f_, z_, out=image_)), self._rows(out_)
            if weight is None:
                place.copy_(rows)
            else:
                torch.mm(rows, weight.T, out=place)
            hidden = torch.mm(rows, self.enter.linear.weight.T).mul_(self._rows(gate_))
            place.addmm_(hidden, leave.T)
            if place.data_ptr() != out_.data_ptr():  # features on another axis: it is a copy
                moved = out_.movedim(self.axis, -1)
                moved.copy_(place.view(moved.shape))
            torch.add(z_, out_, out=image_)

    def inputs(self, r: list[Tensor], member: int = 0) -> Tensor:
        return self._rows(r[0])

    outputs = inputs

    def _rows(self, x: Tensor) -> Tensor:
        return x.movedim(self.axis, -1).reshape(-1, x.shape[self.axis])

    def set_linear(self, weight: Tensor, member: int = 0) -> None:
        self.linear.linear.weight.data.copy_(weight)


def in_cache(z: Tensor) -> int:
    """Samples to correct at a time, so that what was just written is still in the cache when it is read again."""
    whole = z.device.type != "cpu" or z.nbytes <= CACHE
    return max(len(z) if whole else len(z) * CACHE // z.nbytes, 1)


def beside_identity(weight: Tensor, gain: Tensor) -> Tensor:
    """I + gain W."""
    weight = gain * weight
    weight.diagonal().add_(1)
    return weight

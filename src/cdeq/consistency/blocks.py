"""The corrections of one group of a state's tensors: pointwise, or for images with their neighbourhoods.

What each is, `correction.py` says. Beside N(r), as it is trained, each has `corrected`, which writes r + N(r) without
gradients: in a rollout a pass over a large state costs as much as arithmetic, so it makes few of them, a few samples at
a time. Shapes: B samples, F features, h gated features.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.consistency.features import FeatureLinear
from cdeq.consistency.groups import Group
from cdeq.consistency.start import pooled, zeroed

LARGEST_DENSE = 1024
"""Features up to which each may correct every other; beyond that a correction is of low rank."""
CACHE = 1 << 20
"""Bytes of a state that are corrected at a time."""
FEW_CHANNELS = 4
"""Channels of an image up to which convolutions at full resolution cost little."""


class Block(Protocol):
    """The correction of one group of a state."""

    def share(self, sources: list[Tensor]) -> Any:
        """What the context has in the gates."""

    def gate(self, z: Tensor, share: Any) -> Any:
        """The gates at a state."""

    def __call__(self, r: Tensor, gate: Any) -> Tensor: ...

    def corrected(
        self, z: Tensor, f: Tensor, gate: Any, gain: Tensor, out: Tensor, image: Tensor
    ) -> None:
        """Write p = r + gain N(r) of r = f - z to `out`, and z + p to `image`."""

    def inputs(self, r: Tensor) -> Tensor:
        """Rows (positions, K) of all that the linear part sees at each position."""

    def outputs(self, r: Tensor) -> Tensor:
        """Rows (positions, F), in the same order."""

    def set_linear(self, weight: Tensor) -> None:
        """Take over a linear map (F, K) from `inputs` to the correction."""


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

    def share(self, sources: list[Tensor]) -> Tensor | None:
        if not sources:
            return None
        context = sources[0] if len(sources) == 1 else torch.cat(sources, dim=self.axis)
        return self.gates.part(context, 0, self.gates.linear.bias)

    def gate(self, z: Tensor, share: Tensor | None) -> Tensor:
        if share is None:
            return F.relu(self.gates(z))
        own = self.gates.part(z, self.gates.linear.in_features - z.shape[self.axis])
        return own.add_(share).relu_()

    def forward(self, r: Tensor, gate: Tensor) -> Tensor:
        gated = self.leave(gate * self.enter(r))
        return gated + self.linear(r) if self.dense else gated

    def corrected(
        self, z: Tensor, f: Tensor, gate: Tensor, gain: Tensor, out: Tensor, image: Tensor
    ) -> None:
        weight = beside_identity(self.linear.linear.weight, gain) if self.dense else None
        leave = gain * self.leave.linear.weight
        parts: Any = [(z, f, gate, out, image)]
        if self.axis != 0:
            parts = zip(*(t.split(in_cache(z)) for t in parts[0]), strict=True)
        for z_, f_, gate_, out_, image_ in parts:
            rows, place = self.inputs(torch.sub(f_, z_, out=image_)), self.inputs(out_)
            if weight is None:
                place.copy_(rows)
            else:
                torch.mm(rows, weight.T, out=place)
            hidden = torch.mm(rows, self.enter.linear.weight.T).mul_(self.inputs(gate_))
            place.addmm_(hidden, leave.T)
            if place.data_ptr() != out_.data_ptr():  # features on another axis: it is a copy
                moved = out_.movedim(self.axis, -1)
                moved.copy_(place.view(moved.shape))
            torch.add(z_, out_, out=image_)

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

    def share(self, sources: list[Tensor]) -> list[Tensor | None]:
        return [self._share(layer, sources, side) for side, layer in self._gated()]

    def _share(self, layer: Any, sources: list[Tensor], side: int) -> Tensor | None:
        if layer is None or not sources:
            return None
        context = torch.cat([pooled(source, side) for source in sources], dim=1)
        return conv_part(layer, context, 0, layer.bias)

    def gate(self, z: Tensor, share: list[Tensor | None]) -> list[Tensor | None]:
        gates: list[Tensor | None] = []
        for (side, layer), known in zip(self._gated(), share, strict=True):
            if layer is None:
                gates.append(None)
            elif known is None:
                gates.append(F.relu(layer(pooled(z, side))))
            else:
                own = conv_part(layer, pooled(z, side), layer.in_channels - z.shape[1])
                gates.append(own.add_(known).relu_())
        return gates

    def _gated(self) -> list[tuple[int, Any]]:
        """The sides, and the convolutions that make their gates."""
        return list(zip(self.sides, self.gates, strict=True))

    def forward(self, r: Tensor, gate: list[Tensor | None]) -> Tensor:
        total = self._level(0, r, gate[0])
        for i, side in enumerate(self.sides[1:], 1):
            total = add_squares(total, self._level(i, pooled(r, side), gate[i]), side)
        return total

    def corrected(
        self,
        z: Tensor,
        f: Tensor,
        gate: list[Tensor | None],
        gain: Tensor,
        out: Tensor,
        image: Tensor,
    ) -> None:
        if gate[0] is not None:
            r = torch.sub(f, z, out=image)
            torch.addcmul(r, self(r, gate), gain, out=out)
            torch.add(z, out, out=image)
            return
        linear: Any = self.linear[0]
        weight = beside_identity(linear.weight.flatten(1), gain)
        count, side = in_cache(z), self.sides[1]
        if count == len(z):
            r = f - z
            # Into memory in one piece, where it is a third faster than into the place of p.
            plain = torch.bmm(weight.expand(count, -1, -1), r.flatten(2)).view_as(r)
            change = self._level(1, pooled(r, side), gate[1]).mul_(gain)
            torch.add(z, add_squares(plain, change, side, out=out), out=image)
            return
        pieces = list(zip(*(t.split(count) for t in (z, f, out, image)), strict=True))
        means, room = [], torch.empty_like(z[:count])
        for z_, f_, out_, _ in pieces:
            r = torch.sub(f_, z_, out=room[: len(z_)])
            torch.bmm(weight.expand(len(r), -1, -1), r.flatten(2), out=out_.flatten(2))
            means.append(pooled(r, side))
        change = self._level(1, torch.cat(means), gate[1]).mul_(gain)
        for (z_, _, out_, image_), part in zip(pieces, change.split(count), strict=True):
            torch.add(z_, add_squares(out_, part, side), out=image_)

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


def in_cache(z: Tensor) -> int:
    """Samples to correct at a time, so that what was just written is still in the cache when it is read again."""
    whole = z.device.type != "cpu" or z.nbytes <= CACHE
    return max(len(z) if whole else len(z) * CACHE // z.nbytes, 1)


def beside_identity(weight: Tensor, gain: Tensor) -> Tensor:
    """I + gain W."""
    weight = gain * weight
    weight.diagonal().add_(1)
    return weight


def conv_part(layer: Any, x: Tensor, first: int, bias: Tensor | None = None) -> Tensor:
    """The share of some of its channels in a convolution, from the `first` on."""
    return F.conv2d(x, layer.weight[:, first : first + x.shape[1]], bias, padding=layer.padding)


def add_squares(total: Tensor, part: Tensor, side: int, out: Tensor | None = None) -> Tensor:
    """Images (B, C, H, W) with each number of `part` (B, C, H / side, W / side) added on its square.

    In place, or written to `out`.
    """
    rows, columns = total.shape[2:]
    # As repeat_interleave makes them, in a fraction of the time.
    wide = part[..., None].expand(-1, -1, -1, -1, side).flatten(3)[..., :columns]
    if rows % side:
        wide = wide.repeat_interleave(side, dim=2)[:, :, :rows]
        return total.add_(wide) if out is None else torch.add(total, wide, out=out)
    tall, wide = total.unflatten(2, (rows // side, side)), wide[:, :, :, None]
    if out is None:
        tall.add_(wide)
        return total
    torch.add(tall, wide, out=out.unflatten(2, (rows // side, side)))
    return out

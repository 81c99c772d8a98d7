"""Corrections of images: of few channels by convolutions, of many on one coarse grid of all resolutions.

Shapes: B samples, C channels, F features, h gated features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.consistency.blocks import beside_identity, gated_features, in_cache
from cdeq.consistency.groups import Group
from cdeq.consistency.start import pooled, zeroed

FEW_CHANNELS = 4
"""Channels of an image up to which convolutions at full resolution cost little."""
SQUARE = 4
"""Side of the squares whose means an image of many channels is seen by, if it has one resolution only."""


class ImageBlock(nn.Module):
    """Images of few channels: convolutions of the residual and of its means over squares of several sides, gated."""

    sides = (1, 2, 4, 8)

    def __init__(self, group: Group):
        super().__init__()
        width = group.width
        hidden = gated_features(width)

        def convolutions(inputs: int, outputs: int, bias: bool = False) -> nn.ModuleList:
            """One for each side."""
            return nn.ModuleList(
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias) for _ in self.sides
            )

        self.linear, self.leave = convolutions(width, width), convolutions(hidden, width)
        self.enter = convolutions(width, hidden)
        self.gates = convolutions(group.source_features + width, hidden, bias=True)
        for layer in (*self.linear, *self.leave):
            zeroed(layer)

    def share(self, sources: list[list[Tensor]]) -> list[Tensor | None]:
        [own] = sources
        return [self._share(layer, own, side) for side, layer in self._gated()]

    def _share(self, layer: Any, sources: list[Tensor], side: int) -> Tensor | None:
        if not sources:
            return None
        context = torch.cat([pooled(source, side) for source in sources], dim=1)
        return conv_part(layer, context, 0, layer.bias)

    def gate(self, z: list[Tensor], share: list[Tensor | None]) -> list[Tensor]:
        gates: list[Tensor] = []
        for (side, layer), known in zip(self._gated(), share, strict=True):
            if known is None:
                gates.append(F.relu(layer(pooled(z[0], side))))
            else:
                own = conv_part(layer, pooled(z[0], side), layer.in_channels - z[0].shape[1])
                gates.append(own.add_(known).relu_())
        return gates

    def _gated(self) -> list[tuple[int, Any]]:
        """The sides, and the convolutions that make their gates."""
        return list(zip(self.sides, self.gates, strict=True))

    def forward(self, r: list[Tensor], gate: list[Tensor]) -> list[Tensor]:
        total = self._level(0, r[0], gate[0])
        for i, side in enumerate(self.sides[1:], 1):
            total = add_squares(total, self._level(i, pooled(r[0], side), gate[i]), side)
        return [total]

    def _level(self, i: int, x: Tensor, gate: Tensor) -> Tensor:
        """The correction at one of the sides."""
        return self.linear[i](x) + self.leave[i](gate * self.enter[i](x))

    def corrected(
        self,
        z: list[Tensor],
        f: list[Tensor],
        gate: list[Tensor],
        gain: Tensor,
        out: list[Tensor],
        image: list[Tensor],
    ) -> None:
        r = torch.sub(f[0], z[0], out=image[0])
        torch.addcmul(r, self([r], gate)[0], gain, out=out[0])
        torch.add(z[0], out[0], out=image[0])

    def inputs(self, r: list[Tensor], member: int = 0) -> Tensor:
        levels = []
        for side in self.sides:
            x = pooled(r[0], side)
            levels.append(spread(F.unfold(x, 3, padding=1).unflatten(2, x.shape[2:]), side, r[0]))
        return pixel_rows(torch.cat(levels, dim=1))

    def outputs(self, r: list[Tensor], member: int = 0) -> Tensor:
        return pixel_rows(r[0])

    def set_linear(self, weight: Tensor, member: int = 0) -> None:
        layers: list[Any] = list(self.linear)
        sizes = [layer.weight[0].numel() for layer in layers]
        for layer, part in zip(layers, weight.split(sizes, dim=1), strict=True):
            layer.weight.data.copy_(part.reshape(layer.weight.shape))


class PyramidBlock(nn.Module):
    """Images of many channels, of one resolution or several: each pixel by itself, and all of them on one coarse grid.

    The residuals' means over squares, those of all resolutions side by side, are m; N(r) of a resolution is W r and, on
    each square, its share of A m + V (gate * U m). A convolution at full resolution would cost as much as a step.
    """

    def __init__(self, groups: Sequence[Group], sides: Sequence[int]):
        super().__init__()
        self.sides, self.widths = list(sides), [group.width for group in groups]
        total = sum(self.widths)
        hidden = gated_features(total)
        self.pixels = nn.ParameterList(torch.zeros(w, w) for w in self.widths)
        self.linear = zeroed(nn.Linear(total, total, bias=False))
        self.enter = nn.Linear(total, hidden, bias=False)
        self.leave = zeroed(nn.Linear(hidden, total, bias=False))
        self.gates = nn.Linear(sum(group.source_features for group in groups) + total, hidden)

    @classmethod
    def sides_of(cls, images: Sequence[Tensor]) -> list[int] | None:
        """The sides of squares that bring all images (B, C, H, W) to one grid; None if there are none."""
        if len({image.shape[2:] for image in images}) == 1:
            return [SQUARE] * len(images)
        least = min(image.shape[2] for image in images)
        sides = [image.shape[2] // least for image in images]
        grids = {
            tuple(-(-size // side) for size in image.shape[2:])
            for image, side in zip(images, sides, strict=True)
        }
        return sides if len(grids) == 1 else None

    def share(self, sources: list[list[Tensor]]) -> Tensor | None:
        seen = [
            pooled(source, side)
            for own, side in zip(sources, self.sides, strict=True)
            for source in own
        ]
        if not seen:
            return None
        context = torch.cat(seen, dim=1)
        known = self.gates.weight[:, : context.shape[1]]
        return channels(known, context) + self.gates.bias[:, None, None]

    def gate(self, z: list[Tensor], share: Tensor | None) -> Tensor:
        own = channels(self.gates.weight[:, -sum(self.widths) :], self._means(z))
        return F.relu(own + (self.gates.bias[:, None, None] if share is None else share))

    def forward(self, r: list[Tensor], gate: Tensor) -> list[Tensor]:
        changes = self._change(self._means(r), gate).split(self.widths, dim=1)
        return [
            add_squares(channels(weight, part), change, side)
            for weight, part, change, side in zip(self.pixels, r, changes, self.sides, strict=True)
        ]

    def _means(self, arrays: Sequence[Tensor]) -> Tensor:
        """(B, F, rows, columns) of the coarse grid, all resolutions side by side."""
        means = [pooled(array, side) for array, side in zip(arrays, self.sides, strict=True)]
        return means[0] if len(means) == 1 else torch.cat(means, dim=1)

    def _change(self, means: Tensor, gate: Tensor) -> Tensor:
        """What the coarse grid adds."""
        both = channels(torch.cat([self.linear.weight, self.enter.weight]), means)
        plain, entered = both.split([self.linear.out_features, self.enter.out_features], dim=1)
        return plain + channels(self.leave.weight, gate * entered)

    def corrected(
        self,
        z: list[Tensor],
        f: list[Tensor],
        gate: Tensor,
        gain: Tensor,
        out: list[Tensor],
        image: list[Tensor],
    ) -> None:
        plains, means = [], []
        for z_, f_, out_, weight, side in zip(z, f, out, self.pixels, self.sides, strict=True):
            plain, mean = self._pixels(beside_identity(weight, gain), z_, f_, out_, side)
            plains.append(plain)
            means.append(mean)
        changes = self._change(torch.cat(means, dim=1), gate).mul_(gain).split(self.widths, dim=1)
        for z_, plain, change, side, out_, image_ in zip(
            z, plains, changes, self.sides, out, image, strict=True
        ):
            count = in_cache(z_)
            for pieces in zip(
                *(t.split(count) for t in (z_, plain, change, out_, image_)), strict=True
            ):
                start, total, part, place, moved = pieces
                torch.add(start, add_squares(total, part, side, out=place), out=moved)

    @staticmethod
    def _pixels(
        weight: Tensor, z: Tensor, f: Tensor, out: Tensor, side: int
    ) -> tuple[Tensor, Tensor]:
        """The weight times r = f - z, and the means of r; what is large is written to `out`, some samples at a time."""
        count = in_cache(z)
        if count == len(z):
            r = f - z
            # Into memory in one piece, where it is a third faster than into the place of p.
            return channels(weight, r), pooled(r, side)
        means, room = [], torch.empty_like(z[:count])
        for z_, f_, out_ in zip(*(t.split(count) for t in (z, f, out)), strict=True):
            r = torch.sub(f_, z_, out=room[: len(z_)])
            torch.bmm(weight.expand(len(r), -1, -1), r.flatten(2), out=out_.flatten(2))
            means.append(pooled(r, side) if side > 1 else r.clone())
        return out, torch.cat(means)

    def inputs(self, r: list[Tensor], member: int = 0) -> Tensor:
        squares = spread(self._means(r), self.sides[member], r[member])
        return pixel_rows(torch.cat([r[member], squares], dim=1))

    def outputs(self, r: list[Tensor], member: int = 0) -> Tensor:
        return pixel_rows(r[member])

    def set_linear(self, weight: Tensor, member: int = 0) -> None:
        own, coarse = weight.split([self.widths[member], sum(self.widths)], dim=1)
        self.pixels[member].data.copy_(own)
        self.linear.weight.data.split(self.widths)[member].copy_(coarse)


def channels(weight: Tensor, x: Tensor) -> Tensor:
    """W x of the channels of images; eager, as a product of matrices it is faster on CPU than as a convolution."""
    if torch.compiler.is_compiling():
        return F.conv2d(x, weight[:, :, None, None])
    return torch.bmm(weight.expand(len(x), -1, -1), x.flatten(2)).unflatten(2, x.shape[2:])


def pixel_rows(x: Tensor) -> Tensor:
    """(B, C, H, W) as rows (B H W, C)."""
    return x.permute(0, 2, 3, 1).flatten(0, 2)


def spread(x: Tensor, side: int, like: Tensor) -> Tensor:
    """The numbers of a coarse grid at each pixel of their squares, on images of the size of `like`."""
    return add_squares(x.new_zeros(*x.shape[:2], *like.shape[2:]), x, side)


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

"""MDEQ (Bai et al. 2020): one equilibrium over several resolutions. With one resolution: the single-stream DEQ.

Shapes: B images; branch i has C_i channels at (H / 2^i) x (W / 2^i), H x W what the stem leaves of the image.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from cdeq.models.arguments import arguments_of
from cdeq.models.vision.pyramid_start import PyramidStart

States = tuple[Tensor, ...]


class MDEQ(nn.Module):
    """f: a residual block for each branch, then every branch receives from every other.

    y_i = GN(relu(keep z_i + GN(conv(relu(GN(conv(z_i)))) + u_i))), the middle `expand` times as wide; u_0 is the
    stem's output, u_i = 0 below. f_i = GN(conv1(relu(sum_j F_ji(y_j)))): F_ji is the identity for j = i, strided
    convolutions from a finer branch, and a pointwise one with nearest upsampling from a coarser branch. All
    convolutions of f have normalised weights.

    `channels` of the branches; `stem` channels, and `strides` of its two convolutions. Every branch passes a
    bottleneck of `head` inner channels and four times as many outside on its way to the logits; the branches are
    then added up on the way down, and `final` channels are averaged over the image. `keep` below 1, which is not
    MDEQ's, damps the residual sum; `dropout` takes whole channels of the block's middle, the same during a solve.
    """

    batched = True

    def __init__(
        self,
        *,
        classes: int,
        in_channels: int = 3,
        channels: Iterable[int] = (32, 64, 128, 256),
        expand: int = 5,
        groups: int = 8,
        fuse_groups: int = 4,
        stem: int = 64,
        strides: Iterable[int] = (2, 2),
        head: Iterable[int] = (24, 48, 96, 192),
        final: int = 2048,
        keep: float = 1.0,
        dropout: float = 0.0,
    ):
        super().__init__()
        channels, strides, head = list(channels), list(strides), list(head)
        self.config = arguments_of(locals())
        sizes = {"classes": [classes], "in_channels": [in_channels], "channels": channels}
        sizes |= {"expand": [expand], "groups": [groups], "fuse_groups": [fuse_groups]}
        sizes |= {"stem": [stem], "head": head, "final": [final]}
        _check(sizes, strides)
        if not math.isfinite(keep):
            raise ValueError(f"keep must be a finite number, not {keep}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), not {dropout}")
        self.keep, self.dropout = keep, dropout
        self.shrinks = (2 ** (len(channels) - 1)) * strides[0] * strides[1]
        self.stem = nn.Sequential(
            *_conv_norm_relu(in_channels, stem, strides[0]),
            *_conv_norm_relu(stem, stem, strides[1]),
            nn.Conv2d(stem, channels[0], 1, bias=False),
            nn.BatchNorm2d(channels[0]),
            nn.ReLU(),
        )
        self.blocks = nn.ModuleList(
            ResidualBlock(width, expand * width, groups, keep) for width in channels
        )
        self.fusions = nn.ModuleList(
            nn.ModuleList(
                _fusion(channels, source, target, fuse_groups) for source in range(len(channels))
            )
            for target in range(len(channels))
        )
        self.posts = nn.ModuleList(
            nn.Sequential(
                nn.ReLU(),
                weight_norm(nn.Conv2d(width, width, 1, bias=False)),
                nn.GroupNorm(fuse_groups, width),
            )
            for width in channels
        )
        self.head = Head(channels, head, final, classes)

    def inject(self, x: Tensor) -> States:
        """Images (B, in_channels, ., .) to u_0 (B, C_0, H, W), and in training a mask (B, ., 1, 1) for each branch."""
        fits = x.ndim == 4 and x.shape[1] == self.config["in_channels"]
        if not fits or x.shape[2] % self.shrinks or x.shape[3] % self.shrinks:
            raise ValueError(
                f"images (B, {self.config['in_channels']}, ., .) with sides that {self.shrinks} divides were "
                f"expected, not {tuple(x.shape)}"
            )
        u = self.stem(x)
        if not (self.training and self.dropout):
            return (u,)
        widths = [self.config["expand"] * width for width in self.config["channels"]]
        masks = [F.dropout(u.new_ones(len(u), width, 1, 1), self.dropout) for width in widths]
        return (u, *masks)

    def start(self, context: States) -> States:
        u = context[0]
        return tuple(
            u.new_zeros(u.shape[0], width, u.shape[2] >> i, u.shape[3] >> i)
            for i, width in enumerate(self.config["channels"])
        )

    def step(self, z: States, context: States) -> States:
        masks = context[1:] or (None,) * len(z)
        y = [
            block(part, context[0] if i == 0 else None, mask)
            for i, (block, part, mask) in enumerate(zip(self.blocks, z, masks, strict=True))
        ]
        return tuple(
            post(_fused(fusions, y)) for post, fusions in zip(self.posts, self.fusions, strict=True)
        )

    def readout(self, z: States, context: States) -> Tensor:
        """Logits (B, classes)."""
        return self.head(z)

    def start_network(self) -> nn.Module:
        """A pyramid of depthwise and pointwise convolutions over the injection."""
        return PyramidStart(channels=self.config["channels"])


class ResidualBlock(nn.Module):
    """GN(relu(keep z + GN(conv(relu(GN(conv(z)))) + u)))"""

    def __init__(self, width: int, inner: int, groups: int, keep: float):
        super().__init__()
        self.keep = keep
        self.expand = weight_norm(nn.Conv2d(width, inner, 3, padding=1, bias=False))
        self.contract = weight_norm(nn.Conv2d(inner, width, 3, padding=1, bias=False))
        self.norm_inner = nn.GroupNorm(groups, inner)
        self.norm_sum = nn.GroupNorm(groups, width)
        self.norm_out = nn.GroupNorm(groups, width)

    def forward(self, z: Tensor, u: Tensor | None, mask: Tensor | None) -> Tensor:
        inner = F.relu(self.norm_inner(self.expand(z)))
        if mask is not None:
            inner = inner * mask
        change = self.contract(inner)
        change = self.norm_sum(change if u is None else change + u)
        return self.norm_out(F.relu(torch.add(change, z, alpha=self.keep)))


class Head(nn.Module):
    """Logits from all branches: each widened, then added to the next coarser one, which it is strided down to."""

    def __init__(self, channels: list[int], inner: list[int], final: int, classes: int):
        super().__init__()
        widths = [4 * width for width in inner]
        self.widen = nn.ModuleList(
            Bottleneck(*sizes) for sizes in zip(channels, inner, widths, strict=True)
        )
        self.down = nn.ModuleList(
            nn.Sequential(*_conv_norm_relu(fine, coarse, 2, bias=True))
            for fine, coarse in pairwise(widths)
        )
        self.final = nn.Sequential(
            nn.Conv2d(widths[-1], final, 1), nn.BatchNorm2d(final), nn.ReLU()
        )
        self.classify = nn.Linear(final, classes)

    def forward(self, z: States) -> Tensor:
        total = self.widen[0](z[0])
        for widen, down, part in zip(self.widen[1:], self.down, z[1:], strict=True):
            total = widen(part) + down(total)
        return self.classify(self.final(total).mean(dim=(2, 3)))


class Bottleneck(nn.Module):
    """relu(x' + BN(conv1(relu(BN(conv3(relu(BN(conv1(x))))))))), x' = BN(conv1(x))"""

    def __init__(self, width: int, inner: int, out: int):
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm_relu(width, inner, kernel=1),
            *_conv_norm_relu(inner, inner),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.short = nn.Sequential(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.body(x))


def _conv_norm_relu(
    width: int, out: int, stride: int = 1, kernel: int = 3, bias: bool = False
) -> list[nn.Module]:
    conv = nn.Conv2d(width, out, kernel, stride=stride, padding=kernel // 2, bias=bias)
    return [conv, nn.BatchNorm2d(out), nn.ReLU()]


def _fusion(channels: list[int], source: int, target: int, groups: int) -> nn.Module:
    """F_ji: from branch j = `source` to branch i = `target`."""
    width, out = channels[source], channels[target]
    if source == target:
        return nn.Identity()
    if source > target:
        return nn.Sequential(
            weight_norm(nn.Conv2d(width, out, 1, bias=False)),
            nn.GroupNorm(groups, out),
            nn.Upsample(scale_factor=2 ** (source - target), mode="nearest"),
        )
    layers: list[nn.Module] = []
    for level in range(source + 1, target + 1):
        after = out if level == target else width
        layers.append(weight_norm(nn.Conv2d(width, after, 3, stride=2, padding=1, bias=False)))
        layers.append(nn.GroupNorm(groups, after))
        if level < target:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _fused(fusions: Any, y: list[Tensor]) -> Tensor:
    """sum_j F_ji(y_j) for one i."""
    total = fusions[0](y[0])
    for fusion, part in zip(fusions[1:], y[1:], strict=True):
        total = total + fusion(part)
    return total


def _check(sizes: dict[str, list[int]], strides: list[int]) -> None:
    for name, values in sizes.items():
        if any(value < 1 for value in values):
            raise ValueError(f"{name} must be at least 1, not {values}")
    channels, head = sizes["channels"], sizes["head"]
    if not channels or len(channels) != len(head):
        raise ValueError(
            f"every branch needs its channels and its head: {channels} and {head} differ in number"
        )
    if len(strides) != 2 or any(stride not in (1, 2) for stride in strides):
        raise ValueError(f"the stem has two strides of 1 or 2, not {strides}")
    [groups], [fuse_groups] = sizes["groups"], sizes["fuse_groups"]
    for width in channels:
        if width % groups or width % fuse_groups:
            raise ValueError(
                f"groups {groups} and fuse_groups {fuse_groups} must divide every branch's channels, not {width}"
            )

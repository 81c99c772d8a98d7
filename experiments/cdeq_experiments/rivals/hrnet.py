"""HRNet, an explicit image classifier. Shapes: B images, C channels, H x W pixels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.models.arguments import arguments_of
from cdeq_experiments.rivals.image_layers import (
    check_images,
    check_sizes,
    conv_norm,
    he_weights,
    stem_stride,
)


class HRNet(nn.Module):
    """z_i = relu(sum_j a_ij(b_j(z_j))) over branches of halving resolution (Sun et al. 2019, HRNet-Wx-C).

    Branch i has 2^i `width` channels at 1 / 2^i of the resolution of branch 0. Stage 1 is one branch of
    bottleneck blocks of `stem` channels; each later stage adds a branch and repeats, `modules[stage]` times,
    a module of `blocks` residual blocks b_j on each branch and the exchange a_ij between all of them. Of
    `modules` the first `stages` numbers are used. The head widens branch i to 4 * 2^i `head` channels, adds
    the branches from fine to coarse, goes to `features` channels and takes the mean over all positions.
    The defaults are HRNet-W18-C; nothing of it is left out.

    The stem is two 3 x 3 convolutions of stride 2. Up to 32 pixels the first has stride 1 instead, so that
    branch 0 of 32 and of 64 pixels has 16 x 16 positions; of 224 it has 56 x 56.
    """

    def __init__(
        self,
        *,
        classes: int,
        in_channels: int = 3,
        image_size: int = 224,
        width: int = 18,
        stages: int = 4,
        modules: Sequence[int] = (1, 1, 4, 3),
        blocks: int = 4,
        stem: int = 64,
        head: int = 32,
        features: int = 2048,
    ):
        super().__init__()
        modules = tuple(modules)
        self.config = arguments_of(locals())
        check_sizes(self.config, *(name for name in self.config if name != "modules"))
        if not 2 <= stages <= len(modules):
            raise ValueError(
                f"stages must be from 2, which exchange, to the {len(modules)} of modules, not {stages}"
            )
        if any(repeats < 1 for repeats in modules[:stages]):
            raise ValueError(f"each stage needs at least one module, not {modules[:stages]}")
        widths = [width << branch for branch in range(stages)]
        self.stem = nn.Sequential(
            conv_norm(in_channels, stem, 3, stride=stem_stride(image_size, 2)),
            conv_norm(stem, stem, 3, stride=2),
        )
        bottlenecks = [bottleneck(stem, stem)]
        bottlenecks += [bottleneck(4 * stem, stem) for _ in range(modules[0] * blocks - 1)]
        self.first_stage = nn.Sequential(*bottlenecks)
        self.first_branch = conv_norm(4 * stem, width, 3)
        # The coarsest branch of each stage, at half the resolution of the coarsest before it.
        sources = [4 * stem, *widths[1:-1]]
        self.new_branches = nn.ModuleList(
            conv_norm(source, target, 3, stride=2)
            for source, target in zip(sources, widths[1:], strict=True)
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(ExchangeModule(widths[: stage + 1], blocks) for _ in range(repeats)))
            for stage, repeats in enumerate(modules[1:stages], start=1)
        )
        heads = [4 * head << branch for branch in range(stages)]
        self.widen = nn.ModuleList(
            bottleneck(branch, wide // 4) for branch, wide in zip(widths, heads, strict=True)
        )
        self.coarsen = nn.ModuleList(
            conv_norm(fine, coarse, 3, stride=2) for fine, coarse in pairwise(heads)
        )
        self.last = conv_norm(heads[-1], features, 1)
        self.apply(he_weights)
        # After the draw above, which is for layers before a ReLU.
        self.head = nn.Linear(features, classes)

    def branches(self, x: Tensor) -> list[Tensor]:
        """Images to the maps of the last stage, finest first: i has 2^i `width` channels."""
        check_images(x, self.config["in_channels"])
        first = self.first_stage(self.stem(x))
        maps = [self.first_branch(first)]
        # Only the first new branch starts before the transition of its source.
        source = first
        for new_branch, stage in zip(self.new_branches, self.stages, strict=True):
            maps = stage([*maps, new_branch(source)])
            source = maps[-1]
        return maps

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_channels, H, W) to logits (B, classes); other sizes than `image_size` pass too."""
        finest, *coarser = self.branches(x)
        y = self.widen[0](finest)
        for coarsen, widen, branch in zip(self.coarsen, self.widen[1:], coarser, strict=True):
            y = widen(branch) + coarsen(y)
        return self.head(self.last(y).mean(dim=(2, 3)))


class ExchangeModule(nn.Module):
    """z_i = relu(sum_j a_ij(b_j(z_j))): residual blocks on each branch, then all to all (Sun et al., figure 2).

    Maps are (B, widths[i], H / 2^i, W / 2^i), rounded up.
    """

    def __init__(self, widths: Sequence[int], blocks: int):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(basic_block(width) for _ in range(blocks))) for width in widths
        )
        self.fusions = nn.ModuleList(Fusion(widths, target) for target in range(len(widths)))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        maps = [branch(z) for branch, z in zip(self.branches, maps, strict=True)]
        return [fusion(maps) for fusion in self.fusions]


class Fusion(nn.Module):
    """relu(sum_j a_ij(z_j)) for one branch i, the target.

    a_ii is the identity; from coarse to fine a_ij is a 1 x 1 convolution and the nearest position, from fine
    to coarse a chain of 3 x 3 convolutions of stride 2.
    """

    def __init__(self, widths: Sequence[int], target: int):
        super().__init__()
        self.target = target
        self.paths = nn.ModuleList(
            exchange_path(widths, source, target) for source in range(len(widths))
        )

    def forward(self, maps: list[Tensor]) -> Tensor:
        total = maps[self.target]
        for source, (path, z) in enumerate(zip(self.paths, maps, strict=True)):
            if source == self.target:
                continue
            term = path(z)
            if source > self.target:
                # By size and not by factor: a map of odd sides has no exact half.
                term = F.interpolate(term, size=total.shape[-2:], mode="nearest")
            total = total + term
        return F.relu(total, inplace=True)


def exchange_path(widths: Sequence[int], source: int, target: int) -> nn.Module:
    """a_ij from branch `source` to branch `target`, without the upsampling; only between is a ReLU."""
    if source == target:
        return nn.Identity()
    if source > target:
        return conv_norm(widths[source], widths[target], 1, relu=False)
    halvings = [
        conv_norm(widths[source], widths[source], 3, stride=2) for _ in range(target - source - 1)
    ]
    return nn.Sequential(
        *halvings, conv_norm(widths[source], widths[target], 3, stride=2, relu=False)
    )


class Residual(nn.Module):
    """relu(body(x) + shortcut(x)) of He et al. (2016)."""

    def __init__(self, body: nn.Module, shortcut: nn.Module):
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def basic_block(width: int) -> Residual:
    """Two 3 x 3 convolutions that keep the width."""
    body = nn.Sequential(conv_norm(width, width, 3), conv_norm(width, width, 3, relu=False))
    return Residual(body, nn.Identity())


def bottleneck(inputs: int, inner: int) -> Residual:
    """1 x 1, 3 x 3 and 1 x 1 convolutions, `inputs` to 4 `inner` channels."""
    outputs = 4 * inner
    body = nn.Sequential(
        conv_norm(inputs, inner, 1),
        conv_norm(inner, inner, 3),
        conv_norm(inner, outputs, 1, relu=False),
    )
    same = inputs == outputs
    return Residual(body, nn.Identity() if same else conv_norm(inputs, outputs, 1, relu=False))

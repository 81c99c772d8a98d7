"""HRNet, an explicit image classifier. Shapes: B images, C channels, H x W pixels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

from torch import Tensor, nn
from torch.nn import functional as F

from cdeq_experiments.rivals.arguments import checked_arguments
from cdeq_experiments.rivals.image_layers import ImageClassifier, conv_norms, stem_stride


class HRNet(ImageClassifier):
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
        self.config = checked_arguments(locals())
        if not 2 <= stages <= len(modules) or min(modules[:stages]) < 1:
            raise ValueError(
                f"stages must be from 2 to the {len(modules)} of modules, with at least one module each, "
                f"not {stages} of {modules}"
            )
        widths = [width << branch for branch in range(stages)]
        self.stem = conv_norms(in_channels, (stem, 3, stem_stride(image_size, 2)), (stem, 3, 2))
        inputs = [stem, *[4 * stem] * (modules[0] * blocks - 1)]
        self.first_stage = nn.Sequential(*(bottleneck(each, stem) for each in inputs))
        self.first_branch = conv_norms(4 * stem, (width, 3))
        # The coarsest branch of each stage, at half the resolution of the coarsest before it.
        self.new_branches = nn.ModuleList(
            conv_norms(source, (target, 3, 2))
            for source, target in pairwise([4 * stem, *widths[1:]])
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(ExchangeModule(widths[: stage + 1], blocks) for _ in range(repeats)))
            for stage, repeats in enumerate(modules[1:stages], start=1)
        )
        heads = [4 * head << branch for branch in range(stages)]
        self.widen = nn.ModuleList(bottleneck(each, head << i) for i, each in enumerate(widths))
        self.coarsen = nn.ModuleList(
            conv_norms(fine, (coarse, 3, 2)) for fine, coarse in pairwise(heads)
        )
        self.last = conv_norms(heads[-1], (features, 1))
        self.finish(features)

    def branches(self, x: Tensor) -> list[Tensor]:
        """Images to the maps of the last stage, finest first: i has 2^i `width` channels."""
        # Only the first new branch starts before the transition of its source.
        source = self.first_stage(self.stem(x))
        maps = [self.first_branch(source)]
        for new_branch, stage in zip(self.new_branches, self.stages, strict=True):
            maps = stage([*maps, new_branch(source)])
            source = maps[-1]
        return maps

    def features(self, x: Tensor) -> Tensor:
        """Images (B, in_channels, H, W) to (B, features)."""
        finest, *coarser = self.branches(x)
        y = self.widen[0](finest)
        for coarsen, widen, branch in zip(self.coarsen, self.widen[1:], coarser, strict=True):
            y = widen(branch) + coarsen(y)
        return self.last(y).mean(dim=(2, 3))


class ExchangeModule(nn.Module):
    """z_i = relu(sum_j a_ij(b_j(z_j))): residual blocks on each branch, then all to all (Sun et al., figure 2).

    Maps are (B, widths[i], H / 2^i, W / 2^i), rounded up. a_ii is the identity; from coarse to fine a_ij is a 1 x 1
    convolution and the nearest position, from fine to coarse 3 x 3 convolutions of stride 2, ReLUs only between them.
    """

    def __init__(self, widths: Sequence[int], blocks: int):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(Residual(width, (width, 3), (width, 3)) for _ in range(blocks)))
            for width in widths
        )
        self.paths = nn.ModuleDict()
        for (target, outputs), (source, inputs) in product(enumerate(widths), repeat=2):
            if source != target:
                halvings = [(inputs, 3, 2)] * (target - source - 1)
                last = (outputs, 1) if source > target else (outputs, 3, 2)
                path = conv_norms(inputs, *halvings, last, relu=False)
                self.paths[f"{source} to {target}"] = path

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        maps = [branch(z) for branch, z in zip(self.branches, maps, strict=True)]
        fused = []
        for target, total in enumerate(maps):
            for source, z in enumerate(maps):
                if source != target:
                    term = self.paths[f"{source} to {target}"](z)
                    if source > target:
                        # By size and not by factor: a map of odd sides has no exact half.
                        term = F.interpolate(term, size=total.shape[-2:], mode="nearest")
                    total = total + term
            fused.append(F.relu(total, inplace=True))
        return fused


class Residual(nn.Module):
    """relu(convolutions(x) + shortcut(x)) of He et al. (2016), the shortcut an identity where the width stays."""

    def __init__(self, inputs: int, *layers: tuple[int, ...]):
        super().__init__()
        outputs = layers[-1][0]
        self.body = conv_norms(inputs, *layers, relu=False)
        same = inputs == outputs
        self.shortcut = nn.Identity() if same else conv_norms(inputs, (outputs, 1), relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def bottleneck(inputs: int, inner: int) -> Residual:
    """1 x 1, 3 x 3 and 1 x 1 convolutions, `inputs` to 4 `inner` channels."""
    return Residual(inputs, (inner, 1), (inner, 3), (4 * inner, 1))

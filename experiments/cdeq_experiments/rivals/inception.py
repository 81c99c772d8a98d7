"""Inception-V2, an explicit image classifier. Shapes: B images, C channels, H x W pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cdeq_experiments.rivals.arguments import checked_arguments
from cdeq_experiments.rivals.image_layers import (
    SMALL_IMAGE,
    ImageClassifier,
    conv_norms,
    stem_stride,
)

STEM = (64, 64, 192)
# The paper's table gives 4c and 4d 576 channels, which its own columns do not sum to: they are 608.
STAGES = (
    ((64, 64, 64, 64, 96, 32), (64, 64, 96, 64, 96, 64)),
    (
        (224, 64, 96, 96, 128, 128),
        (192, 96, 128, 96, 128, 128),
        (160, 128, 160, 128, 160, 128),
        (96, 128, 192, 160, 192, 128),
    ),
    ((352, 192, 320, 160, 224, 128), (352, 192, 320, 192, 224, 128)),
)
"""The channels of the blocks, rows of figure 5 of Ioffe & Szegedy (2015): `single, three_reduce, three, double_reduce,
double, pool`. `single` are those of the 1 x 1 convolution, `three` and `double` those of the paths with one and two
3 x 3 convolutions, each behind a 1 x 1 convolution to `..._reduce` channels, and `pool` those of the pooled path.
"""
# Blocks 3c and 4e, of stride 2, which end the first and the second stage; nothing follows the third.
REDUCTIONS = (((0, 128, 160, 64, 96, 0),), ((0, 128, 192, 192, 256, 0),), ())
PUBLISHED_BLOCKS = tuple(len(stage) for stage in STAGES)


class InceptionV2(ImageClassifier):
    """y = W mean(b_10(... b_1(s(x)))), b_i(x) = [path_1(x), ..., path_4(x)] (Ioffe & Szegedy 2015, figure 5).

    BN-Inception: a stem s, three stages of Inception blocks with a batch norm behind every convolution,
    and the mean over all positions. `width` scales all published channels; `blocks` says how many blocks of
    each stage are kept, from the first, beside the two of stride 2 that end the first two stages. The
    auxiliary heads are left out, and the first convolution is a plain one, not a separable one.

    Above 64 pixels the stem is the published one: a 7 x 7 convolution and two pools of stride 2 each, so
    that the stages of 224 pixels see 28, 14 and 7. Up to 64 pixels the first convolution is 3 x 3, with
    stride 1 up to 32 pixels or 2, and the first pool is left out: of 32 and of 64 pixels the stages see
    16, 8 and 4.
    """

    def __init__(
        self,
        *,
        classes: int,
        in_channels: int = 3,
        image_size: int = 224,
        width: float = 1.0,
        blocks: Sequence[int] = PUBLISHED_BLOCKS,
    ):
        super().__init__()
        blocks = tuple(blocks)
        self.config = checked_arguments(locals())
        if not width > 0:
            raise ValueError(
                f"width scales the published channels and must be above 0, not {width}"
            )
        fits = [1 <= kept <= most for kept, most in zip(blocks, PUBLISHED_BLOCKS, strict=False)]
        if len(blocks) != len(STAGES) or not all(fits):
            raise ValueError(
                f"blocks must be three numbers from 1 to at most {PUBLISHED_BLOCKS}, not {blocks}"
            )
        first, reduced, channels = (scale(published, width) for published in STEM)
        small = image_size <= SMALL_IMAGE
        self.stem = nn.Sequential(
            conv_norms(in_channels, (first, 3 if small else 7, stem_stride(image_size, 2))),
            nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1),
            conv_norms(first, (reduced, 1), (channels, 3)),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.stages = nn.Sequential()
        for rows, kept, end in zip(STAGES, blocks, REDUCTIONS, strict=True):
            stage = nn.Sequential()
            for widths in (*rows[:kept], *end):
                # Only the very last block of the paper takes the largest of its pool, not the mean.
                largest = widths is STAGES[-1][-1]
                scaled = [scale(published, width) for published in widths]
                block = InceptionBlock(channels, scaled, largest=largest)
                stage.append(block)
                channels = block.channels
            self.stages.append(stage)
        self.finish(channels)

    def features(self, x: Tensor) -> Tensor:
        """Images (B, in_channels, H, W) to (B, F)."""
        return self.stages(self.stem(x)).mean(dim=(2, 3))


class InceptionBlock(nn.Module):
    """[conv1(x), conv3(conv1(x)), conv3(conv3(conv1(x))), conv1(pool(x))] beside each other.

    (B, inputs, H, W) to (B, channels, H, W); a block without a `single` path has stride 2, and its last path is the
    pool of largest values alone: (B, channels, H / 2, W / 2), rounded up.
    """

    def __init__(self, inputs: int, widths: Sequence[int], *, largest: bool = False):
        super().__init__()
        single, three_reduce, three, double_reduce, double, pooled = widths
        stride = 1 if single else 2
        pool = (nn.MaxPool2d if largest or not single else nn.AvgPool2d)(3, stride, padding=1)
        paths: list[nn.Module] = [
            conv_norms(inputs, (three_reduce, 1), (three, 3, stride)),
            conv_norms(inputs, (double_reduce, 1), (double, 3), (double, 3, stride)),
        ]
        if single:
            last = nn.Sequential(pool, conv_norms(inputs, (pooled, 1)))
            paths = [conv_norms(inputs, (single, 1)), *paths, last]
        else:
            paths.append(pool)
        self.paths = nn.ModuleList(paths)
        self.channels = single + three + double + (pooled or inputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([path(x) for path in self.paths], dim=1)


def scale(channels: int, width: float) -> int:
    """Published channels times `width`, but none that were there may vanish."""
    return max(1, round(channels * width)) if channels else 0

"""Small MDEQs of one to three branches, and states for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cdeq.models.vision.mdeq import MDEQ
from checks import numbers
from teachers import randomized

CLASSES = 3
WIDTHS, HEADS = (4, 8, 12), (2, 3, 4)


def make(branches: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"expand": 2, "groups": 2, "fuse_groups": 2, "stem": 6, "strides": (1, 1), "final": 10}
    return MDEQ(
        classes=CLASSES,
        **{**sizes, "channels": WIDTHS[:branches], "head": HEADS[:branches], **options},
    ).eval()


def scrambled(branches: int = 2, **options: Any) -> Any:
    """In double precision, with no weight left at its initial value, where a norm's could hide."""
    return randomized(make(branches, **options).double(), 0.3)


def states(branches: int, side: int = 8, batch: int = 2, seed: int = 5) -> tuple[Tensor, ...]:
    return tuple(
        numbers(batch, width, side >> i, side >> i, seed=seed + i)
        for i, width in enumerate(WIDTHS[:branches])
    )


def contracted(branches: int = 2, share: float = 0.3, **options: Any) -> Any:
    """A map that draws states together.

    Its norms give on a `share` of their input, and biases that differ within a group: without these a later norm
    would divide by next to nothing, and undo the share.
    """
    model = make(branches, keep=0.3, **options)
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.GroupNorm):
                norm.weight.mul_(share)
                norm.bias.copy_(torch.arange(len(norm.bias)) % 2 - 0.2)
    return model

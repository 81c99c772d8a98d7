"""Causal convolutions as matrix products, on CPU faster than Conv1d with its transposes. Shapes: B texts, L tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SMALL = 1024
"""Numbers up to which a call costs more than its arithmetic."""


def causal_windows(
    x: Tensor, kernel: int, *, dilation: int = 1, before: Tensor | None = None
) -> Tensor:
    """Each token (B, L, C) beside the `kernel` - 1 before it, `dilation` apart, the oldest first: (B, L, kernel C).

    `before` (B, P, C) are tokens that went before x; zeros stand for those that are missing.
    """
    length, past = x.shape[1], (kernel - 1) * dilation
    earlier = (0, 0, past, 0)
    if before is None:
        known = F.pad(x, earlier)
    else:
        count = before.shape[1]
        # Where enough is known, nothing is padded; an exported model must not ask how much there is.
        enough = not torch.compiler.is_compiling() and count >= past
        tail = before[:, count - past :] if enough else F.pad(before, earlier)[:, count:]
        known = torch.cat((tail, x), dim=1)
    if length == dilation == 1:
        return known.flatten(1)[:, None]  # nothing to be cut
    return torch.cat([known[:, i : i + length] for i in range(0, past + 1, dilation)], dim=-1)


def gelu(x: Tensor) -> Tensor:
    """torch's; on CPU in double precision where x is small, which torch computes itself.

    In single precision it asks oneDNN, whose call alone takes longer for one token than the products around it.
    """
    if torch.compiler.is_compiling() or x.is_cuda or x.numel() > SMALL:
        return F.gelu(x)
    return F.gelu(x.double()).to(x.dtype)

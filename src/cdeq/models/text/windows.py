"""Causal convolutions as matrix products, on CPU faster than Conv1d with its transposes. Shapes: B texts, L tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_windows(
    x: Tensor, kernel: int, *, dilation: int = 1, before: Tensor | None = None
) -> Tensor:
    """Each token (B, L, C) beside the `kernel` - 1 before it, `dilation` apart, the oldest first: (B, L, kernel C).

    `before` (B, P, C) are tokens that went before x; zeros stand for those that are missing.
    """
    length, past = x.shape[1], (kernel - 1) * dilation
    known = x if before is None else torch.cat((before[:, max(before.shape[1] - past, 0) :], x), 1)
    known = F.pad(known, (0, 0, past + length - known.shape[1], 0))
    return torch.cat([known[:, i : i + length] for i in range(0, past + 1, dilation)], dim=-1)

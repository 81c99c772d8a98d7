"""Causal convolutions as matrix products, on CPU faster than Conv1d with its transposes. Shapes: B texts, L tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        known = torch.cat((F.pad(before, earlier)[:, before.shape[1] :], x), dim=1)
    if length == dilation == 1:
        return known.flatten(1)[:, None]  # nothing to be cut
    return torch.cat([known[:, i : i + length] for i in range(0, past + 1, dilation)], dim=-1)


class WindowStart(nn.Module):
    """s(u) = W gelu(conv(u)): a start for students, from u (B, L, D) of a token and the `kernel` - 1 before it.

    Zero before training. What u is of a context, a subclass says in its `forward`.
    """

    def __init__(self, width: int, kernel: int = 3):
        super().__init__()
        self.width, self.kernel = width, kernel
        self.mix = nn.Linear(kernel * width, width)
        self.out = nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def start(self, u: Tensor, before: Tensor | None = None) -> Tensor:
        return self.out(F.gelu(self.mix(causal_windows(u, self.kernel, before=before))))

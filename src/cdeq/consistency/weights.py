"""The student's weights: theta + c delta, and a context mixed with the same c."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdeq.equilibrium.contract import Context
from cdeq.equilibrium.trees import map_tensors


class FullDelta(nn.Module):
    """A change of one weight, as large as the weight itself. Starts at zero."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.change = nn.Parameter(torch.zeros_like(weight))

    def forward(self) -> Tensor:
        return self.change


class LowRankDelta(nn.Module):
    """A change of rank r: left (out, r) times right (r, rest), in the shape of the weight. Starts at zero."""

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        rows, columns = weight.shape[0], weight[0].numel()
        self.shape = weight.shape
        self.left = nn.Parameter(weight.new_zeros(rows, rank))
        self.right = nn.Parameter(torch.randn_like(weight.new_empty(rank, columns)) / columns**0.5)

    def forward(self) -> Tensor:
        return (self.left @ self.right).reshape(self.shape)


class Deltas(nn.Module):
    """The changes of a teacher's weights, by the weights' names."""

    def __init__(self, weights: dict[str, Tensor], rank: int | None):
        super().__init__()
        self.names = list(weights)
        self.changes = nn.ModuleList(
            LowRankDelta(w, rank)
            if rank is not None and w.ndim >= 2 and rank < min(w.shape[0], w[0].numel())
            else FullDelta(w)
            for w in weights.values()
        )

    def forward(self) -> list[Tensor]:
        return [change() for change in self.changes]


def mix_weights(
    names: list[str], theta: list[Tensor], delta: list[Tensor], c: float | Tensor
) -> dict[str, Tensor]:
    """theta + c delta by name; nothing at c = 0, where the teacher's own weights serve."""
    if isinstance(c, Tensor):
        mixed = [t + c.to(t.dtype) * d for t, d in zip(theta, delta, strict=True)]
    elif c == 0.0 or not names:
        return {}
    else:
        mixed = [torch.add(t, d, alpha=c) for t, d in zip(theta, delta, strict=True)]
    return dict(zip(names, mixed, strict=True))


def mix_contexts(teacher: Context, student: Context, c: float | Tensor) -> Context:
    """teacher + c (student - teacher), tensor by tensor.

    What both share, what is not a dense floating tensor and what is not in a tree (such as a captured function)
    stays the teacher's.
    """
    if not torch.compiler.is_compiling() and teacher is student:  # nothing to walk through
        return teacher

    def mix(a: Tensor, b: Tensor) -> Tensor:
        if a is b or a.layout != torch.strided or not a.is_floating_point():
            return a
        if isinstance(c, float) and c in (0.0, 1.0):
            return b if c else a
        return torch.lerp(a, b, c if isinstance(c, float) else c.to(a.dtype))

    return map_tensors(mix, teacher, student)

"""Broyden's "good" method with limited memory, stored as its steps alone (Kelley 1995, section 7.3).

Shapes: B samples, D numbers in each sample, n steps remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cdeq.equilibrium.states import norm_dtype

SMALLEST_DENOMINATOR = 0.1  # one update stretches a step at most tenfold


@dataclass
class _Memory:
    """The steps s_0 ... s_{n-1} since the last restart, (B, memory, D), and a small matrix of them.

    `factors` (B, memory, memory), lower triangular, gives the amounts a = factors (s_j.r)_j that the
    factors of the inverse Jacobian add to a residual r.
    """

    steps: Tensor
    factors: Tensor
    count: int


@dataclass(frozen=True, kw_only=True)
class Broyden:
    """z_{k+1} = z_k - J_k^{-1} (f(z_k) - z_k), with J_0 = -I and a rank-one update of J at each step.

    With full steps the inverse is a product of factors I + s_{j+1} s_j^T / |s_j|^2, so only the steps are
    kept: half the usual memory, and three passes over it at each update. After `memory` steps it restarts:
    dropping the oldest factor instead breaks the secant equations of the rest, and often stalls.
    """

    memory: int = 20

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError(f"Broyden's memory must be at least 1, not {self.memory}")

    def init(self, z: Tensor) -> _Memory:
        batch, dim = z.shape
        dtype = norm_dtype(z.dtype)
        return _Memory(
            steps=z.new_empty(batch, self.memory, dim, dtype=dtype),
            factors=z.new_zeros(batch, self.memory, self.memory, dtype=dtype),
            count=0,
        )

    def update(
        self, k: int, z: Tensor, fz: Tensor, residual: Tensor, memory: _Memory
    ) -> tuple[Tensor, _Memory]:
        n = memory.count % self.memory
        memory.count = n + 1
        step, r = memory.steps[:, n : n + 1], residual[:, None]
        tiny = torch.finfo(r.dtype).tiny
        row = memory.factors[:, n : n + 1, : n + 1]  # its last entry is 1 so far
        if n == 0:
            memory.factors.diagonal(dim1=1, dim2=2).fill_(1.0)
            step.copy_(r)
            square = torch.bmm(r, r.mT).clamp_min_(tiny)
        else:
            factors = memory.factors[:, :n, :n]
            _write_step(r, memory.steps[:, :n], factors, step)
            # a_n = s_n.p / |s_n|^2, where p has gone through the factors before.
            products = torch.bmm(step, memory.steps[:, 1 : n + 1].mT)
            square = products[:, :, -1:].clamp_min_(tiny)
            row[:, :, :n] = torch.bmm(products, factors)
        row.div_(square)
        return torch.add(z, step.squeeze(1)).to(z.dtype), memory


def _write_step(r: Tensor, steps: Tensor, factors: Tensor, step: Tensor) -> None:
    """Write s_n = p / (1 - s_{n-1}.p / |s_{n-1}|^2), where p is r (B, 1, D) through all factors.

    Factor j adds a_j s_{j+1} to p, with a_j = s_j.p / |s_j|^2: linear in the products s_j.r, so that r
    meets every step once.
    """
    # A row times a matrix: many times faster on CPU than a matrix times a column.
    a = torch.bmm(torch.bmm(r, steps.mT), factors.mT)
    shrink = 1 - a[:, :, -1:]
    shrink = shrink.abs().clamp_min_(SMALLEST_DENOMINATOR).copysign_(shrink)
    torch.div(torch.baddbmm(r, a[:, :, :-1], steps[:, 1:]), shrink, out=step)

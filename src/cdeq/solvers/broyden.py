"""Broyden's "good" method with limited memory, stored as its steps alone (Kelley 1995, section 7.3).

Shapes: B samples, D numbers a sample, n steps remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cdeq.equilibrium.states import norm_dtype, subtract

SMALLEST_DENOMINATOR = 0.1  # one update stretches a step at most tenfold


@dataclass
class _Memory:
    """The steps s_0 ... s_{n-1} since the last restart, (B, memory, D), and what is known of them.

    `squares` holds |s_j|^2 and `products` -s_i.s_{j+1} / |s_j|^2, (B, memory, memory).
    """

    steps: Tensor
    squares: Tensor
    products: Tensor
    count: int


@dataclass(frozen=True, kw_only=True)
class Broyden:
    """z_{k+1} = z_k - J_k^{-1} (f(z_k) - z_k), with J_0 = -I and one rank-one update of J a step.

    With full steps the inverse is a product of factors I + s_{j+1} s_j^T / |s_j|^2, so only the steps are
    kept: half the usual memory, and two passes over it an update. After `memory` steps it starts anew:
    dropping the oldest factor instead breaks the secant equations of the rest, and often stalls.
    """

    memory: int = 20

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError(f"Broyden's memory must be at least 1, not {self.memory}")

    def init(self, z: Tensor) -> _Memory:
        batch, dim = z.shape
        n = self.memory
        return _Memory(
            steps=z.new_empty(batch, n, dim, dtype=norm_dtype(z.dtype)),
            squares=z.new_empty(batch, n, dtype=torch.float64),
            products=z.new_empty(batch, n, n, dtype=torch.float64),
            count=0,
        )

    def update(self, k: int, z: Tensor, fz: Tensor, memory: _Memory) -> tuple[Tensor, _Memory]:
        n = memory.count % self.memory
        memory.count = n + 1
        step = memory.steps[:, n]
        r = subtract(fz, z)
        if n == 0:
            step.copy_(r)
            memory.squares[:, 0] = _squares(step).squeeze(1)
        else:
            _new_step(r, n, memory)
        return torch.add(z, step).to(z.dtype), memory


def _new_step(r: Tensor, n: int, memory: _Memory) -> None:
    """Remember s_n = p / (1 - s_{n-1}.p / |s_{n-1}|^2), where p is r passed through all factors.

    Factor j adds a_j s_{j+1} to p, with a_j = s_j.p / |s_j|^2. The products s_j.p obey a triangular
    system in the products of the steps, so that r meets every step once.
    """
    steps, squares = memory.steps[:, :n], memory.squares[:, :n]
    known = memory.products[:, :n, :n]
    # A row times a matrix: many times faster on CPU than a matrix times a column.
    along = torch.bmm(r[:, None], steps.mT).mT.double()
    moved = torch.linalg.solve_triangular(known, along, upper=False, unitriangular=True)
    a = moved.squeeze(2) / squares
    stretch = 1 - a[:, -1:]
    stretch = stretch.abs().clamp_min_(SMALLEST_DENOMINATOR).copysign_(stretch)

    p = torch.baddbmm(r[:, None], a[:, None, :-1].to(r.dtype), steps[:, 1:]).squeeze(1)
    torch.div(p, stretch.to(r.dtype), out=memory.steps[:, n])
    along = torch.baddbmm(along, known[:, :, :-1], moved[:, :-1], alpha=-1).squeeze(2) / -stretch

    square = _squares(memory.steps[:, n])
    memory.products[:, :n, n - 1] = along / squares[:, -1:]
    memory.products[:, n, :n] = torch.cat([along[:, 1:], -square], dim=1) / squares
    memory.squares[:, n] = square.squeeze(1)


def _squares(step: Tensor) -> Tensor:
    """|s|^2 of each row, (B, 1), above zero even for a sample that no longer moves."""
    size = torch.linalg.vector_norm(step, dim=1, keepdim=True)
    return size.double().square_().clamp_min_(1e-280)

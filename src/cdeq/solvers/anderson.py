"""Anderson acceleration (paper, alg:AA), also known as Anderson mixing or Pulay's DIIS.

Shapes: B samples, D numbers in each sample, n = min(k, m) + 1 states remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cdeq.equilibrium.contract import Context, EquilibriumModel, causal_positions
from cdeq.equilibrium.states import State, norm_dtype
from cdeq.solvers.base import check_mixing


def anderson_weights(gram: Tensor, ridge: float) -> Tensor:
    """alpha (B, n) minimising |sum_i alpha_i r_i|^2 with sum_i alpha_i = 1, from the Gram matrix (B, n, n).

    The ridge adds `ridge * |r_i|^2 alpha_i^2`: relative to the residuals, so that it neither drowns the
    small residuals near the equilibrium nor vanishes beside the large ones far from it. Where even so
    the matrix is singular, alpha_i ~ 1 / |r_i|^2, the limit of a large ridge.
    """
    gram = gram.to(torch.float64, copy=True)
    squares = gram.diagonal(dim1=1, dim2=2)
    squares.mul_(1 + ridge).clamp_min_(1e-280)  # a residual may be zero
    # Cholesky loses nothing to residuals of different sizes, and reports failure without raising.
    factor, failed = torch.linalg.cholesky_ex(gram)
    alpha = torch.cholesky_solve(torch.ones_like(squares)[:, :, None], factor).squeeze(2)
    if bool(failed.any()):
        alpha = torch.where(failed[:, None] == 0, alpha, 1 / squares)
    return alpha / alpha.sum(dim=1, keepdim=True)


@dataclass
class _Memory:
    """Ring buffers of residuals and images, (B, m+1, D), and the residuals' Gram matrix, (B, m+1, m+1).

    With L causal positions there is a buffer for each of them, (B, L, m+1, D / L), and a Gram matrix.
    """

    residuals: Tensor
    images: Tensor
    gram: Tensor


@dataclass(frozen=True, kw_only=True)
class Anderson:
    """z_{k+1} = sum_i alpha_i (beta f(z_i) + (1 - beta) z_i) over the last `window` + 1 states (paper, eq:AA).

    `window` is the paper's m, `mixing` its beta, `ridge` the regularisation relative to the Gram matrix,
    where it is at least the rounding error of that matrix. `positions`: of states (B, L, D) of a causal model, L; each
    position then has mixing weights of its own, made from the positions up to it, so that none learns of later ones.
    """

    window: int = 5
    mixing: float = 1.0
    ridge: float = 1e-8
    positions: int | None = None

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"Anderson's window must be at least 1, not {self.window}")
        if not 0 <= self.ridge < math.inf:
            raise ValueError(f"Anderson's ridge must be finite and not negative, not {self.ridge}")
        if self.positions is not None and self.positions < 1:
            raise ValueError(f"Anderson's positions must be at least 1, not {self.positions}")
        check_mixing(self.mixing)

    def for_input(self, model: EquilibriumModel, context: Context, z0: State) -> Anderson:
        """With mixing weights for each position, if the model is causal."""
        if self.positions is not None:
            return self
        return replace(self, positions=causal_positions(model, z0))

    def init(self, z: Tensor) -> _Memory:
        slots, dtype = self.window + 1, norm_dtype(z.dtype)
        *several, numbers = self.rows(z).shape
        return _Memory(
            residuals=z.new_empty(*several, slots, numbers, dtype=dtype),
            images=z.new_empty(*several, slots, numbers, dtype=dtype),
            gram=z.new_empty(*several, slots, slots, dtype=torch.float64),
        )

    def update(
        self, k: int, z: Tensor, fz: Tensor, residual: Tensor, memory: _Memory
    ) -> tuple[Tensor, _Memory]:
        kept, image = self.slots(k, memory)
        kept.copy_(self.rows(residual))
        image.copy_(self.rows(fz))
        return self.mix(k, z, memory), memory

    def slots(self, k: int, memory: _Memory) -> tuple[Tensor, Tensor]:
        """Where the residual and the image of the k-th state are kept, in the form of `rows`."""
        slot = k % (self.window + 1)
        return memory.residuals[..., slot, :], memory.images[..., slot, :]

    def mix(self, k: int, z: Tensor, memory: _Memory) -> Tensor:
        """The next state, (B, D), once residual and image of the k-th, z, are in their slots."""
        slot, n = k % (self.window + 1), min(k, self.window) + 1
        new, image = self.slots(k, memory)
        if self.mixing != 1.0:
            image.sub_(new, alpha=1 - self.mixing)
        row = self.products(new, memory.residuals[..., :n, :])
        memory.gram[..., slot, :n] = row
        memory.gram[..., :n, slot] = row
        if n == 1:  # the first state is all there is to mix
            return image.reshape(z.shape).to(z.dtype, copy=True)
        ridge = max(self.ridge, 4 * torch.finfo(row.dtype).eps)
        gram = memory.gram[..., :n, :n]
        alpha = anderson_weights(gram.reshape(-1, n, n), ridge).to(row.dtype).view_as(row)
        mixed = torch.matmul(alpha[..., None, :], memory.images[..., :n, :])
        return mixed.reshape(z.shape).to(z.dtype)

    def products(self, new: Tensor, others: Tensor) -> Tensor:
        """A residual's row of the Gram matrix, n products instead of n^2; of a position, with all up to it."""
        # As a row times a matrix it is many times faster on CPU than as a matrix times a column.
        row = torch.matmul(new[..., None, :], others.mT).squeeze(-2)
        return row if self.positions is None else row.cumsum(dim=1)

    def rows(self, flat: Tensor) -> Tensor:
        """(B, D), or with causal positions (B, L, D / L)."""
        return flat if self.positions is None else flat.unflatten(1, (self.positions, -1))

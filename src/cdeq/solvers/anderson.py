"""Anderson acceleration (paper, alg:AA), also known as Anderson mixing or Pulay's DIIS.

Shapes: B samples, D numbers in each sample, n = min(k, m) + 1 states remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cdeq.equilibrium.contract import Context, EquilibriumModel, causal_positions, fading_of
from cdeq.equilibrium.states import State, norm_dtype
from cdeq.solvers.base import check_mixing

PIECE = 1 << 14
"""Numbers whose products are added in single precision: more of them lose digits that the mixing weights need."""


def running_sums(products: Tensor, fading: float) -> Tensor:
    """sum_{j <= i} fading^(i - j) products_j, of (B, L, n): nothing of what comes later.

    Where a position's error hardly knows of those far before it, weights made of its own neighbourhood bring it nearer
    than those of all positions up to it.
    """
    place = torch.arange(products.shape[1], device=products.device)
    behind = place[:, None] - place
    shares = torch.where(behind < 0, 0.0, fading ** behind.clamp_min(0).to(products.dtype))
    return torch.matmul(shares.to(products.dtype), products)


def plain_sum(running: Tensor, fading: float) -> Tensor:
    """The sum over all positions (B, ...) of what has the running sums (B, L, ...)."""
    return (1 - fading) * running.sum(dim=1) + fading * running[:, -1]


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
    """Ring buffers of residuals and images, (B, m+1, D), and the residuals' Gram matrices, (B, P, m+1, m+1).

    There is one for each of P places with mixing weights of their own: L causal positions, or the whole sample.
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
    `fading`: how much less each of them counts than the next.
    """

    window: int = 5
    mixing: float = 1.0
    ridge: float = 1e-8
    positions: int | None = None
    fading: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"Anderson's window must be at least 1, not {self.window}")
        if not 0 <= self.ridge < math.inf:
            raise ValueError(f"Anderson's ridge must be finite and not negative, not {self.ridge}")
        if self.positions is not None and self.positions < 1:
            raise ValueError(f"Anderson's positions must be at least 1, not {self.positions}")
        if not 0 <= self.fading <= 1:
            raise ValueError(f"Anderson's fading must lie in [0, 1], not {self.fading}")
        check_mixing(self.mixing)

    def for_input(self, model: EquilibriumModel, context: Context, z0: State) -> Anderson:
        """With mixing weights for each position, if the model is causal."""
        if self.positions is not None:
            return self
        return replace(self, positions=causal_positions(model, z0), fading=fading_of(model))

    def init(self, z: Tensor) -> _Memory:
        slots, dtype = self.window + 1, norm_dtype(z.dtype)

        def ring() -> Tensor:
            """Each slot in one piece of memory; the samples come first, as in all that belongs to them."""
            return z.new_empty(slots, *z.shape, dtype=dtype).transpose(0, 1)

        gram = z.new_empty(len(z), self.positions or 1, slots, slots, dtype=torch.float64)
        return _Memory(residuals=ring(), images=ring(), gram=gram)

    def update(
        self, k: int, z: Tensor, fz: Tensor, residual: Tensor, memory: _Memory
    ) -> tuple[Tensor, _Memory]:
        for place, new in zip(self.slots(k, memory), (residual, fz), strict=True):
            place.copy_(new)
        self.multiply(k, memory)
        return self.mix(k, memory).to(z.dtype), memory

    def slots(self, k: int, memory: _Memory) -> tuple[Tensor, Tensor]:
        """Where the residual and the image of the k-th state are kept, (B, D)."""
        slot = k % (self.window + 1)
        return memory.residuals[:, slot], memory.images[:, slot]

    def multiply(self, k: int, memory: _Memory) -> Tensor:
        """Take the k-th residual, which is in its slot, into the Gram matrices; its squares, (B, P)."""
        slot, n = k % (self.window + 1), min(k, self.window) + 1
        row = self.products(memory.residuals[:, slot], memory.residuals[:, :n])
        memory.gram[..., slot, :n] = row
        memory.gram[..., :n, slot] = row
        return row[..., slot]

    def products(self, new: Tensor, others: Tensor) -> Tensor:
        """A residual's row of the Gram matrices, (B, P, n): n products, not n^2."""
        # As a row times a matrix it is many times faster on CPU than as a matrix times a column.
        row, columns = self.rows(new)[:, :, None], self.rows(others).movedim(1, -1)
        if row.shape[-1] <= PIECE or row.dtype == torch.float64:
            found = torch.matmul(row, columns)
        else:
            pieces = zip(row.split(PIECE, dim=-1), columns.split(PIECE, dim=-2), strict=True)
            found = torch.stack([torch.matmul(*pair) for pair in pieces]).sum(
                0, dtype=torch.float64
            )
        found = found.squeeze(2)
        return found if self.positions is None else running_sums(found, self.fading)

    def mix(self, k: int, memory: _Memory) -> Tensor:
        """The next state, (B, D), once the k-th image is in its slot and its residual is multiplied."""
        return self.combined(self.weights(k, memory), memory.images)

    def weights(self, k: int, memory: _Memory) -> Tensor:
        """alpha (B, P, n) of the images up to the k-th, which is damped where it is kept."""
        residual, image = self.slots(k, memory)
        if self.mixing != 1.0:
            image.sub_(residual, alpha=1 - self.mixing)
        n = min(k, self.window) + 1
        gram = memory.gram[..., :n, :n]
        if n == 1:  # the first state is all there is to mix
            return image.new_ones(gram.shape[:-1])
        ridge = max(self.ridge, 4 * torch.finfo(image.dtype).eps)
        alpha = anderson_weights(gram.reshape(-1, n, n), ridge).to(image.dtype)
        return alpha.view(gram.shape[:-1])

    def combined(self, alpha: Tensor, images: Tensor) -> Tensor:
        """sum_i alpha_i images_i, (B, D): of all their numbers, or of those of some tensors of the state."""
        if self.positions is None:
            return torch.matmul(alpha, images[:, : alpha.shape[-1]]).squeeze(1)
        # Many small products: a pass for each image is several times faster on CPU.
        images = self.rows(images)
        mixed = alpha[..., :1] * images[:, 0]
        for i in range(1, alpha.shape[-1]):
            mixed.addcmul_(alpha[..., i : i + 1], images[:, i])
        return mixed.flatten(1)

    def rows(self, flat: Tensor) -> Tensor:
        """(..., D) as the places that have mixing weights of their own, (..., P, D / P)."""
        return flat.unflatten(-1, (self.positions or 1, -1))

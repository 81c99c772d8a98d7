"""Anderson mixing and its safeguard once more, without branches on data and without writing in place.

What is compiled or exported may neither ask whether something happened nor change a tensor that others see. The numbers
are those of `RunningAnderson` and `GuardedAnderson` up to rounding; tests hold both to that. Each operation is a node
of the exported graph, and for one sample a small node costs more than its arithmetic: so small systems are written out
number by number, and a step computes its next state from as little as it can, since what only further steps need is
left out of the graph. Shapes: B samples, P places with mixing weights of their own (1, or the positions of a causal
model), N numbers of each place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdeq.consistency.history import AndersonHistory
from cdeq.consistency.safeguard import FALLEN, GROWTH, PATIENCE, ROUNDING, Correct, GuardedAnderson
from cdeq.equilibrium.states import State, subtract, tensors_of
from cdeq.placement import not_cast
from cdeq.solvers.anderson import running_sums

SMALLEST = 1e-37
"""Squares of residuals that are divided by, at least."""
Triangle = tuple[tuple[Tensor, ...], ...]
"""Entries (B, P, 1) of a symmetric matrix: those of row i up to the diagonal."""


def eliminated_weights(gram: Sequence[Sequence[Tensor]], ridge: float) -> list[Tensor]:
    """alpha_i of a Gram matrix, given by its rows up to the diagonal: `anderson_weights` by elimination.

    ONNX has no Cholesky. Every pivot of a positive definite matrix is positive, so that no rows are exchanged, and the
    answer is as good as Cholesky's. Where a pivot is not, alpha_i ~ 1 / |r_i|^2.
    """
    left = [[entry.double() for entry in row] for row in gram]
    for row in left:
        # A residual may be zero. ONNX keeps numbers in single precision: no 1e-280, and seven digits of 1 + ridge.
        row[-1] = (row[-1] + ridge * row[-1]).clamp_min(SMALLEST)
    squares = [row[-1] for row in left]
    right, factors = [torch.ones_like(square) for square in squares], []
    sound = torch.ones_like(squares[0], dtype=torch.bool)
    for k, row in enumerate(left):
        below = [other[k] / row[k] for other in left[k + 1 :]]
        factors.append(below)
        for i, factor in enumerate(below, start=k + 1):
            right[i] = right[i] - factor * right[k]
            for j in range(k + 1, i + 1):
                left[i][j] = left[i][j] - factor * left[j][k]
        if k:
            sound = sound & (row[k] > 0)
    alpha: list[Tensor] = []
    for k in reversed(range(len(left))):
        known = right[k] / left[k][k]
        for factor, solved in zip(factors[k], alpha, strict=True):
            known = known - factor * solved
        alpha.insert(0, known)
    alpha = [torch.where(sound, a, 1 / square) for a, square in zip(alpha, squares, strict=True)]
    total = sum(alpha[1:], alpha[0])
    return [a / total for a in alpha]


class Past(NamedTuple):
    """What mixing remembers: damped images and residuals (B, P, N), the newest last, and their products.

    Each of the `products` is of one place alone; `evaluations` counts those so far. The safeguard adds the `image` and
    the `residual` of its best, and for each place (B, P, 1): `best` and `mark`, as squares, `since`, and `trusted`,
    None while all are; see `safeguard.Guarded`.
    """

    images: tuple[Tensor, ...] = ()
    residuals: tuple[Tensor, ...] = ()
    products: Triangle = ()
    evaluations: int = 0
    best: Any = None
    image: Any = None
    residual: Any = None
    trusted: Tensor | None = None
    mark: Any = None
    since: Any = None

    def last(self, count: int) -> Past:
        """With no more than so many images."""
        old = max(len(self.images) - count, 0)
        products = tuple(row[old:] for row in self.products[old:])
        return self._replace(
            images=self.images[old:], residuals=self.residuals[old:], products=products
        )


class BranchlessAnderson(GuardedAnderson):
    """`GuardedAnderson` for steps that are compiled or exported; called plainly, `RunningAnderson`."""

    def __init__(self, history: AndersonHistory, window: int, z: State):
        self.batched, self.causal = history.batched, history.causal
        self.window, self.mixing, self.ridge = window, history.mixing, history.ridge
        self.fading = history.fading
        self.features: int | None = None
        if isinstance(z, Tensor) and not history.batched:
            self.features = z.shape[-1]

    def __call__(self, z: State, h: State, memory: Past | None) -> tuple[State, Past]:
        rows, image = self._rows(z), self._rows(h)
        residual = subtract(image, rows)
        past = self._with(memory or Past(), image, residual)
        return self._state(self._mixed(past), z), past

    def guarded(self, z: State, f: State, correct: Correct, memory: Any) -> tuple[State, Any]:
        rows, image = self._rows(z), self._rows(f)
        residual = subtract(image, rows)
        corrected = self._rows(correct(z, f)).to(residual.dtype)
        with not_cast(z):
            mixed, memory = self._judged(rows, image, residual, corrected, memory)
        return self._state(mixed, z), memory

    def _judged(
        self, z: Tensor, image: Tensor, residual: Tensor, corrected: Tensor, memory: Past | None
    ) -> tuple[Tensor, Past]:
        """The next state from f(z), f(z) - z and what it is corrected to, all as rows (B, P, N)."""
        eps = torch.finfo(z.dtype).eps
        z, image = z.to(residual.dtype), image.to(residual.dtype)
        if memory is None:
            past = self._with(Past(), z + corrected, corrected)
            size = self._summed(past.products[-1][-1])
            since = torch.zeros_like(size, dtype=torch.long)
            past = past._replace(best=size, image=image, residual=residual, mark=size, since=since)
            return self._mixed(past), past
        if memory.trusted is not None:
            corrected = torch.where(memory.trusted, corrected, residual)
        past = self._with(memory, z + corrected, corrected)
        size = self._summed(past.products[-1][-1])
        fallen = size < FALLEN**2 * memory.mark
        since = torch.where(fallen, 0, memory.since + 1)
        grown = ~(size <= GROWTH**2 * memory.best)  # also where it is NaN
        if memory.evaluations >= PATIENCE:
            tired = since >= PATIENCE
            grown = grown | (tired if memory.trusted is None else tired & memory.trusted)
        noise = (ROUNDING * eps) ** 2 * self._summed(self._product(z, z))
        grown = grown & ~(size <= noise)
        # Taken back: all that is remembered there is the best state, without its correction.
        damped = self._damped(memory.image, memory.residual)
        square = self._product(memory.residual, memory.residual)
        products = tuple(
            tuple(torch.where(grown, square, entry) for entry in row) for row in past.products
        )
        mixed = torch.where(grown, damped, self._mixed(past._replace(products=products)))
        size = torch.where(grown, self._summed(square), size)
        better = (size < memory.best) & ~grown
        return mixed, past._replace(
            images=tuple(torch.where(grown, damped, kept) for kept in past.images),
            residuals=tuple(torch.where(grown, memory.residual, kept) for kept in past.residuals),
            products=products,
            best=torch.where(better | grown, size, memory.best),
            image=torch.where(better, image, memory.image),
            residual=torch.where(better, residual, memory.residual),
            trusted=~grown if memory.trusted is None else memory.trusted & ~grown,
            mark=torch.where(fallen, size, memory.mark),
            since=since,
        )

    def _with(self, past: Past, image: Tensor, residual: Tensor) -> Past:
        """The past and one more evaluation."""
        past = past.last(self.window)
        residuals = (*past.residuals, residual)
        return past._replace(
            images=(*past.images, self._damped(image, residual)),
            residuals=residuals,
            products=(*past.products, tuple(self._product(residual, other) for other in residuals)),
            evaluations=past.evaluations + 1,
        )

    def _damped(self, image: Tensor, residual: Tensor) -> Tensor:
        image = image.to(residual.dtype)
        return image if self.mixing == 1.0 else image - (1 - self.mixing) * residual

    def _mixed(self, past: Past) -> Tensor:
        """sum_i alpha_i image_i, (B, P, N)."""
        mixed = past.images[0]
        if len(past.images) == 1:
            return mixed
        entries = self._summed(torch.cat([entry for row in past.products for entry in row], dim=2))
        columns = iter(entries.split(1, dim=2))
        gram = [[next(columns) for _ in row] for row in past.products]
        ridge = max(self.ridge, 4 * torch.finfo(mixed.dtype).eps)
        alpha = [a.to(mixed.dtype) for a in eliminated_weights(gram, ridge)]
        mixed = alpha[0] * mixed
        for a, image in zip(alpha[1:], past.images[1:], strict=True):
            mixed = torch.addcmul(mixed, a, image)
        return mixed

    def _summed(self, product: Tensor) -> Tensor:
        """In double precision; of a causal model, over the positions up to each."""
        return running_sums(product.double(), self.fading) if self.causal else product.double()

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """(B, P, 1); of a graph, which is one long sample, the sums of its nodes are added in double precision."""
        product = a * b
        if self.features is not None:
            product = product.unflatten(2, (-1, self.features)).sum(dim=3).double()
        return product.sum(dim=2, keepdim=True)

    def _rows(self, state: State) -> Tensor:
        """(B, P, N)."""
        if isinstance(state, Tensor) and self.causal and state.ndim == 3:
            return state
        parts = [
            t.reshape(t.shape[0], 1, math.prod(t.shape[1:]))
            if self.batched
            else t.reshape(1, 1, -1)
            for t in tensors_of(state)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _state(self, rows: Tensor, like: State) -> State:
        """The inverse of `_rows`, in the shapes and the dtype of a state."""
        tensors = tensors_of(like)
        sizes = [math.prod(t.shape[1:]) if self.batched else t.numel() for t in tensors]
        pieces = [rows] if len(sizes) == 1 else rows.split(sizes, dim=2)
        parts = [p.reshape(t.shape).to(t.dtype) for p, t in zip(pieces, tensors, strict=True)]
        return parts[0] if isinstance(like, Tensor) else tuple(parts)

"""Anderson mixing and its safeguard once more, without branches on data and without writing in place.

What is compiled or exported may neither ask whether something happened nor change a tensor that others see. The numbers
are those of `RunningAnderson` and `GuardedAnderson` up to rounding; tests hold both to that. Shapes: B samples, P
places with mixing weights of their own (1, or the positions of a causal model), N numbers of each place, n evaluations.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdeq.consistency.history import AndersonHistory
from cdeq.consistency.safeguard import FALLEN, GROWTH, PATIENCE, ROUNDING, GuardedAnderson
from cdeq.equilibrium.states import State, norm_dtype, subtract, tensors_of


def eliminated_weights(gram: Tensor, ridge: float) -> Tensor:
    """alpha (..., n) of Gram matrices (..., n, n): `anderson_weights` by elimination, since ONNX has no Cholesky.

    Every pivot of a positive definite matrix is positive, so that no rows are exchanged, and the answer is as good as
    Cholesky's. Where a pivot is not, alpha_i ~ 1 / |r_i|^2.
    """
    gram = gram.double()
    squares = (gram.diagonal(dim1=-2, dim2=-1) * (1 + ridge)).clamp_min(1e-280)
    diagonal = torch.eye(gram.shape[-1], dtype=torch.bool, device=gram.device)
    left = torch.cat(
        (torch.where(diagonal, squares[..., None], gram), torch.ones_like(gram[..., :1])), -1
    )
    rows, sound = [], torch.ones_like(squares[..., :1], dtype=torch.bool)
    for _ in range(gram.shape[-1]):
        pivot, below = left[..., :1, :1], left[..., 1:, :]
        row = left[..., :1, 1:] / pivot
        rows.append(row.squeeze(-2))
        sound = sound & (pivot.squeeze(-2) > 0)
        left = below[..., 1:] - below[..., :1] * row
    alpha = rows.pop()
    for row in reversed(rows):
        known = (row[..., :-1] * alpha).sum(dim=-1, keepdim=True)
        alpha = torch.cat((row[..., -1:] - known, alpha), -1)
    alpha = torch.where(sound, alpha, 1 / squares)
    return alpha / alpha.sum(dim=-1, keepdim=True)


class Past(NamedTuple):
    """What mixing remembers: damped images and residuals (B, P, N), the newest last; and the safeguard, of its best.

    `best`, `trusted`, `mark`, `since` (B, P, 1), `image` and `residual` (B, P, N): as in `safeguard.Guarded`.
    """

    images: tuple[Tensor, ...]
    residuals: tuple[Tensor, ...]
    best: Tensor | None = None
    image: Tensor | None = None
    residual: Tensor | None = None
    trusted: Tensor | None = None
    mark: Tensor | None = None
    since: Tensor | None = None


class BranchlessAnderson(GuardedAnderson):
    """`GuardedAnderson` for steps that are compiled or exported; called plainly, `RunningAnderson`."""

    def __init__(self, history: AndersonHistory, window: int):
        self.batched, self.causal = history.batched, history.causal
        self.window, self.mixing, self.ridge = window, history.mixing, history.ridge

    def __call__(self, z: State, h: State, memory: Past | None) -> tuple[State, Past]:
        rows, image = self._rows(z), self._rows(h)
        residual = subtract(image, rows)
        past = memory or Past((), ())
        mixed, images, residuals = self._mixed(image, residual, past.images, past.residuals)
        return self._state(mixed, z), Past(images, residuals)

    def guarded(
        self, z: State, f: State, residual: State, change: State, memory: Any
    ) -> tuple[State, Any]:
        rows, image = self._rows(z), self._rows(f)
        residual = self._rows(residual).to(norm_dtype(rows.dtype))
        moved = self._rows(change).to(residual.dtype)
        if memory is None:
            unknown = torch.full_like(self._sizes(residual), torch.inf)
            trusted = torch.ones_like(unknown, dtype=torch.bool)
            since = torch.zeros_like(trusted, dtype=torch.long)
            memory = Past((), (), unknown, image, residual, trusted, unknown, since)
        moved = torch.where(memory.trusted, moved, 0.0)
        size = self._sizes(residual + moved)
        noise = ROUNDING * torch.finfo(rows.dtype).eps * self._sizes(rows)
        fallen = size < FALLEN * memory.mark
        since = torch.where(fallen, 0, memory.since + 1)
        grown = ~(size <= GROWTH * memory.best)  # also where it is NaN
        grown = (grown | (memory.trusted & (since >= PATIENCE))) & ~(size <= noise)
        better = (size < memory.best) | grown
        image = torch.where(grown, memory.image, image)
        residual = torch.where(grown, memory.residual, residual)
        moved = torch.where(grown, 0.0, moved)
        size = torch.where(grown, self._sizes(residual), size)
        damped = image.to(residual.dtype) - (1 - self.mixing) * residual
        images = tuple(torch.where(grown, damped, past) for past in memory.images)
        residuals = tuple(torch.where(grown, residual, past) for past in memory.residuals)
        mixed, images, residuals = self._mixed(
            image.to(residual.dtype) + moved, residual + moved, images, residuals
        )
        return self._state(mixed, z), Past(
            images,
            residuals,
            torch.where(better, size, memory.best),
            torch.where(better, image, memory.image),
            torch.where(better, residual, memory.residual),
            memory.trusted & ~grown,
            torch.where(fallen, size, memory.mark),
            since,
        )

    def _mixed(
        self,
        image: Tensor,
        residual: Tensor,
        images: tuple[Tensor, ...],
        residuals: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """sum_i alpha_i image_i (B, P, N), and what is remembered with the newest."""
        damped = image.to(residual.dtype)
        if self.mixing != 1.0:
            damped = damped - (1 - self.mixing) * residual
        images = (*images[-self.window :], damped)
        residuals = (*residuals[-self.window :], residual)
        if len(images) == 1:
            return damped, images, residuals
        r = torch.stack(residuals, dim=2)
        gram = r @ r.mT
        gram = gram.cumsum(dim=1) if self.causal else gram
        ridge = max(self.ridge, 4 * torch.finfo(r.dtype).eps)
        alpha = eliminated_weights(gram, ridge).to(r.dtype)
        return (alpha[:, :, None] @ torch.stack(images, dim=2)).squeeze(2), images, residuals

    def _sizes(self, rows: Tensor) -> Tensor:
        """Norms (B, P, 1) of rows (B, P, N): of whole samples, or of the positions up to each."""
        norms = torch.linalg.vector_norm(rows, dim=2, keepdim=True, dtype=norm_dtype(rows.dtype))
        return norms.double().square().cumsum(dim=1).sqrt() if self.causal else norms

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

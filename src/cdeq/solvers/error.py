"""How far a state is from the equilibrium: estimated from what a solve has seen, or proven by a contraction.

A residual r = f(z) - z is not a distance: near the equilibrium z* - z is about (I - J)^-1 r, J the Jacobian of f. Every
pair of iterates shows how much (I - J)^-1 can stretch: |z_k - z_j| / |r_k - r_j|. For Picard's iteration of a map that
contracts by q this tends to 1 / (1 - q); Anderson's steps reach into slow directions and show it sooner. The steps
themselves show more: if residuals fall by rho at each, all that are still to come add up to at most |z_k - z_k-1|
rho / (1 - rho). Each of the two sees what the other may not, so the larger counts.
Shapes: B samples, D numbers in each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cdeq.equilibrium.contract import Contraction
from cdeq.equilibrium.states import StateLayout, norm_dtype, residual_ratio, row_norms, subtract


class Seen(NamedTuple):
    """What one evaluation shows: z and f(z) - z (B, D), |z| (B,), the relative residual (B,).

    `missing` (B,): the solver's own estimate of |z* - z| / |z|, if it has one.
    """

    z: Tensor
    residual: Tensor
    size: Tensor
    relative: Tensor
    missing: Tensor | None = None


class Measure(Protocol):
    """What a tolerance bounds, in place of the residual. Its memory is a tree of tensors with the samples first."""

    def init(self, z: Tensor) -> Any:
        """Empty memory for states like `z`."""

    def update(self, k: int, seen: Seen, memory: Any) -> tuple[Tensor, Any]:
        """Values (B, M) after evaluation k = 0, 1, ..., and the new memory.

        The tolerance bounds the first; the others are kept for the solution.
        """


def rounding(dtype: torch.dtype) -> float:
    """A relative residual that is nothing but rounding."""
    return 4 * torch.finfo(dtype).eps


LAGS = 3
"""Over so many evaluations it is seen how fast residuals fall; the slowest of their rates counts."""
SLOWEST = 0.98
"""The largest rate that is believed: past it the steps to come cannot be told from those before."""


@dataclass
class _Memory:
    """The state and residual before, the largest stretch so far, and the last relative residuals (B, LAGS)."""

    z: Tensor
    residual: Tensor
    stretch: Tensor
    past: Tensor


@dataclass(frozen=True)
class ErrorEstimate:
    """The largest of three: the residual of each sample times the largest stretch seen so far, the sum of the steps to
    come at the rate seen, and what the solver says is missing.

    Nothing is known from one evaluation: then it is infinite, unless the solver says what is missing or the residual is
    nothing but rounding.
    """

    def init(self, z: Tensor) -> _Memory:
        one = torch.ones_like(row_norms(z))
        residual = torch.zeros_like(z, dtype=norm_dtype(z.dtype))
        return _Memory(z, residual, one, torch.full_like(one[:, None], torch.inf).repeat(1, LAGS))

    def update(self, k: int, seen: Seen, memory: _Memory) -> tuple[Tensor, _Memory]:
        z, residual, size, relative, missing = seen
        if k == 0:
            value = torch.full_like(relative, torch.inf)
            if missing is not None:
                value = torch.fmax(missing, relative)
            value = torch.where(relative <= rounding(z.dtype), relative, value)
            return value[:, None], _Memory(z, residual, memory.stretch, _newest(relative, memory))
        apart = subtract(z, memory.z)
        moved = row_norms(apart)
        # Into the same place: states may be large, and new memory costs as much as the arithmetic.
        changed = row_norms(torch.sub(residual, memory.residual, out=apart))
        # Differences that rounding has a share in tell nothing.
        known = changed > 100 * torch.finfo(z.dtype).eps * size
        found = torch.where(known, moved / changed.clamp_min(1e-300), 0.0)
        stretch = torch.fmax(memory.stretch, found)
        lags = torch.arange(1, LAGS + 1, device=z.device)
        falls = relative[:, None] / memory.past.clamp_min(torch.finfo(relative.dtype).tiny)
        rate = falls.pow(1 / lags).amax(dim=1).clamp_max(SLOWEST)
        rate = torch.where(relative > 10 * rounding(z.dtype), rate, 0.0)  # noise does not fall
        value = torch.fmax(stretch * relative, residual_ratio(moved, size) * rate / (1 - rate))
        if missing is not None:
            value = torch.fmax(value, missing)
        return value[:, None], _Memory(z, residual, stretch, _newest(relative, memory))


def _newest(relative: Tensor, memory: _Memory) -> Tensor:
    return torch.cat([relative[:, None], memory.past[:, :-1]], dim=1)


@dataclass(frozen=True)
class ProvenBound:
    """|z - z*| / |z*| <= a / (|z| - a) with a = |f(z) - z| / (1 - q), in the norm in which f contracts by q.

    Infinite where |z| <= a: then nothing is known of |z*|.
    """

    contraction: Contraction
    layout: StateLayout

    def init(self, z: Tensor) -> None:
        return None

    def update(self, k: int, seen: Seen, memory: None) -> tuple[Tensor, None]:
        if self.contraction.norm is None:
            residual, size = row_norms(seen.residual), seen.size
        else:
            layout = self.layout.resized(len(seen.z))
            residual = self.contraction.norm(layout.restore(seen.residual))
            size = self.contraction.norm(layout.restore(seen.z.to(seen.residual.dtype)))
        away = residual / (1 - self.contraction.factor)
        bound = torch.where(size > away, away / (size - away).clamp_min(1e-300), torch.inf)
        return torch.where(residual == 0, 0.0, bound)[:, None], None

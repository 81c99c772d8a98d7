"""How far a state is from the equilibrium, estimated from what a solve has seen.

A residual r = f(z) - z is not a distance: near the equilibrium z* - z is about (I - J)^-1 r, J the Jacobian of f. Every
pair of iterates shows how much (I - J)^-1 can stretch: |z_k - z_j| / |r_k - r_j|. For Picard's iteration of a map that
contracts by q this tends to 1 / (1 - q); Anderson's steps reach into slow directions and show it sooner.
Shapes: B samples, D numbers in each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdeq.equilibrium.states import row_norms, subtract


class ErrorEstimate:
    """The residual of each sample times the largest stretch seen so far."""

    def __init__(self) -> None:
        self.before: tuple[Tensor, Tensor] | None = None
        self.stretch: Tensor | None = None

    @staticmethod
    def rounding(dtype: torch.dtype) -> float:
        """A relative residual that is nothing but rounding."""
        return 4 * torch.finfo(dtype).eps

    def __call__(self, z: Tensor, residual: Tensor, size: Tensor, relative: Tensor) -> Tensor:
        """The estimated relative error (B,) of z (B, D), with its residual, |z| and relative residual.

        Nothing is known from one evaluation: then it is infinite, except where the residual is nothing but rounding.
        """
        if self.before is None or self.stretch is None:
            self.stretch = torch.ones_like(size)
            self.before = (z, residual)
            return torch.where(relative <= self.rounding(z.dtype), relative, torch.inf)
        moved = row_norms(subtract(z, self.before[0]))
        changed = row_norms(residual - self.before[1])
        # Differences that rounding has a share in tell nothing.
        known = changed > 100 * torch.finfo(z.dtype).eps * size
        seen = torch.where(known, moved / changed.clamp_min(1e-300), 0.0)
        self.stretch = torch.fmax(self.stretch, seen)
        self.before = (z, residual)
        return self.stretch * relative

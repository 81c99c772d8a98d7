"""The safeguard of corrected steps: what a learned correction may not do is make things worse.

Every step measures the corrected residual p = f(z) - z + N(f(z) - z) of the state it leaves, sample by sample. A sample
whose |p| has grown past its best is taken back to its best state, from where it goes on with the teacher's own steps
under Anderson's method, without a further evaluation and without correction. Shapes: B samples, D numbers in each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdeq.consistency.history import HistoryMemory, RunningAnderson
from cdeq.equilibrium.states import State, StateLayout, row_norms, subtract

GROWTH = 10.0
"""How many times its best a corrected residual may be: on its way to the equilibrium it need not fall at every step."""
ROUNDING = 64
"""Residuals below so many units of rounding of the state are noise, and judge nothing."""


class Guarded(NamedTuple):
    """What the safeguard remembers of each sample."""

    best: Tensor
    """(B,): the smallest |p|."""
    image: Tensor
    """(B, D): f at the state that had it."""
    residual: Tensor
    """(B, D): f(z) - z there."""
    trusted: Tensor
    """(B,): whether corrections still take part."""
    inner: HistoryMemory


class GuardedAnderson(RunningAnderson):
    """Anderson mixing over the corrected map, along one rollout that nobody differentiates."""

    def guarded(
        self, z: State, f: State, change: State, memory: Guarded | None
    ) -> tuple[State, Guarded]:
        """The next state from f(z) and its correction N(f(z) - z)."""
        layout = StateLayout.of(z, self.batched)
        flat, image = layout.flatten(z), layout.flatten(f)
        residual = subtract(image, flat)
        moved = layout.flatten(change).to(residual.dtype)
        if memory is None:
            trusted = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
            size = torch.full((len(flat),), torch.inf, dtype=residual.dtype, device=flat.device)
            memory = Guarded(size, image, residual, trusted, (0, self.solver.init(flat)))
        trusted = memory.trusted
        moved = torch.where(trusted[:, None], moved, 0.0)
        size = row_norms(residual + moved)
        noise = ROUNDING * torch.finfo(flat.dtype).eps * row_norms(flat)
        grown = ~(size <= torch.clamp_min(GROWTH * memory.best, noise))  # also where it is NaN
        better = size < memory.best
        count, kept = memory.inner
        if bool(grown.any()):
            rows = grown[:, None]
            image = torch.where(rows, memory.image, image)
            residual = torch.where(rows, memory.residual, residual)
            moved = torch.where(rows, 0.0, moved)
            self._forget(kept, count, grown, image, residual)
            # Without its correction a residual is of another size: judged anew from here on.
            size = torch.where(grown, row_norms(residual), size)
            better = better | grown
        corrected = residual + moved
        mixed, kept = self.solver.update(
            count, flat, (image.to(corrected.dtype) + moved).to(flat.dtype), corrected, kept
        )
        memory = Guarded(
            torch.where(better, size, memory.best),
            torch.where(better[:, None], image, memory.image),
            torch.where(better[:, None], residual, memory.residual),
            trusted & ~grown,
            (count + 1, kept),
        )
        return layout.restore(mixed), memory

    def _forget(self, kept: Any, count: int, rows: Tensor, image: Tensor, residual: Tensor) -> None:
        """Let all that is remembered of some samples be their best state."""
        slots = min(count, self.solver.window + 1)
        if not slots:
            return
        kept.images[rows, :slots] = image[rows, None].to(kept.images.dtype)
        kept.residuals[rows, :slots] = residual[rows, None]
        own = residual[rows]
        square = self.solver.products(own, own[:, None]).double()  # (rows, 1) or (rows, L, 1)
        kept.gram[rows, ..., :slots, :slots] = square[..., None]

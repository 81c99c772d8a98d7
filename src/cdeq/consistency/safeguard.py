"""The safeguard of corrected steps: what a learned correction may not do is make things worse.

Every step measures the corrected residual p = f(z) - z + N(f(z) - z) of the state it leaves, sample by sample. A sample
whose |p| has grown past its best, or hardly fallen for a while, is taken back to its best state, from where it goes on
with the teacher's own steps under Anderson's method, without a further evaluation and without correction. In a causal
model each position is judged by the positions up to it, so that none learns of later ones. Shapes: B samples, D numbers
in each, P places that are judged: 1, or the positions of a causal model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdeq.consistency.history import RunningAnderson
from cdeq.equilibrium.states import State, StateLayout, norm_dtype, row_norms
from cdeq.solvers.anderson import Anderson

GROWTH = 10.0
"""How many times its best a corrected residual may be: on its way to the equilibrium it need not fall at every step."""
PATIENCE, FALLEN = 10, 0.9
"""In so many evaluations |p| must fall to this share: where I + N is all but singular it is small without a reason."""
ROUNDING = 64
"""Residuals below so many units of rounding of the state are noise, and judge nothing."""


class Guarded(NamedTuple):
    """What the safeguard remembers of each sample."""

    best: Tensor
    """(B, P): the smallest |p|."""
    image: Tensor
    """(B, D): f at the state that had it."""
    residual: Tensor
    """(B, D): f(z) - z there."""
    trusted: Tensor
    """(B, P): whether corrections still take part."""
    mark: Tensor
    """(B, P): |p| when it had last fallen enough."""
    since: Tensor
    """(B, P): evaluations since then."""
    inner: Any
    """Anderson's."""


@dataclass(frozen=True)
class Safeguard:
    """Anderson mixing over the corrected map, as an update rule on flat states."""

    solver: Anderson

    def init(self, z: Tensor) -> Guarded:
        inner = self.solver.init(z)
        unknown = torch.full_like(self._sizes(z), torch.inf)
        trusted = torch.ones_like(unknown, dtype=torch.bool)
        nothing = torch.zeros_like(z, dtype=norm_dtype(z.dtype))
        since = torch.zeros_like(trusted, dtype=torch.long)
        return Guarded(unknown, z, nothing, trusted, unknown, since, inner)

    def update(
        self, k: int, z: Tensor, fz: Tensor, residual: Tensor, moved: Tensor, memory: Guarded
    ) -> tuple[Tensor, Guarded]:
        """The next state from f(z), f(z) - z and its correction, `moved`.

        States may be large, and then a pass over one costs as much as arithmetic: where all samples do well, none is
        made that mixing alone would not need, and sums are written where mixing keeps them.
        """
        if k == 0:
            memory = memory._replace(image=fz, residual=residual)
        image = fz
        if not bool(memory.trusted.all()):
            moved = self._where(memory.trusted, moved, 0.0)
        kept = memory.inner
        corrected = self._keep(k, image, residual, moved, kept)
        size = self._sizes(corrected)
        fallen = size < FALLEN * memory.mark
        since = torch.where(fallen, 0, memory.since + 1)
        grown = ~(size <= GROWTH * memory.best)  # also where it is NaN
        grown = grown | (memory.trusted & (since >= PATIENCE))
        if bool(grown.any()):
            noise = ROUNDING * torch.finfo(z.dtype).eps * self._sizes(z)
            grown = grown & ~(size <= noise)
        better = size < memory.best
        if bool(grown.any()):
            image = self._where(grown, memory.image, image)
            residual = self._where(grown, memory.residual, residual)
            moved = self._where(~grown, moved, 0.0)
            self._forget(kept, k, grown, image, residual)
            self._keep(k, image, residual, moved, kept)
            # Without its correction a residual is of another size: judged anew from here on.
            size = torch.where(grown, self._sizes(residual), size)
            better = better | grown
        return self.solver.mix(k, z, kept), Guarded(
            torch.where(better, size, memory.best),
            self._chosen(better, image, memory.image),
            self._chosen(better, residual, memory.residual),
            memory.trusted & ~grown,
            torch.where(fallen, size, memory.mark),
            since,
            kept,
        )

    def _keep(self, k: int, image: Tensor, residual: Tensor, moved: Tensor, kept: Any) -> Tensor:
        """Put corrected residual and image where Anderson's method keeps them; the residual, as rows."""
        past = self.solver.slots(k, kept)
        for place, plain in zip(past, (residual, image), strict=True):
            torch.add(*map(self.solver.rows, (plain, moved)), out=place)
        return past[0]

    def _chosen(self, places: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """Rows (B, D) with the new numbers at these places; without a copy where it is all places or none."""
        if bool(places.all()):
            return new
        return self._where(places, new, old) if bool(places.any()) else old

    def _sizes(self, rows: Tensor) -> Tensor:
        """Norms (B, P) of rows (B, D), or (B, P, D / P): of whole samples, or of the positions up to each."""
        if self.solver.positions is None:
            return row_norms(rows)[:, None]
        apart = rows if rows.ndim == 3 else self.solver.rows(rows)
        norms = torch.linalg.vector_norm(apart, dim=2)
        return norms.double().square().cumsum(dim=1).sqrt()

    def _where(self, places: Tensor, new: Tensor, old: Tensor | float) -> Tensor:
        """Rows (B, D) with the new numbers of these places (B, P) and the old ones of the others."""
        if self.solver.positions is None:
            return torch.where(places, new, old)
        rows = self.solver.rows
        before = rows(old) if isinstance(old, Tensor) else old
        return torch.where(places[..., None], rows(new), before).flatten(1)

    def _forget(
        self, kept: Any, count: int, grown: Tensor, image: Tensor, residual: Tensor
    ) -> None:
        """Let all that is remembered of some places be their best state."""
        slots, rows = min(count, self.solver.window + 1), self.solver.rows
        places = grown[..., None] if self.solver.positions is None else grown[..., None, None]
        damped = image.to(residual.dtype) - (1 - self.solver.mixing) * residual
        for past, best in ((kept.images, damped), (kept.residuals, residual)):
            old = past[..., :slots, :]
            past[..., :slots, :] = torch.where(places, rows(best)[..., None, :], old)
        # A place's products are sums over all places up to it.
        touched = grown.cumsum(dim=1) > 0
        touched = touched if self.solver.positions is None else touched[..., None]
        for slot in range(slots):
            past = kept.residuals[..., :slots, :]
            row = self.solver.products(past[..., slot, :], past)
            kept.gram[..., slot, :slots] = torch.where(
                touched, row.double(), kept.gram[..., slot, :slots]
            )


class GuardedAnderson(RunningAnderson):
    """The same along one rollout that nobody differentiates."""

    def guarded(
        self, z: State, f: State, residual: State, change: State, memory: Any
    ) -> tuple[State, Any]:
        """The next state from f(z), f(z) - z and its correction N(f(z) - z)."""
        layout, guard = StateLayout.of(z, self.batched), Safeguard(self.solver)
        flat, image = layout.flatten(z), layout.flatten(f)
        residual = layout.flatten(residual).to(norm_dtype(flat.dtype))
        moved = layout.flatten(change).to(residual.dtype)
        count, kept = memory or (0, guard.init(flat))
        mixed, kept = guard.update(count, flat, image, residual, moved, kept)
        return layout.restore(mixed), (count + 1, kept)

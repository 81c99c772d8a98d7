"""The safeguard of corrected steps: what a learned correction may not do is make things worse.

Every step measures the corrected residual p = f(z) - z + N(f(z) - z) of the state it leaves, sample by sample. A sample
whose |p| has grown past its best, or hardly fallen for a while, is taken back to its best state, from where it goes on
with the teacher's own steps under Anderson's method, without a further evaluation and without correction. In a causal
model each position is judged by the positions up to it, so that none learns of later ones. Shapes: B samples,
D numbers in each, P places that are judged: 1, or the positions of a causal model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdeq.consistency.history import RunningAnderson
from cdeq.equilibrium.states import State, StateLayout, norm_dtype, tensors_of
from cdeq.placement import not_cast
from cdeq.solvers.anderson import Anderson, running_sums

GROWTH = 10.0
"""How many times its best a corrected residual may be: on its way to the equilibrium it need not fall at every step."""
PATIENCE, FALLEN = 10, 0.9
"""In so many evaluations |p| must fall to this share: where I + N is all but singular it is small without a reason."""
ROUNDING = 64
"""Residuals below so many units of rounding of the state are noise, and judge nothing."""

Correct = Callable[..., Any]
"""correct(z, f): p = r + N(r) of r = f - z, a state; correct(z, f, (a, b)): p written to a, and z + p to b."""


class Guarded(NamedTuple):
    """What the safeguard remembers of each sample."""

    best: Tensor
    """(B, P): the smallest |p|."""
    state: State
    """z where it was."""
    image: State
    """f(z) there."""
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
    """Anderson mixing over the corrected map, as an update rule on flat states, or on those of a layout.

    States may be large, and then a pass over one costs as much as arithmetic: where all samples do well, none is made
    that mixing alone would not need, and p and z + p are written where mixing keeps them.
    """

    solver: Anderson
    layout: StateLayout | None = None

    def init(self, z: Tensor) -> Guarded:
        return self.begin(z, self.solver.init(z))

    def begin(self, z: State, ring: Any) -> Guarded:
        """The memory at the first state, with the ring buffers of the solver."""
        unknown = torch.full_like(ring.gram[..., 0, 0], torch.inf)
        since = torch.zeros_like(unknown, dtype=torch.long)
        return Guarded(unknown, z, z, since == 0, unknown, since, ring)

    def measured(self, k: int, z: State, f: State, memory: Guarded) -> Tensor:
        """|p| (B, P), double, once p and z + p are in the slots of z; where corrections were dropped, of f(z) - z."""
        if not bool(memory.trusted.all()):
            slots = self.solver.slots(k, memory.inner)
            self._replace(~memory.trusted, slots, self._residual(f, z), self._flat(f))
        return self.solver.multiply(k, memory.inner).double().sqrt()

    def judged(self, k: int, z: State, f: State, size: Tensor, memory: Guarded) -> Guarded:
        """The memory after f(z), its ring buffers ready to be mixed; `size` is what was measured."""
        ring = memory.inner
        if k == 0:
            memory = memory._replace(state=z, image=f)
        fallen = size < FALLEN * memory.mark
        since = torch.where(fallen, 0, memory.since + 1)
        grown = ~(size <= GROWTH * memory.best)  # also where it is NaN
        grown = grown | (memory.trusted & (since >= PATIENCE))
        if bool(grown.any()):
            noise = ROUNDING * torch.finfo(tensors_of(z)[0].dtype).eps
            grown = grown & ~(size <= noise * self._sizes(self._flat(z)))
        better = (size < memory.best) & ~grown
        if bool(grown.any()):
            # Without its correction a residual is of another size: judged anew from here on.
            size = torch.where(grown, self._take_back(k, z, f, grown, memory), size)
        return Guarded(
            torch.where(better | grown, size, memory.best),
            *self._chosen(better, (z, f), (memory.state, memory.image)),
            memory.trusted & ~grown,
            torch.where(fallen, size, memory.mark),
            since,
            ring,
        )

    def _take_back(self, k: int, z: State, f: State, grown: Tensor, memory: Guarded) -> Tensor:
        """Let all that is remembered of some places be their best state; the sizes (B, P) of all residuals then."""
        solver, ring = self.solver, memory.inner
        image, residual = self._flat(memory.image), self._residual(memory.image, memory.state)
        damped = image - (1 - solver.mixing) * residual
        count = min(k, solver.window + 1)
        for slot in range(count):
            past = ring.residuals[:, slot], ring.images[:, slot]
            self._replace(grown, past, residual, damped)
        # A place's products are sums over all places up to it.
        touched, past = grown.cumsum(dim=1) > 0, ring.residuals[:, :count]
        for slot in range(count):
            row, old = solver.products(past[:, slot], past), ring.gram[..., slot, :count]
            old.copy_(torch.where(touched[..., None], row.double(), old))
        self._replace(grown, solver.slots(k, ring), residual, image)
        solver.multiply(k, ring)
        now = self._residual(f, z)
        self._replace(grown, (now,), residual)
        return self._sizes(now)

    def _replace(self, places: Tensor, olds: tuple[Tensor, ...], *news: Tensor) -> None:
        """Put the new numbers of these places (B, P) into tensors (B, D)."""
        for old, new in zip(olds, news, strict=True):
            rows = self.solver.rows(old)
            torch.where(places[..., None], self.solver.rows(new), rows, out=rows)

    def _flat(self, state: State) -> Tensor:
        """(B, D), in at least single precision."""
        flat = state if self.layout is None else self.layout.flatten(state)
        assert isinstance(flat, Tensor)
        return flat.to(norm_dtype(flat.dtype))

    def _residual(self, f: State, z: State) -> Tensor:
        return self._flat(f) - self._flat(z)

    def _sizes(self, flat: Tensor) -> Tensor:
        """Norms (B, P) of (B, D): of whole samples, or of the positions up to each."""
        norms = torch.linalg.vector_norm(self.solver.rows(flat), dim=2)
        squares = norms.double().square()[..., None]
        return running_sums(squares, self.solver.fading).squeeze(2).sqrt()  # of one place: itself

    def _chosen(
        self, places: Tensor, new: tuple[State, State], old: tuple[State, State]
    ) -> tuple[State, State]:
        """The new states at these places; without a copy where it is all places or none."""
        if bool(places.all()):
            return new
        if not bool(places.any()):
            return old
        chosen = []
        for pair in zip(new, old, strict=True):
            ours, theirs = (self.solver.rows(self._flat(state)) for state in pair)
            flat = torch.where(places[..., None], ours, theirs).flatten(1)
            chosen.append(flat if self.layout is None else self.layout.restore(flat))
        return chosen[0], chosen[1]


class GuardedAnderson(RunningAnderson):
    """The same along one rollout that nobody differentiates."""

    def guarded(self, z: State, f: State, correct: Correct, memory: Any) -> tuple[State, Any]:
        """The next state from f(z) and what corrects its residual."""
        layout = StateLayout.of(z, self.batched)
        guard = Safeguard(self.solver, layout)
        count, kept = memory or (0, guard.begin(z, self.begin(z, layout)))
        correct(z, f, self.places(count, kept.inner, layout))
        with not_cast(z):
            size = guard.measured(count, z, f, kept)
            kept = guard.judged(count, z, f, size, kept)
            return self.mixed(count, kept.inner, layout, z), (count + 1, kept)

"""A student as a solver: its start, its corrections and its safeguard as an update rule of the one solve loop.

For recipes whose every step is an evaluation of the teacher's own f. So every residual is measured as the student goes,
each sample stops by itself, and what a correction cannot do Anderson's method does from there.
Shapes: B samples, D numbers in each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cdeq.consistency.history import AndersonHistory, Spare
from cdeq.consistency.safeguard import Guarded, Safeguard
from cdeq.equilibrium.contract import Context, EquilibriumModel
from cdeq.equilibrium.states import (
    State,
    StateLayout,
    map_state,
    row_norms,
    tensors_of,
)
from cdeq.placement import is_plain
from cdeq.solvers.anderson import Anderson, plain_sum

if TYPE_CHECKING:
    from cdeq.consistency.student import Student


class _Memory(NamedTuple):
    """What is remembered of each sample, and what is known of the newest state between its check and its update."""

    gates: Any
    """Of the newest correction."""
    stretch: Tensor
    """(B,): |r + N(r)| / |r| when it was last seen."""
    size: Tensor | None
    """|r + N(r)| (B, P) of the newest residual, if it is in its slot of the ring buffers and multiplied."""
    inner: Any
    """The safeguard's, or Anderson's."""


@dataclass(frozen=True, eq=False, repr=False)
class StudentSolver:
    """z_{k+1} = Anderson's mixing of z_k + r_k + N(r_k), from the student's start; made by `student.as_solver()`.

    It serves any model with the states and contexts of the student's teacher, for example that teacher while it is
    trained further: its start and its corrections only make the way shorter, and N(0) = 0 leaves every equilibrium
    where it is. `solver` mixes; without `corrects` that is all that follows the start. `guesses`: what is missing at a
    state after the first is taken from the correction before, so that none is made where a solve ends. `layout` is that
    of the states, known once there is an input.
    """

    student: Student
    solver: Anderson
    corrects: bool = True
    guesses: bool = False
    layout: StateLayout | None = None
    context: Context = None

    def __repr__(self) -> str:
        return f"StudentSolver({self.student.recipe.name!r}, {self.solver!r})"

    @torch.no_grad()
    def start(self, model: EquilibriumModel, context: Context) -> State:
        """The model's start with the student's change of it, where that is finite."""
        plain = model.start(context)
        return finite_or(self.student.changed_start(plain, context), plain, self.student.batched)

    def for_input(self, model: EquilibriumModel, context: Context, z0: State) -> StudentSolver:
        solver = self.solver.for_input(model, context, z0)
        layout = StateLayout.of(z0, self.student.batched)
        return replace(self, solver=solver, layout=layout, context=context)

    def init(self, z: Tensor) -> _Memory:
        if self.layout is None:
            raise ValueError(
                "a student solves a model in a context: use cdeq.solve_model or cdeq.solve_with_gradient"
            )
        ring = self._spare.ring(self.solver, z)
        inner = self._guard.begin(z, ring) if self._is_guarded else ring
        return _Memory(None, z.new_ones(len(z), dtype=ring.residuals.dtype), None, inner)

    def update(
        self, k: int, z: Tensor, fz: Tensor, residual: Tensor, memory: _Memory
    ) -> tuple[Tensor, _Memory]:
        if not self.corrects:
            mixed, ring = self.solver.update(k, z, fz, residual, memory.inner)
            return mixed, memory._replace(inner=ring)
        if memory.size is None:
            memory = self._corrected(k, z, fz, residual, memory)
        assert memory.size is not None
        inner: Any = memory.inner
        if self._is_guarded:
            inner = self._guard.judged(k, z, fz, memory.size, inner)
        mixed = self.solver.mix(k, self._ring(inner)).to(z.dtype)
        return mixed, memory._replace(size=None, inner=inner)

    def missing(
        self, k: int, z: Tensor, fz: Tensor, residual: Tensor, memory: _Memory
    ) -> tuple[Tensor | None, _Memory]:
        """|r + N(r)|, which is |z* - z| as far as N is (I - J)^-1 - I; None without corrections.

        Where corrections were dropped, and where it guesses, |r| times what the last of them made of it. It costs
        nothing: mixing needs the same correction, and the same product.
        """
        if not self.corrects:
            return None, memory
        if k == 0 or not self.guesses:
            memory = self._corrected(k, z, fz, residual, memory)
        return memory.stretch * row_norms(residual), memory

    def handed_over(self, memory: _Memory) -> Tensor | bool:
        """Whether the corrections of a sample were dropped; of a causal model, at all of its positions."""
        if isinstance(memory.inner, Guarded):
            return ~memory.inner.trusted.any(dim=1)
        return False

    @property
    def _is_guarded(self) -> bool:
        return self.student.recipe.safeguard and self.corrects

    @property
    def _guard(self) -> Safeguard:
        return Safeguard(self.solver)

    @property
    def _spare(self) -> Spare:
        history = self.student.history
        assert isinstance(history, AndersonHistory)
        return history.spare

    def end(self, memory: _Memory) -> None:
        """Another solve may have the ring buffers."""
        self._spare.end(self.solver, self._ring(memory.inner))

    def _ring(self, inner: Any) -> Any:
        return inner.inner if isinstance(inner, Guarded) else inner

    def _corrected(
        self, k: int, z: Tensor, fz: Tensor, residual: Tensor, memory: _Memory
    ) -> _Memory:
        """With p = r + N(r), at the gain of step k, and z + p in the slots of z, and p multiplied."""
        inner = memory.inner
        slots = self.solver.slots(k, self._ring(inner))
        if isinstance(inner, Guarded) and not bool(inner.trusted.any()):
            for place, plain in zip(slots, (residual, fz), strict=True):  # nobody wants N(r)
                place.copy_(plain)
            return memory._replace(size=self.solver.multiply(k, inner.inner).double().sqrt())
        assert self.layout is not None
        layout = self.layout.resized(len(z))
        gates, state, f = memory.gates, layout.restore(z), layout.restore(fz)
        # Samples that go on alone keep theirs: the context is of the whole batch.
        if len(z) == self.layout.batch:
            gates = self.student.gates(f, self.context, k, gates)
        places = (layout.restore(slots[0]), layout.restore(slots[1]))
        if is_plain(state, f, *places):
            self.student.corrected(state, f, places, number=k, gates=gates)
        else:  # in half precision: r is the difference in single precision
            change = self.student.correction_of(layout.restore(residual), k, gates)
            moved = layout.flatten(change).to(residual.dtype)
            for place, plain in zip(slots, (residual, fz), strict=True):
                torch.add(plain, moved, out=place)
        if isinstance(inner, Guarded):
            size = self._guard.measured(k, z, fz, inner)
        else:
            size = self.solver.multiply(k, inner).double().sqrt()
        whole = plain_sum(size.square(), self.solver.fading).sqrt().to(residual.dtype)
        stretch = whole / row_norms(residual).clamp_min(1e-30)
        if isinstance(inner, Guarded):
            stretch = torch.where(inner.trusted.all(dim=1), stretch, memory.stretch)
        return _Memory(gates, stretch, size, inner)


def finite_or(state: State, other: State, batched: bool) -> State:
    """The state, with the samples that are not finite from the other one."""
    layout = StateLayout.of(state, batched)
    flat = layout.flatten(state)
    finite = row_norms(flat).isfinite()[:, None]
    if bool(finite.all()):
        return state
    return layout.restore(torch.where(finite, flat, layout.flatten(other)))


def like_start(z0: State, start: State) -> State:
    """z0 itself; refuses one that is no state of the model's."""
    expected = [tuple(t.shape) for t in tensors_of(start)]
    given = [tuple(t.shape) for t in tensors_of(z0)]
    if isinstance(start, Tensor) != isinstance(z0, Tensor) or expected != given:
        raise ValueError(f"z0 must be a state like the teacher's start, {expected}, not {given}")
    return map_state(lambda given, own: given.to(own), z0, start)

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

from cdeq.consistency.safeguard import Guarded, Safeguard
from cdeq.equilibrium.contract import Context, EquilibriumModel, causal_positions
from cdeq.equilibrium.states import State, StateLayout, map_state, row_norms, tensors_of
from cdeq.solvers.anderson import Anderson

if TYPE_CHECKING:
    from cdeq.consistency.student import Student


class _Memory(NamedTuple):
    """`gates` of the newest correction. `moved`: the correction of the newest residual."""

    gates: Any
    moved: Tensor | None
    inner: Any


@dataclass(frozen=True, eq=False, repr=False)
class StudentSolver:
    """z_{k+1} = Anderson's mixing of z_k + r_k + N(r_k), from the student's start; made by `student.as_solver()`.

    It serves any model with the states and contexts of the student's teacher, for example that teacher while it is
    trained further: its start and its corrections only make the way shorter, and N(0) = 0 leaves every equilibrium
    where it is. `solver` mixes; `layout` is that of the states, known once there is an input.
    """

    student: Student
    solver: Anderson
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
        solver = replace(self.solver, positions=causal_positions(model, z0))
        layout = StateLayout.of(z0, self.student.batched)
        return StudentSolver(self.student, solver, layout, context)

    def init(self, z: Tensor) -> _Memory:
        if self.layout is None:
            raise ValueError(
                "a student solves a model in a context: use cdeq.solve_model or cdeq.solve_with_gradient"
            )
        return _Memory(None, None, self._inner().init(z))

    def update(
        self, k: int, z: Tensor, fz: Tensor, residual: Tensor, memory: _Memory
    ) -> tuple[Tensor, _Memory]:
        moved = memory.moved
        if moved is None:
            moved, memory = self._correction(k, z, residual, memory)
        inner = self._inner()
        kept: Any = memory.inner
        if moved is None:
            mixed, kept = self.solver.update(k, z, fz, residual, kept)
        elif isinstance(inner, Safeguard):
            mixed, kept = inner.update(k, z, fz, residual, moved, kept)
        else:
            image = (fz.to(moved.dtype) + moved).to(z.dtype)
            mixed, kept = self.solver.update(k, z, image, residual + moved, kept)
        return mixed, _Memory(memory.gates, None, kept)

    def missing(
        self, k: int, z: Tensor, residual: Tensor, memory: _Memory
    ) -> tuple[Tensor | None, _Memory]:
        """|r + N(r)|, which is |z* - z| as far as N is (I - J)^-1 - I; None without corrections."""
        moved, memory = self._correction(k, z, residual, memory)
        if moved is None:
            return None, memory
        return row_norms(residual + moved), memory._replace(moved=moved)  # for the update

    def handed_over(self, memory: _Memory) -> Tensor | bool:
        """Whether the corrections of a sample were dropped; of a causal model, at all of its positions."""
        if isinstance(memory.inner, Guarded):
            return ~memory.inner.trusted.any(dim=1)
        return False

    def _inner(self) -> Safeguard | Anderson:
        guarded = self.student.recipe.safeguard
        return Safeguard(self.solver) if guarded else self.solver

    def _correction(
        self, k: int, z: Tensor, residual: Tensor, memory: _Memory
    ) -> tuple[Tensor | None, _Memory]:
        """N(r) with the gain of step k, flat, or None for a student without corrections; and its gates, remembered."""
        if self.student.correction is None:
            return None, memory
        assert self.layout is not None
        layout = self.layout.resized(len(residual))
        gates = memory.gates
        # Samples that go on alone keep theirs: the context is of the whole batch.
        if len(z) == self.layout.batch:
            gates = self.student.gates(layout.restore(z), self.context, k, gates)
        change = self.student.correction_of(layout.restore(residual), k, gates)
        return layout.flatten(change).to(residual.dtype), memory._replace(gates=gates)


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

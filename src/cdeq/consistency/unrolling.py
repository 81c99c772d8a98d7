"""A student as a plain module: its first steps in a row, the weights of each made, no branch on data.

`torch.compile` takes it whole, and `cdeq.export` writes it down. Beside it the teacher's own step, with which a solve
can be finished where there is no torch. Shapes: B samples; a state and a context are as the teacher's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cdeq.consistency.branchless import BranchlessAnderson
from cdeq.consistency.history import AndersonHistory
from cdeq.consistency.parts import Prepared, StepMemory, TeacherMethods, TimePoint
from cdeq.consistency.weights import Deltas
from cdeq.equilibrium.contract import Context, EquilibriumModel, Input, is_batched
from cdeq.equilibrium.memory import Remembering, Segment
from cdeq.equilibrium.states import State, residual_ratio, row_norms, subtract, tensors_of
from cdeq.equilibrium.trees import named_tensors

if TYPE_CHECKING:
    from cdeq.consistency.student import Student


MOST_TOKENS = 4096
"""Tokens of a text and its memory together that an exported model takes, where it knows its positions by heart."""


class UnrolledStudent(nn.Module):
    """The output after `steps` steps, and the teacher's residual |f(z) - z| / |z| there, (B,).

    The residual is of the very state that is read out, which costs one more evaluation of f; without `check` it is left
    out. A model with memory also gives what it remembers. `certified`: the state, f of it and the context besides, all
    that `TeacherStep` needs to go on. A snapshot: training the student further does not change it.
    """

    def __init__(
        self, student: Student, steps: int, *, check: bool = True, certified: bool = False
    ):
        super().__init__()
        baked = student.baked(steps)
        self.check, self.certified = check or certified, certified
        self.points: list[TimePoint] = []
        for j in range(steps):
            point = student.time_point(j)
            self.points.append(point._replace(strength=float(point.strength)))
        self.shares_context = student.recipe.injection == "teacher"
        strengths = [1.0 if student.time_heads is not None else p.strength for p in self.points]
        needed = {0.0, *strengths} if self.shares_context else {0.0, 1.0, *strengths}
        self.strengths: list[Any] = sorted(needed)
        self.models = nn.ModuleList(baked.models[c] for c in self.strengths)
        for c in (0.0,) if self.shares_context else (0.0, 1.0):  # those that make contexts
            if hasattr(baked.models[c], "tabulate"):
                baked.models[c].tabulate(MOST_TOKENS)
        # What is left of the student has no weights to change any more: they are in the models.
        self.student = baked.student
        self.student.methods = TeacherMethods(baked.models[0.0])
        self.student.deltas, self.student.rates = Deltas({}, None), None
        self.window = 1
        if isinstance(student.history, AndersonHistory):
            self.window = max(min(student.history.window, steps - 1), 1)
        self.requires_grad_(False).eval()

    def forward(self, x: Input) -> tuple[Tensor, ...]:
        return tuple(self.named(x).values())

    def named(self, x: Input) -> dict[str, Tensor]:
        """The outputs by name, in their order."""
        base = changed = self.models[0].inject(x)  # type: ignore[operator]
        if not self.shares_context:
            changed = self.models[self.strengths.index(1.0)].inject(x)  # type: ignore[operator]
        prepared = Prepared(base, changed, self._evaluate)
        z = self.student.begin(prepared)
        history: Any = self.student.history
        if isinstance(history, AndersonHistory):
            history = BranchlessAnderson(history, self.window, z)
        memory: StepMemory | None = None
        for point in self.points:
            z, memory = self.student.advance(z, point, memory, prepared, history)
        teacher, remembers = self.student.teacher, isinstance(x, Segment)
        if not self.check:
            return named_answer(teacher, z, base, remembers)
        f = teacher.step(z, base)
        found = named_answer(teacher, z, base, remembers, f)
        if self.certified:
            found |= named_tensors(z, "state") | named_tensors(f, "next_state")
            found |= named_tensors(base, "context")
        return found

    def _evaluate(self, c: float | Tensor, z: State, context: Context) -> State:
        return self.models[self.strengths.index(c)].step(z, context)  # type: ignore[operator]


class TeacherStep(nn.Module):
    """One evaluation of the teacher's f: output and residual of the state it is given, and the next state f(z)."""

    def __init__(self, unrolled: UnrolledStudent, remembers: bool):
        super().__init__()
        self.methods, self.remembers = unrolled.student.methods, remembers

    def forward(self, z: State, context: Context) -> tuple[Tensor, ...]:
        return tuple(self.named(z, context).values())

    def named(self, z: State, context: Context) -> dict[str, Tensor]:
        """The outputs by name, in their order."""
        teacher: Any = self.methods.model
        f = teacher.step(z, context)
        found = named_answer(teacher, z, context, self.remembers, f)
        return found | named_tensors(f, "next_state")


def named_answer(
    teacher: EquilibriumModel, z: State, context: Context, remembers: bool, f: State | None = None
) -> dict[str, Tensor]:
    """`output`, `residual` where f(z) is given, and what a model with memory keeps for the next segment."""
    found = {"output": teacher.readout(z, context)}
    if f is not None:
        found["residual"] = whole_residual(z, f, is_batched(teacher))
    if remembers and isinstance(teacher, Remembering):
        found |= named_tensors(teacher.remember(z, context), "next_memory")
    return found


def whole_residual(z: State, f: State, batched: bool) -> Tensor:
    """|f(z) - z| / |z| for each sample, (B,), as `relative_residual` measures it."""

    def rows(state: State) -> Tensor:
        parts = [t.flatten(1) if batched else t.reshape(1, -1) for t in tensors_of(state)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    before = rows(z)
    return residual_ratio(row_norms(subtract(rows(f), before)), row_norms(before))

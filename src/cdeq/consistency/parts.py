"""What a student is made of beside its own weights: its clock's points, what its steps share, the teacher's shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cdeq.consistency.history import HistoryMemory
from cdeq.consistency.weights import mix_contexts
from cdeq.equilibrium.contract import Context, Input, check_contract, is_batched
from cdeq.equilibrium.states import State, tensors_of
from cdeq.equilibrium.trees import tensors_in


class TimePoint(NamedTuple):
    """A point on the student's clock: solver time t, and c_out(t), the student's share there."""

    time: float
    strength: float | Tensor


class Prepared(NamedTuple):
    """All that the steps on one input share.

    `base` and `changed` are the contexts under theta and theta + delta; `call(c, z, context)` is one evaluation of the
    teacher's map under the weights theta + c delta.
    """

    base: Context
    changed: Context
    call: Callable[[float | Tensor, State, Context], State]

    def step(self, z: State, c: float | Tensor) -> State:
        """f(z; theta + c delta), in the context mixed with the same c."""
        return self.call(c, z, mix_contexts(self.base, self.changed, c))


class StepMemory(NamedTuple):
    """What a step must know of those before it: how many there were, the gates of the correction, and the history's."""

    number: int
    gates: Any
    history: HistoryMemory


@dataclass(frozen=True, kw_only=True)
class TeacherShapes:
    """What a student must know of its teacher to be rebuilt without an example."""

    features: tuple[int, ...]
    axes: tuple[int, ...]
    weights: tuple[str, ...]
    """Names of the teacher's weights that take part in a step, and so are changed."""


class TeacherMethods(nn.Module):
    """The teacher's methods behind one forward, as `functional_call` needs it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, method: str, *arguments: Any) -> Any:
        return getattr(self.model, method)(*arguments)

    def under(self, weights: dict[str, Tensor], method: str, *arguments: Any) -> Any:
        """A method of the teacher with other weights, by name; with its own where none are given."""
        if not weights:
            return self(method, *arguments)
        named = {f"model.{name}": weight for name, weight in weights.items()}
        return functional_call(self, named, (method, *arguments))


def check_teacher(teacher: object, *, needs_weights: bool) -> None:
    """Refuse what a student cannot be made of: no equilibrium model, or one without the weights it would change."""
    if isinstance(teacher, type):
        raise TypeError(f"{teacher.__name__} is a class: give an instance, {teacher.__name__}(...)")
    check_contract(teacher)
    if not isinstance(teacher, nn.Module):
        raise TypeError(
            f"a teacher must be an nn.Module, and {type(teacher).__name__} is none: wrap its functions with "
            "cdeq.from_functions"
        )
    if needs_weights and not any(p.is_floating_point() for p in teacher.parameters()):
        raise TypeError(
            "this recipe changes the teacher's weights, and the teacher has no parameters: pass its modules to "
            "cdeq.from_functions, or use recipe='corrected', which needs none"
        )


def try_teacher(teacher: Any, x: Input) -> tuple[Context, State]:
    """The context and the start of one input; refuses, in words, what goes wrong when a teacher is first used."""
    try:
        context = teacher.inject(x)
        z = teacher.start(context)
        after = teacher.step(z, context)
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(
            f"the teacher cannot take this input ({type(error).__name__}: {error}). An input is what its "
            f"inject() takes: {_described(x)} was given. Batches are x or (x, y); check their dtype and shape."
        ) from error
    parts, moved = tensors_of(z), tensors_of(after)
    if [p.shape for p in parts] != [p.shape for p in moved]:
        raise ValueError(
            f"step() must return a state like its start: {[tuple(p.shape) for p in parts]}, not "
            f"{[tuple(p.shape) for p in moved]}"
        )
    half = {p.dtype for p in parts} & {torch.float16, torch.bfloat16}
    if half:
        raise ValueError(
            f"the teacher's states are of {half.pop()}: distil it in single precision (teacher.float()), and use the "
            "student under autocast"
        )
    if isinstance(x, Tensor) and is_batched(teacher):
        size = len(x)
        for part in parts:
            if part.shape[0] != size and size in part.shape[1:]:
                raise ValueError(
                    f"a state of shape {tuple(part.shape)} for {size} samples: the batch axis comes first, or "
                    "the teacher says batched = False"
                )
    return context, z


def _described(x: Any) -> str:
    found = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors_in(x)]
    return ", ".join(found) or type(x).__name__


def weights_in_use(teacher: nn.Module, x: Input, *, with_injection: bool) -> tuple[str, ...]:
    """Names of the weights that a step depends on, or the injection too; those of the readout do not take part."""
    methods = TeacherMethods(teacher)
    weights = {
        name: p.detach().requires_grad_()
        for name, p in teacher.named_parameters()
        if p.is_floating_point()
    }
    with torch.enable_grad():
        context = methods.under(weights if with_injection else {}, "inject", x)
        z = methods.under(weights, "step", methods("start", context), context)
        total = torch.stack([part.float().sum() for part in tensors_of(z)]).sum()
        if not total.requires_grad:
            found: tuple[Tensor | None, ...] = (None,) * len(weights)
        else:
            found = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    names = tuple(
        name for name, gradient in zip(weights, found, strict=True) if gradient is not None
    )
    if not names:
        raise ValueError(
            "no weight of the teacher takes part in its step: there is nothing to distil"
        )
    return names

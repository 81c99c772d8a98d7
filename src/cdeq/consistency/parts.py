"""What a student is made of beside its own weights: moments, what steps share, the teacher's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from cdeq.equilibrium.contract import Context, check_contract


class Moment(NamedTuple):
    """A point on the student's clock: solver time t, and c_out(t), the student's share there."""

    time: float
    strength: float | Tensor


class Prepared(NamedTuple):
    """All that the steps on one input share: contexts under theta and theta + delta, and the weights."""

    base: Context
    changed: Context
    theta: list[Tensor]
    delta: list[Tensor]
    weights: dict[str, Tensor]
    """theta + delta, by name."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """What of a teacher's shapes a student is built on, so that it can be rebuilt without an example."""

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


def check_teacher(teacher: object) -> None:
    """Refuse what a student cannot be made of: no equilibrium model, or one without weights."""
    check_contract(teacher)
    if not isinstance(teacher, nn.Module) or not any(
        p.is_floating_point() for p in teacher.parameters()
    ):
        raise TypeError(
            "a teacher must be an nn.Module with parameters, which the student's changes are made of; "
            "wrap plain functions with cdeq.from_functions and pass it your modules"
        )

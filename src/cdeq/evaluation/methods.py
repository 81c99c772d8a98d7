"""What is compared: ways from an input to states z_0, z_1, ... of which z_k has cost k evaluations of f."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cdeq import solvers
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import EquilibriumModel
from cdeq.equilibrium.states import State
from cdeq.models.learned_solvers import LearnedSolver
from cdeq.solvers import Solver, solve_model

SOLVERS: dict[str, Solver] = {name: kind() for name, kind in solvers.SOLVERS.items()}
"""The plain solvers that every student is compared with."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A solver, a student, or anything else that improves a state step by step.

    `states(x, steps)` passes through z_0 ... z_steps; `output(x, steps)` does all the work from input to output.
    `extra(x)`: the work that is done once for each input, injection included, before the first step.
    `own`: the equilibrium that the method seeks, where that is not the compared teacher's. Its readout, distance
        and residual are measured there.
    `counts`: the step counts it is made for; any, without them.
    `label`: the name in its rows, where several methods share one.
    """

    states: Callable[[Any, int], Iterator[State]]
    output: Callable[[Any, int], Tensor]
    parameters: int
    extra: Callable[[Any], object] | None = None
    own: Target | None = None
    counts: tuple[int, ...] | None = None
    label: str | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model and its equilibria, one for each test batch; None where they are not known."""

    model: EquilibriumModel
    equilibria: list[State] | None


@dataclass(frozen=True, kw_only=True)
class Explicit:
    """A model without an equilibrium: `output(x)` is all there is to it."""

    output: Callable[[Any], Tensor]
    parameters: int


def solver_method(teacher: EquilibriumModel, solver: Solver, **fields: Any) -> Method:
    """A plain solver that spends its whole budget; `fields` are further ones of the method."""

    def states(x: Any, steps: int) -> Iterator[State]:
        seen: list[State] = []
        solve_model(
            teacher,
            teacher.inject(x),
            solver,
            tol=0.0,
            max_steps=steps,
            callback=lambda k, z: seen.append(z),
        )
        # A solve that stopped early, at an exact equilibrium or because it diverged, stays where it is.
        yield from seen + seen[-1:] * (steps + 1 - len(seen))

    def output(x: Any, steps: int) -> Tensor:
        context = teacher.inject(x)
        found = solve_model(teacher, context, solver, tol=0.0, max_steps=steps)
        return teacher.readout(found.state, context)

    return Method(states=states, output=output, parameters=parameter_count(teacher), **fields)


def learned_solver_method(teacher: EquilibriumModel, solver: LearnedSolver) -> Method:
    """A learned solver of the teacher; its weights count beside the teacher's."""

    def output(x: Any, steps: int) -> Tensor:
        context = teacher.inject(x)
        *_, z = solver.rollout(teacher, context, steps)
        return teacher.readout(z, context)

    return Method(
        states=lambda x, steps: solver.rollout(teacher, teacher.inject(x), steps),
        output=output,
        parameters=parameter_count(teacher) + parameter_count(solver),
        extra=lambda x: solver.initial(teacher.inject(x)),
    )


def student_method(student: Student) -> Method:
    """A student, with the cost of its start network and its second injection."""
    return Method(
        states=lambda x, steps: student.rollout(student.prepare(x), steps),
        output=lambda x, steps: student(x, steps=steps),
        parameters=parameter_count(student),
        extra=lambda x: student.begin(student.prepare(x)),
    )


def parameter_count(model: Any) -> int:
    """Weights of a model; a student counts its frozen teacher's too, since it runs with both."""
    return sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0

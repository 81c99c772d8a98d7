"""How a segment of text is read: by solving for its equilibrium, or by a student's steps.

With a cache, what stays the same from one segment to the next is kept: keys and values of the tokens before, and of the
distances. For a new token, keys and values of the last one are made, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cdeq.consistency.baking import fold_weights, settle
from cdeq.consistency.parts import Prepared
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import Context
from cdeq.equilibrium.memory import Following, Segment
from cdeq.equilibrium.states import State
from cdeq.generation.language import LanguageModel
from cdeq.solvers import MAX_STEPS, TOL, Solver, solve_model


class Reading(NamedTuple):
    """A segment that was read: its state and context, the evaluations it took, and whether the solver converged.

    `prepared` is all that was made for the segment before the first evaluation, which a `CachedReader` goes on from.
    """

    state: State
    context: Context
    evaluations: int
    converged: bool = True
    prepared: Any = None


Reader = Callable[[Segment], Reading]
"""How a method reads a segment."""


class CachedReader:
    """A reader that can go on from its last reading: the same to rounding as reading the segment anew, only sooner."""

    def __init__(
        self,
        prepare: Callable[[Segment], Any],
        follow: Callable[[Segment, Any], Any],
        solve: Callable[[Any], Reading],
    ):
        self._prepare, self._follow, self._solve = prepare, follow, solve

    @torch.no_grad()
    def __call__(self, x: Segment) -> Reading:
        return self._solve(self._prepare(x))

    @torch.no_grad()
    def follow(self, x: Segment, last: Reading) -> Reading:
        """Read the segment right after the last one, whose memory it has."""
        return self._solve(self._follow(x, last.prepared))


def teacher_reader(
    model: LanguageModel,
    *,
    solver: Solver | None = None,
    tol: float = TOL,
    max_steps: int = MAX_STEPS,
    cache: bool = True,
) -> Reader:
    """Reading by solving for the equilibrium, to a tolerance; with a `cache`, if the model has `follow`."""
    folded = settle(fold_weights(model))
    inject: Callable[[Segment], Context] = folded.inject

    def solve(context: Context) -> Reading:
        found = solve_model(folded, context, solver, tol=tol, max_steps=max_steps)
        converged = bool(found.converged.all())
        return Reading(found.state, context, found.evaluations, converged, prepared=context)

    if cache and isinstance(folded, Following):
        return CachedReader(inject, folded.follow, solve)
    return torch.no_grad()(lambda x: solve(inject(x)))


def student_reader(student: Student, steps: int, *, cache: bool = True) -> Reader:
    """Reading by `steps` steps of a student, whose weights are made once, not for each token."""
    baked = student.baked(steps).settled()

    def solve(prepared: Prepared) -> Reading:
        return Reading(baked.run(prepared), prepared.base, steps, prepared=prepared)

    if cache and isinstance(student.teacher, Following):
        return CachedReader(baked.prepare, baked.follow, solve)
    return torch.no_grad()(lambda x: solve(baked.prepare(x)))

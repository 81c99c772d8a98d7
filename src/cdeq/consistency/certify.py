"""Certified solving: the student as a solver, with what is known of the error measured, estimated and bounded."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from cdeq.consistency.certificate import Certificate, warn_of_unlike
from cdeq.consistency.solver import finite_or, like_start
from cdeq.equilibrium.contract import Context, Input, declared_contraction
from cdeq.equilibrium.states import State, StateLayout
from cdeq.solvers.anderson import Anderson
from cdeq.solvers.base import MAX_STEPS, TOL, Solver
from cdeq.solvers.error import ErrorEstimate, ProvenBound, Seen
from cdeq.solvers.loop import solve_model
from cdeq.solvers.solution import Solution

if TYPE_CHECKING:
    from cdeq.consistency.parts import Prepared
    from cdeq.consistency.student import Student

DEFAULT_STUDENT_STEPS = 2
"""Steps before the first check, for a student without a plan."""
WORTH = 0.85
"""Corrections take part in solves if they cut the evaluations to this share: a corrected step costs that much more."""
Level = Literal["error", "residual", "bound"]
"""What a tolerance may bound."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CertifiedSolution:
    """A state, and what is known of its distance to the equilibrium, for each sample.

    `output`: the readout at `state`.
    `residual` (B,): |f(z) - z| / |z| of the teacher, measured at `state`. It is not a distance.
    `error` (B,): the relative distance to the equilibrium, estimated from what the solve has seen. It may be wrong.
    `bound` (B,): at least the relative distance, with `confidence` over inputs like those of `student.calibrate` where
        `bound_kind` is "calibrated"; for certain where it is "proven", in the norm in which the teacher says that it
        contracts. None where neither is known.
    `unlike_calibration` (B,): inputs unlike those of calibration, for which the bound may not hold; None without one.
    `converged` (B,): whether what the tolerance bounds is within it.
    `steps` (B,): evaluations of f spent on each sample. `evaluations`: calls of f on the batch, or what was left of it.
    `sample_seconds` (B,): from input to the evaluation at which each sample stopped; those of a batch wait for each
        other's evaluations. `seconds`: of the whole batch, from input to output.
    `finished_by`: who brought each sample within the tolerance: `student`, `solver`, or None.
    `history` (evaluations, B, 3): residual, error and bound of the states whose residuals were measured on the way.
    """

    state: State
    output: Tensor
    residual: Tensor
    error: Tensor
    bound: Tensor | None
    bound_kind: Literal["calibrated", "proven"] | None
    confidence: float | None
    unlike_calibration: Tensor | None
    converged: Tensor
    steps: Tensor
    evaluations: int
    sample_seconds: Tensor
    seconds: float
    finished_by: list[str | None]
    history: Tensor

    def __repr__(self) -> str:
        """A line to read; the fields hold the rest."""
        count = len(self.finished_by)
        known = f"largest residual {float(self.residual.max()):.1e}"
        known += f", estimated error {float(self.error.max()):.1e}"
        if self.bound is not None:
            known += f", {self.bound_kind} bound {float(self.bound.max()):.1e}"
        return (
            f"CertifiedSolution({count} sample{'s' * (count != 1)}: {int(self.converged.sum())} converged, "
            f"{self.finished_by.count('student')} by the student and {self.finished_by.count('solver')} by the "
            f"solver; {float(self.steps.double().mean()):.1f} evaluations on average, {known})"
        )


@dataclass(frozen=True)
class Levels:
    """What a tolerance bounds, and beside it residual, estimated error and bound: (B, 4)."""

    by: Level
    certificate: Certificate | None
    proven: ProvenBound | None

    @property
    def bound_kind(self) -> Literal["calibrated", "proven"] | None:
        if self.proven is not None:
            return "proven"
        return None if self.certificate is None else "calibrated"

    def init(self, z: Tensor) -> Any:
        return ErrorEstimate().init(z)

    def update(self, k: int, seen: Seen, memory: Any) -> tuple[Tensor, Any]:
        found, memory = ErrorEstimate().update(k, seen, memory)
        error = found[:, 0]
        if self.proven is not None:
            bound = self.proven.update(k, seen, None)[0][:, 0].to(error.dtype)
        elif self.certificate is not None:
            bound = self.certificate.bound(error)
        else:
            bound = torch.full_like(error, torch.inf)
        levels: dict[Level, Tensor] = {"residual": seen.relative, "error": error, "bound": bound}
        return torch.stack([levels[self.by], *levels.values()], dim=1), memory


def levels_for(student: Student, context: Context, start: State, by: Level) -> Levels:
    """The levels that are known of a student's solves; refuses a bound that is not."""
    if by not in get_args(Level):
        raise ValueError(f"measure must be one of {', '.join(get_args(Level))}, not {by!r}")
    contraction = declared_contraction(student.teacher, context)
    proven = None
    if contraction is not None:
        proven = ProvenBound(contraction, StateLayout.of(start, student.batched))
    levels = Levels(by, student.certificate, proven)
    if by == "bound" and levels.bound_kind is None:
        raise ValueError(
            'measure="bound" needs a bound: call student.calibrate(held_out) with inputs that the student was not '
            'trained on, or give the teacher a `contraction`; measure="error" needs neither'
        )
    return levels


@torch.no_grad()
def certified_solve(
    student: Student,
    x: Input,
    *,
    tol: float = TOL,
    measure: Level = "error",
    max_steps: int = MAX_STEPS,
    z0: State | None = None,
    solver: Solver | None = None,
    student_steps: int | None = None,
) -> CertifiedSolution:
    """As many evaluations as it takes for `measure` to be within `tol`, for each sample.

    A student whose steps are the teacher's own (recipes `corrected` and `warm_start`) is a solver: its residuals are
    measured as it goes, and where its corrections do not help, Anderson's method goes on. Other students take the
    steps of their plan first, or `student_steps`, and the solver takes over; its first evaluation is the check.
    `z0`: where to begin, in place of the student's start; without `student_steps` other students leave it to the
    solver, for their first steps are made for their own start. `solver`: in place of the student's steps or, for other
    students, of Anderson's method after them.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, not {max_steps}")
    if not tol > 0:
        raise ValueError(f"tol must be positive, not {tol}")
    if student_steps is not None and (student.is_solver or student_steps < 0):
        raise ValueError(
            "student_steps must not be negative, and are for recipes with changed weights: others need no plan"
        )
    began = time.perf_counter()
    prepared = student.prepare(x)
    start, ahead = _first_steps(student, prepared, tol, max_steps, z0, student_steps)
    levels = levels_for(student, prepared.base, start, measure)
    before = time.perf_counter() - began
    by_student, solver = solver is None, solver or _own_solver(student, levels)
    solution = solve_model(
        student.teacher,
        prepared.base,
        solver,
        z0=start,
        tol=tol,
        max_steps=max_steps - ahead,
        measured_only=True,
        measure=levels,
    )
    assert solution.values is not None
    assert solution.value_history is not None
    assert solution.seconds is not None
    _, residual, error, bound = solution.values.unbind(1)
    kind, confidence, unlike = levels.bound_kind, None, None
    if (certificate := student.certificate) is not None:
        seen = (solution.history[0], prepared.base, start)
        unlike = certificate.unlike(*seen, student.batched)
        if kind == "calibrated":
            confidence = certificate.confidence
            warn_of_unlike(unlike)
    return CertifiedSolution(
        state=solution.state,
        output=student.teacher.readout(solution.state, prepared.base),
        residual=residual,
        error=error,
        bound=None if kind is None else bound,
        bound_kind=kind,
        confidence=confidence,
        unlike_calibration=unlike,
        converged=solution.converged,
        steps=solution.steps + ahead,
        evaluations=solution.evaluations + ahead,
        finished_by=_finished_by(student, solution, by_student=by_student),
        sample_seconds=before + solution.seconds[solution.steps.cpu() - 1],
        seconds=time.perf_counter() - began,
        history=solution.value_history[:, :, 1:],
    )


def _own_solver(student: Student, levels: Levels) -> Solver:
    """The student, or what takes over from it. Where nobody goes by the estimated error, a guess of it is enough."""
    if not student.is_solver:
        return Anderson()
    guesses = levels.by == "residual" and levels.certificate is None
    return replace(student.as_solver(), guesses=guesses)


def _first_steps(
    student: Student,
    prepared: Prepared,
    tol: float,
    max_steps: int,
    z0: State | None,
    student_steps: int | None,
) -> tuple[State, int]:
    """Where the solve begins, and after how many steps of the student's plan."""
    plain = student.teacher.start(prepared.base)
    if student.is_solver:
        if z0 is not None:
            return like_start(z0, plain), 0
        return student.as_solver().start(student.teacher, prepared.base), 0
    planned = planned_steps(student.plan, tol) if z0 is None else 0
    ahead = min(planned if student_steps is None else student_steps, max_steps - 1)
    *_, z = student.rollout(prepared, ahead, z0)
    return finite_or(z, plain, student.batched), ahead


def _finished_by(student: Student, solution: Solution, by_student: bool) -> list[str | None]:
    """Who brought each sample within the tolerance: the student alone, if its start or its corrections did."""
    assert solution.handed_over is not None
    alone = solution.steps == 1
    if by_student and student.is_solver and student.corrects_solves:
        alone = alone | ~solution.handed_over
    return [
        ("student" if own else "solver") if done else None
        for own, done in zip(alone.tolist(), solution.converged.tolist(), strict=True)
    ]


def planned_steps(plan: dict[float, int], tol: float) -> int:
    """The steps planned for the tolerance nearest to `tol`."""
    if not plan:
        return DEFAULT_STUDENT_STEPS
    return plan[min(plan, key=lambda known: abs(math.log(known) - math.log(tol)))]


@torch.no_grad()
def plan_handover(
    student: Student,
    inputs: list[Input],
    *,
    tolerances: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4),
    most: int = 12,
    max_steps: int = 60,
) -> dict[float, int]:
    """For each tolerance, the number of student steps that gives the fewest evaluations in all.

    A solve passes the loose tolerances on its way to the tightest, so one for each number serves them all. A student
    that is a solver needs no plan, unless its corrections save too little: then it plans none of them.
    """
    prepared = [student.prepare(x) for x in inputs]
    tried = (tolerances, max_steps)
    if student.is_solver:
        if student.correction is None:
            return {}
        solver = student.as_solver()
        corrected, plain = (
            sum(sum(_spent(student, one, replace(solver, corrects=c), *tried)) for one in prepared)
            for c in (True, False)
        )
        return {} if corrected <= WORTH * plain else dict.fromkeys(tolerances, 0)
    costs = {tol: [0] * (most + 1) for tol in tolerances}
    for one in prepared:
        start = student.teacher.start(one.base)
        for ahead, z in enumerate(student.rollout(one, most)):
            z0 = finite_or(z, start, student.batched)
            spent = _spent(student, one, Anderson(), tolerances, max_steps - ahead, z0)
            samples = StateLayout.of(z0, student.batched).batch
            for tol, evaluations in zip(tolerances, spent, strict=True):
                costs[tol][ahead] += evaluations + ahead * samples
    return {tol: spent.index(min(spent)) for tol, spent in costs.items()}


def _spent(
    student: Student,
    prepared: Prepared,
    solver: Solver,
    tolerances: tuple[float, ...],
    max_steps: int,
    z0: State | None = None,
) -> list[int]:
    """Evaluations, of all samples together, until the residuals are within each tolerance or the budget is spent."""
    solution = solve_model(
        student.teacher,
        prepared.base,
        solver,
        z0=z0,
        tol=min(tolerances),
        max_steps=max_steps,
        compact=False,
    )
    found = []
    for tol in tolerances:
        # A sample stops at its first residual within the tolerance, or spends the budget.
        waiting = (solution.history <= tol).cumsum(dim=0) == 0
        stuck = waiting[-1] * (max_steps - solution.evaluations)
        steps = (waiting.sum(dim=0) + 1).clamp_max(solution.evaluations) + stuck
        found.append(int(steps.sum()))
    return found

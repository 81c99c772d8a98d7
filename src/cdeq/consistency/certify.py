"""Certified solving: student steps first, then the teacher's solver, with the teacher's residual measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cdeq.equilibrium.contract import Input
from cdeq.equilibrium.states import State, StateLayout, row_norms
from cdeq.solvers.anderson import Anderson
from cdeq.solvers.base import MAX_STEPS, TOL, Solver
from cdeq.solvers.loop import solve_model

if TYPE_CHECKING:
    from cdeq.consistency.parts import Prepared
    from cdeq.consistency.student import Student

DEFAULT_STUDENT_STEPS = 2
"""Steps before the first check, for a student without a plan."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CertifiedSolution:
    """A state and the residual that was measured there, which decides when a solver stops; it is not a distance.

    `output`: the readout at `state`. `residual` (B,): the teacher's |f(z) - z| / |z|, measured at `state`.
    `steps` (B,): evaluations of f spent on each sample, the check included. `evaluations`: calls of f on the
    whole batch. `finished_by`: who brought each sample below the tolerance: `student`, `solver`, or None.
    """

    state: State
    output: Tensor
    residual: Tensor
    converged: Tensor
    steps: Tensor
    evaluations: int
    finished_by: list[str | None]

    def __repr__(self) -> str:
        """A line to read; the fields hold the rest."""
        count = len(self.finished_by)
        return (
            f"CertifiedSolution({count} sample{'s' * (count != 1)}: {int(self.converged.sum())} converged, "
            f"{self.finished_by.count('student')} by the student and {self.finished_by.count('solver')} by the "
            f"solver; {float(self.steps.double().mean()):.1f} evaluations on average, largest residual "
            f"{float(self.residual.max()):.1e})"
        )


@torch.no_grad()
def certified_solve(
    student: Student,
    x: Input,
    *,
    tol: float = TOL,
    max_steps: int = MAX_STEPS,
    student_steps: int | None = None,
    solver: Solver | None = None,
) -> CertifiedSolution:
    """Student steps, then the teacher's solver from there, warm; its first evaluation is the check.

    The check measures the residual of the student's state. A sample below `tol` stops there; for the others
    the same evaluation is the solver's first. How many student steps come first is the student's plan for
    this tolerance, made on data by `plan_handover`, unless `student_steps` is given.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, not {max_steps}")
    if not tol > 0:
        raise ValueError(f"tol must be positive, not {tol}")
    if student_steps is not None and student_steps < 0:
        raise ValueError(f"student_steps must not be negative, not {student_steps}")
    ahead = planned_steps(student.plan, tol) if student_steps is None else student_steps
    ahead = min(ahead, max_steps - 1)
    prepared = student.prepare(x)
    *_, z = student.rollout(prepared, ahead)
    solution = solve_model(
        student.teacher,
        prepared.base,
        solver or Anderson(),
        z0=_sound(student, prepared, z),
        tol=tol,
        max_steps=max_steps - ahead,
        measured_only=True,
    )
    finished = torch.where(solution.steps == 1, 0, 1).tolist()
    return CertifiedSolution(
        state=solution.state,
        output=student.teacher.readout(solution.state, prepared.base),
        residual=solution.residual,
        converged=solution.converged,
        steps=solution.steps + ahead,
        evaluations=solution.evaluations + ahead,
        finished_by=[
            ("student", "solver")[who] if done else None
            for who, done in zip(finished, solution.converged.tolist(), strict=True)
        ],
    )


def _sound(student: Student, prepared: Prepared, z: State) -> State:
    """The state, with samples that are not finite put back to the teacher's start."""
    layout = StateLayout.of(z, student.batched)
    flat = layout.flatten(z)
    finite = row_norms(flat).isfinite()[:, None]
    if bool(finite.all()):
        return z
    return layout.restore(
        torch.where(finite, flat, layout.flatten(student.teacher.start(prepared.base)))
    )


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

    A solve passes the loose tolerances on its way to the tightest, so one for each number serves them all.
    """
    costs = {tol: [0] * (most + 1) for tol in tolerances}
    for x in inputs:
        prepared = student.prepare(x)
        for ahead, z in enumerate(student.rollout(prepared, most)):
            solution = solve_model(
                student.teacher,
                prepared.base,
                Anderson(),
                z0=_sound(student, prepared, z),
                tol=min(tolerances),
                max_steps=max_steps - ahead,
            )
            for tol in tolerances:
                # A sample stops at its first residual within the tolerance, or spends the budget.
                waiting = (solution.history <= tol).cumsum(dim=0) == 0
                stuck = waiting[-1] * (max_steps - ahead - solution.evaluations)
                steps = (waiting.sum(dim=0) + 1).clamp_max(solution.evaluations) + stuck
                costs[tol][ahead] += int((steps + ahead).sum())
    return {tol: spent.index(min(spent)) for tol, spent in costs.items()}

"""The certified solve beside the teacher's own solver: evaluations and seconds to the same residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cdeq.consistency.certify import CertifiedSolution
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import Input
from cdeq.evaluation.styles import seconds_text
from cdeq.evaluation.timing import median_times
from cdeq.solvers import MAX_STEPS, Anderson, Solution, solve_model


@dataclass(frozen=True, kw_only=True)
class CertifiedComparison:
    """One batch to the residual `tol`, by the solver alone and by `student.solve`.

    Evaluations are means over the samples, all that measure a residual included; seconds, and those of the CPU, are
    medians of the whole way, input to output; the other numbers are shares of the samples.
    """

    tol: float
    samples: int
    solver_evaluations: float
    solver_seconds: float
    solver_cpu_seconds: float
    solver_converged: float
    student_evaluations: float
    student_seconds: float
    student_cpu_seconds: float
    student_converged: float
    finished_by_student: float

    def text(self) -> str:
        """One line for a person."""
        line = (
            f"to a certified residual of {self.tol:g} on {self.samples} sample"
            f"{'' if self.samples == 1 else 's'}: Anderson alone {self.solver_evaluations:.1f} evaluations, "
            f"{seconds_text(self.solver_seconds)}; student.solve {self.student_evaluations:.1f}, "
            f"{seconds_text(self.student_seconds)}, {100 * self.finished_by_student:.0f}% of the samples "
            "finished by the student, the others by the solver from there"
        )
        for name, share in (
            ("Anderson", self.solver_converged),
            ("student.solve", self.student_converged),
        ):
            if share < 1:
                line += f"; {name} left {100 * (1 - share):.0f}% of the samples above it"
        return line


@torch.no_grad()
def compare_certified(
    student: Student, x: Input, *, tol: float = 1e-3, max_steps: int = MAX_STEPS, repeats: int = 5
) -> CertifiedComparison:
    """Anderson from the teacher's start, and the student's certified solve, taking turns on one batch."""
    teacher = student.teacher

    def alone() -> Solution:
        context = teacher.inject(x)
        solution = solve_model(teacher, context, Anderson(), tol=tol, max_steps=max_steps)
        teacher.readout(solution.state, context)
        return solution

    def certified() -> CertifiedSolution:
        return student.solve(x, tol=tol, max_steps=max_steps, measure="residual")

    times = median_times({"solver": lambda: alone, "student": lambda: certified}, repeats)
    theirs, ours = alone(), certified()
    return CertifiedComparison(
        tol=tol,
        samples=len(ours.finished_by),
        solver_evaluations=float(theirs.steps.double().mean()),
        solver_seconds=times["solver"][0],
        solver_cpu_seconds=times["solver"][1],
        solver_converged=float(theirs.converged.double().mean()),
        student_evaluations=float(ours.steps.double().mean()),
        student_seconds=times["student"][0],
        student_cpu_seconds=times["student"][1],
        student_converged=float(ours.converged.double().mean()),
        finished_by_student=ours.finished_by.count("student") / len(ours.finished_by),
    )

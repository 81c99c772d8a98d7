"""The student: a teacher's copy that reaches its equilibrium in a few evaluations.

Here is what it is used for; what it is made of, its clock and its steps are in the files that it builds on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cdeq.consistency.baking import BakedStudent
from cdeq.consistency.calibration import calibrate
from cdeq.consistency.certify import CertifiedSolution, Level, certified_solve
from cdeq.consistency.deployment import export_student
from cdeq.consistency.history import AndersonHistory
from cdeq.consistency.saving import load_student, save_student
from cdeq.consistency.sharing import fetch_student, push_student, share_student
from cdeq.consistency.solver import StudentSolver
from cdeq.consistency.student_steps import StudentSteps
from cdeq.consistency.unrolling import UnrolledStudent
from cdeq.equilibrium.contract import Input
from cdeq.equilibrium.states import State
from cdeq.solvers.anderson import Anderson
from cdeq.solvers.base import MAX_STEPS, TOL, Solver


class Student(StudentSteps):
    """g_phi: maps a state at solver time t towards the equilibrium, one evaluation of f for each step.

    Made by `cdeq.distill`, or `Student.load`. The teacher inside is a frozen copy.
    """

    def forward(self, x: Input, steps: int = 2, z0: State | None = None) -> Tensor:
        """The output after `steps` evaluations of f, from the learned start or from `z0`.

        A state of a similar input, such as the frame before, is a good `z0`.
        """
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps must be a whole number, 0 or more, not {steps!r}")
        prepared = self.prepare(x)
        z = deque(self.rollout(prepared, steps, z0), maxlen=1).pop()  # which holds no other
        return self.teacher.readout(z, prepared.base)

    def trajectory(self, x: Input, steps: int, z0: State | None = None) -> list[State]:
        """The states z_0 ... z_steps."""
        return list(self.rollout(self.prepare(x), steps, z0))

    def baked(self, steps: int) -> BakedStudent:
        """The student as it is now, with the weights of its first `steps` steps made once for all inputs."""
        return BakedStudent(self, steps)

    @property
    def is_solver(self) -> bool:
        """Whether all its steps are evaluations of the teacher's own f under Anderson's method."""
        recipe = self.recipe
        return not recipe.changes_weights and recipe.history == "anderson"

    @property
    def corrects_solves(self) -> bool:
        """Whether its solves use its corrections: not where they were found to save too few evaluations."""
        return self.correction is not None and (not self.plan or any(self.plan.values()))

    def as_solver(self) -> StudentSolver:
        """The student as a solver, for `cdeq.solve_model`, `cdeq.solve_with_gradient` and `cdeq.TeachConfig`."""
        if not self.is_solver:
            raise ValueError(
                f"a student of the recipe {self.recipe.name!r} is no solver: its steps are not the teacher's own under "
                "Anderson's method; those of 'corrected' and 'warm_start' are"
            )
        history = self.history
        assert isinstance(history, AndersonHistory)
        mixing = Anderson(window=history.window, mixing=history.mixing, ridge=history.ridge)
        return StudentSolver(self, mixing, self.corrects_solves)

    def unrolled(self, steps: int, *, check: bool = True) -> UnrolledStudent:
        """Its first `steps` steps as a plain module, for `torch.compile`: x to (output, residual)."""
        return UnrolledStudent(self, steps, check=check)

    def export(
        self,
        path: str | Path,
        x: Input,
        steps: int = 2,
        *,
        check: bool = True,
        certified: bool = False,
    ) -> list[Path]:
        """Write the first `steps` steps as ONNX (`.onnx`) or for torch (`.pt2`): x to (output, residual).

        `x`: an input to take the shapes from; the number of samples stays open, and for a causal model the lengths.
        The residual is that of the state read out, and costs one more evaluation; without `check` it is left out.
        `certified`: the state and the context, too, and beside the file another, `.step`, with the teacher's step, to
        go on from there. Returns the files.
        """
        return export_student(self, path, x, steps, check=check, certified=certified)

    def solve(
        self,
        x: Input,
        tol: float = TOL,
        max_steps: int = MAX_STEPS,
        *,
        measure: Level = "error",
        z0: State | None = None,
        solver: Solver | None = None,
        student_steps: int | None = None,
    ) -> CertifiedSolution:
        """As many evaluations as it takes for an estimated error of `tol`; see `certified_solve`.

        `measure`: what `tol` bounds, the estimated "error", the measured "residual", or the "bound".
        """
        return certified_solve(
            self,
            x,
            tol=tol,
            measure=measure,
            max_steps=max_steps,
            z0=z0,
            solver=solver,
            student_steps=student_steps,
        )

    def calibrate(
        self,
        loader: Iterable[Any],
        steps: int = 8,
        max_batches: int | None = None,
        *,
        confidence: float | None = 0.99,
    ) -> tuple[float, ...]:
        """On held-out data, set the bound of `solve` and choose the clock of the first steps, if there is one.

        See `cdeq.consistency.calibration`.
        """
        return calibrate(self, loader, steps=steps, max_batches=max_batches, confidence=confidence)

    def save(self, folder: str | Path) -> None:
        """Write the student and its teacher as a folder of config.json and safetensors."""
        save_student(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, teacher: nn.Module | type | None = None) -> Student:
        """Read a saved student; `teacher`: its class, or an instance to fill, if the class cannot be imported."""
        return load_student(cls, Path(folder), teacher)

    def save_pretrained(self, folder: str | Path) -> None:
        """`save`, with a model card, README.md, beside it; a README.md of your own is kept."""
        share_student(self, Path(folder))

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload to the Hugging Face hub, as `owner/name`; returns the address of the commit.

        `options` are huggingface_hub's: private, token, branch, commit_message, create_pr.
        """
        return push_student(self, repo_id, **options)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_repo: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        teacher: nn.Module | type | None = None,
    ) -> Student:
        """A student from a folder, or from a repository `owner/name` of the Hugging Face hub.

        `revision`: a branch, a tag or a commit. No code of a repository is run: a teacher whose class is not cdeq's is
        refused, unless you pass the class, or an instance to fill, as `teacher`.
        """
        return fetch_student(
            cls,
            folder_or_repo,
            teacher,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
        )

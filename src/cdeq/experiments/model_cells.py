"""The models of a data set: trained, resumed where they were cut short, and timed; each in a folder of its own.

What is the same for texts and images is here; a kind of data fills in `ModelCell`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from cdeq.consistency.distill import distill
from cdeq.consistency.recipes import recipe_named
from cdeq.consistency.student import Student
from cdeq.experiments.cells import Cells
from cdeq.experiments.compare import Explicit, Method, Quality
from cdeq.experiments.metrics import Metric
from cdeq.experiments.options import Options
from cdeq.experiments.plans import CHECKPOINT_EVERY, ModelPlan
from cdeq.experiments.provenance import Training
from cdeq.experiments.train import (
    PHANTOM_STEPS,
    SOLVER_DEPTH,
    built,
    few_step_teaching,
    timed,
    train_solver,
)
from cdeq.models.learned_solvers import HyperDEQ, SolverLossWeights
from cdeq.training.log import Progress, ProgressBar
from cdeq.training.loop import FitConfig
from cdeq.training.task_loss import TaskLoss
from cdeq.training.teach import TeachConfig
from cdeq.trajectories import TrajectoryStore, record

Teacher = Any
"""An equilibrium model that is a module."""

SAVED = "student"
"""The folder of a finished student, inside that of its training."""
RECORD_STEPS = {"endpoint": 40, "full": 30}
"""Budget of a recorded solve: to its tolerance, or of all its states."""


@dataclass(frozen=True, kw_only=True)
class StudentPlan:
    """A student's recipe by name, the fields of it that are changed, and whether one seed is enough."""

    recipe: str
    changes: dict[str, Any]
    once: bool = False


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """How far a teacher is solved: as a `reference` within a `budget` of steps, and in everyday use (`usual`).

    Nobody in production knows the score to stop at.
    """

    reference: float = 1e-4
    budget: int = 80
    usual: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class ModelCell(ABC):
    """A data set with its plan, and the folders of what is trained on it."""

    plan: Any  # a ModelPlan of the kind's own
    options: Options

    # What a kind of data fills in.

    students: ClassVar[Mapping[str, StudentPlan]]
    """By the method's name."""
    teacher_name: ClassVar[str]
    shown: ClassVar[tuple[int, ...]]
    """Evaluations at which every method is scored."""
    solved: ClassVar[tuple[int, ...]]
    """Those of the plain solvers: closer, so that the moment they reach the converged score is known better."""
    tolerances: ClassVar[Tolerances]

    @property
    @abstractmethod
    def data_key(self) -> dict[str, Any]:
        """What everything depends on beside the plan: the data themselves."""

    @abstractmethod
    def recorded_key(self, mode: str) -> dict[str, int]:
        """How much of the training data is recorded in a mode, under the name it has in configurations."""

    @property
    @abstractmethod
    def metric(self) -> Metric: ...

    @abstractmethod
    def build_teacher(self) -> nn.Module: ...

    @abstractmethod
    def teach(self, model: Teacher, config: TeachConfig, folder: Path, progress: Progress) -> None:
        """Train a model of this data's contract in place."""

    @abstractmethod
    def build_hyperdeq(self, teacher: Teacher) -> HyperDEQ: ...

    @abstractmethod
    def record_batches(self, mode: str) -> Iterable[Any]:
        """What is distilled from: (x, y) pairs."""

    @property
    def carried(self) -> bool:
        """Recorded batches follow on each other, with memory."""
        return False

    @abstractmethod
    def task_loss(self, teacher: Teacher) -> TaskLoss: ...

    @abstractmethod
    def explicit_config(self, name: str) -> dict[str, Any]:
        """What an explicit model depends on beside the data."""

    @abstractmethod
    def trained_explicit(self, name: str) -> tuple[nn.Module, Training]: ...

    @property
    @abstractmethod
    def explicit_names(self) -> tuple[str, ...]: ...

    other_teachers: ClassVar[Mapping[str, str]] = {}
    """Equilibrium models that are compared but not distilled: the method's name, and the model's."""

    def other_teacher_config(self, name: str) -> dict[str, Any]:
        """What one of them depends on beside the data and the plan."""
        raise NotImplementedError(f"{type(self).__name__} has no {name}")

    def trained_other_teacher(self, name: str) -> tuple[Teacher, Training]:
        raise NotImplementedError(f"{type(self).__name__} has no {name}")

    # Scores.

    @abstractmethod
    def score_teacher(self, teacher: Teacher) -> dict[str, Any]:
        """Metric, steps and residual of the converged teacher; its states on the test data are kept."""

    @abstractmethod
    def score_solved(self, teacher: Teacher) -> dict[str, Any]:
        """The same under its own solver, to the tolerance of everyday use."""

    @abstractmethod
    def score_method(
        self,
        method: Method,
        model: Teacher,
        counts: tuple[int, ...],
        progress: Callable[[int, int], None] | None,
    ) -> dict[int, Quality]: ...

    def score_other_teacher(
        self,
        model: Teacher,
        method: Method,
        counts: tuple[int, ...],
        progress: Callable[[int, int], None] | None,
    ) -> tuple[dict[str, Any], dict[int, Quality]]:
        """As `score_teacher`, and its scores under `method`, to its own equilibrium."""
        raise NotImplementedError(f"{type(self).__name__} has no other teacher")

    @abstractmethod
    def score_explicit(self, model: nn.Module) -> dict[str, Any]: ...

    @abstractmethod
    def timed_input(self) -> Any:
        """What all methods are timed on."""

    @abstractmethod
    def timed_method(self, method: Method, model: Teacher, x: Any) -> Method:
        """The method from an input to what a score takes."""

    @abstractmethod
    def timed_explicit(self, model: nn.Module, x: Any) -> Explicit: ...

    @abstractmethod
    def timed_solved(self, teacher: Teacher, x: Any) -> Explicit: ...

    # Folders.

    def place(self, name: str, config: dict[str, Any] | None = None) -> Path:
        """The folder of one training; `config` is what it depends on beside the data and the teacher."""
        return Cells(self.options.runs).place(f"{self.plan.name}-{name}", self._whole(config or {}))

    def result(self, name: str, config: dict[str, Any], work: Callable[[], Any]) -> Any:
        """What `work()` gives, now or before; `config` as for `place`."""
        return Cells(self.options.runs).result(
            f"{self.plan.name}-{name}", self._whole(config), work
        )

    def _whole(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"plan": self.plan.base, **self.data_key, **config}

    def bar(self, title: str) -> AbstractContextManager[ProgressBar | None]:
        return self.options.bar(f"{self.plan.title}: {title}")

    def say(self, what: str) -> None:
        self.options.say(f"{self.plan.title}: {what}")


# Equilibrium models.


def pretrained(cell: ModelCell) -> tuple[Teacher, Training]:
    """The teacher as a shallow model, which every equilibrium model begins from."""
    model = built(cell.build_teacher, seed=0)
    training = taught(cell, model, cell.plan.pretraining, cell.place("pretrain"), "pre-train")
    return model, training


def trained_teacher(cell: ModelCell) -> tuple[Teacher, Training]:
    """The teacher at its equilibrium; its training includes the shallow one."""
    return _continued(cell, cell.plan.teaching, cell.place("teacher"), cell.teacher_name)


def few_step_model(cell: ModelCell, steps: int) -> tuple[Teacher, Training]:
    """A model trained on from the pre-trained one to be good after `steps` Picard steps."""
    plan = cell.plan
    usual = plan.teaching
    fit_config = replace(usual.fit, updates=plan.few, warmup=min(plan.warmup, plan.few // 4))
    config = few_step_teaching(replace(usual, fit=fit_config, penalty=0.0), steps)
    folder = cell.place("few_step", few_step_config(plan, steps))
    return _continued(cell, config, folder, f"{steps} steps")


def few_step_config(plan: ModelPlan, steps: int) -> dict[str, Any]:
    """What a few-step model depends on beside the teacher's pre-training."""
    return {"steps": steps, "updates": plan.few, "phantom": PHANTOM_STEPS}


def _continued(
    cell: ModelCell, config: TeachConfig, folder: Path, title: str
) -> tuple[Teacher, Training]:
    """The pre-trained model, trained on; the seconds of both."""
    model, before = pretrained(cell)
    training = taught(cell, model, config, folder, title)
    return model.requires_grad_(False), training.after(before.seconds)


def taught(
    cell: ModelCell, model: Teacher, config: TeachConfig, folder: Path, title: str
) -> Training:
    """A model trained in place; what that took."""
    with cell.bar(title) as bar:
        return timed(folder, bar, lambda tick: cell.teach(model, config, folder, tick))


# What is made from the teacher.


def recorded(cell: ModelCell, teacher: Teacher, mode: str) -> tuple[TrajectoryStore, float]:
    """The teacher's equilibria, or all its states, on some of the training data; and the seconds it took."""
    config = {"mode": mode, **cell.recorded_key(mode), "steps": RECORD_STEPS[mode]}
    folder = cell.place("record", config) / "trajectories"

    def work() -> dict[str, float]:
        began = time.perf_counter()
        with cell.bar(f"record ({mode})") as bar:
            record(
                teacher,
                cell.record_batches(mode),
                folder,
                max_steps=RECORD_STEPS[mode],
                mode=mode,
                carried=cell.carried,
                progress=bar,
            )
        return {"seconds": time.perf_counter() - began}

    took = cell.result("record", config, work)
    return TrajectoryStore.open(folder), took["seconds"]


def student_config(cell: ModelCell, name: str, seed: int) -> dict[str, Any]:
    """What a student depends on beside the teacher."""
    plan, student = cell.plan, cell.students[name]
    published = student.recipe == "paper"
    updates = plan.papers if published else plan.students
    fit_config = FitConfig(
        updates=updates,
        learning_rate=plan.paper_rate if published else plan.student_rate,
        warmup=updates // 20,
        checkpoint_every=CHECKPOINT_EVERY,
    )
    recipe = recipe_named(student.recipe, **student.changes)
    recorded_from = cell.recorded_key(recipe.store_mode)
    return {"recipe": recipe, "fit": fit_config, **recorded_from, "seed": seed}


def trained_student(
    cell: ModelCell, teacher: Teacher, name: str, seed: int
) -> tuple[Student, Training]:
    """One of the cell's students; its training includes the recording of what it learns from."""
    config = student_config(cell, name, seed)
    store, before = recorded(cell, teacher, config["recipe"].store_mode)
    folder = cell.place(name, config)

    def run(tick: Progress) -> None:
        if not (folder / SAVED).exists():
            distill(
                teacher,
                store,
                recipe=config["recipe"],
                fit_config=config["fit"],
                folder=folder,
                task_loss=cell.task_loss(teacher),
                seed=seed,
                progress=cell.options.progress,
            ).save(folder / SAVED)

    training = timed(folder, None, run)
    return Student.load(folder / SAVED), training.after(before)


def hyperdeq_config(cell: ModelCell, seed: int) -> dict[str, Any]:
    """What HyperDEQ depends on beside the teacher."""
    plan = cell.plan
    fit_config = FitConfig(
        updates=plan.solvers, learning_rate=plan.solver_rate, checkpoint_every=CHECKPOINT_EVERY
    )
    weights = SolverLossWeights(anneal=plan.solvers)
    return {
        "fit": fit_config,
        **cell.recorded_key("endpoint"),
        "depth": SOLVER_DEPTH,
        "loss": weights,
        "seed": seed,
    }


def trained_hyperdeq(cell: ModelCell, teacher: Teacher, seed: int) -> tuple[HyperDEQ, Training]:
    """HyperDEQ for the teacher, on the equilibria that its students learn from."""
    store, before = recorded(cell, teacher, "endpoint")
    solver = built(lambda: cell.build_hyperdeq(teacher), seed)
    config = hyperdeq_config(cell, seed)
    folder = cell.place("hyperdeq", config)
    with cell.bar(f"HyperDEQ, seed {seed}") as bar:
        training = train_solver(
            solver,
            teacher,
            store,
            config["fit"],
            weights=config["loss"],
            folder=folder,
            seed=seed,
            progress=bar,
        )
    return solver, training.after(before)

"""What is distilled: a data set, its teacher trained once, and the folders of what is made from them.

A kind of data (text, images, graphs) fills in `Subject`; every table and figure is made of the same pieces.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from cdeq.consistency.distillation import distill
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.student import Student
from cdeq.evaluation import SOLVERS, Method, Quality
from cdeq.evaluation import Metric
from cdeq.evaluation import Training
from cdeq.evaluation import TeacherResult
from cdeq.training.log import Progress, ProgressBar
from cdeq.training.loop import FitConfig
from cdeq.training.task_loss import TaskLoss
from cdeq.trajectories import TrajectoryStore, record
from cdeq_experiments.cells import Cells
from cdeq_experiments.options import Options
from cdeq_experiments.train import timed

Teacher = Any
"""An equilibrium model that is a module."""

SAVED = "student"
"""The folder of a finished student, inside that of its training."""
RECORD_STEPS = {"endpoint": 40, "full": 30}
"""Budget of a recorded solve: to its tolerance, or of all its states."""


@dataclass(frozen=True, kw_only=True)
class StudentPlan:
    """A student's recipe by name, the fields of it that are changed, and the solver whose states it learns from.

    `longer`: so many times the usual updates. `once`: one seed is enough.
    """

    recipe: str
    changes: dict[str, Any] = field(default_factory=dict)
    solver: str = "anderson"
    longer: int = 1
    once: bool = False

    @property
    def whole(self) -> Recipe:
        return Recipe.from_name(self.recipe, **self.changes)


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """How far a teacher is solved: as a `reference` within a `budget` of steps, and in everyday use (`usual`).

    Nobody in production knows the score to stop at.
    """

    reference: float = 1e-4
    budget: int = 80
    usual: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class Subject(ABC):
    """A data set with its plan, its teacher, and the folders of what is made from it."""

    plan: Any  # of the kind's own; it has a name and a title
    options: Options

    students: ClassVar[Mapping[str, StudentPlan]]
    """By the method's name; `paper` and `anchored` are among them."""
    teacher_name: ClassVar[str]
    shown: ClassVar[tuple[int, ...]]
    """Evaluations at which every method is scored."""
    tolerances: ClassVar[Tolerances] = Tolerances()

    @property
    @abstractmethod
    def base(self) -> dict[str, Any]:
        """What everything depends on: the data, and all that the teacher was made with."""

    @abstractmethod
    def recorded_key(self, mode: str) -> dict[str, int]:
        """How much of the training data is recorded in a mode, under the name it has in configurations."""

    @property
    @abstractmethod
    def metric(self) -> Metric: ...

    @abstractmethod
    def trained_teacher(self) -> tuple[Teacher, Training]:
        """The teacher at its equilibrium, trained now or before."""

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
    def student_fit(self, recipe: str) -> FitConfig:
        """How a student by a recipe of this name is trained."""

    def finished(self, student: Student, plan: StudentPlan) -> Student:
        """What is done to a student when it has been trained."""
        return student

    # Scores.

    @abstractmethod
    def score_teacher(self, teacher: Teacher) -> dict[str, Any]:
        """Metric, steps and residual of the converged teacher; its states on the test data are kept."""

    @abstractmethod
    def score_method(
        self,
        method: Method,
        model: Teacher,
        counts: tuple[int, ...],
        progress: Callable[[int, int], None] | None,
    ) -> dict[int, Quality]: ...

    @abstractmethod
    def timed_input(self) -> Any:
        """What all methods are timed on."""

    @abstractmethod
    def timed_method(self, method: Method, model: Teacher, x: Any) -> Method:
        """The method from an input to what a score takes."""

    # Folders.

    def place(self, name: str, config: dict[str, Any] | None = None) -> Path:
        """The folder of one training; `config` is what it depends on beside the data and the teacher."""
        whole = {**self.base, **(config or {})}
        return Cells(self.options.runs).place(f"{self.plan.name}-{name}", whole)

    def result(self, name: str, config: dict[str, Any], work: Callable[[], Any]) -> Any:
        """What `work()` gives, now or before; `config` as for `place`."""
        whole = {**self.base, **config}
        return Cells(self.options.runs).result(f"{self.plan.name}-{name}", whole, work)

    def bar(self, title: str) -> AbstractContextManager[ProgressBar | None]:
        return self.options.bar(f"{self.plan.title}: {title}")

    @contextmanager
    def counting(self, title: str) -> Iterator[Callable[[int, int], None] | None]:
        """A bar that is told how many of how many are done; None if bars are not asked for."""
        with self.bar(title) as bar:
            yield None if bar is None else lambda done, total: bar(done, total, {})

    def say(self, what: str) -> None:
        self.options.say(f"{self.plan.title}: {what}")

    def quiet(self) -> Self:
        """The same without bars and lines, for a process of its own."""
        return replace(self, options=self.options.quiet())


def teacher_result(
    subject: Subject, about: dict[str, Any], name: str | None = None
) -> TeacherResult:
    """The converged teacher, or another model called `name`, from its score as it was kept."""
    return TeacherResult(
        dataset=subject.plan.title,
        name=name or subject.teacher_name,
        parameters=about["parameters"],
        metric_name=subject.metric.name,
        metric=about["metric"],
        higher_is_better=subject.metric.higher_is_better,
        steps=about["steps"],
        residual=about["residual"],
        train_seconds=about["seconds"],
    )


def recorded(
    subject: Subject, teacher: Teacher, mode: str, solver: str = "anderson"
) -> tuple[TrajectoryStore, float]:
    """The teacher's equilibria, or all its states, on some of the training data; and the seconds it took."""
    config = {"mode": mode, **subject.recorded_key(mode), "steps": RECORD_STEPS[mode]}
    if solver != "anderson":
        config["solver"] = SOLVERS[solver]
    folder = subject.place("record", config) / "trajectories"

    def work() -> dict[str, float]:
        began = time.perf_counter()
        with subject.bar(f"record ({mode}, {solver})") as bar:
            record(
                teacher,
                subject.record_batches(mode),
                folder,
                solver=SOLVERS[solver],
                max_steps=RECORD_STEPS[mode],
                mode=mode,
                carried=subject.carried,
                progress=bar,
            )
        return {"seconds": time.perf_counter() - began}

    took = subject.result("record", config, work)
    return TrajectoryStore.open(folder), took["seconds"]


def student_config(subject: Subject, plan: StudentPlan, seed: int) -> dict[str, Any]:
    """What a student depends on beside the teacher."""
    recipe = plan.whole
    fit = subject.student_fit(plan.recipe)
    return {
        "recipe": recipe,
        "fit": replace(fit, updates=plan.longer * fit.updates),
        **subject.recorded_key(recipe.store_mode),
        **({} if plan.solver == "anderson" else {"solver": SOLVERS[plan.solver]}),
        "seed": seed,
    }


def trained_student(
    subject: Subject, teacher: Teacher, plan: StudentPlan, seed: int, name: str | None = None
) -> tuple[Student, Training]:
    """A student by a plan, in a folder that is called `name`; its training includes the recording it learns from."""
    config = student_config(subject, plan, seed)
    recipe = config["recipe"]
    store, before = recorded(subject, teacher, recipe.store_mode, plan.solver)
    folder = subject.place(name or plan.recipe, config)

    def run(tick: Progress) -> None:
        if not (folder / SAVED).exists():
            student = distill(
                teacher,
                store,
                recipe=recipe,
                fit=config["fit"],
                folder=folder,
                task_loss=subject.task_loss(teacher),
                seed=seed,
                progress=subject.options.progress,
            )
            subject.finished(student, plan).save(folder / SAVED)

    training = timed(folder, None, run)
    return Student.load(folder / SAVED), training.after(before)

"""Subjects with rivals: a teacher trained in two stages, learned solvers, few-step and explicit models.

What is the same for texts and images is here; a kind of data fills in `ModelCell`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from cdeq.evaluation import Explicit, Method, Quality
from cdeq.evaluation import Training
from cdeq.models.learned_solvers import HyperDEQ, SolverLossWeights
from cdeq.solvers import Anderson, solve_model
from cdeq.training.log import Progress
from cdeq.training.loop import FitConfig
from cdeq.training.teaching import TeachConfig
from cdeq_experiments.plans import CHECKPOINT_EVERY, ModelPlan
from cdeq_experiments.subjects import Subject, Teacher, Tolerances, recorded
from cdeq_experiments.train import (
    PHANTOM_STEPS,
    SOLVER_DEPTH,
    built,
    few_step_teaching,
    timed,
    train_solver,
)


@dataclass(frozen=True, kw_only=True)
class ModelCell(Subject):
    """A data set with everything that is trained on it."""

    solved: ClassVar[tuple[int, ...]]
    """Evaluations of the plain solvers: closer, so that the moment they reach the converged score is known better."""

    @property
    @abstractmethod
    def data_key(self) -> dict[str, Any]:
        """What everything depends on beside the plan: the data themselves."""

    @property
    def base(self) -> dict[str, Any]:
        return {"plan": self.plan.base, **self.data_key}

    @abstractmethod
    def build_teacher(self) -> nn.Module: ...

    @abstractmethod
    def teach(self, model: Teacher, config: TeachConfig, folder: Path, progress: Progress) -> None:
        """Train a model of this data's contract in place."""

    def trained_teacher(self) -> tuple[Teacher, Training]:
        """Trained at its equilibrium after the shallow training, whose seconds are in."""
        return _continued(self, self.plan.teaching, self.place("teacher"), self.teacher_name)

    def student_fit(self, recipe: str) -> FitConfig:
        return self.plan.student_fit(recipe)

    @abstractmethod
    def build_hyperdeq(self, teacher: Teacher) -> HyperDEQ: ...

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
    def score_solved(self, teacher: Teacher) -> dict[str, Any]:
        """As `score_teacher` under its own solver, to the tolerance of everyday use."""

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
    def timed_explicit(self, model: nn.Module, x: Any) -> Explicit: ...

    @abstractmethod
    def timed_solved(self, teacher: Teacher, x: Any) -> Explicit: ...


def solved_output(teacher: Teacher, x: Any, tolerances: Tolerances) -> Tensor:
    """The teacher's output under its own solver, run as it is in everyday use."""
    context = teacher.inject(x)
    z = solve_model(
        teacher, context, Anderson(), tol=tolerances.usual, max_steps=tolerances.budget
    ).state
    return teacher.readout(z, context)


# Equilibrium models.


def pretrained(cell: ModelCell) -> tuple[Teacher, Training]:
    """The teacher as a shallow model, which every equilibrium model begins from."""
    model = built(cell.build_teacher, seed=0)
    training = taught(cell, model, cell.plan.pretraining, cell.place("pretrain"), "pre-train")
    return model, training


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


# The learned solver.


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

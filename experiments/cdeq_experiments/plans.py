"""What every plan of a table has: how a teacher, its students and its rivals are trained on one data set."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from cdeq.gradients import Phantom
from cdeq.solvers import Anderson
from cdeq.training.loop import FitConfig
from cdeq.training.teaching import TeachConfig

CHECKPOINT_EVERY = 200

LATER = frozenset(
    (
        *("recorded", "students", "student_rate", "papers", "paper_rate"),
        *("solvers", "solver_rate", "few", "explicit", "bodies", "explicit_rate"),
    )
)
"""Fields of a plan that the teacher does not depend on."""


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """Everything that is chosen for one data set; settings are chosen on its validation split.

    A teacher is pre-trained as `pretrain_depth` unrolled steps for `pretrain` updates, then trained at its
    equilibrium for `updates`. `few` updates of a few-step model begin where the pre-training ended. `recorded`
    batches of training data are distilled from; `students`, `papers` and `solvers` are updates of students, of
    those by the published recipe, whose update is one evaluation or two, and of HyperDEQ.
    """

    name: str
    title: str

    batch: int = 16
    pretrain: int = 1600
    pretrain_depth: int = 3
    pretrain_rate: float = 2e-3
    updates: int = 700
    learning_rate: float = 1e-3
    depths: tuple[int, int] = (8, 20)
    phantom: int = 3
    penalty: float = 0.1
    warmup: int = 100

    recorded: int = 64
    students: int = 160
    papers: int = 350
    student_rate: float = 6e-3
    paper_rate: float = 1e-3
    solvers: int = 150
    solver_rate: float = 3e-3
    few: int = 600
    explicit: dict[str, int] = field(default_factory=dict)
    """Updates of each explicit model: about as many as the teacher's time allows."""
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sizes of an explicit model, where not its own default."""
    explicit_rate: float = 2e-3

    @property
    def later(self) -> frozenset[str]:
        """Names of fields that the teacher does not depend on."""
        return LATER

    @property
    def base(self) -> dict[str, Any]:
        """The fields that data and teacher depend on; changing others does not train the teacher anew."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.later}

    @property
    def pretraining(self) -> TeachConfig:
        """Shallow: `pretrain_depth` steps, unrolled."""
        fit = FitConfig(
            updates=self.pretrain,
            learning_rate=self.pretrain_rate,
            warmup=min(self.warmup, self.pretrain // 4),
            final_fraction=0.3,
            checkpoint_every=CHECKPOINT_EVERY,
        )
        return TeachConfig(fit=fit, pretrain=self.pretrain, pretrain_depth=self.pretrain_depth)

    @property
    def teaching(self) -> TeachConfig:
        """At the equilibrium, solved to a depth that is drawn anew for each update."""
        fit = FitConfig(
            updates=self.updates,
            learning_rate=self.learning_rate,
            warmup=min(self.warmup, self.updates // 4),
            checkpoint_every=CHECKPOINT_EVERY,
        )
        return TeachConfig(
            fit=fit,
            solver=Anderson(),
            gradient=Phantom(steps=self.phantom, damping=1.0),
            tol=1e-3,
            depths=self.depths,
            penalty=self.penalty,
        )

    def student_fit(self, recipe: str) -> FitConfig:
        """How a student is trained."""
        published = recipe == "paper"
        updates = self.papers if published else self.students
        return FitConfig(
            updates=updates,
            learning_rate=self.paper_rate if published else self.student_rate,
            warmup=updates // 20,
            checkpoint_every=CHECKPOINT_EVERY,
        )

    def explicit_fit(self, name: str) -> FitConfig:
        """How an explicit model is trained."""
        return FitConfig(
            updates=self.explicit[name],
            learning_rate=self.explicit_rate,
            warmup=min(self.warmup, self.explicit[name] // 4),
            checkpoint_every=CHECKPOINT_EVERY,
        )

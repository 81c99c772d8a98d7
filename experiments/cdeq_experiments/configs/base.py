"""What a configuration is made of: typed, frozen, nested data. One `SuiteConfig` says everything about one data set.

The arguments of a model are given straight to its class; those that depend on the data themselves (classes, features,
words) are added there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal

from torch import nn

from cdeq.consistency.recipes import Recipe
from cdeq.gradients import Phantom
from cdeq.solvers import Anderson, Solver
from cdeq.training import FitConfig, TeachConfig, few_step_teaching
from cdeq_experiments.options import ExperimentError

Kind = Literal["text", "images", "graph"]
KINDS: tuple[Kind, ...] = ("text", "images", "graph")
Arguments = Mapping[str, Any]
CORRECTED = ("warm_start", "corrected")
"""The default recipe after its control, which is trained as it is: the start first, for as many updates."""
SOLVED, FEW_STEP = "solved", "few_step"
"""Rows of a table: the teacher under its own solver, as in everyday use; models trained for a few steps."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model: its class, and its arguments but for those that the data give."""

    model: type[nn.Module]
    arguments: Arguments = field(default_factory=dict)

    def build(self, **sizes: int) -> nn.Module:
        """The untrained model; `sizes` are what the data give."""
        return self.model(**sizes, **self.arguments)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(ModelConfig):
    """An equilibrium model: trained as a shallow one first, if so asked, then at its equilibrium.

    Where it is compared but not distilled: the `solver` it is measured under, the name of its row in `closed_form`.
    """

    title: str
    teaching: TeachConfig
    pretraining: TeachConfig | None = None
    solver: Solver = field(default_factory=Anderson)
    closed_form: str | None = None

    def continued(self, teaching: TeachConfig) -> ContinuedConfig:
        """This one, once it is trained, trained on."""
        given = {f.name: getattr(self, f.name) for f in fields(TeacherConfig)}
        return ContinuedConfig(**{**given, "pretraining": None, "teaching": teaching})


@dataclass(frozen=True, kw_only=True)
class ContinuedConfig(TeacherConfig):
    """The trained teacher of a suite, trained on: to be good after a few steps, or to be deeper."""


@dataclass(frozen=True, kw_only=True)
class ExplicitConfig(ModelConfig):
    """A model without an equilibrium."""

    fit: FitConfig


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """A student: a recipe by name, the fields of it that are changed, and how it is trained.

    `solver`: whose states it learns from. `inputs`: what it is distilled on; a kind of data knows the names.
    `calibrated_steps`: how many steps have their clock chosen after the training. `clock`: the recipe's decay in
    use, where it is not that of training. `once`: one seed is enough.
    """

    recipe: str
    fit: FitConfig
    changes: Arguments = field(default_factory=dict)
    solver: str = "anderson"
    inputs: str = "training"
    calibrated_steps: int | None = None
    clock: float | None = None
    once: bool = False

    def resolve(self) -> Recipe:
        """The whole recipe."""
        return Recipe.from_name(self.recipe, **self.changes)

    def start_network(self, teacher: Any) -> nn.Module | None:
        """Its start, where it is not the one that its teacher offers."""
        return None


@dataclass(frozen=True, kw_only=True)
class LearnedSolverConfig:
    """The learned solver of the teacher, by the name of its rows; trained for `depth` steps."""

    name: str
    fit: FitConfig
    depth: int = 6


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """How many batches of training data are recorded (None: all), and how many steps a solve may take."""

    batches: int | None
    max_steps: int


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """How far a teacher is solved: as a `reference` within `max_steps`, and in everyday use, if that is shown.

    The states that distances are measured to are solved on to `exact`, where the reference is not exact enough.
    """

    reference: float = 1e-4
    max_steps: int = 80
    exact: float | None = None
    everyday: float | None = 1e-3


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of evaluations: `shown` on a page, at which `methods` and plain `solvers` are scored, and `timed`.

    With `time_first_seed` the seconds of the first seed stand for all.
    """

    shown: tuple[int, ...]
    methods: tuple[int, ...]
    solvers: tuple[int, ...]
    timed: tuple[int, ...]
    time_first_seed: bool = False


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """One data set and everything that is trained and measured on it.

    `data`: what the kind of data needs to know. `solvers`: the plain ones, by name. `few_step`: how a model for a
    few steps is trained, whatever their number; `few_step_distances`: it is measured at its own equilibrium.
    `recording`: for each mode. `seeded_teacher`: each seed has a teacher (and a split of the data) of its own; else
    all students have the teacher of seed 0. `optional`: silently left out if its files are not there.
    """

    kind: Kind
    name: str
    title: str
    data: Any
    teacher: TeacherConfig
    students: Mapping[str, StudentConfig]
    recording: Mapping[str, RecordConfig]
    tolerances: Tolerances
    counts: Counts
    solvers: tuple[str, ...] = ("picard", "anderson", "broyden")
    others: Mapping[str, TeacherConfig] = field(default_factory=dict)
    learned_solver: LearnedSolverConfig | None = None
    few_step: TeachConfig | None = None
    few_step_distances: bool = False
    explicit: Mapping[str, ExplicitConfig] = field(default_factory=dict)
    seeded_teacher: bool = False
    optional: bool = False

    @property
    def pretrained(self) -> str:
        """The name of its teacher and student in the zoo."""
        return f"{self.teacher.title}-{self.name.replace('-', '')}".lower()

    def with_students(
        self, students: Mapping[str, StudentConfig], counts: Counts, solvers: tuple[str, ...] = ()
    ) -> SuiteConfig:
        """The same data set and teacher with these students and plain solvers, and nothing else."""
        limits = replace(self.tolerances, everyday=None)
        gone: dict[str, Any] = {"others": {}, "learned_solver": None, "few_step": None}
        gone |= {"explicit": {}, "tolerances": limits, "solvers": solvers}
        return replace(self, students=students, counts=counts, **gone)

    def with_methods(self, names: Collection[str]) -> SuiteConfig:
        """The same with what these rows are made of; refuses names of no row."""
        asked, learned = set(names), self.learned_solver
        others = {n: {n, one.closed_form or n} for n, one in self.others.items()}
        known = {*self.solvers, *chain(*others.values()), *self.students, *self.explicit}
        known |= {SOLVED} if self.tolerances.everyday is not None else set()
        known |= {learned.name} if learned is not None else set()
        known |= {FEW_STEP} if self.few_step is not None else set()
        if unknown := sorted(asked - known):
            raise ExperimentError(
                f"{self.title} has no {', '.join(unknown)}, only {', '.join(sorted(known))}"
            )
        return replace(
            self,
            solvers=tuple(name for name in self.solvers if name in asked),
            others={name: one for name, one in self.others.items() if others[name] & asked},
            learned_solver=learned if learned is not None and learned.name in asked else None,
            students={name: one for name, one in self.students.items() if name in asked},
            few_step=self.few_step if FEW_STEP in asked else None,
            explicit={name: one for name, one in self.explicit.items() if name in asked},
        )

    def few_step_teacher(self, steps: int) -> ContinuedConfig:
        """The teacher, trained on to be good after `steps` Picard steps."""
        assert self.few_step is not None
        return self.teacher.continued(few_step_teaching(self.few_step, steps))


# How everything on a text or on images is trained.


@dataclass(frozen=True)
class Updates:
    """How many updates, and their learning rate."""

    count: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Updates of everything that is trained on a text or on images.

    An equilibrium model is first trained as `pretraining_depth` unrolled steps. A few-step model goes on from the
    teacher, on text at a tenth of its rate: at the same rate it would lose what the teacher has learned. A solve in
    training has between `depths` steps, the last `phantom_steps` with a gradient.
    """

    pretraining: Updates = Updates(1600, 2e-3)
    teaching: Updates = Updates(700, 1e-3)
    paper: Updates = Updates(350, 1e-3)
    anchored: Updates = Updates(160, 6e-3)
    corrected: Updates = Updates(300, 3e-3)
    learned_solver: Updates = Updates(150, 3e-3)
    explicit: Updates = Updates(1000, 2e-3)
    few_step: Updates = Updates(600, 1e-4)
    pretraining_depth: int = 3
    depths: tuple[int, int] = (8, 20)
    phantom_steps: int = 3
    penalty: float = 0.1
    warmup_updates: int = 100
    weight_decay: float = 0.0

    def fit(self, updates: Updates) -> FitConfig:
        """The training of a model from its beginning."""
        config = _fit(updates, min(self.warmup_updates, updates.count // 4))
        return replace(config, weight_decay=self.weight_decay)

    def teach(self) -> TeachConfig:
        """At the equilibrium, solved to a depth that is drawn for each update."""
        return TeachConfig(
            fit=self.fit(self.teaching),
            gradient=Phantom(steps=self.phantom_steps, damping=1.0),
            tol=1e-3,
            depths=self.depths,
            penalty=self.penalty,
        )

    def teacher(self, title: str, model: type[nn.Module], arguments: Arguments) -> TeacherConfig:
        """An equilibrium model in both stages."""
        shallow = replace(self.fit(self.pretraining), final_fraction=0.3)
        depth = self.pretraining_depth
        return TeacherConfig(
            title=title,
            model=model,
            arguments=arguments,
            pretraining=TeachConfig(
                fit=shallow, pretrain_updates=shallow.updates, pretrain_depth=depth
            ),
            teaching=self.teach(),
        )

    def teach_few_steps(self) -> TeachConfig:
        """How a few-step model is trained, whatever the number of steps."""
        return replace(self.teach(), fit=self.fit(self.few_step), penalty=0.0)

    def student(self, recipe: str, **changes: Any) -> StudentConfig:
        """A student of a recipe."""
        updates: Updates = getattr(self, "corrected" if recipe in CORRECTED else recipe)
        if recipe in CORRECTED:
            changes = {**first_updates(recipe, updates.count), **changes}
        return StudentConfig(recipe=recipe, fit=_fit(updates, updates.count // 20), changes=changes)

    def hyperdeq(self) -> LearnedSolverConfig:
        return LearnedSolverConfig(name="hyperdeq", fit=_fit(self.learned_solver))

    def explicit_models(
        self, models: Mapping[str, type[nn.Module]], shared: Arguments, own: Mapping[str, Arguments]
    ) -> dict[str, ExplicitConfig]:
        """Explicit models with the arguments that they share and those of each."""
        given: dict[str, Any] = {"fit": self.fit(self.explicit)}
        return {
            name: ExplicitConfig(model=model, arguments={**shared, **own.get(name, {})}, **given)
            for name, model in models.items()
        }


def first_updates(recipe: str, updates: int) -> dict[str, int]:
    """What of the default recipe or its control is trained alone at first, for as many updates as the whole."""
    parts = ["start"] if recipe == "warm_start" else ["start", "correction"]
    return {f"{part}_updates": updates for part in parts}


def _fit(updates: Updates, warmup_updates: int = 0) -> FitConfig:
    given: dict[str, Any] = {"updates": updates.count, "learning_rate": updates.rate}
    return FitConfig(**given, warmup_updates=warmup_updates, checkpoint_every=200)


def record_configs(endpoint: int, full: int) -> dict[str, RecordConfig]:
    """As many batches with their equilibria alone, and with all their states."""
    return {
        "endpoint": RecordConfig(batches=endpoint, max_steps=40),
        "full": RecordConfig(batches=full, max_steps=30),
    }

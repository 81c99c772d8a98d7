"""The entries of a table: each is one model of a suite to train and score, and becomes rows when all are timed.

An entry says what its scores depend on, so that they are found again as long as nothing of that has changed, and how
it is made: what it does on the way from an input to an output, so that it can be timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from cdeq import evaluation
from cdeq.evaluation import SOLVERS, Explicit, Method, Quality, Row, Target
from cdeq.solvers import Picard, Solver
from cdeq.training.parallel import on_main_process
from cdeq_experiments.configs.base import FEW_STEP, SOLVED, StudentConfig, TeacherConfig
from cdeq_experiments.jobs import Job
from cdeq_experiments.runs import Run
from cdeq_experiments.suites.base import Suite
from cdeq_experiments.suites.contract import Key, Model


class Made(NamedTuple):
    """What was trained, as it is timed; the model whose answers are scored, and its states; seconds of training."""

    way: Method | Explicit
    model: Model
    equilibria: Any = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """`method`: its name in rows; `key`: what it depends on; `build`: how it is made; `early`: from the data alone.

    `folder`: its name in that of its run, where it is not the method's.
    """

    suite: Suite
    method: str
    seed: int
    key: Key
    build: Callable[[Suite], Made]
    counts: tuple[int, ...]
    early: bool = False
    folder: str | None = None

    @property
    def name(self) -> str:
        """Unique in a table."""
        steps = f" {self.counts[0]}" if len(self.counts) == 1 else ""
        return f"{self.method}{steps} seed {self.seed}"

    @property
    def run(self) -> Run:
        about = {"counts": self.counts, "tolerances": self.suite.config.tolerances}
        return self.suite.run(f"score-{self.folder or self.method}", {**self.key, **about})

    def job(self) -> Job:
        return Job(f"{self.suite.title}: {self.name}", self.run, self.score)

    def make(self) -> Made:
        """Trained now or before; the seconds it takes are those from an input to what a score takes."""
        made = self.build(self.suite)
        if not isinstance(made.way, Method):
            return made
        method = replace(made.way, counts=self.counts, label=self.method)
        return made._replace(way=self.suite.timed_method(method, made.model))

    def score(self) -> dict[str, Any]:
        """Its scores, as plain JSON."""
        suite, made = self.suite, self.make()
        found: dict[str, Any] = {"seconds": made.seconds}
        if isinstance(made.way, Method):
            with suite.options.bar(f"{suite.title}: score {self.name}") as bar:
                told = None if bar is None else lambda done, total: bar(done, total, {})
                given = (made.way, made.model, made.equilibria, self.counts, told)
                scores = on_main_process(partial(suite.score_method, *given))
            found["scores"] = {k: asdict(quality) for k, quality in scores.items()}
        elif self.method == SOLVED:
            tol = suite.config.tolerances.everyday or 0.0
            found |= on_main_process(partial(suite.converge, made.model, suite.data.test(), tol))
        else:
            found |= on_main_process(partial(suite.score_explicit, made.model))
        return {**found, **evaluation.provenance()}

    def rows(
        self, found: dict[str, Any], way: Method | Explicit, clock: str, seconds: Any
    ) -> list[Row]:
        """From its scores and the seconds that were measured under the name `clock`."""
        about: dict[str, Any] = {"dataset": self.suite.config.title, "seed": self.seed}
        about["train_seconds"] = found["seconds"]
        if isinstance(way, Method):
            scores = {int(k): Quality(**quality) for k, quality in found["scores"].items()}
            return evaluation.method_rows(clock, way, scores, seconds, **about)
        row = evaluation.explicit_row(clock, way, found["metric"], seconds, **about)
        row = replace(row, method=self.method, top5=found.get("top5"))
        if self.method == SOLVED:  # its cost is what its solver took
            row = replace(row, residual=found["residual"], f_equivalents=found["steps"])
        return [row]


# How entries are made.


def _of_teacher(suite: Suite, method: Method, seconds: float | None = None) -> Made:
    """A method that seeks the teacher's equilibrium."""
    return Made(method, suite.teacher, suite.find_equilibria(), seconds)


def make_solver(name: str, suite: Suite) -> Made:
    return _of_teacher(suite, evaluation.solver_method(suite.teacher, SOLVERS[name]))


def make_learned_solver(seed: int, suite: Suite) -> Made:
    solver, training = suite.train_learned_solver(seed)
    method = evaluation.learned_solver_method(suite.teacher, solver)
    return _of_teacher(suite, method, training.seconds)


def make_student(config: StudentConfig, seed: int, suite: Suite) -> Made:
    student, training = suite.train_student(config, seed)
    return _of_teacher(suite, evaluation.student_method(student), training.seconds)


def make_own(
    name: str, config: TeacherConfig, solver: Solver, distances: bool, suite: Suite
) -> Made:
    """An equilibrium model under a solver, measured at its own equilibrium."""
    model, training = suite.train_equilibrium_model(name, config)
    own = Target(model=model, equilibria=None)
    states = suite.find_equilibria(name, config) if distances else None
    method = evaluation.solver_method(model, solver, own=own)
    return Made(method, model, states, training.seconds)


def make_closed_form(name: str, config: TeacherConfig, suite: Suite) -> Made:
    """An equilibrium model without iteration."""
    model, training = suite.train_equilibrium_model(name, config)

    def output(x: Any) -> Tensor:
        return model.readout(model.closed_form(x, tol=1e-5).state, model.inject(x))

    return Made(suite.timed_output(model, output), output, None, training.seconds)


def make_explicit(name: str, suite: Suite) -> Made:
    model, training = suite.train_explicit(name)
    way = suite.timed_output(model, suite.explicit_output(model))
    return Made(way, model, None, training.seconds)


def make_solved(suite: Suite) -> Made:
    """The teacher under its own solver, as in everyday use."""
    return Made(suite.timed_output(suite.teacher, suite.everyday_output), suite.teacher)


def entries_of(suite: Suite) -> list[Entry]:
    """The entries of a suite that are asked for, in the order of their rows."""
    config, counts, found = suite.config, suite.config.counts, list[Entry]()

    def add(method: str, key: Key, build: Any, *given: Any, **fields: Any) -> None:
        usual = {"seed": suite.teacher_seed, "counts": counts.methods}
        how: dict[str, Any] = {"method": method, "key": key, "build": partial(build, *given)}
        found.append(Entry(suite=suite, **{**usual, **how, **fields}))

    teacher = suite.teacher_key
    if config.tolerances.everyday is not None:
        add(SOLVED, teacher, make_solved)
    for name in config.solvers:
        key = {**teacher, "solver": SOLVERS[name]}
        add(name, key, make_solver, name, counts=counts.solvers)
    for name, other in config.others.items():
        key = {**suite.model_key(other), "solver": other.solver}
        add(name, key, make_own, name, other, other.solver, True, early=True)
    for seed in suite.seeds:
        if (learned := config.learned_solver) is not None:
            key = suite.learned_solver_key(seed)
            add(learned.name, key, make_learned_solver, seed, seed=seed)
        for name, student in config.students.items():
            if seed == suite.seeds[0] or not student.once:
                key = {"student": suite.student_run(student, seed).folder.name}
                key["clock"] = student.clock
                # Its name in a table takes no part: tables and ablations share students.
                shared: dict[str, Any] = {"seed": seed, "folder": student.recipe}
                add(name, key, make_student, student, seed, **shared)
    for steps in counts.shown if config.few_step is not None else ():
        few = config.few_step_teacher(steps)
        given = (FEW_STEP, few, Picard(), config.few_step_distances)
        key = {**suite.model_key(few), "distances": config.few_step_distances}
        add(FEW_STEP, key, make_own, *given, counts=(steps,))
    for name, other in config.others.items():
        if other.closed_form is not None:
            key = suite.model_key(other)
            add(other.closed_form, key, make_closed_form, name, other, early=True)
    for name in config.explicit:
        add(name, suite.explicit_key(name), make_explicit, name, early=True)
    asked = suite.options.methods
    return [entry for entry in found if not asked or entry.method in asked]


def recordings_of(suite: Suite) -> list[Job]:
    """What the students and the learned solver of a suite learn from."""
    students = suite.config.students.values()
    wanted = {(one.resolve().store_mode, one.solver, one.inputs) for one in students}
    if suite.config.learned_solver is not None:
        wanted.add(("endpoint", "anderson", "training"))
    return [suite.recording(*how) for how in sorted(wanted)]

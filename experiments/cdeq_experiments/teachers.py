"""Other trainings of the tables' teachers: how good they are, how deep, and what is left for a student to gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from cdeq import evaluation
from cdeq.evaluation import Row, solver_method
from cdeq.gradients import Phantom
from cdeq.solvers import Picard
from cdeq_experiments.configs import table_configs
from cdeq_experiments.configs.base import KINDS, Kind, SuiteConfig, TeacherConfig
from cdeq_experiments.jobs import Job, run_jobs
from cdeq_experiments.options import Options
from cdeq_experiments.suites.base import Suite
from cdeq_experiments.tables import Experiment, Part, make_part

VALIDATION = "validation score"
SHARE = 3
"""Of the updates at the equilibrium, a third is what another training of a text's or of images' teacher has."""

Settings = Mapping[str, TeacherConfig]
"""Teachers by what is changed."""


def graph_settings(config: SuiteConfig) -> Settings:
    """Each with one changed value."""
    teacher, fit = config.teacher, config.teacher.teaching.fit
    width, longer = teacher.arguments["width"], 3 * fit.updates
    kappa = 0.8 if teacher.arguments["kappa"] == 0.95 else 0.95

    def trained(**changes: Any) -> TeacherConfig:
        return replace(teacher, teaching=replace(teacher.teaching, fit=replace(fit, **changes)))

    def built(**changes: Any) -> TeacherConfig:
        return replace(teacher, arguments={**teacher.arguments, **changes})

    return {
        f"{longer} updates": trained(updates=longer, warmup_updates=min(10, longer // 10)),
        "no weight decay": trained(weight_decay=0.0),
        "dropout 0.2": built(dropout=0.2),
        f"width {2 * width}": built(width=2 * width),
        f"kappa {kappa}": built(kappa=kappa),
    }


def deeper_settings(config: SuiteConfig) -> Settings:
    """Two attempts at an equilibrium that is further away from the first steps.

    The teacher trained on at its equilibrium: solved deeper, a longer gradient, no penalty. And a teacher that was
    never shallow: the same from the beginning, at the learning rate of the shallow stage.
    """
    teacher, usual = config.teacher, config.teacher.teaching
    assert teacher.pretraining is not None
    fit = replace(usual.fit, updates=max(usual.fit.updates // SHARE, 1))
    fit = replace(fit, warmup_updates=min(fit.warmup_updates, fit.updates // 4))
    low, high = usual.depths
    deep = replace(usual, fit=fit, gradient=Phantom(steps=5, damping=1.0), penalty=0.0)
    deep = replace(deep, depths=(low + 4, 2 * high))
    rate = teacher.pretraining.fit.learning_rate
    alone = replace(deep, fit=replace(fit, learning_rate=rate))
    return {
        f"trained on for {fit.updates} deep updates": teacher.continued(deep),
        f"{fit.updates} deep updates alone": replace(teacher, pretraining=None, teaching=alone),
    }


SETTINGS: dict[Kind, Callable[[SuiteConfig], Settings]] = {
    "text": deeper_settings,
    "images": deeper_settings,
    "graph": graph_settings,
}


def with_settings(config: SuiteConfig) -> SuiteConfig:
    """The teacher of a table, and beside it what else was tried, each under plain iteration."""
    counts = replace(config.counts, shown=config.counts.solvers)
    found = SETTINGS[config.kind](config)
    others = {name: replace(one, title=name, solver=Picard()) for name, one in found.items()}
    return replace(config.with_students({}, counts), others=others)


def measure_settings(suites: Sequence[Suite], options: Options) -> Iterator[list[Part]]:
    """One data set after another, so that a run that is cut short has something to show."""
    for suite in suites:
        tried = {"teacher": suite.config.teacher, **suite.config.others}
        run_jobs([suite.equilibria(name, config) for name, config in tried.items()], options)
        jobs = [setting(suite, name, config) for name, config in tried.items()]
        run_jobs(jobs, options)
        found = [job.run.read() for job in jobs]
        yield [make_part(suite, [Row(**row) for one in found for row in one["rows"]], found)]


def setting(suite: Suite, name: str, config: TeacherConfig) -> Job:
    """One teacher: converged, on validation data, and after a few plain steps."""
    key = {**suite.model_key(config), "title": config.title, "counts": suite.config.counts.shown}
    work = partial(measure, suite, name, config)
    return Job(f"{suite.title}: {config.title}", suite.run("setting", key), work)


def measure(suite: Suite, name: str, config: TeacherConfig) -> dict[str, Any]:
    """Its rows, as plain JSON."""
    model, _ = suite.train_equilibrium_model(name, config)
    found, states = suite.equilibria(name, config).run.read(), suite.find_equilibria(name, config)
    valid = suite.converge(model, suite.data.valid(), suite.config.tolerances.reference)["metric"]
    picard = solver_method(model, Picard())
    scores = suite.score_method(picard, model, states, suite.config.counts.shown, None)
    about: dict[str, Any] = {"dataset": suite.config.title, "method": config.title}
    about |= {"seed": suite.teacher_seed, "parameters": found["parameters"], "seconds": None}
    about |= {"train_seconds": found["seconds"], "figures": {VALIDATION: valid}}
    rows = [Row(steps=k, f_equivalents=k, **about, **asdict(one)) for k, one in scores.items()]
    return {"rows": [asdict(row) for row in rows], **evaluation.provenance()}


TEACHERS = Experiment(
    name="teachers",
    layout="teachers",
    configs=lambda scale: [
        with_settings(config) for kind in KINDS for config in table_configs(kind, scale)
    ],
    measure=measure_settings,
)

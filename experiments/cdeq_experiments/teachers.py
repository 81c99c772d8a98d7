"""Other settings of the IGNN than those of Table 3: what they change about the teacher, and what is left to gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from cdeq.evaluation import Row, solver_method
from cdeq.solvers import Picard
from cdeq_experiments.configs import table_configs
from cdeq_experiments.configs.base import SuiteConfig, TeacherConfig
from cdeq_experiments.jobs import Job, run_jobs
from cdeq_experiments.options import Options
from cdeq_experiments.suites.base import Suite
from cdeq_experiments.tables import Experiment, Part, make_part

VALIDATION = "validation accuracy"
USUAL = "as in Table 3"


def settings(config: SuiteConfig) -> list[SuiteConfig]:
    """The teacher of Table 3 and what else was tried; its title says what is changed."""
    teacher, fit = config.teacher, config.teacher.teaching.fit
    width, longer = teacher.arguments["width"], 3 * fit.updates
    kappa = 0.8 if teacher.arguments["kappa"] == 0.95 else 0.95

    def trained(**changes: Any) -> TeacherConfig:
        return replace(teacher, teaching=replace(teacher.teaching, fit=replace(fit, **changes)))

    def built(**changes: Any) -> TeacherConfig:
        return replace(teacher, arguments={**teacher.arguments, **changes})

    found = {
        USUAL: teacher,
        f"{longer} updates": trained(updates=longer, warmup_updates=min(10, longer // 10)),
        "no weight decay": trained(weight_decay=0.0),
        "dropout 0.2": built(dropout=0.2),
        f"width {2 * width}": built(width=2 * width),
        f"kappa {kappa}": built(kappa=kappa),
    }
    alone = config.with_students({}, config.counts)
    return [replace(alone, teacher=replace(one, title=name)) for name, one in found.items()]


def measure_settings(suites: Sequence[Suite], options: Options) -> Iterator[list[Part]]:
    run_jobs([suite.equilibria() for suite in suites], options)
    yield run_jobs([setting(suite) for suite in suites], options)


def setting(suite: Suite) -> Job:
    """One teacher: converged, on validation nodes, and after a few steps."""
    name = suite.config.teacher.title
    key = {**suite.teacher_key, "setting": name, "counts": suite.config.counts.shown}
    return Job(f"{suite.title}: {name}", suite.run("setting", key), partial(measure, suite))


def measure(suite: Suite) -> Part:
    config, model = suite.config, suite.teacher
    found = suite.equilibria().run.read()
    states = suite.find_equilibria()
    valid = suite.converge(model, suite.data.valid(), config.tolerances.reference)["metric"]
    picard = solver_method(model, Picard())
    scores = suite.score_method(picard, model, states, config.counts.shown, None)
    about: dict[str, Any] = {"dataset": config.title, "method": config.teacher.title}
    about |= {"seed": suite.teacher_seed, "parameters": found["parameters"], "seconds": None}
    about |= {"train_seconds": found["seconds"], "figures": {VALIDATION: valid}}
    rows = [Row(steps=k, f_equivalents=k, **about, **asdict(one)) for k, one in scores.items()]
    return make_part(suite, rows)


TEACHERS = Experiment(
    name="teachers",
    layout="teachers",
    configs=lambda scale: [
        one for config in table_configs("graph", scale) for one in settings(config)
    ],
    measure=measure_settings,
)

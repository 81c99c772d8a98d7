"""One runner for every experiment, and one for every table: train and score all entries of all suites, time them.

Tables 1, 2 and 3 are suites of text, images and graphs; ablations and the inductive table are the same suites with
other students.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from itertools import groupby
from typing import Any

import torch

from cdeq import evaluation
from cdeq.evaluation import Explicit, Method, Results, Row, TeacherResult
from cdeq.training.parallel import is_main_process, on_main_process
from cdeq_experiments.configs import table_configs
from cdeq_experiments.configs.base import KINDS, Kind, SuiteConfig
from cdeq_experiments.entries import SOLVED, entries_of, recordings_of
from cdeq_experiments.jobs import Job, run_jobs
from cdeq_experiments.options import ExperimentError, Options
from cdeq_experiments.pages import join, read_page, write_pages
from cdeq_experiments.suites import make_suites
from cdeq_experiments.suites.base import PUBLISHED, Suite

REPEATS = 5
"""Of every timing."""

MEASURED = ("parameters", "metric", "steps", "residual", "converged")  # of a converged teacher
Page = dict[str, Any]
Part = dict[str, Any]
"""What one suite measured, as plain JSON: rows, teachers, and where they come from."""

NOTES: dict[str, Page] = tomllib.loads(
    resources.files("cdeq_experiments").joinpath("notes.toml").read_text(encoding="utf-8")
)
"""Title and notes of each experiment."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """`configs(scale)` are its data sets; `measure(suites, options)` gives what they measured, some parts at a time.

    `layout`: how it is shown; `more(configs)`: what that needs to know. `publish`: its models are kept for users.
    """

    name: str
    layout: str
    configs: Callable[[str], list[SuiteConfig]]
    measure: Callable[[list[Suite], Options], Iterable[list[Part]]]
    more: Callable[[list[SuiteConfig]], Page] = lambda configs: {}
    publish: bool = False

    def page(self, scale: str) -> Page:
        """How its results are laid out for a reader, as plain JSON."""
        configs = self.configs(scale)
        counts = {config.title: list(config.counts.shown) for config in configs}
        return {"layout": self.layout, **NOTES[self.name], "counts": counts, **self.more(configs)}

    def require_notes(self) -> None:
        """Refuse at once, not after training, an experiment without a title."""
        if self.name not in NOTES:
            raise ExperimentError(
                f"{self.name} has no title: add [{self.name}] to notes.toml, with title and notes"
            )

    def run(self, options: Options) -> Results:
        """Do what was not done before; the page is written as soon as there is something new to show."""
        suites, parts = make_suites(self.configs(options.scale), options), list[Part]()
        before = read_page(options.out, self.name, options.scale) if options.add else None
        for new in self.measure(suites, options):
            parts += new
            results = Results(
                experiment=self.name,
                scale=options.scale,
                commit=evaluation.joined(part["commit"] for part in parts),
                command=evaluation.joined(part["command"] for part in parts),
                hardware=parts[-1]["hardware"],
                teachers=tuple(TeacherResult(**t) for part in parts for t in part["teachers"]),
                rows=tuple(Row(**row) for part in parts for row in part["rows"]),
                page=self.page(options.scale),
            )
            results = results if before is None else join(before, results)
            if is_main_process():
                write_pages(results, options.out)
        if self.publish:
            for suite in suites:
                if suite.teacher_seed == 0 and PUBLISHED in suite.config.students:
                    options.say(suite.publish(results))
        return results


def make_part(suite: Suite, rows: Iterable[Row], scores: Iterable[Part] = ()) -> Part:
    """The rows of a suite with its converged models; `scores` are what they were made from."""
    metric, models = suite.metrics["metric"], {"teacher": suite.config.teacher}
    teachers = [
        TeacherResult(
            dataset=suite.config.title,
            name=config.title,
            metric_name=metric.name,
            higher_is_better=metric.higher_is_better,
            train_seconds=found["seconds"],
            seed=suite.teacher_seed,
            **{field: found[field] for field in MEASURED},
        )
        for name, config in (models | dict(suite.config.others)).items()
        for job in [suite.equilibria(name, config)]
        for found in [job.run.result(job.work)]
    ]
    kept = {"rows": [asdict(row) for row in rows], "teachers": [asdict(one) for one in teachers]}
    return {**kept, **evaluation.provenance(scores)}


def measure_tables(suites: Sequence[Suite], options: Options) -> Iterator[list[Part]]:
    """One suite after another, or, where several processes share the work, all suites with the same seed at once.

    So a run that is cut short has something of everything.
    """
    groups = [[suite] for suite in suites]
    if options.jobs > 1:
        groups = [list(same) for _, same in groupby(suites, lambda suite: suite.teacher_seed)]
    for group in groups:
        entries = [entry for suite in group for entry in entries_of(suite)]
        teachers = [suite.equilibria() for suite in group]
        run_jobs([*teachers, *(entry.job() for entry in entries if entry.early)], options)
        run_jobs([job for suite in group for job in recordings_of(suite)], options)
        run_jobs([entry.job() for entry in entries if not entry.early], options)
        for suite in group:
            yield run_jobs([timing(suite)], options, alone=True)


def timing(suite: Suite) -> Job:
    """The rows of one suite: all its methods timed on one input, in turns, and joined with their scores."""
    scores = {entry.name: [entry.method, entry.run.folder.name] for entry in entries_of(suite)}
    titles = [suite.config.title, suite.config.teacher.title]
    key = {"scores": scores, "counts": suite.config.counts, "titles": titles}
    return Job(f"{suite.title}: timing", suite.run("rows", key), partial(measure_rows, suite))


def measure_rows(suite: Suite) -> Part:
    """Time what each entry does on the input of the suite."""
    entries, counts, x = entries_of(suite), suite.config.counts, suite.timed_input()
    first = {entry.method: entry.name for entry in reversed(entries)}
    clocks = {e.name: first[e.method] if counts.time_first_seed else e.name for e in entries}
    ways = {e.name: e.make().way for e in entries if e.name in clocks.values()}
    solved = {e.name for e in entries if e.method == SOLVED}
    explicit = {name: way for name, way in ways.items() if isinstance(way, Explicit)}
    measure = partial(
        evaluation.measure_seconds,
        {name: way for name, way in ways.items() if isinstance(way, Method)},
        suite.teacher,
        x,
        counts.timed,
        explicit={name: way for name, way in explicit.items() if name not in solved},
        repeats=REPEATS,
        others={name: way for name, way in explicit.items() if name in solved},
    )
    with torch.no_grad():
        seconds = on_main_process(measure)
    found = {entry.name: entry.run.read() for entry in entries}
    rows: list[Row] = []
    for entry in entries:
        clock = clocks[entry.name]
        rows += entry.rows(found[entry.name], ways[clock], clock, seconds)
    return make_part(suite, rows, found.values())


def same_equilibrium(configs: Sequence[SuiteConfig]) -> Page:
    """Methods that seek the equilibrium of the teacher: their distances are compared."""
    config = configs[0]
    learned = [] if config.learned_solver is None else [config.learned_solver.name]
    return {"same_equilibrium": [*config.solvers, *learned, *config.students]}


def _table(name: str, kind: Kind) -> Experiment:
    given: dict[str, Any] = {"configs": partial(table_configs, kind), "measure": measure_tables}
    return Experiment(name=name, layout="table", more=same_equilibrium, publish=True, **given)


def pretrained_configs(scale: str) -> list[SuiteConfig]:
    """All data sets, each with its teacher, its default student and plain iteration alone."""
    every = [replace(c, seeded_teacher=False) for kind in KINDS for c in table_configs(kind, scale)]
    kept = [{"corrected": c.students["corrected"]} for c in every]
    return [c.with_students(s, c.counts, ("picard",)) for c, s in zip(every, kept, strict=True)]


ZOO = replace(_table("zoo", "text"), configs=pretrained_configs)
"""What the zoo is made by: teachers and students as folders with a card, in runs/models."""
TABLES = (_table("table1", "text"), _table("table2", "images"), _table("table3", "graph"))

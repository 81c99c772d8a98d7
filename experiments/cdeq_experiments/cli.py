"""The commands `cdeq reproduce` and `cdeq report`; the library's command line finds them here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from cdeq.cli import Placed, check_counts, wide_console
from cdeq.training import is_main_process, process_group, process_rank
from cdeq_experiments.options import ExperimentError, Options, silent

Tables = Literal["table1", "table2", "table3", "zoo", "inductive", "chains", "teachers"]
Figures = Literal["residuals", "cost", "overhead", "certified"]
Paper = Literal[
    "solvers", "history", "lambdas", "modules", "window", "gamma-rho", "beta", "time-map"
]
Ablations = Literal[Paper, "recipe", "corrected", "updates"]


@dataclass(frozen=True, kw_only=True)
class Reproduce(Placed):
    """Run one of the paper's tables, with ours beside it, and write it as JSON, Markdown and PNG.

    Work that was done before is not done again; a run that was cut short is resumed.
    """

    experiment: tyro.conf.Positional[Literal[Tables, Figures, Ablations, "all"]]
    """Which: table1 (language), table2 (images), table3 (graphs), inductive (unseen nodes), chains (long ones),
    teachers (other trainings of them), a figure or an ablation by name (docs/reproducing.md says what each is), or all
    of them."""
    scale: Literal["tiny", "small", "paper"] = "small"
    """tiny: embedded data, a minute; small: real data, one to two hours for a table on two cores; paper: the
    published sizes, as configurations that were not run in full."""
    data_dir: Path | None = None
    """Where the data sets are; default: the environment variable CDEQ_DATA, then the user's cache folder."""
    out: Path | None = None
    """Where the pages go; default results/<scale>."""
    runs: Path = Path("runs/experiments")
    """Where trainings and measurements are kept."""
    seeds: int | None = None
    """How many seeds; default 3, at the scale tiny 1."""
    first_seed: int = 0
    """The first of them."""
    only: tuple[str, ...] = ()
    """Names of data sets, or kinds of data (text, images, graph), to run only these."""
    train_teachers: bool = False
    """Train every teacher; without it one that the zoo has, trained the same way on the same data, comes from there."""
    students_only: bool = False
    """Leave out explicit, few-step and other equilibrium models, which take hours to train."""
    methods: tuple[str, ...] = ()
    """Names of rows, as in the results, such as few_step or transformer_xl, to make these alone."""
    add: bool = False
    """Keep what the page in --out has beside the new rows, so that seeds, methods or data sets can be run one by one.
    Seconds are compared within one run only: methods that the page has timed keep theirs, new ones have none."""
    jobs: int | None = None
    """How many jobs (a model to train and score) are done at a time, each in a process of its own; default 1, for all
    at the scale tiny as many as there are cores. The processes of torchrun do one job together."""
    threads: int | None = None
    """Threads that each process computes with; default: as many as torch chooses, divided among them."""

    def __post_init__(self) -> None:
        check_counts(threads=self.threads, seeds=self.seeds, jobs=self.jobs)
        if self.first_seed < 0:
            raise ValueError(f"first_seed must be at least 0, not {self.first_seed}")

    @property
    def all_seeds(self) -> tuple[int, ...]:
        count = self.seeds or (1 if self.scale == "tiny" else 3)
        return tuple(range(self.first_seed, self.first_seed + count))

    @property
    def processes(self) -> int:
        """Jobs of the tiny scale are too small for more than a thread each."""
        many = (self.experiment, self.scale) == ("all", "tiny")
        return self.jobs or ((os.cpu_count() or 1) if many else 1)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Put everything that was reproduced on one page, report.html, that opens from disk."""

    results: Path = Path("results/small")
    """The folder that `cdeq reproduce` wrote to."""
    out: Path | None = None
    """Where the page goes; default report.html in that folder."""


@process_group()
def reproduce(options: Reproduce) -> int:
    whole = options.experiment == "all"
    if whole and options.only:
        raise ExperimentError("--only differs from experiment to experiment: name one of them")
    from cdeq_experiments.pages import show
    from cdeq_experiments.registry import EXPERIMENTS, require_data

    together, leads = process_rank()[1] > 1, is_main_process()
    placement = options.placement(training=True)
    if together and options.jobs is not None:
        raise ExperimentError("the processes of torchrun do one job together: leave --jobs out")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console, began = wide_console(120), time.perf_counter()
    out = options.out or Path("results") / options.scale
    given = Options(
        scale=options.scale,
        data=options.data_dir,
        runs=options.runs,
        out=out,
        seeds=options.all_seeds,
        only=options.only,
        placement=placement,
        train_teachers=options.train_teachers or options.experiment == "zoo",
        students_only=options.students_only,
        methods=options.methods,
        add=options.add,
        jobs=1 if together else options.processes,
        threads=options.threads,
        progress=leads and (together or options.processes == 1),
        say=(lambda line: console.print(line, highlight=False)) if leads else silent,
    )
    if whole:
        require_data(given)
    names = tuple(EXPERIMENTS) if whole else (options.experiment,)
    for name in names:
        EXPERIMENTS[name].require_notes()
    for name in names:
        torch.manual_seed(0)
        results = EXPERIMENTS[name].run(given)
        if leads:
            show(console, results)
            console.print(f"Read {out / name}.md", highlight=False)
    given.say(f"{time.perf_counter() - began:.0f} seconds in all.")
    if whole:
        given.say(f"cdeq report --results {out} puts it on one page.")
    return 0


def report(options: Report) -> int:
    from cdeq_experiments.pages import write_report
    from cdeq_experiments.registry import EXPERIMENTS

    path = options.out or options.results / "report.html"
    print(write_report(options.results, path, order=tuple(EXPERIMENTS)))
    return 0


COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "reproduce": (Reproduce, reproduce),
    "report": (Report, report),
}
"""For each command its options and what it runs."""

"""The command line: `cdeq demo`, `cdeq reproduce`. Here arguments are read, the seed is set and lines are printed."""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console

from cdeq.consistency.recipes import RecipeError
from cdeq.consistency.saving import StudentFolderError
from cdeq.experiments.options import ExperimentError
from cdeq.experiments.results import ResultsError
from cdeq.training import CheckpointError
from cdeq.trajectories import StoreError

KNOWN_ERRORS = (
    CheckpointError,
    StoreError,
    RecipeError,
    ResultsError,
    ExperimentError,
    StudentFolderError,
    ImportError,  # an extra that is not installed
    OSError,
)
"""Errors whose message is all that a user needs."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small equilibrium model on embedded data, distil it with both recipes, and compare.

    Prints one table and writes results.json, recipes.json, plots and report.html to runs/demo-<task>/.
    """

    task: Literal["images", "text", "graph"] = "images"
    """What to demonstrate on."""
    out: Path | None = None
    """Where to write; default runs/demo-<task>, with -seed<n> for a seed other than 0.
    A run cut short there is resumed."""
    seed: int = 0
    """Seed of data split, teacher and students."""
    threads: int | None = None
    """Threads to compute with; default: as many as torch chooses."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")

    @property
    def folder(self) -> Path:
        """Where everything goes; another seed has another folder."""
        seed = f"-seed{self.seed}" if self.seed else ""
        return self.out or Path("runs") / f"demo-{self.task}{seed}"


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run one of the paper's tables, with ours beside it, and write it as JSON, Markdown and PNG.

    Work that was done before is not done again; a run cut short goes on where it was.
    """

    experiment: tyro.conf.Positional[Literal["table3", "inductive"]]
    """Which: table3 (node classification), inductive (unseen nodes)."""
    scale: Literal["tiny", "small", "paper"] = "small"
    """tiny: embedded data, a minute; small: real graphs, about an hour on two cores; paper: for GPUs."""
    data_dir: Path | None = None
    """Where the data sets are; default: the environment variable CDEQ_DATA, then the user's cache folder."""
    out: Path | None = None
    """Where the table goes; default results/<scale>."""
    runs: Path = Path("runs/cells")
    """Where trainings and measurements are kept."""
    seeds: int = 3
    """How many seeds, from 0 on."""
    only: tuple[str, ...] = ()
    """Names of data sets, to run these alone."""
    jobs: int = 1
    """How many data sets and seeds are worked on at a time, each in a process of its own."""
    threads: int | None = None
    """Threads to compute with, of each process; default: as many as torch chooses, shared out."""

    def __post_init__(self) -> None:
        for name in ("threads", "seeds", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


def check_extras(task: str) -> None:
    """Refuse at once, not after minutes of training, if a package that the demo needs is missing."""
    _require("matplotlib", "matplotlib", f"the {task} demo needs", "demo")
    if task != "text":
        _require("sklearn", "scikit-learn", f"the {task} demo needs", "demo")


def _require(module: str, package: str, who: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{who} {package} ({error}): pip install 'cdeq[{extra}]'") from error


def demo(options: Demo) -> int:
    check_extras(options.task)
    from cdeq.experiments.demo import certified_line, run_demo
    from cdeq.experiments.demo_tasks import DEMO_TASKS
    from cdeq.experiments.table import results_table

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)  # wide enough for the table
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    task = DEMO_TASKS[options.task](options.seed)
    results, certified = run_demo(
        task, options.folder, seed=options.seed, progress=True, say=console.print
    )
    console.print(results_table(results, task.dataset))
    console.print(certified_line(certified), highlight=False)
    console.print(
        f"{time.perf_counter() - began:.0f} seconds in all. "
        f"Read {options.folder / 'report.html'}; figures in {options.folder}/"
    )
    return 0


def reproduce(options: Reproduce) -> int:
    for module, extra in (("matplotlib", "demo"), ("torch_geometric", "graphs")):
        _require(module, module, f"{options.experiment} needs", extra)
    if options.scale == "tiny":
        _require("sklearn", "scikit-learn", "the tiny scale needs", "demo")
    from cdeq.experiments.options import Options
    from cdeq.experiments.reproduce import EXPERIMENTS, TABLE_COUNTS
    from cdeq.experiments.table import results_table

    console = Console() if Console().is_terminal else Console(width=120)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    began = time.perf_counter()
    out = options.out or Path("results") / options.scale
    results = EXPERIMENTS[options.experiment](
        Options(
            scale=options.scale,
            data=options.data_dir,
            runs=options.runs,
            out=out,
            seeds=options.seeds,
            only=options.only,
            jobs=options.jobs,
            threads=options.threads,
            progress=True,
            say=lambda line: console.print(line, highlight=False),
        )
    )
    for dataset in results.datasets:
        console.print(
            results_table(results, dataset, ("metric", "distance", "seconds"), TABLE_COUNTS)
        )
    console.print(
        f"{time.perf_counter() - began:.0f} seconds in all. Read {out / options.experiment}.md"
    )
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `cdeq` command."""
    try:
        options = tyro.extras.subcommand_cli_from_dict(
            {"demo": Demo, "reproduce": Reproduce},
            prog="cdeq",
            description="Deep equilibrium models in a few evaluations.",
            args=arguments,
        )
        return demo(options) if isinstance(options, Demo) else reproduce(options)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except KNOWN_ERRORS as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"cdeq: {message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())

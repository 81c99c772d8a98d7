"""The command line: `cdeq demo`, `cdeq reproduce`, `cdeq generate`.

Here arguments are read, the seed is set and lines are printed.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console

from cdeq.consistency.recipes import RecipeError
from cdeq.consistency.saving import StudentFolderError
from cdeq.evaluation.results import Results, ResultsError
from cdeq.training import CheckpointError
from cdeq.trajectories import StoreError
from cdeq_experiments.options import ExperimentError

KNOWN_ERRORS = (
    CheckpointError,
    StoreError,
    RecipeError,
    ResultsError,
    ExperimentError,
    StudentFolderError,
    ImportError,  # an extra that is not installed
    FloatingPointError,  # a training that diverged
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

    experiment: tyro.conf.Positional[
        Literal[
            "table1",
            "table2",
            "table3",
            "inductive",
            "teachers",
            "residuals",
            "solvers",
            "history",
            "lambdas",
            "modules",
            "window",
            "gamma-rho",
            "beta",
            "time-map",
            "recipe",
            "updates",
            "cost",
            "overhead",
            "certified",
            "all",
        ]
    ]
    """Which: table1 (language), table2 (images), table3 (graphs), inductive (unseen nodes), teachers (of graphs), a
    figure or an ablation by name (docs/reproducing.md says what each is), or all of them."""
    scale: Literal["tiny", "small", "paper"] = "small"
    """tiny: embedded data, a minute; small: real data, one to two hours a table on two cores; paper: the
    published sizes, as configurations that were not run in full."""
    data_dir: Path | None = None
    """Where the data sets are; default: the environment variable CDEQ_DATA, then the user's cache folder."""
    out: Path | None = None
    """Where the table goes; default results/<scale>."""
    runs: Path = Path("runs/cells")
    """Where trainings and measurements are kept."""
    seeds: int | None = None
    """How many seeds, from 0 on; default 3, at the scale tiny 1."""
    only: tuple[str, ...] = ()
    """Names of data sets, to run these alone."""
    jobs: int | None = None
    """How many pieces of work (a data set and seed, a model) are done at a time, each in a process of its own; default
    1, for all at the scale tiny as many as there are cores. Under torchrun its processes share the pieces out."""
    threads: int | None = None
    """Threads to compute with, of each process; default: as many as torch chooses, shared out."""

    def __post_init__(self) -> None:
        for name in ("threads", "seeds", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Bind everything that was reproduced into one page, report.html, that opens from disk."""

    results: Path = Path("results/small")
    """The folder that `cdeq reproduce` wrote to."""
    out: Path | None = None
    """Where the page goes; default report.html in that folder."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Write text with a language model and with its student, word by word, and show how fast each is.

    The teacher solves for its equilibrium at every word, the student takes a few steps. All draw with the same
    random numbers, so that their texts can be compared. <unk>, which stands for rare words, is never drawn.
    """

    folder: tyro.conf.Positional[Path]
    """A saved student of a language model with its vocabulary.json; `cdeq reproduce table1` says where it keeps one."""
    prompt: str = ""
    """How the text begins, words separated by spaces; without it, at the beginning of a line."""
    tokens: int = 60
    """How many words to write; the end of a line counts as one."""
    steps: tuple[int, ...] = (1, 2)
    """Steps that the student takes for a word; a text is written for each."""
    tolerance: float = 1e-3
    """Relative residual to which the teacher is solved."""
    temperature: float = 1.0
    """Below 1 likely words become likelier; 0 always takes the likeliest."""
    top: int = 40
    """Draw among so many of the likeliest words."""
    seed: int = 0
    """Seed of the random numbers."""
    threads: int | None = None
    """Threads to compute with; default: as many as torch chooses."""
    json: Path | None = None
    """Also write the texts and measurements to this file."""

    def __post_init__(self) -> None:
        from cdeq.generation import check_drawing

        check_drawing(tokens=self.tokens, temperature=self.temperature, top=self.top)
        for name, value in (("threads", self.threads), *(("steps", k) for k in self.steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance must be above 0, not {self.tolerance}")


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
    from cdeq.demo.run import certified_line, run_demo
    from cdeq.demo.tasks import DEMO_TASKS
    from cdeq.evaluation.table import results_table

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


DIGITS = ("sklearn", "scikit-learn", "demo")
PLOTS = ("matplotlib", "matplotlib", "demo")
GRAPHS = ("torch_geometric", "torch_geometric", "graphs")
PICTURES = ("PIL", "pillow", "images")
NEEDED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "table1": (PLOTS,),
    "table2": (PLOTS, PICTURES, DIGITS),
    "table3": (PLOTS, GRAPHS, DIGITS),
    "inductive": (PLOTS, GRAPHS, DIGITS),
    "teachers": (PLOTS, DIGITS),
}
"""The module, package and extra that an experiment cannot do without; a figure needs what images need."""
EMBEDDED_NEED = ("sklearn",)
"""What only the embedded data of the tiny scale need."""


def reproduce(options: Reproduce) -> int:
    whole = options.experiment == "all"
    if whole and options.only:
        raise ExperimentError("--only means other things to different experiments: name one")
    wanted = (PLOTS, PICTURES, GRAPHS, DIGITS) if whole else (PLOTS, PICTURES, DIGITS)
    for module, package, extra in NEEDED.get(options.experiment, wanted):
        if options.scale == "tiny" or module not in EMBEDDED_NEED:
            _require(module, package, f"{options.experiment} needs", extra)
    from cdeq_experiments.crew import crew, crew_size, is_helper
    from cdeq_experiments.options import Options
    from cdeq_experiments.reproduce import EXPERIMENTS, require_data

    if crew_size() > 1 and options.jobs is not None:
        raise ExperimentError("torchrun says how many processes there are: leave --jobs out")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if is_helper():
        crew().serve()
        return 0
    console = Console() if Console().is_terminal else Console(width=120)
    began = time.perf_counter()
    out = options.out or Path("results") / options.scale
    given = Options(
        scale=options.scale,
        data=options.data_dir,
        runs=options.runs,
        out=out,
        seeds=options.seeds or (1 if options.scale == "tiny" else 3),
        only=options.only,
        jobs=max(jobs_of(options), crew_size()),
        threads=options.threads,
        progress=True,
        say=lambda line: console.print(line, highlight=False),
    )
    if whole:
        require_data(given)
    for name in EXPERIMENTS if whole else (options.experiment,):
        torch.manual_seed(0)
        _show(console, EXPERIMENTS[name](given), out / f"{name}.md")
    if crew_size() > 1:
        crew().dismiss()
    console.print(f"{time.perf_counter() - began:.0f} seconds in all.")
    if whole:
        console.print(f"cdeq report --results {out} binds it into one page.", highlight=False)
    return 0


def jobs_of(options: Reproduce) -> int:
    """Pieces of the tiny scale are too small for more than a thread each."""
    if options.jobs is not None:
        return options.jobs
    return (os.cpu_count() or 1) if (options.experiment, options.scale) == ("all", "tiny") else 1


def _show(console: Console, results: Results, page: Path) -> None:
    """A table in the terminal; of a figure or an ablation what its page says first."""
    from cdeq.evaluation.table import results_table
    from cdeq_experiments.reproduce import TABLE_COUNTS

    counts = TABLE_COUNTS.get(results.experiment)
    if counts is not None:
        for dataset in results.datasets:
            quantities = ("metric", "distance", "seconds")
            console.print(results_table(results, dataset, quantities, counts))
    else:
        head = page.read_text(encoding="utf-8").partition("\n## ")[0]
        for line in head.splitlines():
            if line.startswith("- "):
                console.print(line, highlight=False, markup=False)
    console.print(f"Read {page}")


def report(options: Report) -> int:
    from cdeq_experiments.binder import write_binder
    from cdeq_experiments.reproduce import EXPERIMENTS

    path = options.out or options.results / "report.html"
    try:
        print(write_binder(options.results, path, order=tuple(EXPERIMENTS)))
    except ValueError as error:
        raise ExperimentError(str(error)) from None
    return 0


def generate(options: Generate) -> int:
    try:
        return _generate(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _generate(options: Generate) -> int:
    from cdeq import generation as texts
    from cdeq.evaluation.results import write_measurements

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # words that the terminal has no letters for
    student, teacher, vocabulary = texts.load_text_student(options.folder)
    prompt, unknown = texts.prompt_tokens(vocabulary, options.prompt)
    if unknown:
        words = ", ".join(texts.shown(word) for word in unknown)
        print(f"cdeq: not in the vocabulary, read as <unk>: {words}", file=sys.stderr)

    def write(advance: texts.Advance, tokens: int) -> Iterator[texts.Generated]:
        return texts.generate(
            advance,
            teacher,
            prompt,
            tokens=tokens,
            temperature=options.temperature,
            top=options.top,
            excluded=texts.never_drawn(vocabulary),
            generator=torch.Generator().manual_seed(options.seed),
        )

    methods: dict[int | None, texts.Advance] = {
        None: texts.teacher_advance(teacher, tol=options.tolerance)
    }
    methods |= {k: texts.student_advance(student, k) for k in options.steps}
    for advance in methods.values():
        list(write(advance, 2))  # the first words of a process are slow
    console = Console() if Console().is_terminal else Console(width=100)
    writings = []
    for steps, advance in methods.items():
        console.rule(texts.method_name(steps), align="left")
        drawn = []
        given = prompt.tolist() if options.prompt.strip() else []
        _print_words(texts.shown(vocabulary.words[token]) for token in given)
        for one in write(advance, options.tokens):
            drawn.append(one)
            _print_words([texts.shown(vocabulary.words[one.token])])
        print("\n")
        writings.append(texts.Writing.of(steps, drawn))
    console.print(texts.writings_table(writings))
    if writings[0].unconverged:
        console.print(
            f"At {writings[0].unconverged} of {options.tokens} tokens the teacher did not reach "
            f"a residual of {options.tolerance:g}."
        )
    if options.json is not None:
        about = asdict(options)
        about = {name: about[name] for name in about if name not in ("folder", "json", "threads")}
        rows = [one.row(writings[0], vocabulary) for one in writings]
        write_measurements(options.json, rows, folder=str(options.folder), **about)
    return 0


def _print_words(words: Iterable[str]) -> None:
    """Words as soon as they are known, so that the speed can be seen."""
    for word in words:
        print(word, end="" if word == "\n" else " ", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `cdeq` command."""
    try:
        options = tyro.extras.subcommand_cli_from_dict(
            {"demo": Demo, "reproduce": Reproduce, "report": Report, "generate": Generate},
            prog="cdeq",
            description="Deep equilibrium models in a few evaluations.",
            args=arguments,
        )
        run = {Demo: demo, Reproduce: reproduce, Report: report, Generate: generate}
        return run[type(options)](options)  # type: ignore[operator]
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except KNOWN_ERRORS as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"cdeq: {message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())

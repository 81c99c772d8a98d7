"""The command line: `cdeq demo`, `generate` and `export`; with the experiments `cdeq reproduce` and `report` too.

Here arguments are read, the seed is set and lines are printed.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console

import cdeq
from cdeq.consistency.recipes import RecipeError
from cdeq.consistency.saving import StudentFolderError
from cdeq.evaluation.results import ResultsError
from cdeq.export import ExportError
from cdeq.generation import GenerationError, check_drawing
from cdeq.placement import Placement, PlacementError, Precision, moved
from cdeq.training import CheckpointError
from cdeq.trajectories import StoreError
from cdeq.zoo import ZooError

KNOWN_ERRORS: tuple[type[Exception], ...] = (
    CheckpointError,
    StoreError,
    RecipeError,
    ResultsError,
    StudentFolderError,
    GenerationError,
    ZooError,
    ExportError,
    PlacementError,
    ImportError,  # an extra that is not installed
    FloatingPointError,  # a training that diverged
    OSError,
)
"""Errors whose message is all that a user needs."""

EXPERIMENTS = "cdeq_experiments"
"""The second package of the repository, which brings the commands `reproduce` and `report`."""
PIPE_CLOSED = 141
"""What a shell reports of a program whose reader went away (128 + SIGPIPE)."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Options of all commands that compute."""

    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, mps, or another device that torch has here."""
    precision: Precision = "fp32"
    """Of products inside models; with bf16 or fp16 weights, states and residuals stay in single precision."""

    def placement(self, *, training: bool) -> Placement:
        """Both, checked before anything is computed; fp16 is no precision to train in on a CPU."""
        return Placement.of(None, self.device, self.precision, training=training)


@dataclass(frozen=True, kw_only=True)
class Demo(Placed):
    """Train a small equilibrium model on embedded data, distil it with four recipes, and compare.

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
        check_counts(threads=self.threads)

    @property
    def folder(self) -> Path:
        """Where everything goes; another seed has another folder."""
        seed = f"-seed{self.seed}" if self.seed else ""
        return self.out or Path("runs") / f"demo-{self.task}{seed}"


@dataclass(frozen=True, kw_only=True)
class Generate(Placed):
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
    cache: bool = True
    """Keep keys and values from word to word; without it the text is the same, to rounding, and slower."""
    threads: int | None = None
    """Threads to compute with; default: as many as torch chooses."""
    json: Path | None = None
    """Also write the texts and measurements to this file."""

    def __post_init__(self) -> None:
        check_drawing(tokens=self.tokens, temperature=self.temperature, top=self.top)
        check_counts(threads=self.threads, steps=min(self.steps, default=None))
        if not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance must be above 0, not {self.tolerance}")


@dataclass(frozen=True, kw_only=True)
class Zoo:
    """List the pretrained models, or show the card of one: data, training, scores, depth."""

    name: tyro.conf.Positional[str | None] = None
    """Which; without it, all of them."""
    folder: Path | None = None
    """Where they are; default: the environment variable CDEQ_ZOO, then zoo/ of the repository."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a student's first steps as a file that runs without cdeq: ONNX, or torch's .pt2.

    From an input to its output and the teacher's residual there, for any number of samples.
    """

    folder: tyro.conf.Positional[Path]
    """A saved student, such as runs/demo-images/student-corrected."""
    out: Path = Path("student.onnx")
    """The file to write; .onnx or .pt2 says the format."""
    steps: int = 2
    """Evaluations of f that the student takes."""
    check: bool = True
    """Measure the residual of the output, which is one more evaluation."""
    certified: bool = False
    """Also write the teacher's step, to NAME.step.onnx, so that a solve can be finished elsewhere."""


def check_counts(**counts: int | None) -> None:
    """Refuse a count below 1; None was not given."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def require_package(module: str, package: str, who: str, extra: str) -> None:
    """Refuse at once, not after minutes of training, if a package of an extra is missing."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{who} needs {package} ({error}): pip install 'cdeq[{extra}]'"
        ) from error


def wide_console(width: int) -> Console:
    """The terminal as it is; elsewhere wide enough for tables."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def demo(options: Demo) -> int:
    require_package("matplotlib", "matplotlib", f"the {options.task} demo", "demo")
    require_package("jinja2", "jinja2", f"the {options.task} demo", "demo")
    if options.task != "text":
        require_package("sklearn", "scikit-learn", f"the {options.task} demo", "demo")
    from cdeq.demo.run import run_demo
    from cdeq.demo.tasks import DEMO_TASKS

    console, placement = wide_console(100), options.placement(training=True)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    task = DEMO_TASKS[options.task](options.seed)
    results = run_demo(
        task,
        options.folder,
        seed=options.seed,
        placement=placement,
        progress=True,
        say=console.print,
    )
    console.print(results.table())
    console.print(results.findings[-1], highlight=False)  # the certified solve
    console.print(
        f"{time.perf_counter() - began:.0f} seconds in all. "
        f"Read {options.folder / 'report.html'}; plots in {options.folder}/"
    )
    return 0


def generate(options: Generate) -> int:
    try:
        return _generate(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _generate(options: Generate) -> int:
    from cdeq import generation
    from cdeq.evaluation.environment import write_measurements

    placement = options.placement(training=False)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # words that the terminal has no characters for
    student, teacher, vocabulary = generation.load_text_student(options.folder)
    student.to(placement.device)
    prompt, unknown = generation.prompt_tokens(vocabulary, options.prompt)
    prompt = moved(prompt, placement.device)
    if unknown:
        words = ", ".join(generation.printable(word) for word in unknown)
        print(f"cdeq: not in the vocabulary, read as <unk>: {words}", file=sys.stderr)

    def write(reader: generation.Reader, tokens: int) -> Iterator[generation.DrawnToken]:
        return generation.generate(
            reader,
            teacher,
            prompt,
            tokens=tokens,
            temperature=options.temperature,
            top=options.top,
            excluded=generation.excluded_tokens(vocabulary),
            generator=torch.Generator().manual_seed(options.seed),
        )

    readers: dict[int | None, generation.Reader] = {
        None: generation.teacher_reader(teacher, tol=options.tolerance, cache=options.cache)
    }
    readers |= {
        k: generation.student_reader(student, k, cache=options.cache) for k in options.steps
    }
    for reader in readers.values():
        with placement.computing():
            list(write(reader, 2))  # the first words of a process are slow
    console = wide_console(100)
    texts = []
    for steps, reader in readers.items():
        console.rule(generation.method_name(steps), align="left")
        drawn = []
        given = prompt.tolist() if options.prompt.strip() else []
        _print_words(generation.printable(vocabulary.words[token]) for token in given)
        with placement.computing():
            for one in write(reader, options.tokens):
                drawn.append(one)
                _print_words([generation.printable(vocabulary.words[one.token])])
        print("\n")
        texts.append(generation.GeneratedText.of(steps, drawn))
    console.print(generation.speed_table(texts))
    if texts[0].unconverged:
        console.print(
            f"At {texts[0].unconverged} of {options.tokens} tokens the teacher did not reach "
            f"a residual of {options.tolerance:g}."
        )
    if options.json is not None:
        about = asdict(options)
        about = {name: about[name] for name in about if name not in ("folder", "json", "threads")}
        rows = [one.row(texts[0], vocabulary) for one in texts]
        write_measurements(options.json, rows, folder=str(options.folder), **about)
    return 0


def export(options: Export) -> int:
    from cdeq.consistency.deployment import example_of, ready_to_compute

    student = ready_to_compute(cdeq.Student.load(options.folder))
    written = student.export(
        options.out,
        example_of(student),
        options.steps,
        check=options.check,
        certified=options.certified,
    )
    for path in written:
        print(f"wrote {path}, {path.stat().st_size / 1e6:.1f} MB")
    return 0


def _print_words(words: Iterable[str]) -> None:
    """Words as soon as they are known, so that the speed can be seen."""
    for word in words:
        print(word, end="" if word == "\n" else " ", flush=True)


def zoo(options: Zoo) -> int:
    from cdeq.evaluation.cards import card_table, zoo_table
    from cdeq.zoo import Card, pretrained_folder, pretrained_models, zoo_folder

    console = wide_console(110)
    if options.name is not None:
        console.print(card_table(Card.read(pretrained_folder(options.name, options.folder))))
        return 0
    cards = pretrained_models(options.folder)
    if not cards:
        raise ZooError(
            f"no pretrained models in {zoo_folder(options.folder)}: set CDEQ_ZOO to the zoo/ of a checkout"
        )
    console.print(zoo_table(cards))
    return 0


Commands = dict[str, tuple[type, Callable[[Any], int]]]
"""For each command its options and what it runs."""


def commands() -> tuple[Commands, tuple[type[Exception], ...]]:
    """All commands that are installed, and the errors of theirs whose message is all that a user needs."""
    own: Commands = {
        "demo": (Demo, demo),
        "generate": (Generate, generate),
        "export": (Export, export),
        "zoo": (Zoo, zoo),
    }
    try:
        installed = importlib.util.find_spec(f"{EXPERIMENTS}.cli") is not None
    except ModuleNotFoundError:
        installed = False
    if not installed:
        return own, KNOWN_ERRORS
    more: Commands = importlib.import_module(f"{EXPERIMENTS}.cli").COMMANDS
    error = importlib.import_module(f"{EXPERIMENTS}.options").ExperimentError
    return {"demo": own.pop("demo"), **more, **own}, (*KNOWN_ERRORS, error)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `cdeq` command."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            return _run(given or ["--help"])
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # now: at the interpreter's end a closed pipe would be reported
    except BrokenPipeError:  # the reader of our output, `head` for example, has gone
        with suppress(OSError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"cdeq {cdeq.__version__}")
        return 0
    known, errors = commands()
    if arguments[0] in ("reproduce", "report") and arguments[0] not in known:
        print(
            f"cdeq: `{arguments[0]}` needs the experiments, which are not part of this package: "
            "`pip install ./experiments` in a checkout of the repository",
            file=sys.stderr,
        )
        return 2
    try:
        options = tyro.extras.subcommand_cli_from_dict(
            {name: kind for name, (kind, _) in known.items()},
            prog="cdeq",
            description="Deep equilibrium models in a few evaluations. `cdeq --version` prints the version.",
            args=arguments,
        )
        run = next(run for kind, run in known.values() if isinstance(options, kind))
        return run(options)
    except KeyboardInterrupt:
        print("interrupted; the same command resumes here", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except errors as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"cdeq: {message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())

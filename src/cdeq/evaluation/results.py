"""What every experiment leaves behind: one JSON file, the same fields for all of them.

A metric that lies between 0 and 1 (accuracy, F1) is kept as a fraction. A number that is not
finite, from a solver that diverged, is kept as None: JSON has no NaN.
"""

import json
import math
import numbers
import os
import platform
import shlex
import subprocess
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch

from cdeq.files import atomic_write_text


class ResultsError(ValueError):
    """A field of the results is unknown, missing, or of the wrong type; the message names it."""


@dataclass(frozen=True, kw_only=True)
class TeacherResult:
    """The converged teacher: what every other method is measured against."""

    dataset: str
    name: str
    parameters: int
    metric_name: str
    metric: float | None
    higher_is_better: bool
    steps: float | None
    """Steps the teacher's own solver took to converge (the mean, where samples differ)."""
    residual: float | None
    train_seconds: float | None

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method at one step count."""

    dataset: str
    seed: int
    method: str
    steps: int | None
    """Evaluations of the equilibrium map; None for an explicit model, which has no such map."""
    metric: float | None
    distance: float | None
    """Relative distance to the teacher's equilibrium."""
    residual: float | None
    """|f(z) - z| / |z| under the teacher's map."""
    seconds: float | None
    """Median seconds a batch."""
    f_equivalents: float | None
    """Total cost in units of one teacher step."""
    parameters: int
    train_seconds: float | None = None
    """What its own training took, beside its teacher's; None where nothing was trained or nobody kept the time."""
    top5: float | None = None
    """Share of images whose class is among the five likeliest; None for other metrics."""
    figures: dict[str, float] = field(default_factory=dict)
    """Further measurements, by a name that says the unit."""
    published: dict[str, float] = field(default_factory=dict)
    """What the paper reports at the same place: metric, seconds, top5."""

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that an experiment measured, and how."""

    experiment: str
    scale: str
    commit: str
    command: str
    hardware: dict[str, Any] | str
    teachers: tuple[TeacherResult, ...]
    rows: tuple[Row, ...]
    findings: tuple[str, ...] = ()
    """Sentences computed from the rows."""
    page: dict[str, Any] = field(default_factory=dict)
    """How it is laid out for a reader: title, notes, evaluations shown."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "findings", tuple(self.findings))
        object.__setattr__(self, "teachers", tuple(self.teachers))
        object.__setattr__(self, "rows", tuple(self.rows))
        _check_fields(self)
        for name, items, kind in (
            ("teachers", self.teachers, TeacherResult),
            ("rows", self.rows, Row),
        ):
            for i, item in enumerate(items):
                if not isinstance(item, kind):
                    raise ResultsError(f"{name}[{i}]: expected {kind.__name__}, got {item!r}")
        known = set(self.datasets)
        seen: set[tuple[object, ...]] = set()
        for i, row in enumerate(self.rows):
            key = (row.dataset, row.seed, row.method, row.steps)
            if row.dataset not in known:
                raise ResultsError(f"rows[{i}].dataset: no teacher has dataset {row.dataset!r}")
            if key in seen:
                raise ResultsError(
                    f"rows[{i}]: a second row for (dataset, seed, method, steps) {key}"
                )
            seen.add(key)

    @property
    def datasets(self) -> list[str]:
        """The datasets, in the order of their teachers."""
        return list(dict.fromkeys(teacher.dataset for teacher in self.teachers))

    def teacher(self, dataset: str, name: str | None = None) -> TeacherResult:
        """The teacher of a dataset, the first unless named; the mean, where it was trained with several seeds."""
        same = [teacher for teacher in self.teachers if teacher.dataset == dataset]
        if not same:
            raise KeyError(f"no teacher has dataset {dataset!r}; there are {self.datasets}")
        same = [teacher for teacher in same if teacher.name == (name or same[0].name)]
        if not same:
            raise KeyError(f"no teacher of dataset {dataset!r} is called {name!r}")
        means = {
            name: mean([getattr(teacher, name) for teacher in same])
            for name in ("metric", "steps", "residual", "train_seconds")
        }
        return replace(same[0], **means)  # type: ignore[arg-type]

    def rows_of(self, dataset: str) -> list[Row]:
        """The rows of one dataset, in the order measured."""
        return [row for row in self.rows if row.dataset == dataset]

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write to `path`, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(asdict(self)), indent=1, allow_nan=False, ensure_ascii=False)
        atomic_write_text(path, text + "\n")
        return path

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `to_json` wrote. Raises `ResultsError`, naming the field, on anything else."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ResultsError(f"{path}: not JSON: {error}") from error
        try:
            data = _checked_names(cls, data, "")
            for name, kind in (("teachers", TeacherResult), ("rows", Row)):
                if not isinstance(data[name], list):
                    raise ResultsError(f"{name}: expected a list, got {data[name]!r}")
                data[name] = [
                    _build(kind, item, f"{name}[{i}]") for i, item in enumerate(data[name])
                ]
            return cls(**data)
        except ResultsError as error:
            raise ResultsError(f"{path}: {error}") from error


def provenance(parts: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """The commit, command and hardware of this process: what every measurement is kept with.

    Of a result that is put together from `parts`, their commits and commands come first.
    """
    found = list(parts)
    return {
        "commit": joined([*(part["commit"] for part in found), current_commit()]),
        "command": joined([*(part["command"] for part in found), current_command()]),
        "hardware": current_hardware(),
    }


def joined(names: Iterable[str]) -> str:
    """The commits, or the commands, that made a result in several runs, each once."""
    return " and ".join(dict.fromkeys(names))


def mean(values: Sequence[float | None]) -> float | None:
    """The mean, or None if any value is missing: a seed that diverged is not averaged away."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present and len(present) == len(values) else None


def _build(kind: type, data: object, where: str) -> Any:
    data = _checked_names(kind, data, where)
    try:
        return kind(**data)
    except ResultsError as error:
        raise ResultsError(f"{where}.{error}") from error


def _checked_names(kind: type, data: object, where: str) -> dict[str, Any]:
    place = where or "top level"
    if not isinstance(data, dict):
        raise ResultsError(f"{place}: expected an object, got {type(data).__name__}")
    names = [f.name for f in fields(kind)]
    for name in data:
        if name not in names:
            raise ResultsError(f"{place}: unknown field {name!r}; known: {', '.join(names)}")
    for f in fields(kind):
        # A field with a default was added later: older files lack it.
        needed = f.default is MISSING and f.default_factory is MISSING
        if f.name not in data and needed:
            raise ResultsError(f"{place}: missing field {f.name!r}")
    return dict(data)


def _check_fields(item: Any) -> None:
    hints = typing.get_type_hints(type(item))
    for f in fields(item):
        hint = hints[f.name]
        value = _converted(getattr(item, f.name), hint, f.name)
        object.__setattr__(item, f.name, value)


def _converted(value: Any, hint: Any, name: str) -> Any:
    """`value` as its declared type: numbers become plain int or float, NaN and inf None."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        origin = typing.get_origin(kind) or kind
        number = not isinstance(value, bool)
        if origin is float and number and isinstance(value, numbers.Real):
            return float(value) if math.isfinite(value) else None
        if origin is int and number and isinstance(value, numbers.Integral):
            return int(value)
        if origin not in (int, float) and isinstance(value, origin):
            return value
    expected = str(hint) if len(kinds) > 1 else kinds[0].__name__
    raise ResultsError(f"{name}: expected {expected}, got {value!r}")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def current_commit(folder: str | os.PathLike[str] | None = None) -> str:
    """The commit checked out in `folder`, "-dirty" if tracked files changed, or "unknown".

    Without a folder, the commit of cdeq's own source; its version, if it is installed as a package.
    """
    if folder is None:
        here = Path(__file__)
        return _commit(here.parent, here.name) or f"cdeq {version('cdeq')}"
    return _commit(folder) or "unknown"


def _commit(folder: str | os.PathLike[str], tracked: str = ".") -> str | None:
    """The commit, if git knows the folder and the file there."""
    try:
        if not _git(folder, "ls-files", tracked):
            return None
        commit = _git(folder, "rev-parse", "--verify", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(folder: str | os.PathLike[str], *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


FOLDERS = ("--out", "--runs", "--data-dir")
"""Options that say where things are."""


def current_command(argv: Sequence[str] | None = None) -> str:
    """The command line as a person would type it: `cdeq demo --task images`.

    Without the folders of this machine, which nobody else has and no figure depends on.
    """
    program, *arguments = sys.argv if argv is None else argv
    path = Path(program)
    if path.name in ("__main__.py", "cli.py") and path.parent.name == "cdeq":
        head = ["cdeq"]
    elif path.suffix == ".py":
        head = ["python", path.name]
    else:
        head = [path.name]
    kept = [
        argument
        for before, argument in pairwise(["", *arguments])
        if not {argument.partition("=")[0], before} & set(FOLDERS)
    ]
    return shlex.join([*head, *kept])


def write_measurements(
    path: str | os.PathLike[str], rows: list[dict[str, Any]], **about: Any
) -> Path:
    """Write the rows of a benchmark with the command, commit and hardware that they depend on."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "command": current_command(),
        "commit": current_commit(),
        "hardware": current_hardware(),
        **about,
        "rows": rows,
    }
    atomic_write_text(path, json.dumps(_finite(found), indent=1, allow_nan=False) + "\n")
    return path


def current_hardware() -> dict[str, Any]:
    """The machine and how loaded it is now: what the seconds in the results depend on."""
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "load_average": [round(x, 2) for x in os.getloadavg()]
        if hasattr(os, "getloadavg")
        else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpus"] = torch.cuda.device_count()
    return found


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None

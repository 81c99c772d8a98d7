"""What a comparison leaves behind: rows, and how they were made, as one JSON file.

A metric that lies between 0 and 1 (accuracy, F1) is kept as a fraction. A number that is not
finite, from a solver that diverged, is kept as None: JSON has no NaN.
"""

import json
import math
import numbers
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cdeq.evaluation.plain import json_text
from cdeq.files import atomic_write_text

if TYPE_CHECKING:
    from rich.table import Table


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
    converged: float | None = None
    """Share of the test samples with a residual of at most 1e-3; None where it was not measured."""
    seed: int = 0

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
    """Median seconds for one batch."""
    f_equivalents: float | None
    """Cost in steps: everything from input to output, in units of one teacher step."""
    parameters: int
    train_seconds: float | None = None
    """What its own training took, beside its teacher's; None where nothing was trained, or no time was kept."""
    top5: float | None = None
    """Share of images whose class is among the five likeliest; None where it was not measured."""
    figures: dict[str, float] = field(default_factory=dict)
    """Further measurements, by a name that says the unit."""
    published: dict[str, float] = field(default_factory=dict)
    """What the paper reports at the same place: metric, seconds, top5."""

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured, and how."""

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

    def table(self, dataset: str | None = None) -> "Table":
        """Methods by step counts, for `rich.print` or a notebook; of the first dataset unless named."""
        from cdeq.evaluation.table import results_table

        return results_table(self, dataset or self.datasets[0])

    def plot(self, folder: str | os.PathLike[str], dataset: str | None = None) -> list[Path]:
        """Score, distance and residual against steps and seconds, as PNG and SVG files; needs matplotlib."""
        from cdeq.evaluation.plot import plot_results

        return plot_results(self, dataset or self.datasets[0], folder)

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write to `path`, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json_text(asdict(self)))
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
            for name in ("teachers", "rows", "findings"):
                if not isinstance(data.get(name, []), list):
                    raise ResultsError(f"{name}: expected a list, got {data[name]!r}")
            for name, kind in (("teachers", TeacherResult), ("rows", Row)):
                items = enumerate(data[name])
                data[name] = [_build(kind, item, f"{name}[{i}]") for i, item in items]
            return cls(**data)
        except ResultsError as error:
            raise ResultsError(f"{path}: {error}") from error


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

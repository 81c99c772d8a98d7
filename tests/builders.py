"""What many tests build: results written by hand, options of experiments, runs that are cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdeq.evaluation import Results, Row, TeacherResult

if TYPE_CHECKING:
    from cdeq_experiments.options import Options

DATASET = "Blocks"


def row(
    method: str = "picard", steps: int | None = 1, metric: float | None = 0.5, **fields: Any
) -> Row:
    """One row of results; `steps` is None for an explicit model."""
    usual = {
        "dataset": DATASET,
        "seed": 0,
        "distance": None,
        "residual": None,
        "seconds": 0.1,
        "f_equivalents": None,
        "parameters": 10,
    }
    return Row(method=method, steps=steps, metric=metric, **(usual | fields))


def teacher_result(dataset: str = DATASET, **fields: Any) -> TeacherResult:
    """A converged teacher with accuracy 0.8."""
    usual = {
        "name": "IGNN",
        "parameters": 10,
        "metric_name": "accuracy",
        "metric": 0.8,
        "higher_is_better": True,
        "steps": 20,
        "residual": 1e-4,
        "train_seconds": 3.0,
    }
    return TeacherResult(dataset=dataset, **(usual | fields))


def results(*rows: Row, teachers: Iterable[TeacherResult] | None = None, **fields: Any) -> Results:
    """Results with these rows; without `teachers`, one for each data set that the rows name."""
    if teachers is None:
        datasets = dict.fromkeys(row.dataset for row in rows) or (DATASET,)
        teachers = map(teacher_result, datasets)
    usual = {
        "experiment": "table3",
        "scale": "tiny",
        "commit": "abc123",
        "command": "cdeq reproduce table3",
        "hardware": {"cpu": "a processor", "memory_gb": 4.0, "load_average": [0.5, 1.0, 2.0]},
    }
    return Results(teachers=tuple(teachers), rows=rows, **(usual | fields))


def options(folder: Path, **fields: Any) -> Options:
    """Options of an experiment: the tiny scale, one seed, no data, all that it writes in `folder`."""
    from cdeq_experiments.options import Options

    usual = {
        "scale": "tiny",
        "data": folder / "no-data",
        "runs": folder / "runs",
        "out": folder / "out",
        "seeds": (0,),
    }
    return Options(**(usual | fields))


class Cut(Exception):
    """What ends a run before its time."""


def cut_at(count: int) -> Callable[..., None]:
    """A `progress` that ends the run when this many updates, or batches, are done."""

    def progress(done: int, *rest: object) -> None:
        if done == count:
            raise Cut

    return progress


def cut_after(data: Iterable[Any], count: int) -> Iterator[Any]:
    """A loader that ends the run when asked for more than `count` batches."""
    for i, batch in enumerate(data):
        if i == count:
            raise Cut
        yield batch


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, byte for byte."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}

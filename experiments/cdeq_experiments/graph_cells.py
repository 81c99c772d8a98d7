"""One graph with one seed at a time: trained, measured, kept, and the table written anew after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cdeq.evaluation import Training
from cdeq.evaluation import (
    Results,
    Row,
    TeacherResult,
    joined,
    provenance,
)
from cdeq.training.log import ProgressBar
from cdeq_experiments.cells import Cells
from cdeq_experiments.graph_tasks import SCALES, GraphPlan
from cdeq_experiments.options import ExperimentError, Options
from cdeq_experiments.workers import worked


@dataclass(frozen=True, kw_only=True)
class GraphCell:
    """A graph, a seed, and the folders of what is trained on them."""

    plan: GraphPlan
    seed: int
    options: Options

    def place(self, name: str, config: dict[str, Any] | None = None) -> Path:
        """The folder of one training on this graph with this seed."""
        whole = {"plan": self.plan, "seed": self.seed, **(config or {})}
        return Cells(self.options.runs).place(f"{self.plan.name}-{name}", whole)

    def bar(self, title: str) -> AbstractContextManager[ProgressBar | None]:
        return self.options.bar(f"{self.plan.title}, seed {self.seed}: {title}")

    def say(self, what: str, metric: float | None = None, training: Training | None = None) -> None:
        """A line about what is done."""
        line = f"{self.plan.title}, seed {self.seed}: {what}"
        if metric is not None:
            line += f", {100 * metric:.1f}% converged"
        if training is not None and training.seconds is not None:
            line += f", trained in {training.seconds:.0f} s"
        self.options.say(line)


Measured = tuple[list[Row], list[TeacherResult]]


def run_graphs(
    experiment: str,
    plans: Sequence[GraphPlan],
    options: Options,
    measure: Callable[[GraphCell], Measured],
    config: dict[str, Any],
    write: Callable[[Results], object],
) -> Results:
    """Measure each graph with each seed, once; `config` is what the measurement depends on beside them.

    All graphs come with one seed before the next, and the table is written after each, so that a run cut short has
    something of everything.
    """
    for plan in plans:
        plan.require(options.data)  # a missing file is found before hours of training
    cells = [
        GraphCell(plan=plan, seed=seed, options=options)
        for seed in range(options.seeds)
        for plan in plans
    ]
    work = partial(_result, experiment, measure, config)
    parts: list[dict[str, Any]] = []
    quiet = (
        [replace(cell, options=options.quiet()) for cell in cells] if options.jobs > 1 else cells
    )
    for cell, found in zip(cells, worked(work, quiet, options), strict=True):
        if options.jobs > 1:
            cell.say("done")
        parts.append(found)
        write(_gathered(experiment, options.scale, parts))
    return _gathered(experiment, options.scale, parts)


def _result(
    experiment: str,
    measure: Callable[[GraphCell], Measured],
    config: dict[str, Any],
    cell: GraphCell,
) -> dict[str, Any]:
    """What a cell measured, now or before."""
    whole = {"plan": cell.plan, "seed": cell.seed, **config}
    cells = Cells(cell.options.runs)
    return cells.result(f"{cell.plan.name}-{experiment}", whole, partial(_measured, measure, cell))


def _measured(measure: Callable[[GraphCell], Measured], cell: GraphCell) -> dict[str, Any]:
    """What a cell keeps, as plain JSON."""
    rows, teachers = measure(cell)
    return {
        "rows": [asdict(row) for row in rows],
        "teachers": [asdict(teacher) for teacher in teachers],
        **provenance(),
    }


def _gathered(experiment: str, scale: str, parts: list[dict[str, Any]]) -> Results:
    """The cells as one; datasets in the order of the first seed."""
    return Results(
        experiment=experiment,
        scale=scale,
        commit=joined(part["commit"] for part in parts),
        command=joined(part["command"] for part in parts),
        hardware=parts[-1]["hardware"],
        teachers=tuple(TeacherResult(**t) for part in parts for t in part["teachers"]),
        rows=tuple(Row(**row) for part in parts for row in part["rows"]),
    )


def plans_of(options: Options) -> list[GraphPlan]:
    """The graphs of a scale: those named, or all; ogbn-arxiv at the small scale only if its files are there."""
    known = SCALES[options.scale]
    unknown = sorted(set(options.only) - {plan.name for plan in known})
    if unknown:
        there = ", ".join(plan.name for plan in known)
        raise ExperimentError(f"no graph {', '.join(unknown)} at this scale; there are {there}")
    if options.only:
        return [plan for plan in known if plan.name in options.only]
    return [plan for plan in known if not plan.optional or plan.is_available(options.data)]

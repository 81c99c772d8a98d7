"""Where to spend a given time: on a start network, a leap, a correction, or one more evaluation?

    python bench/frontier.py [--tasks images text graph] [--tables results/small/table1.json ...] [--json FILE]
    python bench/frontier.py --exported --no-variants  # the same methods as ONNX files, under onnxruntime

For each demo task one teacher; students of the recipes `warm_start`, `anchored` and `corrected` as the demo has them,
`corrected` with a leap, and `warm_start` and `corrected` with start networks of a fraction and of a multiple of the
usual size. Distances at 0 (a student's start alone) to 12 evaluations, and the median seconds of each, all methods in
turns in one run. The table shows, for the time that Picard takes for k evaluations, how near each method comes in it;
a line below it, how `corrected` stands beside the best of the others over all these times. `--tables` shows the same
for tables that `cdeq reproduce` has written. Eager, calling a function of so small a map costs as much as what it
computes; `--exported` times what is deployed: each method at each count as a file of its own, the plain solvers too.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

from cdeq import Student, distill
from cdeq.consistency.recipes import Recipe
from cdeq.demo.run import train_teacher
from cdeq.demo.task import Task
from cdeq.demo.tasks import DEMO_TASKS
from cdeq.evaluation import (
    SOLVERS,
    Method,
    Results,
    compare,
    find_equilibria,
    median_times,
    provenance,
    solver_method,
    student_method,
    teacher_result,
    within_time,
)
from cdeq.evaluation.plot import INK, SETTINGS, draw_panel, legend_of, require_matplotlib
from cdeq.evaluation.table import curves
from cdeq.models.graph.start import PropagatedStart
from cdeq.models.text.transformer import CausalConvStart
from cdeq.models.vision.conv import ConvStart
from common import Measurement, Options, markdown_table
from subjects import named_inputs, session_of

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before onnxruntime is imported

COUNTS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12)
SHOWN = (1, 2, 3, 5, 8, 12)
COLUMNS = 3
"""Panels beside each other."""
STARTS: dict[str, dict[str, Callable[[Any], nn.Module]]] = {
    "images": {
        "small start": lambda config: ConvStart(config["channels"], kernel=1),
        "large start": lambda config: ConvStart(config["channels"], kernel=9),
    },
    "text": {
        "small start": lambda config: CausalConvStart(config["width"], kernel=1),
        "large start": lambda config: CausalConvStart(config["width"], kernel=8),
    },
    "graph": {
        "small start": lambda config: PropagatedStart(config["width"], inner=8, hops=2),
        "large start": lambda config: PropagatedStart(config["width"], inner=32, hops=12),
    },
}
"""Start networks that are not the usual ones, for each task, from the teacher's arguments."""


@dataclass(frozen=True, kw_only=True)
class FrontierOptions(Options):
    tasks: tuple[str, ...] = tuple(DEMO_TASKS)
    """Demo tasks to run."""
    tables: tuple[Path, ...] = ()
    """Results of tables that are shown too; each has its own commit and hardware."""
    runs: Path = Path("runs/bench/frontier")
    """Where trained teachers are kept."""
    variants: bool = True
    """With a leap and other start networks, beside the recipes as they are."""
    exported: bool = False
    """Time ONNX files under onnxruntime, not eager models."""


def plain_student(teacher: Any, x: Any, **history: Any) -> Student:
    """A plain solver from the teacher's start, as a student that learns nothing: so it can be exported."""
    recipe = Recipe(name="plain", schedule="leap", leap=0, start="teacher", **history)
    return Student.for_example(teacher, recipe, x).eval()


@torch.no_grad()
def exported_seconds(
    students: dict[str, Student], x: Any, repeats: int, threads: int
) -> dict[tuple[str, int], float]:
    """Median seconds from input to output for each student and count, all in turns."""
    arrays = {name: tensor.numpy() for name, tensor in named_inputs(x).items()}
    works: dict[Any, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, student in students.items():
            for count in COUNTS[1:]:
                path = Path(folder) / f"{len(works)}.onnx"
                student.export(path, x, count, check=False)
                run = session_of(path, threads).run
                works[name, count] = lambda run=run: lambda: run(None, arrays)
        return {key: times[0] for key, times in median_times(works, repeats).items()}


def students(task: Task, teacher: Any, variants: bool) -> dict[str, Student]:
    """All students that are compared, by name."""
    made: dict[str, Student] = {}

    def add(name: str, recipe: str, start: nn.Module | None = None, **changes: Any) -> None:
        config = task.students[recipe]
        made[name] = distill(
            teacher,
            task.distilling,
            recipe=Recipe.from_name(recipe, **{**config.changes, **changes}),
            fit=config.fit,
            max_steps=task.distill_steps,
            tol=task.distill_tol,
            start_network=start,
        )

    for recipe in ("anchored", "warm_start", "corrected"):
        add(recipe, recipe)
    if not variants:
        return made
    add("corrected, leap", "corrected", leap=1)
    for size, start in STARTS[task.name].items():
        for recipe in ("warm_start", "corrected"):
            add(f"{recipe}, {size}", recipe, start(teacher.config))
    return made


def measure(task: Task, options: FrontierOptions) -> Results:
    """All methods on one task, in one run."""
    teacher, training = train_teacher(task, options.runs / task.name, 0)
    found = find_equilibria(teacher, task.test, task.metric)  # type: ignore[arg-type]
    methods: dict[str, Method] = {
        name: solver_method(teacher, solver, counts=COUNTS[1:])  # type: ignore[arg-type]
        for name, solver in SOLVERS.items()
    }
    made = students(task, teacher, options.variants)
    methods |= {name: replace(student_method(one), counts=COUNTS) for name, one in made.items()}
    rows = compare(
        methods,
        teacher,  # type: ignore[arg-type]
        task.test,
        found.states,
        task.metric,
        dataset=task.dataset,
        seed=0,
        counts=COUNTS,
        repeats=options.repeats,
    )
    if options.exported:
        x = task.test[0][0]
        made["picard"] = plain_student(teacher, x)
        made["anderson"] = plain_student(teacher, x, history="anderson", window=5)
        seconds = exported_seconds(made, x, options.repeats, options.threads)
        timed = ((row, seconds.get((row.method, row.steps or 0))) for row in rows)
        rows = [replace(row, seconds=found) for row, found in timed if found is not None]
    return Results(
        experiment=f"frontier-{task.name}",
        scale="tiny",
        teachers=(teacher_result(task.dataset, teacher, task.metric, found, training.seconds),),  # type: ignore[arg-type]
        rows=tuple(rows),
        **provenance(),
    )


def table(results: Results, dataset: str) -> str:
    """Nearest within the time of k evaluations of Picard; in brackets the evaluations spent; the nearest in bold."""
    every = within_time(results, dataset)
    reached = {name: every[name] for name in alike(results, dataset)}
    shown = [k for k in SHOWN if any(k in points for points in reached.values())]
    best = {k: min(points[k].distance for points in reached.values() if k in points) for k in shown}
    lines = []
    for method, points in reached.items():
        cells = []
        for k in shown:
            text = f"{points[k].distance:.2g} ({points[k].steps})" if k in points else "–"
            cells.append(f"**{text}**" if k in points and points[k].distance == best[k] else text)
        lines.append([method, *cells])
    title = f"{dataset}: distance reached within the time of so many evaluations of Picard."
    return f"{markdown_table(title, ['', *map(str, shown)], lines)}\n{standing(results, dataset)}\n"


def alike(results: Results, dataset: str) -> list[str]:
    """The methods that seek the teacher's equilibrium; a table has other models too."""
    same = (results.page or {}).get("same_equilibrium")
    return [name for name in curves(results, dataset) if same is None or name in same]


def standing(results: Results, dataset: str) -> str:
    """`corrected` beside the nearest of the others, at every time from its first answer, or one evaluation, on."""
    found = curves(results, dataset)
    limits = [p.seconds for p in found["picard"] if p.steps and p.seconds is not None]
    points = [
        (p.seconds, p.distance, name)
        for name in alike(results, dataset)
        for p in found[name]
        if p.seconds is not None and p.distance is not None and p.seconds <= limits[-1]
    ]
    begin = max(limits[0], min((t for t, _, name in points if name == "corrected"), default=0.0))
    worst, when, beside = 0.0, 0.0, ""
    for now in sorted({max(seconds, begin) for seconds, _, _ in points}):
        reached = [(distance, name) for seconds, distance, name in points if seconds <= now]
        ours = min((d for d, name in reached if name == "corrected"), default=math.inf)
        nearest, other = min(one for one in reached if not one[1].startswith("corrected"))
        if ours / nearest > worst:
            worst, when, beside = ours / nearest, now / limits[0], other
    return (
        f"From the time of {begin / limits[0]:.1f} evaluations of Picard on, corrected is at worst {worst:.2f} times "
        f"as far as the nearest other method ({beside}, in the time of {when:.1f})."
    )


def draw(shown: list[tuple[Results, str]], path: Path) -> None:
    """Distance against seconds, a panel for each data set."""
    matplotlib, new_figure = require_matplotlib()
    with matplotlib.rc_context(SETTINGS):
        rows = math.ceil(len(shown) / COLUMNS)
        figure = new_figure(figsize=(4.2 * COLUMNS, 3.2 * rows), layout="constrained")
        panels = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
        labels: dict[str, Any] = {}
        for unused in panels[len(shown) :]:
            unused.set_visible(False)
        for panel, (results, dataset) in zip(panels, shown, strict=False):
            same = alike(results, dataset)
            kept = replace(results, rows=tuple(row for row in results.rows if row.method in same))
            draw_panel(panel, kept, dataset, "distance", "seconds")
            panel.set_title(dataset, loc="left", fontsize=9.5, weight="bold", color=INK)
            labels |= legend_of(panel)
        figure.legend(
            labels.values(), labels.keys(), loc="outside lower center", ncols=6, frameon=False
        )
        figure.savefig(path, dpi=130)


def main() -> None:
    options = tyro.cli(FrontierOptions, description=__doc__)
    if unknown := sorted(set(options.tasks) - set(DEMO_TASKS)):
        raise SystemExit(f"no task {unknown[0]!r}; there are {', '.join(DEMO_TASKS)}")
    measurement = Measurement(options)
    rows: list[dict[str, Any]] = []
    shown: list[tuple[Results, str]] = []
    for made in (*map(DEMO_TASKS.__getitem__, options.tasks), *options.tables):
        if isinstance(made, Path):
            results = Results.from_json(made)
        else:
            results = measure(made(0), options)
            rows += [asdict(row) for row in results.rows]
        shown += [(results, dataset) for dataset in results.datasets]
        pages = [table(*one) for one in shown]
        print(pages[-1], flush=True)
        measurement.finish(rows, "\n".join(pages))
        if options.json is not None:
            draw(shown, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()

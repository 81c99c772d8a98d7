"""One self-contained HTML page about a comparison: findings, plots, the whole table, and how it was made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdeq.evaluation.findings import findings
from cdeq.evaluation.plot import inline_svg, page_colour, plot_results
from cdeq.evaluation.results import Results, Row
from cdeq.evaluation.styles import (
    PALETTE,
    MetricStyle,
    cost_text,
    listed,
    metric_of,
    seconds_text,
    small_text,
    style,
    teacher_text,
)
from cdeq.evaluation.table import grid
from cdeq.files import atomic_write_text

_HARDWARE = {"cpu": "CPU", "gpu": "GPU", "gpus": "GPUs", "memory_gb": "Memory, GB"}


def write_page(
    results: Results,
    path: str | os.PathLike[str],
    *,
    plots: Mapping[str, Sequence[Path]] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write the page; it needs no other file.

    `plots` are the files of `plot_results` for each dataset; left out, they are drawn here, or the page goes
    without them if matplotlib is not installed. `notes` say how it was made. The findings are those of `results`
    where they are about one dataset, or else computed for each.
    """
    import jinja2  # not when cdeq is imported

    notes = list(notes)
    try:
        pictures = {name: _pictures(results, name, plots) for name in results.datasets}
    except ImportError as error:
        pictures = {}
        notes.append(f"No plots: {error}.")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cdeq.evaluation", "."), autoescape=True, trim_blocks=True
    )
    environment.globals |= {"colour_of": lambda method: page_colour(style(method).colour)}
    html = environment.get_template("report.html").render(
        results=results,
        palette=PALETTE,
        notes=notes,
        sections=[_section(results, name, pictures.get(name, [])) for name in results.datasets],
        facts=_facts(results),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, html)
    return path


def _pictures(
    results: Results, dataset: str, plots: Mapping[str, Sequence[Path]] | None
) -> list[str]:
    """SVG elements, those against steps first."""
    if plots is not None:
        drawn = [path for path in plots.get(dataset, ()) if path.suffix == ".svg"]
        return [inline_svg(path) for path in sorted(drawn, key=lambda path: "seconds" in path.stem)]
    with tempfile.TemporaryDirectory() as folder:
        made = plot_results(results, dataset, folder, formats=("svg",))
        return _pictures(results, dataset, {dataset: made})


def _section(results: Results, dataset: str, pictures: list[str]) -> dict[str, Any]:
    metric = metric_of(results, dataset)
    known = results.findings if len(results.datasets) == 1 else ()
    steps, lines = grid(results, dataset)
    methods: dict[str, list[tuple[str, list[tuple[str, bool]]]]] = {}
    for method, label, cells in lines:
        methods.setdefault(method, []).append((label, cells))
    return {
        "dataset": dataset,
        "teacher": teacher_text(results.teacher(dataset), metric),
        "findings": known or findings(results, dataset),
        "pictures": pictures,
        "steps": ["explicit" if k is None else k for k in steps],
        "methods": [(name, style(name).name, cells) for name, cells in methods.items()],
        "metric": metric.name,
        "rows": [_cells(row, metric) for row in results.rows_of(dataset)],
    }


def _cells(row: Row, metric: MetricStyle) -> list[str]:
    return [
        style(row.method).name,
        "–" if row.steps is None else str(row.steps),
        str(row.seed),
        metric.text(row.metric),
        small_text(row.distance),
        small_text(row.residual),
        seconds_text(row.seconds),
        cost_text(row.f_equivalents),
        f"{row.parameters:,}",
    ]


def _facts(results: Results) -> list[tuple[str, str]]:
    """Seeds, step counts, teachers and machine, each with its name."""
    seeds = sorted({row.seed for row in results.rows})
    steps = sorted({row.steps for row in results.rows if row.steps is not None})
    facts = [
        ("Seeds" if len(seeds) > 1 else "Seed", listed(seeds) if seeds else "–"),
        ("Step counts", listed(steps) if steps else "–"),
    ]
    for teacher in results.teachers:
        text = teacher_text(teacher, metric_of(results, teacher.dataset))
        if teacher.train_seconds is not None:
            text += f", trained in {seconds_text(teacher.train_seconds)}"
        facts.append((f"Teacher, {teacher.dataset}", text))
    hardware = results.hardware
    if isinstance(hardware, str):
        hardware = {"hardware": hardware}
    for name, value in hardware.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        facts.append((_HARDWARE.get(name, name.replace("_", " ").capitalize()), shown))
    return facts

"""Plots of grids: a heat map for two fields, curves against evaluations for lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdeq.evaluation import Results
from cdeq.evaluation import curves, metric_of
from cdeq_experiments.grids import Grid, Variant
from cdeq_experiments.plots import saved_figure


def draw_grid_plot(
    results: Results,
    grid: Grid,
    titles: Mapping[str, str],
    variants: Mapping[str, Sequence[Variant]],
    path: Path,
) -> Path:
    """A column a data set: a heat map, or the metric and below it the distance to the equilibrium."""
    with saved_figure(path, columns=len(titles), rows=1 if grid.axes else 2) as axes:
        for number, (kind, title) in enumerate(titles.items()):
            axes[number].set_title(title)
            if grid.axes:
                _heat_map(axes[number], results, grid, kind, title, variants[kind])
            else:
                _metrics(axes[number], results, title, variants[kind])
                _distances(axes[number + len(titles)], results, title, variants[kind])
    return path


def _metrics(axis: Any, results: Results, title: str, variants: Sequence[Variant]) -> None:
    metric = metric_of(results, title)
    found = curves(results, title)
    _lines(
        axis,
        {
            v.name: {
                p.steps: metric.factor * p.metric
                for p in found[v.name]
                if p.steps and p.metric is not None
            }
            for v in variants
        },
    )
    converged = results.teacher(title).metric
    if converged is not None:
        axis.axhline(metric.factor * converged, linestyle=":", color="0.4", label="converged")
    axis.set_ylabel(metric.name + (" (%)" if metric.percent else ""))
    axis.legend(fontsize="small")


def _distances(axis: Any, results: Results, title: str, variants: Sequence[Variant]) -> None:
    found = curves(results, title)
    _lines(
        axis,
        {v.name: {p.steps: p.distance for p in found[v.name] if p.steps} for v in variants},
    )
    axis.set_yscale("log")
    axis.set_ylabel("distance to the equilibrium")


def _lines(axis: Any, found: Mapping[str, Mapping[int, float | None]]) -> None:
    """A line a variant against evaluations."""
    markers = "osD^vPX<>*"
    for number, (name, points) in enumerate(found.items()):
        axis.plot(
            list(points),
            [float("nan") if value is None else value for value in points.values()],
            marker=markers[number % len(markers)],
            label=name,
        )
    axis.set_xscale("log", base=2)
    ticks = sorted({k for points in found.values() for k in points})
    axis.set_xticks(ticks, [str(k) for k in ticks])
    axis.minorticks_off()
    axis.set_xlabel("evaluations")


def _heat_map(
    axis: Any, results: Results, grid: Grid, kind: str, title: str, variants: Sequence[Variant]
) -> None:
    assert grid.axes is not None
    metric, reported = metric_of(results, title), grid.reported[kind]
    places = {v.cell: v for v in variants if v.cell is not None}
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    found = curves(results, title)
    values = [
        [
            next((p.metric for p in found[places[r, c].name] if p.steps == reported), None)
            for c in columns
        ]
        for r in rows
    ]
    shown = [[float("nan") if v is None else metric.factor * v for v in row] for row in values]
    axis.imshow(shown, cmap="viridis" if metric.higher_is_better else "viridis_r", aspect="auto")
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            axis.text(
                *(j, i, metric.text(value)),
                ha="center",
                va="center",
                fontsize="small",
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.5},
            )
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xlabel(grid.axes[1])
    axis.set_ylabel(grid.axes[0])

"""Plots of grids: a heat map for two fields, curves against evaluations for lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdeq.experiments.grids import Grid, Variant
from cdeq.experiments.plots import saved_figure
from cdeq.experiments.results import Results
from cdeq.experiments.table import curves, metric_of


def draw_grid_plot(
    results: Results,
    grid: Grid,
    titles: Mapping[str, str],
    variants: Mapping[str, Sequence[Variant]],
    path: Path,
) -> Path:
    """One panel a data set."""
    with saved_figure(path, columns=len(titles)) as axes:
        for axis, (kind, title) in zip(axes, titles.items(), strict=True):
            axis.set_title(title)
            if grid.axes:
                _heat_map(axis, results, grid, kind, title, variants[kind])
            else:
                _lines(axis, results, title, variants[kind])
    return path


def _lines(axis: Any, results: Results, title: str, variants: Sequence[Variant]) -> None:
    metric, found = metric_of(results, title), curves(results, title)
    markers = "osD^vPX<>*"
    for number, variant in enumerate(variants):
        points = [p for p in found[variant.name] if p.steps and p.metric is not None]
        axis.plot(
            [p.steps for p in points],
            [metric.factor * (p.metric or 0) for p in points],
            marker=markers[number % len(markers)],
            label=variant.name,
        )
    converged = results.teacher(title).metric
    if converged is not None:
        axis.axhline(metric.factor * converged, linestyle=":", color="0.4", label="converged")
    axis.set_xscale("log", base=2)
    ticks = sorted({p.steps for points in found.values() for p in points if p.steps})
    axis.set_xticks(ticks, [str(k) for k in ticks])
    axis.minorticks_off()
    axis.set_xlabel("evaluations")
    axis.set_ylabel(metric.name + (" (%)" if metric.percent else ""))
    axis.legend(fontsize="small")


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

"""Plots of results: on white, in colours that colour-blind readers can tell apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdeq.evaluation import Results, metric_of, style
from cdeq_experiments.pages.frame import at, figure, frame, tolerances

INK = "#20242c"
COLOURS = ("#0068a3", "#c25500", "#00805d", "#a8477f", "#6b7280", "#8a6d00", "#5b3f9e")
MARKERS = "o^sDvPX"
TICKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
SETTINGS: dict[Any, Any] = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.markersize": 4.5,
    "text.parse_math": False,
}
PICTURED = {
    "anderson": "Anderson, the model's own solver",
    "hyperdeq": "HyperDEQ, a learned solver",
    "paper": "student, recipe paper",
    "anchored": "student, recipe anchored (default)",
}


def draw(results: Results, path: Path) -> Path:
    """Write the plot of a result as PNG."""
    with matplotlib.rc_context(SETTINGS):
        LAYOUTS[results.page["layout"]](results, frame(results)).savefig(path, dpi=130)
    return path


def draw_picture(results: Results, dataset: str, path: Path, most: int = 8) -> Path:
    """One data set for readers in a hurry: the metric of a few methods up to so many evaluations."""
    found, metric = frame(results), metric_of(results, dataset)
    own = found[(found["dataset"] == dataset) & (found["steps"] <= most)]
    own = own[own["method"].isin(PICTURED)]
    with matplotlib.rc_context({**SETTINGS, "font.size": 11, "axes.titlesize": 12}):
        picture = Figure(figsize=(7.2, 3.8), layout="constrained")
        panel = picture.subplots()
        _curves(panel, results, dataset, own, "metric")
        *lines, converged = panel.get_lines()
        for line, method in zip(lines, own["method"].unique(), strict=True):
            line.set_label(PICTURED[method])
        converged.set_label(f"converged teacher, {results.teacher(dataset).steps:.0f} evaluations")
        panel.set_title(f"{dataset}: test {metric.name}")
        panel.legend(loc="lower right")
        picture.savefig(path, dpi=150)
    return path


def _panels(count: int, height: float = 3.2, columns: int = 2) -> tuple[Figure, Iterator[Axes]]:
    """A figure of so many panels, two in a row."""
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    drawn = Figure(figsize=(5.2 * columns, height * rows + 0.5), layout="constrained")
    panels = drawn.subplots(rows, columns, squeeze=False).flat
    for spare in list(panels)[count:]:
        spare.set_visible(False)
    return drawn, iter(panels[:count])


def _legend(drawn: Figure) -> Figure:
    """One legend for all panels, above them."""
    found: dict[str, Any] = {}
    for panel in drawn.axes:
        handles, names = panel.get_legend_handles_labels()
        found |= dict(zip(names, handles, strict=True))
    if found:
        columns = min(len(found), max(3, int(drawn.get_figwidth() / 1.7)))
        drawn.legend(found.values(), found.keys(), loc="outside upper left", ncols=columns)
    return drawn


# Against evaluations.


def _against_evaluations(
    results: Results, found: pd.DataFrame, fields: Sequence[str], variants: bool = False
) -> Figure:
    """A panel for each data set and field: curves, or dots where there is one number of evaluations."""
    drawn, panels = _panels(len(fields) * len(results.datasets))
    for dataset in results.datasets:
        own = found[(found["dataset"] == dataset) & found["steps"].notna()]
        for field in fields:
            if own["steps"].nunique() == 1:
                _dots(next(panels), results, dataset, own, field)
            else:
                _curves(next(panels), results, dataset, own, field, variants)
    return _legend(drawn)


def _curves(
    panel: Axes,
    results: Results,
    dataset: str,
    own: pd.DataFrame,
    field: str,
    variants: bool = False,
) -> None:
    """A line for each method, thicker for students; variants of an ablation have the next of our colours."""
    metric, counts = metric_of(results, dataset), sorted(own["steps"].unique())
    for number, (method, rows) in enumerate(own.groupby("method", sort=False)):
        known, look = rows.sort_values("steps").dropna(subset=field), style(str(method))
        place = number % len(COLOURS)
        if len(known):
            panel.plot(
                known["steps"],
                (metric.factor if field == "metric" else 1.0) * known[field],
                linewidth=1.2 if look.kind == "solver" else 2.0,
                color=COLOURS[place] if variants else look.colour,
                marker=MARKERS[place] if variants else look.marker,
                label=method if variants else look.name,
            )
    goal = results.teacher(dataset).metric
    if field != "metric":
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    elif goal is not None:
        line: dict[str, Any] = {"color": INK, "linestyle": ":", "linewidth": 1.2}
        panel.axhline(metric.factor * goal, label="converged teacher", **line)
    if field == "metric" and metric.percent:
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}%")
    panel.set_xscale("log", base=2)
    ticks = [int(k) for k in counts if k in TICKS]
    panel.set_xticks(ticks, [str(k) for k in ticks])
    panel.set_xticks([], minor=True)
    panel.set_xlabel("evaluations of f")
    panel.set_title(f"{dataset}: {metric.name if field == 'metric' else field}")


def _dots(panel: Axes, results: Results, dataset: str, own: pd.DataFrame, field: str) -> None:
    """A dot for each variant, the first on top, with its number: values that differ little."""
    metric = metric_of(results, dataset)
    values = (metric.factor if field == "metric" else 1.0) * own[field]
    panel.plot(values, own["method"], "o", color=COLOURS[0], markersize=7)
    for name, value in zip(own["method"], values, strict=True):
        panel.annotate(
            _short(value), (value, name), (0, 7), textcoords="offset points", ha="center"
        )
    panel.margins(0.15, 0.25)
    panel.invert_yaxis()
    panel.set_title(f"{dataset}: {metric.name if field == 'metric' else field}")


def _short(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}" if value < 100 else f"{value:.1f}"


def _ablation(results: Results, found: pd.DataFrame) -> Figure:
    if not results.page["axes"]:
        return _against_evaluations(results, found, ("metric", "distance"), variants=True)
    drawn, panels = _panels(len(results.datasets))
    for dataset, panel in zip(results.datasets, panels, strict=True):
        _heat_map(panel, results, dataset, found[found["dataset"] == dataset])
    return drawn


def _heat_map(panel: Axes, results: Results, dataset: str, own: pd.DataFrame) -> None:
    """Two fields of a recipe, one down and one across; the darker the better."""
    metric, page = metric_of(results, dataset), results.page
    variants = pd.DataFrame(page["variants"])
    scores = own[own["steps"] == page["reported"][dataset]].set_index("method")["metric"]
    variants["score"] = variants["name"].map(scores)
    # By rank: one choice that failed would leave all others in one colour.
    variants["rank"] = variants["score"].rank(ascending=metric.higher_is_better)
    down, across = list(variants["row"].unique()), list(variants["column"].unique())
    ranks = variants.pivot(index="row", columns="column", values="rank").loc[down, across]
    panel.imshow(ranks, "Blues", aspect="auto", vmin=-len(variants) / 3, vmax=1.6 * len(variants))
    for row, column, score in variants[["row", "column", "score"]].itertuples(index=False):
        x, y = across.index(column), down.index(row)
        panel.text(x, y, metric.text(score), ha="center", va="center")
    panel.set_xticks(range(len(across)), across)
    panel.set_yticks(range(len(down)), down)
    panel.set(xlabel=page["axes"][1], ylabel=page["axes"][0])
    panel.grid(False)
    panel.set_title(f"{dataset}: {metric.name} at {page['reported'][dataset]} evaluations")


# Bars.


def _bars(
    panel: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[str]
) -> None:
    """Horizontal bars, the first on top, each with its number."""
    known = [0.0 if math.isnan(value) else value for value in values]
    bars = panel.barh(names, known, color=colours, height=0.6)
    panel.bar_label(bars, [_short(value) for value in values], padding=3)
    panel.margins(x=0.15)
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)


def _cost(results: Results, found: pd.DataFrame) -> Figure:
    drawn, panels = _panels(len(results.datasets), height=1.8, columns=3)
    for dataset, panel in zip(results.datasets, panels, strict=True):
        own = found[found["dataset"] == dataset]
        seconds = [results.teacher(dataset).train_seconds or math.nan, *own["train_seconds"]]
        colours = [INK, *(style(method).colour for method in own["method"])]
        _bars(panel, ["teacher", *own["name"]], seconds, colours)
        panel.set_title(f"{dataset}: seconds of training")
    return drawn


def _overhead(results: Results, found: pd.DataFrame) -> Figure:
    drawn, panels = _panels(len(results.datasets), height=1.4, columns=3)
    for dataset, panel in zip(results.datasets, panels, strict=True):
        own = found[found["dataset"] == dataset]
        sizes = [figure(figures, "storage") for figures in own["figures"]]
        _bars(panel, list(own["name"]), sizes, [style(method).colour for method in own["method"]])
        panel.set_title(f"{dataset}: MB for a recorded batch")
    return drawn


def _certified(results: Results, found: pd.DataFrame) -> Figure:
    drawn, panels = _panels(len(results.datasets), height=2.6, columns=3)
    for dataset, panel in zip(results.datasets, panels, strict=True):
        goals = tolerances(found[found["dataset"] == dataset])
        for shift, who, label, method in (
            (-0.2, "solver", "Anderson alone", "anderson"),
            (0.2, "certified", "certified student", "anchored"),
        ):
            times = [1000 * at(found, dataset, f"{who} to {tol}")["seconds"] for tol in goals]
            places = [place + shift for place in range(len(goals))]
            panel.bar(places, times, width=0.38, label=label, color=style(method).colour)
        panel.set_xticks(range(len(goals)), goals)
        panel.set_xlabel("tolerance")
        panel.grid(axis="x", visible=False)
        panel.set_title(f"{dataset}: milliseconds for one batch")
    return _legend(drawn)


LAYOUTS: dict[str, Callable[[Results, pd.DataFrame], Figure]] = {
    "table": partial(_against_evaluations, fields=("metric", "distance")),
    "ablation": _ablation,
    "residuals": partial(_against_evaluations, fields=("residual",)),
    "teachers": partial(_against_evaluations, fields=("metric",), variants=True),
    "cost": _cost,
    "overhead": _overhead,
    "certified": _certified,
}

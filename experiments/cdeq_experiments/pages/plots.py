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

SETTINGS = Path(__file__).parent / "templates" / "plots.mplstyle"
INK = "#20242c"
COLOURS = ("#0068a3", "#c25500", "#00805d", "#a8477f", "#6b7280", "#8a6d00", "#5b3f9e")
MARKERS = "o^sDvPX"
TICKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
PICTURED = {
    "anderson": "Anderson, the model's own solver",
    "hyperdeq": "HyperDEQ, a learned solver",
    "paper": "student, recipe paper",
    "anchored": "student, recipe anchored (default)",
}


def draw(results: Results, path: Path) -> Path:
    """Write the plot of a result as PNG."""
    with matplotlib.rc_context(fname=SETTINGS):
        LAYOUTS[results.page["layout"]](results, frame(results)).savefig(path, dpi=130)
    return path


def draw_picture(results: Results, dataset: str, path: Path, most: int = 8) -> Path:
    """One data set for readers in a hurry: the metric of a few methods up to so many evaluations."""
    found, metric = frame(results), metric_of(results, dataset)
    own = found[(found["dataset"] == dataset) & (found["steps"] <= most)]
    own = own[own["method"].isin(PICTURED)]
    with matplotlib.rc_context({"font.size": 11, "axes.titlesize": 12}, fname=SETTINGS):
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
    """A figure of so many panels, and these one by one."""
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    drawn = Figure(figsize=(5.2 * columns, height * rows + 0.5), layout="constrained")
    panels = list(drawn.subplots(rows, columns, squeeze=False).flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return drawn, iter(panels)


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
    """A panel for each data set and field."""
    drawn, panels = _panels(len(fields) * len(results.datasets))
    for dataset in results.datasets:
        own = found[(found["dataset"] == dataset) & found["steps"].notna()]
        for field in fields:
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
    metric, goal = metric_of(results, dataset), results.teacher(dataset).metric
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
    if field != "metric":
        panel.set_yscale("log")
        low, high = panel.get_ylim()
        between = "2357" if high < 30 * low else ""  # powers of ten alone would be too few
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        panel.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in between else "")
    elif goal is not None:
        line: dict[str, Any] = {"color": INK, "linestyle": ":", "linewidth": 1.2}
        panel.axhline(metric.factor * goal, label="converged teacher", **line)
    if field == "metric" and metric.percent:
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}%")
    panel.set_xscale("log", base=2)
    ticks = [int(k) for k in sorted(own["steps"].unique()) if k in TICKS]
    panel.set_xticks(ticks, [str(k) for k in ticks])
    panel.set_xticks([], minor=True)
    panel.set_xlabel("evaluations of f")
    panel.set_title(f"{dataset}: {metric.name if field == 'metric' else field}")


def _ablation(results: Results, found: pd.DataFrame) -> Figure:
    """Curves; a heat map of two fields, or of one at a single number of evaluations."""
    if not results.page["axes"] and found["steps"].nunique() > 1:
        return _against_evaluations(results, found, ("metric", "distance"), variants=True)
    drawn, panels = _panels(len(results.datasets), height=2.6 if results.page["axes"] else 0.9)
    for dataset in results.datasets:
        _heat_map(next(panels), results, dataset, found[found["dataset"] == dataset])
    return drawn


def _heat_map(panel: Axes, results: Results, dataset: str, own: pd.DataFrame) -> None:
    """Choices down and across; the darker the better."""
    metric, page = metric_of(results, dataset), results.page
    variants = pd.DataFrame(page["variants"])
    if not page["axes"]:
        variants = variants.assign(row="", column=variants["name"])
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
    panel.set_yticks(range(len(down)) if page["axes"] else (), down if page["axes"] else ())
    panel.set(**dict(zip(("ylabel", "xlabel"), page["axes"] or (), strict=False)))
    panel.grid(False)
    panel.set_title(f"{dataset}: {metric.name} at {page['reported'][dataset]} evaluations")


# Bars.


def _bars(results: Results, found: pd.DataFrame, what: str) -> Figure:
    """Seconds of training, or megabytes of a recorded batch: the first bar on top, each with its number."""
    drawn, panels = _panels(len(results.datasets), height=1.6, columns=3)
    for dataset, panel in zip(results.datasets, panels, strict=False):
        own = found[found["dataset"] == dataset]
        bars = [(style(m).name, style(m).colour) for m in own["method"]]
        values = [figure(figures, "storage") for figures in own["figures"]]
        if what == "seconds of training":
            bars = [("teacher", INK), *bars]
            values = [results.teacher(dataset).train_seconds or math.nan, *own["train_seconds"]]
        names, colours = zip(*bars, strict=True)
        shown = panel.barh(names, [0 if math.isnan(v) else v for v in values], color=colours)
        panel.bar_label(shown, [f"{value:,.4g}" for value in values], padding=3)
        panel.margins(x=0.15)
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.set_title(f"{dataset}: {what}")
    return drawn


def _certified(results: Results, found: pd.DataFrame) -> Figure:
    drawn, panels = _panels(len(results.datasets), height=2.6, columns=3)
    for dataset, panel in zip(results.datasets, panels, strict=False):
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
    "cost": partial(_bars, what="seconds of training"),
    "overhead": partial(_bars, what="MB for a recorded batch"),
    "certified": _certified,
}

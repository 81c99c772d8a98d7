"""Plots of results: on white, in colours that colour-blind readers can tell apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdeq.evaluation import Results, metric_of, style
from cdeq.evaluation.plot import legend_of, write_figure
from cdeq_experiments.pages.frame import figure, frame

SETTINGS = Path(__file__).parent / "templates" / "plots.mplstyle"
INK = "#20242c"
COLOURS = ("#0068a3", "#c25500", "#00805d", "#a8477f", "#6b7280", "#8a6d00", "#5b3f9e")
MARKERS = "o^sDvPX*h"
TICKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 50, 100, 200, 500, 1000)
PICTURED = {
    "anderson": "Anderson, the model's own solver",
    "hyperdeq": "HyperDEQ, a learned solver",
    "paper": "student, recipe paper",
    "anchored": "student, recipe anchored",
    "corrected": "student, recipe corrected (default)",
}
BARS = {
    "train_seconds": "seconds of training",
    "storage": "MB for a recorded batch",
    "seconds": "seconds for one batch",
}
LOOKS = {"solver": "anderson", "certified": "corrected"}
"""In whose colour those are shown that were run to a tolerance."""


def draw(results: Results, path: Path) -> Path:
    """Write the plot of a result as PNG."""
    with matplotlib.rc_context(fname=SETTINGS):
        drawn = LAYOUTS[results.page["layout"]](results, frame(results))
        write_figure(drawn, path, dpi=130)
    return path


def draw_picture(results: Results, dataset: str, path: Path, most: int = 8) -> Path:
    """One data set for readers in a hurry: the metric of a few methods up to so many evaluations."""
    found = frame(results)
    own = found[(found["dataset"] == dataset) & (found["steps"] <= most)]
    own = own.assign(name=own["method"].map(PICTURED)).dropna(subset="name")
    with matplotlib.rc_context({"font.size": 11, "axes.titlesize": 12}, fname=SETTINGS):
        picture = Figure(figsize=(7.2, 3.8), layout="constrained")
        panel = picture.subplots()
        _curves(panel, results, dataset, own, "metric")
        steps = results.teacher(dataset).steps
        panel.get_lines()[-1].set_label(f"converged teacher, {steps:.0f} evaluations")
        panel.set_title(f"{dataset}: test {metric_of(results, dataset).name}")
        panel.legend(loc="lower right")
        write_figure(picture, path, dpi=150)
    return path


def _panels(
    results: Results,
    found: pd.DataFrame,
    draw_panel: Callable[[Axes, Results, str, pd.DataFrame, str], None],
    fields: Sequence[str] = ("metric",),
    height: float = 3.2,
    columns: int = 2,
) -> Figure:
    """A panel for each data set and field, and one legend for all of them, above."""
    places = [(dataset, field) for dataset in results.datasets for field in fields]
    columns = min(len(places), columns)
    rows = math.ceil(len(places) / columns)
    drawn = Figure(figsize=(5.2 * columns, height * rows + 0.5), layout="constrained")
    legend: dict[str, Any] = {}
    for panel, place in zip_longest(drawn.subplots(rows, columns, squeeze=False).flat, places):
        if place is None:
            panel.set_visible(False)
            continue
        draw_panel(panel, results, place[0], found[found["dataset"] == place[0]], place[1])
        legend |= legend_of(panel)
    if legend:
        across = min(len(legend), max(3, int(drawn.get_figwidth() / 1.7)))
        drawn.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=across)
    return drawn


def _curves(panel: Axes, results: Results, dataset: str, own: pd.DataFrame, field: str) -> None:
    """A line for each method, thicker for students; variants of an ablation have the next of our colours.

    When these are used up, they come again with other markers, on dashed lines.
    """
    metric, goal = metric_of(results, dataset), results.teacher(dataset).metric
    variants, own = results.page["layout"] in ("ablation", "teachers"), own[own["steps"].notna()]
    for place, (method, rows) in enumerate(own.groupby("method", sort=False)):
        known, look = rows.sort_values("steps").dropna(subset=field), style(str(method))
        again = variants and place >= len(COLOURS)
        if variants:
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            look = look._replace(kind="student", colour=colour, marker=marker)
        if len(known):
            panel.plot(
                known["steps"],
                (metric.factor if field == "metric" else 1.0) * known[field],
                linewidth=1.2 if look.kind == "solver" else 2.0,
                linestyle="--" if again else "-",
                color=look.colour,
                marker=look.marker,
                label=known["name"].iloc[0],
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
        return _panels(results, found, _curves, ("metric", "distance"))
    return _panels(results, found, _heat_map, height=2.6 if results.page["axes"] else 0.9)


def _heat_map(panel: Axes, results: Results, dataset: str, own: pd.DataFrame, field: str) -> None:
    """Choices down and across; the darker the better."""
    metric, page = metric_of(results, dataset), results.page
    variants = pd.DataFrame(page["variants"])
    if not page["axes"]:
        variants = variants.assign(row="", column=variants["name"])
    scores = own[own["steps"] == page["reported"][dataset]].set_index("method")[field]
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


def _bars(panel: Axes, results: Results, dataset: str, own: pd.DataFrame, field: str) -> None:
    """The first bar on top, each with its number."""
    values = own[field] if field in own else [figure(found, field) for found in own["figures"]]
    looks = [style(LOOKS.get(m.partition(" to ")[0], m)).colour for m in own["method"]]
    bars = list(zip(own["name"], values, looks, strict=True))
    if field == "train_seconds":
        bars.insert(0, ("teacher", results.teacher(dataset).train_seconds or math.nan, INK))
    names, values, colours = zip(*bars, strict=True)
    shown = panel.barh(names, [0 if math.isnan(v) else v for v in values], color=colours)
    panel.bar_label(shown, [f"{value:,.4g}" for value in values], padding=3)
    panel.margins(x=0.15)
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.set_title(f"{dataset}: {BARS[field]}")


def _chains(results: Results, found: pd.DataFrame) -> Figure:
    """What is converged or explicit against the length of chains, and for the longest all against evaluations."""
    drawn = Figure(figsize=(15.6, 4.2), layout="constrained")
    panels, longest = drawn.subplots(1, 3), results.datasets[-1]
    published = found[found["method"].str.endswith("_published")]
    settled = published[published["steps"] == published["steps"].max()]
    converged = pd.concat([found[found["steps"].isna()], settled])
    converged = converged.assign(steps=converged["dataset"].str.split().str[-1].astype(float))
    converged = converged.replace({"method": {"solved": "ignn", "eignn_closed": "eignn"}})
    converged["name"] = [style(method).name for method in converged["method"]]
    own = found[(found["dataset"] == longest) & ~found["method"].str.contains("ignn")]
    for panel, rows in zip(panels, (converged, own, own), strict=True):
        _curves(panel, results, longest, rows, "distance" if panel is panels[2] else "metric")
    panels[0].get_lines()[-1].remove()  # the teacher of the longest alone
    lengths = converged["steps"].unique()
    panels[0].set_xticks(lengths, [f"{length:g}" for length in lengths])
    panels[0].set(xlabel="nodes of a chain", title="Chains: accuracy, converged")
    for panel in panels[:2]:
        panel.legend()
    return drawn


LAYOUTS: dict[str, Callable[[Results, pd.DataFrame], Figure]] = {
    "chains": _chains,
    "table": partial(_panels, draw_panel=_curves, fields=("metric", "distance")),
    "ablation": _ablation,
    "residuals": partial(_panels, draw_panel=_curves, fields=("residual",)),
    "teachers": partial(_panels, draw_panel=_curves),
    "cost": partial(_panels, draw_panel=_bars, fields=("train_seconds",), height=1.6, columns=3),
    "overhead": partial(_panels, draw_panel=_bars, fields=("storage",), height=1.6, columns=3),
    "certified": partial(_panels, draw_panel=_bars, fields=("seconds",), height=2.6, columns=3),
}

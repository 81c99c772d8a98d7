"""Results as curves: metric, distance and residual against steps and against seconds."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdeq.evaluation.results import Results
from cdeq.evaluation.styles import PALETTE, MetricStyle, metric_of, style
from cdeq.evaluation.table import Point, curves, kind_of
from cdeq.files import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTITIES = ("metric", "distance", "residual")
AXES = ("steps", "seconds")
INK = "#20242c"
"""The colour of all text and lines that belong to no method; an HTML page puts its own in place of it."""
SETTINGS = {"svg.fonttype": "none", "font.size": 9, "mathtext.default": "regular"}

Ends = list[tuple[float, str, str]]
"""For each line the height at which it ends, its label and its colour."""


def plot_results(
    results: Results,
    dataset: str,
    folder: str | os.PathLike[str],
    *,
    formats: Sequence[str] = ("png", "svg"),
) -> list[Path]:
    """Write the plots of one dataset into `folder` and return their paths.

    Each of six panels alone, narrow enough for a phone, its lines labelled where they end; and, as PNG, one
    overview of all six.
    """
    matplotlib, new_figure = require_matplotlib()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []

    def save(figure: Figure, stem: str, kind: str, dpi: int) -> None:
        paths.append(folder / f"{stem}.{kind}")
        metadata = {"Date": None} if kind == "svg" else None
        face = "none" if kind == "svg" else "white"
        write_figure(figure, paths[-1], dpi=dpi, facecolor=face, metadata=metadata)

    # The context puts matplotlib's settings back as they were; no pyplot, no backend is chosen.
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": "cdeq"}):
        if "png" in formats:
            overview = new_figure(figsize=(11, 6.6), layout="constrained")
            _draw_overview(overview, results, dataset)
            save(overview, slug(dataset), "png", 130)
        for quantity in QUANTITIES:
            for axis in AXES:
                figure = new_figure(figsize=(3.9, 2.9))
                figure.subplots_adjust(left=0.15, right=0.79, bottom=0.16, top=0.89)
                panel = figure.subplots()
                _label_ends(panel, draw_panel(panel, results, dataset, quantity, axis))
                for kind in formats:
                    save(figure, f"{slug(dataset)}-{quantity}-{axis}", kind, 200)
    return paths


def require_matplotlib() -> tuple[Any, Callable[..., Figure]]:
    """matplotlib and its `Figure`, imported now; an error that says what to install."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'plots need matplotlib: install it with `pip install "cdeq[demo]"`'
        ) from error
    return matplotlib, Figure


def write_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure in the format of the file's suffix; the file is whole or absent."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], **options)
    atomic_write_bytes(path, content.getvalue())


def slug(name: str) -> str:
    """A name as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "dataset"


def draw_panel(panel: Axes, results: Results, dataset: str, quantity: str, axis: str) -> Ends:
    """Draw one panel on matplotlib axes and return where its lines end."""
    metric = metric_of(results, dataset)
    factor = metric.factor if quantity == "metric" and metric.percent else 1.0
    ends: Ends = []
    heights: list[float] = []
    times: list[float] = []
    found = curves(results, dataset)
    for method, points in found.items():
        look = style(method, explicit=kind_of(points) == "explicit")
        xs = [getattr(point, axis) for point in points]
        ys = [_height(point, quantity, factor) for point in points]
        shown = [y for y in ys if not math.isnan(y)]
        if not shown:
            continue
        if axis == "steps" and look.kind != "explicit" and all(x is None for x in xs):
            continue  # a solver run to its tolerance: the teacher's own level
        heights += shown
        ends.append((shown[-1], look.name, look.colour))
        lined: dict[str, Any] = {"color": look.colour, "label": look.name}
        if axis == "steps" and look.kind == "explicit":  # no steps: one level line
            panel.axhline(shown[0], linestyle="-.", linewidth=1.1, **lined)
            continue
        times += [x for x in xs if x is not None]
        width, size = {"solver": (1.1, 3.8), "student": (1.9, 3.8), "explicit": (1.1, 8)}[look.kind]
        xs = [math.nan if x is None else x for x in xs]
        panel.plot(xs, ys, marker=look.marker, markersize=size, linewidth=width, **lined)

    _scale(panel, quantity, axis, metric, heights, times)
    target = getattr(results.teacher(dataset), quantity, None)  # its distance is 0 by definition
    if target is not None and heights and (quantity == "metric" or target > 0):
        panel.axhline(factor * target, color=INK, linestyle=":", linewidth=1.2, label="Teacher")
        ends.append((factor * target, "Teacher", INK))
    if axis == "steps":
        steps = sorted({p.steps for points in found.values() for p in points if p.steps})
        panel.set_xticks(steps, [str(k) for k in steps])
    return ends


def _height(point: Point, quantity: str, factor: float) -> float:
    """A value to draw; NaN, a gap in the line, where there is none or a log scale has no place."""
    y = getattr(point, quantity)
    return math.nan if y is None or (quantity != "metric" and y <= 0) else factor * y


def _scale(
    panel: Axes,
    quantity: str,
    axis: str,
    metric: MetricStyle,
    heights: list[float],
    times: list[float],
) -> None:
    """Scales, labels and title of a panel."""
    wide = bool(heights) and min(heights) > 0 and max(heights) > 8 * min(heights)
    if heights and (quantity != "metric" or (wide and not metric.percent)):
        panel.set_yscale("log")
        narrow = max(heights) < 40 * min(heights)  # too narrow for powers of ten alone
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        panel.yaxis.set_minor_formatter(
            lambda y, _: f"{y:g}" if narrow and f"{y:e}"[0] in "25" else ""
        )
    if axis == "seconds":
        longest = max(times, default=1.0)
        unit = 1e3 if longest < 1 else 1.0
        if times and longest > 40 * min(times) > 0:
            panel.set_xscale("log")
        panel.xaxis.set_major_formatter(lambda x, _: f"{unit * x:g}")
        panel.set_xlabel(f"{'milli' if unit > 1 else ''}seconds per batch", color=INK)
    else:
        panel.set_xlabel("steps (evaluations of f)", color=INK)
    if quantity == "metric" and metric.percent:
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}%")
    names = {"metric": metric.name.capitalize(), "distance": "Distance to the equilibrium"}
    title = f"{names.get(quantity, 'Residual')} by {'time' if axis == 'seconds' else axis}"
    panel.set_title(title, loc="left", fontsize=9.5, weight="bold", color=INK, parse_math=False)
    panel.set_facecolor("none")
    panel.grid(color=INK, alpha=0.13, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(INK)
    panel.tick_params(which="both", colors=INK, labelsize=8.5)


def _label_ends(panel: Axes, ends: Ends) -> None:
    """Write each line's name right of where it ends, moved apart where names would overlap."""
    place = panel.transData + panel.transAxes.inverted()
    x = panel.get_xlim()[1]
    wanted = sorted((min(max(place.transform((x, y))[1], 0.0), 1.0), n, c) for y, n, c in ends)
    heights = spread_out([height for height, _, _ in wanted], gap=0.085)
    for height, (_, name, colour) in zip(heights, wanted, strict=True):
        where: dict[str, Any] = {"transform": panel.transAxes, "va": "center"}
        panel.text(1.03, height, name, color=colour, fontsize=8.5, parse_math=False, **where)


def spread_out(heights: list[float], gap: float, top: float = 1.0) -> list[float]:
    """Rising heights, neighbours moved at least `gap` apart, between 0 and `top` if there is room.

    Heights too close to each other form a group, spread evenly around their mean.
    """

    def kept_inside(centre: float, count: int) -> float:
        half = gap * (count - 1) / 2
        return max(min(centre, top - half), half)

    groups: list[tuple[float, float, int]] = []  # place, mean of the heights, how many
    for height in heights:
        average, count = height, 1
        place = kept_inside(average, count)
        while groups and place - groups[-1][0] < gap * (count + groups[-1][2]) / 2:
            _, before, n = groups.pop()
            average, count = (before * n + average * count) / (n + count), n + count
            place = kept_inside(average, count)
        groups.append((place, average, count))
    return [place + gap * (i - (n - 1) / 2) for place, _, n in groups for i in range(n)]


def _draw_overview(figure: Figure, results: Results, dataset: str) -> None:
    labels: dict[str, Any] = {}
    for row, axis in zip(figure.subplots(len(AXES), len(QUANTITIES)), AXES, strict=True):
        for panel, quantity in zip(row, QUANTITIES, strict=True):
            draw_panel(panel, results, dataset, quantity, axis)
            labels |= legend_of(panel)
    if labels:
        figure.legend(
            labels.values(), labels.keys(), loc="outside upper center", ncols=7, frameon=False
        )


def legend_of(panel: Axes) -> dict[str, Any]:
    """The labels of a panel's lines and what to draw beside them."""
    handles, names = panel.get_legend_handles_labels()
    return dict(zip(names, handles, strict=True))


def page_colour(colour: str) -> str:
    """The CSS variable under which an HTML page has a method's colour, light or dark."""
    return f"var(--m-{colour.lstrip('#')})"


def inline_svg(path: Path) -> str:
    """An SVG plot as an element of an HTML page, in the page's own ink and method colours."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)  # HTML knows them
    text = text.replace(INK, "currentColor")
    for colour in PALETTE:
        text = text.replace(colour, page_colour(colour))
    # Every plot has a `patch_1`: one page must not have two.
    mark = path.stem
    text = re.sub(r'\bid="([^"]+)"', rf'id="{mark}-\1"', text)
    return re.sub(r'(url\(|href=")#', rf"\1#{mark}-", text)

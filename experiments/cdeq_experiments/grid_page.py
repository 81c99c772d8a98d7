"""A grid on paper: JSON, a Markdown table laid out as the paper's, the paper's own figure in brackets, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cdeq.evaluation import Results
from cdeq.evaluation import (
    MetricStyle,
    Point,
    curves,
    markdown_rows,
    metric_of,
    seconds_text,
    small_text,
)
from cdeq.files import atomic_write_text
from cdeq_experiments.grid_plots import draw_grid_plot
from cdeq_experiments.grids import Grid, Variant
from cdeq_experiments.paper_table import page_of
from cdeq_experiments.published import bracketed

ALIKE = 0.005
"""Scores that differ by less than this share are not told apart: seeds of one and the same choice differ as much."""
ONE_SEED = (
    "One seed: differences as small as those between the seeds of one and the same student, in tables 1 to 3, say "
    "nothing."
)
BRACKETS = (
    "In brackets what the paper reports for the same choice at its own scale (WikiText-103, ImageNet, ogbn-arxiv): "
    "to compare trends by, not values. Seconds in brackets are those of its own machines."
)


def write_grid(
    results: Results,
    grid: Grid,
    titles: Mapping[str, str],
    variants: Mapping[str, Sequence[Variant]],
    folder: Path,
) -> list[Path]:
    """`folder`/<experiment>.json, .md and .png; `titles` and `variants` are by the kind of data."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / results.experiment
    tables = {}
    for kind, title in titles.items():
        lay_out = matrix if grid.axes else listing
        tables[title] = lay_out(results, grid, kind, title, variants[kind])
    claims = [
        claim(results, grid, kind, title, variants[kind], k)
        for kind, title in titles.items()
        for k in told(grid, kind, variants[kind])
    ]
    shown = {kind: [v for v in variants[kind] if kind in v.published] for kind in titles}
    notes = [*grid.notes, *([BRACKETS] if any(shown.values()) else [])]
    if len({row.seed for row in results.rows}) == 1:
        notes.append(ONE_SEED)
    page = page_of(results, title=grid.title, tables=tables, notes=notes, claims=claims)
    atomic_write_text(stem.with_suffix(".md"), page)
    return [
        results.to_json(stem.with_suffix(".json")),
        stem.with_suffix(".md"),
        draw_grid_plot(results, grid, titles, variants, stem.with_suffix(".png")),
    ]


def points_of(results: Results, title: str, name: str) -> dict[int | None, Point]:
    """A variant's points by the number of evaluations."""
    return {p.steps: p for p in curves(results, title).get(name, [])}


def listing(
    results: Results, grid: Grid, kind: str, title: str, variants: Sequence[Variant]
) -> str:
    """A row a variant, a column a number of evaluations; the paper's figure at its number."""
    metric, reported = metric_of(results, title), grid.reported[kind]
    counts = grid.counts[kind]
    found = {v.name: points_of(results, title, v.name) for v in variants}
    best = {k: _best(metric, [points[k].metric for points in found.values()]) for k in counts}
    ends = sorted({min(counts), reported})
    head = ["", *(f"{metric.name} at {k}" for k in counts)]
    head += [*(f"distance at {k}" for k in ends), f"seconds at {reported}"]
    rows = []
    for variant in variants:
        points = found[variant.name]
        cells = [variant.name]
        for k in counts:
            text = metric.text(points[k].metric, points[k].spread)
            text = f"**{text}**" if points[k].metric == best[k] else text
            cells.append(text + (bracketed(variant.published.get(kind)) if k == reported else ""))
        cells += [small_text(points[k].distance) for k in ends]
        took = seconds_text(points[reported].seconds)
        cells.append(took + bracketed(variant.published_seconds.get(kind)))
        rows.append(cells)
    return markdown_rows(head, rows)


def matrix(results: Results, grid: Grid, kind: str, title: str, variants: Sequence[Variant]) -> str:
    """Two fields, one down and one across, at the number of evaluations that the paper reports."""
    assert grid.axes is not None
    metric, reported = metric_of(results, title), grid.reported[kind]
    places = {v.cell: v for v in variants if v.cell is not None}
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    found = {cell: points_of(results, title, v.name)[reported] for cell, v in places.items()}
    best = _best(metric, [p.metric for p in found.values()])
    down, across = grid.axes
    lines = []
    for row in rows:
        cells = [row]
        for column in columns:
            p = found[row, column]
            text = metric.text(p.metric, p.spread)
            text = f"**{text}**" if p.metric == best else text
            cells.append(text + bracketed(places[row, column].published.get(kind)))
        lines.append(cells)
    table = markdown_rows([f"{down} \\ {across}", *columns], lines)
    return f"{metric.name} at {reported} evaluations:\n\n{table}"


def _best(metric: MetricStyle, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return (max if metric.higher_is_better else min)(known, default=None)


def told(grid: Grid, kind: str, variants: Sequence[Variant]) -> list[int]:
    """Evaluations that sentences are about: the paper's; of what the paper does not have, the fewest too."""
    own = not any(kind in v.published for v in variants)
    return sorted({grid.reported[kind], *([min(grid.counts[kind])] if own else [])})


def claim(
    results: Results, grid: Grid, kind: str, title: str, variants: Sequence[Variant], steps: int
) -> str:
    """Which choice is best after so many steps, where the recipe's own stands, and which is best in the paper."""
    metric = metric_of(results, title)
    found = {v.name: points_of(results, title, v.name)[steps] for v in variants}
    scores = {name: p.metric for name, p in found.items() if p.metric is not None}
    if not scores:
        return f"- {title}: no variant has a score."
    order = sorted(scores, key=lambda name: scores[name], reverse=metric.higher_is_better)
    first, own = order[0], grid.default
    line = f"- {title}, at {steps} evaluation{'s' * (steps != 1)}: "
    low, high = min(scores.values()), max(scores.values())
    alike = high - low < ALIKE * abs(scores[first])
    if alike:
        line += (
            f"all choices lie within {100 * ALIKE:g}% ({metric.text(low)} to {metric.text(high)})"
        )
    else:
        line += f"best is {first} ({metric.text(scores[first])})"
    if not alike and own != first and own in scores:
        place = order.index(own) + 1
        line += f"; {own} is number {place} of {len(order)} ({metric.text(scores[own])})"
    given = {v.name: v.published[kind] for v in variants if kind in v.published}
    if given:
        top = (max if metric.higher_is_better else min)(given, key=lambda name: given[name])
        agrees = "as here" if top == first and not alike else "not as here"
        line += f"; in the paper best is {top} ({given[top]:g}), {agrees}"
    line += _nearest(found, own)
    spread = [p.spread for p in found.values() if p.spread is not None]
    if spread:
        line += f"; standard deviations over seeds up to {metric.text(max(spread))}"
    return line + "."


def _nearest(found: Mapping[str, Point], own: str) -> str:
    """Who ends nearest to the equilibrium, and where the recipe's own choice does."""
    distances = {name: p.distance for name, p in found.items() if p.distance is not None}
    if not distances:
        return ""
    first = min(distances, key=lambda name: distances[name])
    line = f"; nearest to the equilibrium is {first} ({small_text(distances[first])})"
    if own != first and own in distances:
        line += f", {own} is at {small_text(distances[own])}"
    return line

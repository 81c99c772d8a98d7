"""Results as a table for the terminal, and the curves that tables and plots share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import stdev

from rich import box
from rich.table import Table
from rich.text import Text

from cdeq.evaluation.results import Results, Row, mean
from cdeq.evaluation.styles import (
    STYLES,
    cost_text,
    metric_of,
    seconds_text,
    small_text,
    style,
    teacher_text,
)

QUANTITIES = ("metric", "distance", "residual", "seconds")
"""What a table shows by default; `f_equivalents`, the cost in steps, can be asked for."""


@dataclass(frozen=True, kw_only=True)
class Point(Row):
    """One method at one step count: a row whose numbers are means over the seeds, and the first of these."""

    seeds: int
    spread: float | None
    """Standard deviation of the metric over the seeds; None for a single seed."""


def curves(results: Results, dataset: str) -> dict[str, list[Point]]:
    """For each method, in the order of `STYLES`, its points by rising step count."""
    rows = results.rows_of(dataset)
    methods = list(dict.fromkeys(row.method for row in rows))
    order = [method for method in STYLES if method in methods]
    order += [method for method in methods if method not in STYLES]
    found: dict[str, list[Point]] = {}
    for method in order:
        groups: dict[int | None, list[Row]] = {}
        for row in rows:
            if row.method == method:
                groups.setdefault(row.steps, []).append(row)
        steps = sorted(groups, key=lambda k: -1 if k is None else k)
        found[method] = [_point(groups[k]) for k in steps]
    return found


def _point(rows: list[Row]) -> Point:
    averaged = ("metric", "distance", "residual", "seconds", "f_equivalents", "top5")
    means = {name: mean([getattr(row, name) for row in rows]) for name in averaged}
    metrics = [row.metric for row in rows if row.metric is not None]
    spread = stdev(metrics) if len(metrics) == len(rows) > 1 else None
    return Point(**(vars(rows[0]) | means), seeds=len(rows), spread=spread)


def kind_of(points: list[Point]) -> str:
    """Solver, student or explicit."""
    explicit = all(point.steps is None for point in points)
    return style(points[0].method, explicit=explicit).kind


def grid(
    results: Results, dataset: str, shown: Sequence[str] = QUANTITIES
) -> tuple[list[int | None], Iterator[tuple[str, str, list[tuple[str, bool]]]]]:
    """The step counts, and for each method and quantity its cells `(text, is best)`.

    The best of a column is the best of its quantity at that step count over all methods; the cost in
    steps has none, since a plain solver's is the step count itself.
    """
    found = curves(results, dataset)
    metric = metric_of(results, dataset)
    steps = sorted({p.steps for points in found.values() for p in points}, key=lambda k: k or 1e9)
    quantities: list[tuple[str, str, Callable[[Point], str], bool | None]] = [
        (metric.name, "metric", lambda p: metric.text(p.metric, p.spread), metric.higher_is_better),
        ("distance", "distance", lambda p: small_text(p.distance), False),
        ("residual", "residual", lambda p: small_text(p.residual), False),
        ("seconds", "seconds", lambda p: seconds_text(p.seconds), False),
        ("cost in steps", "f_equivalents", lambda p: cost_text(p.f_equivalents), None),
    ]

    def best(field: str, higher: bool | None, k: int | None) -> float | None:
        column = [getattr(p, field) for points in found.values() for p in points if p.steps == k]
        present = [value for value in column if value is not None]
        if higher is None or len(present) < 2:
            return None
        return max(present) if higher else min(present)

    def lines() -> Iterator[tuple[str, str, list[tuple[str, bool]]]]:
        for method, points in found.items():
            at = {point.steps: point for point in points}
            for label, field, text, higher in (q for q in quantities if q[1] in shown):
                cells = []
                for k in steps:
                    value = getattr(at[k], field) if k in at else None
                    is_best = value is not None and value == best(field, higher, k)
                    cells.append((text(at[k]) if k in at else "", is_best))
                if any(text not in ("", "–") for text, _ in cells):
                    yield method, label, cells

    return steps, lines()


def results_table(
    results: Results,
    dataset: str,
    shown: Sequence[str] = QUANTITIES,
    counts: Sequence[int] | None = None,
) -> Table:
    """Methods by steps; the best of each step count in bold, the converged teacher above.

    `shown` quantities, at `counts` alone, default all.
    """
    if counts is not None:
        kept = [row for row in results.rows if row.steps is None or row.steps in counts]
        results = replace(results, rows=tuple(kept))
    steps, lines = grid(results, dataset, shown)
    teacher = teacher_text(results.teacher(dataset), metric_of(results, dataset))
    table = Table(
        title=Text.assemble((results.experiment, "bold"), f" · {dataset}\n", (teacher, "dim")),
        caption="Bold: best at that number of steps. Seconds: median for a batch.",
        title_justify="left",
        caption_justify="left",
        title_style="",
        box=box.HORIZONTALS,
        padding=(0, 1, 0, 0),  # narrow enough for six step counts in 80 columns
    )
    table.add_column("method", no_wrap=True)
    table.add_column("steps", style="dim", no_wrap=True, justify="right")
    for k in steps:
        table.add_column("explicit" if k is None else str(k), justify="right", no_wrap=True)
    last = None
    for method, label, cells in lines:
        if method != last and last is not None:
            table.add_section()
        look = style(method)
        name = Text(look.name if method != last else "", style=f"bold {look.dark}")
        table.add_row(
            name, Text(label), *(Text(text, "bold" if top else "") for text, top in cells)
        )
        last = method
    return table

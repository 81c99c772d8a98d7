"""Results laid out as the paper's tables are: a block of rows for each number of evaluations, a table a data set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from cdeq.evaluation import Results
from cdeq.evaluation import (
    Point,
    cost_text,
    curves,
    markdown_rows,
    metric_of,
    seconds_text,
    small_text,
    style,
    teacher_text,
)
from cdeq.files import atomic_write_text
from cdeq_experiments.plots import QUANTITIES, draw_grid
from cdeq_experiments.published import Figure, bracketed, published_beside

ONE_STEP = "picard"
"""The method whose first step is the teacher at one evaluation: from its own start all solvers agree there."""


def gap_closed(results: Results, dataset: str, method: str, steps: int) -> float | None:
    """Share of the way from the teacher at one step to the converged teacher that a method's metric covers.

    1 is the converged teacher; more than that is possible. None where there is no gap, or no such row. A perplexity
    counts by its logarithm, the loss.
    """
    found, teacher = curves(results, dataset), results.teacher(dataset)
    first = next((p.metric for p in found.get(ONE_STEP, []) if p.steps == 1), None)
    reached = next((p.metric for p in found.get(method, []) if p.steps == steps), None)
    converged = teacher.metric
    if first is None or reached is None or converged is None or first == converged:
        return None
    if teacher.metric_name == "perplexity":
        first, reached, converged = math.log(first), math.log(reached), math.log(converged)
    return (reached - first) / (converged - first)


def paper_table(
    results: Results,
    dataset: str,
    shown: Sequence[int],
    same_equilibrium: Sequence[str] | None = None,
) -> str:
    """One data set: explicit models, then all methods at each number of evaluations; the best of a block in bold.

    Distances are compared among the methods of one and the same equilibrium, default all.
    """
    found, metric = curves(results, dataset), metric_of(results, dataset)
    beside = published_beside(results, dataset)
    ranked = any(p.top5 is not None for points in found.values() for p in points)
    head = ["model", "parameters", "evaluations", metric.name, *(["top 5"] if ranked else [])]
    head += ["distance", "seconds", "cost in steps", "gap closed"]
    rows = []
    for k in (None, *shown):
        block = [p for points in found.values() for p in points if p.steps == k]
        scores = [p.metric for p in block if p.metric is not None]
        best = (max if metric.higher_is_better else min)(scores, default=None)
        near = min(
            (
                p.distance
                for p in block
                if p.distance is not None
                and (same_equilibrium is None or p.method in same_equilibrium)
            ),
            default=None,
        )
        for p in block:
            closed = None if k is None else gap_closed(results, dataset, p.method, k)
            paper = beside.figure(p.method, k) if beside else Figure()
            cells = [
                style(p.method, explicit=k is None).name,
                f"{p.parameters:,}",
                "–" if k is None else str(k),
                _bold(metric.text(p.metric, p.spread), p.metric is not None and p.metric == best)
                + bracketed(paper.metric),
                *([metric.text(p.top5, None) + bracketed(paper.top5)] if ranked else []),
                _bold(small_text(p.distance), p.distance is not None and p.distance == near),
                seconds_text(p.seconds) + bracketed(paper.seconds),
                cost_text(p.f_equivalents),
                "–" if closed is None else f"{round(100 * closed)}%",
            ]
            rows.append(cells)
    return markdown_rows(head, rows)


def brackets_note(results: Results) -> list[str]:
    """What stands in brackets, where something does."""
    beside = {name: published_beside(results, name) for name in results.datasets}
    pairs = [f"{table.data} beside {name}" for name, table in beside.items() if table]
    if not pairs:
        return []
    return [
        f"In brackets what the paper reports at the same place, seconds a batch on its own machines: "
        f"{', '.join(pairs)}. Its DEQ (its MDEQ, its IGNN) is beside Anderson, its C-DEQ beside Paper. Where the data "
        f"are not the same, compare trends, not values."
    ]


def _bold(text: str, best: bool) -> str:
    return f"**{text}**" if best and text != "–" else text


def nearest_methods(results: Results, dataset: str, methods: Sequence[str]) -> dict[int, str]:
    """For each number of evaluations, which of the methods is nearest to its equilibrium."""
    found = curves(results, dataset)
    at: dict[int, list[Point]] = {}
    for name in methods:
        for p in found.get(name, []):
            if p.steps is not None and p.distance is not None:
                at.setdefault(p.steps, []).append(p)
    return {k: min(points, key=lambda p: p.distance or 0.0).method for k, points in at.items()}


def write_table(
    results: Results,
    folder: Path,
    *,
    title: str,
    shown: Sequence[int],
    notes: Sequence[str] = (),
    claims: Sequence[str] = (),
    same_equilibrium: Sequence[str] | None = None,
) -> list[Path]:
    """`folder`/<experiment>.json, .md and .png."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / results.experiment
    tables = {
        name: paper_table(results, name, shown, same_equilibrium) for name in results.datasets
    }
    notes = [*notes, *brackets_note(results)]
    page = page_of(results, title=title, tables=tables, notes=notes, claims=claims)
    paths = [results.to_json(stem.with_suffix(".json")), stem.with_suffix(".md")]
    atomic_write_text(paths[-1], page)
    paths.append(draw_grid(results, stem.with_suffix(".png"), QUANTITIES[:2]))
    return paths


def page_of(
    results: Results,
    *,
    title: str,
    tables: Mapping[str, str],
    notes: Sequence[str] = (),
    claims: Sequence[str] = (),
) -> str:
    """A result in Markdown: what made it, what it says, a table a data set, how to read it, on which machine."""
    page = [
        f"# {title}",
        "",
        f"Made by `{results.command}` at commit {results.commit}; mean ± standard deviation over the seeds.",
        "",
        *claims,
        "",
    ]
    for dataset, table in tables.items():
        teachers = dict.fromkeys(t.name for t in results.teachers if t.dataset == dataset)
        seeds = len({row.seed for row in results.rows_of(dataset)})
        page += [f"## {dataset} ({seeds} seed{'s' * (seeds != 1)})", ""]
        for name in teachers:
            page += [
                f"- {teacher_text(results.teacher(dataset, name), metric_of(results, dataset))}"
            ]
        page += ["", table]
    if notes:
        page += ["## How to read it", "", *(f"- {note}" for note in notes), ""]
    hardware = results.hardware if isinstance(results.hardware, dict) else {"cpu": results.hardware}
    page += ["Hardware: " + ", ".join(f"{k} {v}" for k, v in hardware.items()) + ".", ""]
    return "\n".join(page)

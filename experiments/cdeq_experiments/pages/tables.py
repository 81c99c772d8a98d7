"""Results as tables of text, one function for each layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from cdeq.evaluation import MetricStyle, Results, cost_text, metric_of, seconds_text, small_text
from cdeq_experiments.pages.frame import at, figure, frame, tolerances
from cdeq_experiments.pages.sentences import plain

CAPTIONS = {
    "distance": "Distance to the equilibrium",
    "seconds": "Time of one batch",
    "gap_closed": "Gap closed",
    "top5": "Top-5 accuracy",
    "residual": "Residual",
}
"""By field of the frame; the metric has its own name."""
MARKS = {"metric": "best", "distance": "nearest"}
"""The fields whose best is bold, and where the frame marks it."""


class Table(NamedTuple):
    """A caption, names of columns, and rows of cells; **bold** in a cell is Markdown's."""

    caption: str
    head: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The first column is words, the others numbers."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(results: Results) -> dict[str, list[Table]]:
    """All tables of each data set."""
    found, lay_out = frame(results), LAYOUTS[results.page["layout"]]
    parts = {dataset: found[found["dataset"] == dataset] for dataset in results.datasets}
    return {d: list(lay_out(results, d, own)) if len(own) else [] for d, own in parts.items()}


def cell(metric: MetricStyle, row: pd.Series, field: str, *, paper: bool = True) -> str:
    """One number of a row of the frame, the best in bold, what the paper reports in brackets."""
    texts: dict[str, Callable[[float | None], str]] = {
        "metric": lambda value: metric.text(value, _known(row["spread"])),
        "top5": metric.text,
        "seconds": seconds_text,
        "gap_closed": _percent,
    }
    text = texts.get(field, small_text)(_known(row[field]))
    if field in MARKS and row[MARKS[field]]:
        text = f"**{text}**"
    told = row["published"].get(field) if paper else None
    return text + _bracket(told, metric.factor if field in ("metric", "top5") else 1.0)


def by_count(metric: MetricStyle, own: pd.DataFrame, counts: Sequence[float], field: str) -> Table:
    """Methods down, numbers of evaluations across; a method without a number anywhere is left out."""
    rows, known = [], own[own["steps"].isin(counts)]
    for name, group in known[known[field].notna()].groupby("name", sort=False):
        cells = {row["steps"]: cell(metric, row, field) for _, row in group.iterrows()}
        rows.append([plain(str(name)), *(cells.get(k, "–") for k in counts)])
    caption = CAPTIONS.get(field, metric.name.capitalize())
    return Table(caption, ["evaluations", *(f"{k:g}" for k in counts)], rows)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{round(100 * value)}%"


def _bracket(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f" ({factor * value:g})"


# Layouts.


def _table(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    metric, teacher = metric_of(results, dataset), results.teacher(dataset)
    for field in ("metric", "distance", "seconds", "gap_closed", "top5"):
        if own[field].notna().any():
            yield by_count(metric, own, results.page["counts"][dataset], field)
    lone = own[own["steps"].isna()]
    if len(lone):
        fields = ["metric", *(["top5"] if lone["top5"].notna().any() else []), "seconds"]
        head = ["", *(CAPTIONS.get(field, metric.name).lower() for field in fields)]
        cells = [
            [plain(r["name"]), *(cell(metric, r, f) for f in fields)] for _, r in lone.iterrows()
        ]
        yield Table("Without a number of evaluations", head, cells)
    trained = seconds_text(teacher.train_seconds)
    sizes = [[plain(teacher.name), f"{teacher.parameters:,}", "1.0", trained]]
    for name, group in own.groupby("name", sort=False):
        first, spent = group.iloc[0], _known(group["train_seconds"].mean(skipna=False))
        if (
            spent is not None or first["parameters"] != teacher.parameters
        ):  # else the teacher, solved
            cost = cost_text(_known(first["f_equivalents"]))
            sizes.append([plain(str(name)), f"{first['parameters']:,}", cost, seconds_text(spent)])
    head = ["", "parameters", "cost in teacher steps, at its first count", "training"]
    yield Table("Size, cost and training", head, sizes)


def _ablation(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    metric, page = metric_of(results, dataset), results.page
    counts, reported = page["counts"][dataset], page["reported"][dataset]
    if page["axes"]:
        places = {v["name"]: (v["row"], v["column"]) for v in page["variants"]}
        here = own[(own["steps"] == reported) & own["method"].isin(places)]
        shown = {places[r["method"]]: cell(metric, r, "metric") for _, r in here.iterrows()}
        down, across = (list(dict.fromkeys(place[i] for place in shown)) for i in (0, 1))
        rows = [[a, *(shown.get((a, b), "") for b in across)] for a in down]
        caption = f"{metric.name.capitalize()} at {reported} evaluations"
        yield Table(caption, [" \\ ".join(page["axes"]), *across], rows)
        return
    wanted = [("metric", k) for k in counts]
    wanted += [("distance", k) for k in sorted({min(counts), reported})] + [("seconds", reported)]
    short = {"metric": metric.name, "distance": "distance", "seconds": "time"}
    rows = []
    for method, group in own.groupby("method", sort=False):
        at_count = {r["steps"]: r for _, r in group.iterrows()}
        cells = [cell(metric, at_count[k], f) if k in at_count else "" for f, k in wanted]
        rows.append([plain(str(method)), *cells])
    yield Table("", ["", *(f"{short[f]} at {k}" for f, k in wanted)], rows)


def _residuals(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    counts = sorted(own["steps"].dropna().unique())
    yield by_count(metric_of(results, dataset), own, counts, "residual")


def _cost(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    whole = results.teacher(dataset).train_seconds or math.nan
    rows = [["teacher", seconds_text(_known(whole)), "100%"]]
    for name, spent, paper in own[["name", "train_seconds", "published"]].itertuples(index=False):
        told = f" ({100 * paper['train_hours'] / paper['teacher_hours']:.1f})" if paper else ""
        share = "–" if math.isnan(spent / whole) else f"{100 * spent / whole:.1f}%"
        rows.append([plain(name), seconds_text(_known(spent)), share + told])
    yield Table("", ["", "training", "of the teacher's"], rows)


def _overhead(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    rows = []
    for name, figures, paper in own[["name", "figures", "published"]].itertuples(index=False):
        told = [_bracket(paper.get(key.partition(",")[0])) for key in figures]
        cells = [f"{v:.3g}{more}" for v, more in zip(figures.values(), told, strict=True)]
        rows.append([plain(name), *cells])
    yield Table("", ["", *own["figures"].iloc[0]], rows)


def _certified(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    rows = []
    for tol in tolerances(own):
        solver, student = (at(own, dataset, f"{who} to {tol}") for who in ("solver", "certified"))
        cells = [
            text
            for row in (solver, student)
            for text in (cost_text(row["f_equivalents"]), seconds_text(_known(row["seconds"])))
        ]
        share = _percent(figure(student["figures"], "by the student"))
        rows.append([tol, *cells, share, f"{student['seconds'] / solver['seconds']:.2f}"])
    head = ["tolerance", "Anderson: evaluations", "time", "certified: evaluations", "time"]
    yield Table("", [*head, "finished by the student", "ratio of times"], rows)


def _teachers(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    metric, counts = metric_of(results, dataset), results.page["counts"][dataset]
    rows = []
    for method, group in own.groupby("method", sort=False):
        teacher, scores = results.teacher(dataset, str(method)), group.set_index("steps")["metric"]
        valid = figure(group["figures"].iloc[0], "validation accuracy")
        values = [valid, teacher.metric, *(_known(scores.get(k, math.nan)) for k in counts)]
        texts = [metric.text(value) for value in values]
        rows.append([plain(str(method)), *texts[:2], f"{teacher.steps:.3g}", *texts[2:]])
    yield Table("", ["", "validation", "converged", "steps", *(f"at {k}" for k in counts)], rows)


LAYOUTS: dict[str, Callable[[Results, str, pd.DataFrame], Iterator[Table]]] = {
    "table": _table,
    "ablation": _ablation,
    "residuals": _residuals,
    "cost": _cost,
    "overhead": _overhead,
    "certified": _certified,
    "teachers": _teachers,
}

"""Results as tables of text, for Markdown, HTML and the terminal alike: one function for each layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from cdeq.evaluation import Results, cost_text, metric_of, seconds_text, small_text
from cdeq_experiments.pages.frame import at, figure, frame, tolerances
from cdeq_experiments.pages.sentences import plain


class Table(NamedTuple):
    """A caption, names of columns, and rows of cells; **bold** in a cell is Markdown's."""

    caption: str
    head: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The first column is words, the others numbers."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Cell = Callable[[pd.Series], str]


def tables(results: Results) -> dict[str, list[Table]]:
    """All tables of each data set."""
    found, lay_out = frame(results), LAYOUTS[results.page["layout"]]
    parts = {dataset: found[found["dataset"] == dataset] for dataset in results.datasets}
    return {d: list(lay_out(results, d, own)) if len(own) else [] for d, own in parts.items()}


def quantities(results: Results, dataset: str, paper: bool = True) -> dict[str, tuple[str, Cell]]:
    """By field of the frame: what it is called, and how a row of the frame writes it, the paper's in brackets."""
    metric = metric_of(results, dataset)

    def told(row: pd.Series, field: str, factor: float = 1.0) -> str:
        return _bracket(row["published"].get(field) if paper else None, factor)

    return {
        "metric": (
            metric.name,
            lambda r: (
                _bold(metric.text(_known(r["metric"]), _known(r["spread"])), r["best"])
                + told(r, "metric", metric.factor)
            ),
        ),
        "distance": (
            "distance to the equilibrium",
            lambda r: _bold(small_text(_known(r["distance"])), r["nearest"]),
        ),
        "seconds": (
            "time of one batch",
            lambda r: seconds_text(_known(r["seconds"])) + told(r, "seconds"),
        ),
        "gap_closed": (
            "gap closed",
            lambda r: "–" if math.isnan(r["gap_closed"]) else f"{round(100 * r['gap_closed'])}%",
        ),
        "top5": (
            "top-5 accuracy",
            lambda r: metric.text(_known(r["top5"])) + told(r, "top5", metric.factor),
        ),
        "residual": ("residual", lambda r: small_text(_known(r["residual"]))),
    }


def by_count(own: pd.DataFrame, counts: Sequence[float], caption: str, cell: Cell) -> Table:
    """Methods down, numbers of evaluations across; a method without a number anywhere is left out."""
    rows = []
    for name, group in own[own["steps"].isin(counts)].groupby("name", sort=False):
        cells = {row["steps"]: cell(row) for _, row in group.iterrows()}
        if any(text != "–" for text in cells.values()):
            rows.append([plain(str(name)), *(cells.get(k, "") for k in counts)])
    return Table(caption, ["evaluations", *(f"{k:g}" for k in counts)], rows)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _bold(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


def _bracket(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f" ({factor * value:g})"


# Layouts.


def _table(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    named = quantities(results, dataset)
    for field in ("metric", "distance", "seconds", "gap_closed", "top5"):
        caption, cell = named[field]
        if own[field].notna().any():
            yield by_count(own, results.page["counts"][dataset], caption.capitalize(), cell)
    lone = own[own["steps"].isna()]
    if len(lone):
        fields = ["metric", *(["top5"] if lone["top5"].notna().any() else []), "seconds"]
        cells = [[plain(r["name"]), *(named[f][1](r) for f in fields)] for _, r in lone.iterrows()]
        yield Table("Without a number of evaluations", ["", *(named[f][0] for f in fields)], cells)
    teacher = results.teacher(dataset)
    trained = seconds_text(teacher.train_seconds)
    sizes = [[f"{plain(teacher.name)}, the teacher", f"{teacher.parameters:,}", "1.0", trained]]
    for name, group in own.groupby("name", sort=False):
        first, spent = group.iloc[0], _known(group["train_seconds"].mean(skipna=False))
        if spent is None and first["parameters"] == teacher.parameters:
            continue  # the teacher itself, under a solver
        cost = cost_text(_known(first["f_equivalents"]))
        sizes.append([plain(str(name)), f"{first['parameters']:,}", cost, seconds_text(spent)])
    head = ["", "parameters", "cost in teacher steps, at its first count", "training"]
    yield Table("Size, cost and training", head, sizes)


def _ablation(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    page, named = results.page, quantities(results, dataset)
    counts, reported = page["counts"][dataset], page["reported"][dataset]
    if page["axes"]:
        places = {v["name"]: (v["row"], v["column"]) for v in page["variants"]}
        here = own[(own["steps"] == reported) & own["method"].isin(places)]
        shown = {places[r["method"]]: named["metric"][1](r) for _, r in here.iterrows()}
        down, across = (list(dict.fromkeys(place[i] for place in shown)) for i in (0, 1))
        rows = [[a, *(shown.get((a, b), "") for b in across)] for a in down]
        caption = f"{named['metric'][0].capitalize()} at {reported} evaluations"
        yield Table(caption, [" \\ ".join(page["axes"]), *across], rows)
        return
    wanted = [("metric", k) for k in counts]
    wanted += [("distance", k) for k in sorted({min(counts), reported})] + [("seconds", reported)]
    short = {"metric": named["metric"][0], "distance": "distance", "seconds": "time"}
    rows = []
    for method, group in own.groupby("method", sort=False):
        at_count = {r["steps"]: r for _, r in group.iterrows()}
        cells = [named[f][1](at_count[k]) if k in at_count else "" for f, k in wanted]
        rows.append([plain(str(method)), *cells])
    yield Table("", ["", *(f"{short[f]} at {k}" for f, k in wanted)], rows)


def _residuals(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    counts = sorted(own["steps"].dropna().unique())
    yield by_count(own, counts, "Residual", quantities(results, dataset)["residual"][1])


def _cost(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    whole = results.teacher(dataset).train_seconds or math.nan
    rows = [["teacher", seconds_text(_known(whole)), "100%"]]
    for _, r in own.iterrows():
        share, paper = r["train_seconds"] / whole, r["published"]
        told = f" ({100 * paper['train_hours'] / paper['teacher_hours']:.1f})" if paper else ""
        text = "–" if math.isnan(share) else f"{100 * share:.1f}%"
        rows.append([plain(r["name"]), seconds_text(_known(r["train_seconds"])), text + told])
    yield Table("", ["", "training", "of the teacher's"], rows)


def _overhead(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    names = list(own["figures"].iloc[0])
    rows = [
        [
            plain(r["name"]),
            *(
                f"{r['figures'][n]:.3g}{_bracket(r['published'].get(n.partition(',')[0]))}"
                for n in names
            ),
        ]
        for _, r in own.iterrows()
    ]
    yield Table("", ["", *(name.replace(" a batch", " per batch") for name in names)], rows)


def _certified(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    head = ["tolerance", "Anderson: evaluations", "time", "certified: evaluations", "time"]
    rows = []
    for tol in tolerances(own):
        solver, student = (at(own, dataset, f"{who} to {tol}") for who in ("solver", "certified"))
        pair = [
            f(r) for r in (solver, student) for f in (lambda r: f"{r['f_equivalents']:.1f}", _time)
        ]
        by_student = f"{100 * figure(student['figures'], 'by the student'):.0f}%"
        rows.append([tol, *pair, by_student, f"{student['seconds'] / solver['seconds']:.2f}"])
    yield Table("", [*head, "finished by the student", "ratio of times"], rows)


def _time(row: pd.Series) -> str:
    return seconds_text(_known(row["seconds"]))


def _teachers(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    metric, counts = metric_of(results, dataset), results.page["counts"][dataset]
    rows = []
    for method, group in own.groupby("method", sort=False):
        teacher = results.teacher(dataset, str(method))
        scores = {r["steps"]: metric.text(_known(r["metric"])) for _, r in group.iterrows()}
        valid = metric.text(figure(group["figures"].iloc[0], "validation accuracy"))
        shown = [
            metric.text(teacher.metric),
            f"{teacher.steps:.3g}",
            *(scores.get(k, "") for k in counts),
        ]
        rows.append([plain(str(method)), valid, *shown])
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

"""Results as tables of text, one function for each layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from cdeq.evaluation import MetricStyle, Results, cost_text, metric_of, seconds_text, small_text
from cdeq_experiments.pages.frame import certified, figure, frame
from cdeq_experiments.pages.sentences import plain

FIELDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "distance": ("Distance to the equilibrium", small_text),
    "residual": ("Residual", small_text),
    "seconds": ("Time of one batch", seconds_text),
    "gap_closed": ("Gap closed", lambda share: f"{round(100 * share)}%"),
    "top5": ("Top-5 accuracy", "{:.1%}".format),
    "parameters": ("parameters", "{:,}".format),
    "f_equivalents": ("cost in teacher steps, at its first count", cost_text),
    "train_seconds": ("training", seconds_text),
    "training_share": ("of the teacher's", "{:.1%}".format),
    "by the student": ("finished by the student", "{:.0%}".format),
    "ratio": ("ratio of times", "{:.2f}".format),
}
"""What fields of the frame are called and how they are written; the metric says so itself."""
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
    """One number of a row of the frame, the best in bold, what the paper reports in brackets.

    A field is a column of the frame, or a further measurement by its name.
    """
    value = row[field] if field in row else figure(row["figures"], field.partition(",")[0])
    told = row["published"].get(field.partition(",")[0]) if paper else None
    if math.isnan(value):
        text = "–"
    elif field in ("metric", "converged", "validation score"):
        spread = row["spread"] if field == "metric" else math.nan
        text = metric.text(value, None if math.isnan(spread) else spread)
    else:
        text = FIELDS[field][1](value) if field in FIELDS else f"{value:.3g}"
    if field in MARKS and row[MARKS[field]]:
        text = f"**{text}**"
    factor = metric.factor if field in ("metric", "top5") else 1.0
    return text if told is None else f"{text} ({factor * told:g})"


def _table_of(
    metric: MetricStyle,
    own: pd.DataFrame,
    columns: Sequence[str] | Mapping[str, tuple[str, Any]],
    *first: list[str],
    by: tuple[str, str] = ("name", "steps"),
    caption: str = "",
    corner: str = "",
) -> Table:
    """`first`, and a row for each method; `columns` are a field each, at a number of evaluations or at none.

    `by` are the columns of the frame that tell rows of the table apart, and what differs within one.
    """
    if not isinstance(columns, Mapping):
        columns = {FIELDS[name][0] if name in FIELDS else name: (name, 0) for name in columns}
    rows = [*first]
    for name, group in own.fillna({"steps": 0}).groupby(by[0], sort=False):
        at = {row[by[1]]: row for _, row in group.iterrows()}
        cells = [cell(metric, at[k], f) if k in at else "–" for f, k in columns.values()]
        rows.append([plain(str(name)), *cells])
    return Table(caption, [corner, *columns], rows)


def _by_count(metric: MetricStyle, own: pd.DataFrame, counts: Sequence[float], field: str) -> Table:
    """Methods down, numbers of evaluations across; a method without a number anywhere is left out."""
    known = own[own[field].notna() & own["steps"].isin(counts)]
    columns = {f"{k:g}": (field, k) for k in counts}
    caption = metric.name.capitalize() if field == "metric" else FIELDS[field][0]
    return _table_of(metric, known, columns, caption=caption, corner="evaluations")


# Layouts.


def _table(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    metric, teacher = metric_of(results, dataset), results.teacher(dataset)
    for field in ("metric", "distance", "seconds", "gap_closed", "top5"):
        if own[field].notna().any():
            yield _by_count(metric, own, results.page["counts"][dataset], field)
    lone = own[own["steps"].isna()]
    if len(lone):
        fields = {metric.name: "metric", "top-5 accuracy": "top5", "time of one batch": "seconds"}
        columns = {name: (f, 0) for name, f in fields.items() if lone[f].notna().any()}
        yield _table_of(metric, lone, columns, caption="Without a number of evaluations")
    spent = own["name"].map(own.groupby("name")["train_seconds"].mean())
    sizes = own.assign(train_seconds=spent, steps=0).drop_duplicates("name")
    # The others are the teacher, solved.
    sizes = sizes[sizes["train_seconds"].notna() | (sizes["parameters"] != teacher.parameters)]
    first = [plain(teacher.name), f"{teacher.parameters:,}", "1.0"]
    first.append(seconds_text(teacher.train_seconds))
    sized = ("parameters", "f_equivalents", "train_seconds")
    yield _table_of(metric, sizes, sized, first, caption="Size, cost and training")


def _ablation(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    metric, page = metric_of(results, dataset), results.page
    counts, reported = page["counts"][dataset], page["reported"][dataset]
    if page["axes"]:
        variants = pd.DataFrame(page["variants"]).set_index("name")
        here = own[own["steps"] == reported].join(variants, on="method", how="inner")
        columns = {column: ("metric", column) for column in variants["column"].unique()}
        caption = f"{metric.name.capitalize()} at {reported} evaluations"
        by, corner = ("row", "column"), " \\ ".join(page["axes"])
        yield _table_of(metric, here, columns, by=by, caption=caption, corner=corner)
        return
    columns = {f"{metric.name} at {k}": ("metric", k) for k in counts}
    columns |= {f"distance at {k}": ("distance", k) for k in sorted({min(counts), reported})}
    columns |= {f"time at {reported}": ("seconds", reported)}
    yield _table_of(metric, own, columns, by=("method", "steps"))


def _residuals(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    counts = sorted(own["steps"].dropna().unique())
    yield _by_count(metric_of(results, dataset), own, counts, "residual")


def _cost(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    whole = results.teacher(dataset).train_seconds
    own = own.assign(training_share=own["train_seconds"] / (whole or math.nan))
    first = ["teacher", seconds_text(whole), "100%"]
    fields = ("train_seconds", "training_share")
    yield _table_of(metric_of(results, dataset), own, fields, first)


def _overhead(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    yield _table_of(metric_of(results, dataset), own, list(own["figures"].iloc[0]))


def _certified(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    columns = {
        "Anderson: evaluations": ("f_equivalents", "solver"),
        "Anderson: time": ("seconds", "solver"),
        "certified: evaluations": ("f_equivalents", "certified"),
        "certified: time": ("seconds", "certified"),
        "finished by the student": ("by the student", "certified"),
        "ratio of times": ("ratio", "certified"),
    }
    metric, by = metric_of(results, dataset), ("tolerance", "who")
    yield _table_of(metric, certified(own), columns, by=by, corner="tolerance")


def _teachers(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[Table]:
    counts, metric = results.page["counts"][dataset], metric_of(results, dataset)
    teachers = [results.teacher(dataset, method) for method in own["method"]]
    own = own.assign(converged=[t.metric for t in teachers], taken=[t.steps for t in teachers])
    near = own[[metric.near(r["metric"], r["converged"]) for _, r in own.iterrows()]]
    own = own.assign(fewest=own["method"].map(near.groupby("method")["steps"].min()))
    fields = {"validation": "validation score", "converged": "converged", "steps": "taken"}
    fields |= {"within 1% after": "fewest", "training": "train_seconds"}
    columns = {head: (field, counts[0]) for head, field in fields.items()}
    columns |= {f"at {k}": ("metric", k) for k in counts}
    yield _table_of(metric, own, columns)


LAYOUTS: dict[str, Callable[[Results, str, pd.DataFrame], Iterator[Table]]] = {
    "table": _table,
    "chains": _table,
    "ablation": _ablation,
    "residuals": _residuals,
    "cost": _cost,
    "overhead": _overhead,
    "certified": _certified,
    "teachers": _teachers,
}

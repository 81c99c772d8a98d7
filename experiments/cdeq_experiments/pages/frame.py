"""Results as a pandas frame: the one place where numbers are put together over seeds and compared."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

import pandas as pd

from cdeq.evaluation import Results, Row, metric_of, small_text, style

NUMBERS = ["metric", "top5", "distance", "residual", "seconds", "f_equivalents", "train_seconds"]


def frame(results: Results) -> pd.DataFrame:
    """One row for each data set, method and number of evaluations (NaN for none), in the order measured.

    Numbers are means over seeds, NaN if any seed has none: a seed that diverged is not averaged away. `spread` is the
    standard deviation of the metric; `gap_closed` the share of the way from the teacher at one step to the converged
    teacher; `best` and `nearest` mark the best metric and the smallest distance at that number of evaluations.
    """
    rows = pd.DataFrame([vars(row) for row in results.rows], columns=list(Row.__dataclass_fields__))
    rows[["steps", *NUMBERS]] = rows[["steps", *NUMBERS]].astype(float)
    groups = rows.groupby(["dataset", "method", "steps"], sort=False, dropna=False)
    whole = groups[NUMBERS].count().eq(groups.size(), axis=0)
    found = groups[NUMBERS].mean().where(whole).reset_index()
    found["spread"] = groups["metric"].std().where(whole["metric"]).to_numpy()
    for name in ("parameters", "published"):
        found[name] = groups[name].first().to_numpy()
    found["figures"] = [
        pd.DataFrame(list(figures)).dropna(how="all").mean(skipna=False).to_dict()
        for _, figures in groups["figures"]
    ]
    looks = [style(m, explicit=math.isnan(k)) for m, k in found[["method", "steps"]].values]
    found["name"] = [look.name for look in looks]
    kinds = pd.Series([look.kind for look in looks], dtype=str)
    found["explicit"] = found["steps"].isna() & kinds.eq("explicit")
    alike = results.page.get("same_equilibrium") or found["method"].unique()
    for dataset in results.datasets:
        own = found["dataset"] == dataset
        found.loc[own, "gap_closed"] = _gap_closed(results, dataset, found[own])
        metric = metric_of(results, dataset)
        scores = found["metric"].where(own & (found["explicit"] | found["steps"].notna()))
        found.loc[own, "best"] = best_of(found, scores, metric.text, metric.higher_is_better)
        distances = found["distance"].where(own & found["method"].isin(alike))
        found.loc[own, "nearest"] = best_of(found, distances, small_text, higher=False)
    return found


def best_of(
    found: pd.DataFrame, values: pd.Series, text: Callable[[float], str], higher: bool
) -> pd.Series:
    """Which rows are best at their number of evaluations, as far as written digits tell; a single row is not marked."""
    groups = values.groupby(found["steps"], dropna=False)
    top = groups.transform("max" if higher else "min")
    return values.notna() & (values.map(text) == top.map(text)) & (groups.transform("count") > 1)


def _gap_closed(results: Results, dataset: str, own: pd.DataFrame) -> pd.Series:
    """1 at the converged teacher, 0 at one step of it; a perplexity counts by its logarithm, the loss."""
    teacher = results.teacher(dataset)
    # From the same start all solvers agree at one evaluation.
    start = own.loc[(own["method"] == "picard") & (own["steps"] == 1), "metric"].mean()
    end = math.nan if teacher.metric is None else teacher.metric
    values = own["metric"].where(own["steps"].notna())
    if teacher.metric_name == "perplexity":
        values, start, end = values.map(math.log), math.log(start), math.log(end)
    return (values - start) / (end - start if end != start else math.nan)


def at(found: pd.DataFrame, dataset: str, method: str, steps: float | None = None) -> Any:
    """One row of a frame; without `steps` the one that has no number of evaluations. KeyError if there is none."""
    own = found[(found["dataset"] == dataset) & (found["method"] == method)]
    own = own[own["steps"].isna() if steps is None else own["steps"] == steps]
    if len(own) != 1:
        raise KeyError(f"{len(own)} rows for {method!r} at {steps} evaluations on {dataset!r}")
    return own.iloc[0]


def figure(figures: dict[str, float], name: str) -> float:
    """A further measurement of a row by its name without the unit; NaN if there is none."""
    return next((v for key, v in figures.items() if key.partition(",")[0] == name), math.nan)


def certified(own: pd.DataFrame) -> pd.DataFrame:
    """Rows of those run to a `tolerance`: `who`, solver or certified, and the `ratio` of its time to the solver's."""
    parts = own["method"].str.partition(" to ")
    own = own.assign(who=parts[0], tolerance=parts[2])[parts[2] != ""]
    solver = own[own["who"] == "solver"].set_index("tolerance")["seconds"]
    return own.assign(ratio=own["seconds"] / own["tolerance"].map(solver).astype(float))


# What the paper reports.


@cache
def published() -> dict[str, Any]:
    """`beside`: the paper's data set for ours; `values`: by data set, experiment, method and evaluations."""
    file = resources.files("cdeq_experiments.pages") / "published.json"
    return dict(json.loads(file.read_text("utf-8")))


def beside(dataset: str) -> str | None:
    """The data set of the paper that stands beside one of ours, by name."""
    return published()["beside"].get(dataset)


def with_published(results: Results) -> Results:
    """The same with what the paper reports at the same place in each row; shares as fractions, like ours."""

    def values(row: Row) -> dict[str, float]:
        found = published()["values"].get(beside(row.dataset), {}).get(results.experiment, {})
        found = found.get(row.method, {}).get("-" if row.steps is None else str(row.steps), {})
        if "train_hours" in found:
            share = found["train_hours"] / found["teacher_hours"]
            return {**found, "training_share": round(100 * share, 1)}
        shares = ("metric", "top5") if metric_of(results, row.dataset).percent else ()
        return {name: round(v / 100, 6) if name in shares else v for name, v in found.items()}

    return replace(results, rows=tuple(replace(row, published=values(row)) for row in results.rows))

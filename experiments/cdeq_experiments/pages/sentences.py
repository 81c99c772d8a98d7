"""What results say, in words: every sentence of every page is made here, from the frame.

A sentence is one line of Markdown. Where a student loses, it says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence

import pandas as pd

from cdeq.evaluation import (
    SOLVERS,
    MetricStyle,
    Results,
    listed,
    metric_of,
    seconds_text,
    small_text,
    style,
)
from cdeq_experiments.pages.frame import at, frame, tolerances

RECIPES = ("paper", "anchored")
SOLVED = "solved"
"""The teacher's own solver run to its tolerance."""
NEAR = 0.01
"""A score that is worse than the converged one by this share at most has reached it."""
ALIKE = {True: 0.01, False: 0.005}
"""What one seed cannot tell apart: a point of a percentage, else this share; seeds of one choice differ as much."""


def findings(results: Results) -> tuple[str, ...]:
    """The sentences of a result, by its layout, for each data set in turn."""
    found, say = frame(results), LAYOUTS.get(results.page["layout"], lambda *_: iter(()))
    return tuple(
        f"**{plain(dataset)}.** {sentence}"
        for dataset in results.datasets
        for sentence in say(results, dataset, found[found["dataset"] == dataset])
    )


def plain(text: str) -> str:
    """A name as Markdown that shows it as it is."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", text)


def _named(choice: str) -> str:
    return f"*{plain(choice)}*"


def counted(counts: Sequence[float]) -> str:
    """`1 evaluation`, `2 and 4 evaluations`."""
    return f"{listed([f'{k:g}' for k in counts])} evaluation{'s' * (list(counts) != [1])}"


# Tables.


def _table(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    for recipe in RECIPES:
        if recipe in set(own["method"]):
            yield _student(results, dataset, own, recipe)
    if "anchored" in set(own["method"]):
        yield from _speed(results, dataset, own)


def _student(results: Results, dataset: str, own: pd.DataFrame, recipe: str) -> str:
    """How much of the gap it closes, and who is better or nearer to the equilibrium at the counts shown."""
    metric = metric_of(results, dataset)
    own = own[own["steps"].isin(results.page["counts"][dataset])]
    mine = own[own["method"] == recipe].set_index("steps")
    rivals = own[~own["method"].str.startswith(("anchored", recipe))]
    alike = rivals[rivals["method"].isin(results.page.get("same_equilibrium") or rivals["method"])]
    closed = mine.loc[mine.index.isin((1, 2)), "gap_closed"].dropna()
    parts = []
    if len(closed):
        shares = listed([f"{100 * share:.0f}%" for share in closed])
        parts.append(f"closes {shares} of the gap at {counted(list(closed.index))}")
    word = "more accurate" if metric.higher_is_better else "better"
    parts += _ahead(mine["metric"], rivals, metric.better, word)
    parts += _ahead(mine["distance"], alike, _nearer, "nearer to the equilibrium")
    return f"{style(recipe).name}: {'. '.join(parts) or 'nothing to compare with'}."


def _nearer(a: float, b: float) -> bool:
    return a < b and small_text(a) != small_text(b)


def _ahead(
    mine: pd.Series, rivals: pd.DataFrame, better: Callable[[float, float], bool], word: str
) -> Iterator[str]:
    """Who is ahead of a student, and at which counts; `mine` are its values by the number of evaluations."""
    known = rivals.dropna(subset=str(mine.name))
    known = known[known["steps"].isin(mine.index)]
    lost: dict[str, list[float]] = {}
    for name, k, value in known[["name", "steps", mine.name]].itertuples(index=False):
        if math.isnan(mine[k]) or better(value, mine[k]):
            lost.setdefault(plain(name), []).append(k)
    if lost:
        yield f"{word.capitalize()} than it: {_where(lost, len(mine))}"
    elif len(known):
        yield f"No rival is {word}"


def _where(counts: dict[str, list[float]], most: int) -> str:
    """`Picard and Anderson at 4 and 8; Few-step at every count`."""
    names: dict[str, list[str]] = {}
    for name, own in counts.items():
        where = "every count" if len(own) == most > 1 else listed([f"{k:g}" for k in own])
        names.setdefault(where, []).append(name)
    return "; ".join(f"{listed(who)} at {where}" for where, who in names.items())


def _speed(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    """Time to the converged score: the student, the quickest solver at its fewest steps, Anderson to tolerance."""
    metric, goal = metric_of(results, dataset), results.teacher(dataset).metric
    if goal is None:
        return
    timed = own[own["seconds"].notna() & own["steps"].notna()].sort_values("seconds")
    near = timed[[metric.near(value, goal, within=NEAR) for value in timed["metric"]]]
    mine, solvers = near[near["method"] == "anchored"], near[near["method"].isin(SOLVERS)]
    what = f"within {100 * NEAR:g}% of the converged {metric.name} ({metric.text(goal)})"
    if not len(mine):
        yield f"Anchored does not come {what} at any count that was timed."
        return
    student, solved = mine.iloc[0], own[own["method"] == SOLVED]
    text = f"Anchored is {what} after {seconds_text(student['seconds'])} and {counted([student['steps']])}"
    if len(solvers):
        rival = solvers.iloc[0]
        text += f", {_times(rival, student)} the quickest solver, {rival['name']} with {rival['steps']:g}"
    else:
        text += ", no solver at any count that was timed"
    if len(solved):
        text += f", and {_times(solved.iloc[0], student)} Anderson run to its tolerance"
    yield text + "."


def _times(rival: pd.Series, student: pd.Series) -> str:
    ratio = rival["seconds"] / student["seconds"]
    if 1 / 1.05 < ratio < 1.05:
        return "as fast as"
    return f"{ratio:.1f} times faster than" if ratio > 1 else f"{1 / ratio:.1f} times slower than"


# Ablations.


def _ablation(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    counts = {results.page["reported"][dataset]}
    if not any("metric" in values for values in own["published"]):
        counts.add(min(results.page["counts"][dataset]))  # the paper has no count of its own
    for k in sorted(counts):
        here = own[(own["steps"] == k) & own["metric"].notna()]
        if len(here):
            said = _choice(metric_of(results, dataset), here, results.page["default"])
            yield f"With {counted([k])} {said}."


def _choice(metric: MetricStyle, here: pd.DataFrame, default: str) -> str:
    """Which choice is best, whether the default is as good, and which is best in the paper."""
    order = here.sort_values("metric", ascending=not metric.higher_is_better)
    best, last = order.iloc[0], order.iloc[-1]
    seeds = here["spread"].notna().any()
    usual = ALIKE[metric.percent] * (100 / metric.factor if metric.percent else best["metric"])
    noise, who = (here["spread"].max(), "the seeds") if seeds else (usual, "one seed")
    alike = abs(last["metric"] - best["metric"]) <= noise
    scores = {m: metric.text(v) for m, v in here[["method", "metric"]].values}
    behind = abs(here.loc[here["method"] == default, "metric"] - best["metric"])
    if alike:
        ends = f"{scores[best['method']]} to {scores[last['method']]}"
        parts = [f"{who} cannot tell the choices apart ({ends})"]
    else:
        is_default = ", the default," if best["method"] == default else ""
        parts = [f"{_named(best['method'])}{is_default} is best ({scores[best['method']]})"]
        if len(behind) and not is_default:
            close = behind.iloc[0] <= noise
            verdict = f"is as good as far as {who} can tell" if close else "is behind"
            parts.append(f"{_named(default)}, the default, {verdict} ({scores[default]})")
    given = {m: values["metric"] for m, values in here[["method", "published"]].values if values}
    if given:
        top = (max if metric.higher_is_better else min)(given, key=lambda method: given[method])
        agrees = top == best["method"] and not alike
        parts.append("as in the paper" if agrees else f"in the paper {_named(top)} is best")
    elif here["distance"].notna().any():
        near = here.loc[here["distance"].idxmin()]
        far = small_text(near["distance"])
        parts.append(f"{_named(near['method'])} is nearest to the equilibrium ({far})")
    return "; ".join(parts)


# The others.


def _residuals(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    own = own[own["residual"].notna()]
    if len(own):
        first = own.loc[own.groupby("steps")["residual"].idxmin()].sort_values("steps")
        counts = {
            plain(str(n)): list(steps) for n, steps in first.groupby("name", sort=False)["steps"]
        }
        last = own[own["steps"] == own["steps"].max()]
        ends = [f"{plain(r['name'])} {small_text(r['residual'])}" for _, r in last.iterrows()]
        after = counted([last["steps"].iloc[0]])
        yield f"Smallest residual: {_where(counts, len(first))}. After {after}: {', '.join(ends)}."


def _certified(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    goals = tolerances(own)
    mine, solver = (
        [at(own, dataset, f"{who} to {t}") for t in goals] for who in ("certified", "solver")
    )
    if goals:
        ratios = [f"{a['seconds'] / b['seconds']:.2f}" for a, b in zip(mine, solver, strict=True)]
        steps = [listed([f"{row['f_equivalents']:.1f}" for row in rows]) for rows in (mine, solver)]
        yield (
            f"To a residual of {listed(goals)} the certified student takes {listed(ratios)} of Anderson's time "
            f"({steps[0]} evaluations instead of {steps[1]})."
        )


LAYOUTS: dict[str, Callable[[Results, str, pd.DataFrame], Iterator[str]]] = {
    "table": _table,
    "ablation": _ablation,
    "residuals": _residuals,
    "certified": _certified,
}
"""For the other layouts the tables are enough."""

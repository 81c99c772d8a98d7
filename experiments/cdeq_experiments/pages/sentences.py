"""What results say, in words: every sentence of every page is made here, from the frame.

A sentence is one line of Markdown. What is lost is said as what is won.
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
from cdeq_experiments.pages.frame import at, figure, frame, tolerances

RECIPES = ("paper", "anchored")
SOLVED = "solved"
"""The teacher's own solver run to its tolerance."""
NEAR = 0.01
"""A score that is worse than the converged one by this share at most has reached it."""
ALIKE = {True: 0.01, False: 0.005}
"""What one seed cannot tell apart: a point of a percentage, else this share; seeds of one choice differ as much."""


def findings(results: Results) -> tuple[str, ...]:
    """The sentences of a result, by its layout, for each data set in turn."""
    found, say = frame(results), LAYOUTS[results.page["layout"]]
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
        yield from _others(results, dataset)


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
    who: dict[str, list[str]] = {}
    for name, counts in lost.items():
        every = len(counts) == len(mine) > 1
        where = "every count" if every else listed([f"{k:g}" for k in counts])
        who.setdefault(where, []).append(name)
    if lost:
        told = "; ".join(f"{listed(names)} at {where}" for where, names in who.items())
        yield f"{word.capitalize()} than it: {told}"
    elif len(known):
        yield f"No rival is {word}"


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


def _others(results: Results, dataset: str) -> Iterator[str]:
    """Students that differ from the default in how they were made, at one evaluation and with the same seeds."""
    rows = [r for r in results.rows_of(dataset) if r.steps == 1 and r.method.startswith("anchored")]
    base = {row.seed: row for row in rows if row.method == "anchored"}
    metric, parts = metric_of(results, dataset), []
    for method in dict.fromkeys(row.method for row in rows if row.method != "anchored"):
        pairs = [(row, base[row.seed]) for row in rows if row.method == method and row.seed in base]
        values = [(a.metric, b.metric, a.distance, b.distance) for a, b in pairs]
        score, usual, far, near = pd.DataFrame(values, columns=range(4), dtype=float).mean(
            skipna=False
        )
        if not math.isnan(score + usual + far + near):
            texts = f"{metric.text(score)} ({metric.text(usual)}), {far / near:.2f} times"
            parts.append(f"{plain(style(method).name)} {texts}")
    if parts:
        yield (
            "Students made otherwise, at 1 evaluation (in brackets the default with the same seeds), and their "
            f"distance to the equilibrium against its: {'; '.join(parts)}."
        )


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
    own = here[here["method"] == default]
    score = metric.text(best["metric"])
    if alike:
        parts = [f"{who} cannot tell the choices apart ({score} to {metric.text(last['metric'])})"]
    elif best["method"] == default:
        parts = [f"{_named(default)}, the default, is best ({score})"]
    else:
        parts = [f"{_named(best['method'])} is best ({score})"]
        if len(own):
            close = abs(own["metric"].iloc[0] - best["metric"]) <= noise
            verdict = f"is as good as far as {who} can tell" if close else "is behind"
            score = metric.text(own["metric"].iloc[0])
            parts.append(f"{_named(default)}, the default, {verdict} ({score})")
    given = {m: values["metric"] for m, values in here[["method", "published"]].values if values}
    if given:
        top = (max if metric.higher_is_better else min)(given, key=lambda method: given[method])
        agrees = top == best["method"] and not alike
        parts.append("as in the paper" if agrees else f"in the paper {_named(top)} is best")
    elif here["distance"].notna().any():
        near = here.loc[here["distance"].idxmin()]
        parts.append(
            f"{_named(near['method'])} is nearest to the equilibrium ({small_text(near['distance'])})"
        )
    return "; ".join(parts)


# The others.


def _residuals(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    own = own[own["residual"].notna()]
    if len(own):
        first = own.loc[own.groupby("steps")["residual"].idxmin()]
        where = [
            f"{plain(str(name))} at {_ranges(sorted(rows['steps']))}"
            for name, rows in first.groupby("name", sort=False)
        ]
        last = own[own["steps"] == own["steps"].max()]
        ends = [f"{plain(r['name'])} {small_text(r['residual'])}" for _, r in last.iterrows()]
        after = counted([last["steps"].iloc[0]])
        yield f"Smallest residual: {', '.join(where)}. After {after}: {', '.join(ends)}."


def _ranges(counts: Sequence[float]) -> str:
    """`1 to 6`, `1 and 3 to 5`."""
    runs: list[list[int]] = []
    for k in map(int, counts):
        if runs and runs[-1][-1] == k - 1:
            runs[-1].append(k)
        else:
            runs.append([k])
    return listed([f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs])


def _cost(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    teacher = results.teacher(dataset).train_seconds
    own = own[own["train_seconds"].notna()]
    if teacher and len(own):
        shares = own["name"] + (100 * own["train_seconds"] / teacher).map(" {:.0f}%".format)
        yield f"Distilling takes, of the teacher's {seconds_text(teacher)}: {plain(', '.join(shares))}."


def _overhead(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    size = {r["method"]: figure(r["figures"], "storage") for _, r in own.iterrows()}
    if set(RECIPES) <= set(size):
        yield (
            f"A recorded batch takes {size['paper']:.3g} MB for Paper, which learns from trajectories, and "
            f"{size['anchored']:.3g} MB for Anchored, which learns from equilibria: "
            f"{size['paper'] / size['anchored']:.0f} times less."
        )


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


def _teachers(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    valid = own["figures"].map(lambda figures: figure(figures, "validation accuracy"))
    best = own.loc[valid.idxmax()]
    metric, converged = metric_of(results, dataset), results.teacher(dataset, best["method"])
    yield (
        f"Best on validation nodes is {_named(best['method'])} ({metric.text(valid.max())}; test "
        f"{metric.text(converged.metric)}, {metric.text(best['metric'])} with {counted([best['steps']])})."
    )


LAYOUTS: dict[str, Callable[[Results, str, pd.DataFrame], Iterator[str]]] = {
    "table": _table,
    "ablation": _ablation,
    "residuals": _residuals,
    "cost": _cost,
    "overhead": _overhead,
    "certified": _certified,
    "teachers": _teachers,
}

"""What results say, in words: every sentence of every page is made here, from the frame.

A sentence is one line of Markdown. Where a student loses, it says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import isnan

import pandas as pd

from cdeq.evaluation import (
    SOLVERS,
    Results,
    listed,
    metric_of,
    seconds_text,
    small_text,
    style,
)
from cdeq_experiments.pages.frame import certified, frame

RECIPES = ("paper", "anchored", "corrected")
"""Of students, from the published one to the default."""
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
    known = [recipe for recipe in RECIPES if recipe in set(own["method"])]
    yield from (_student(results, dataset, own, recipe) for recipe in known)
    if {*known} - {"paper"} and results.teacher(dataset).metric is not None:
        yield _speed(results, dataset, own, known[-1])


def _student(results: Results, dataset: str, own: pd.DataFrame, recipe: str) -> str:
    """How much of the gap it closes, and who is better or nearer to the equilibrium at the counts shown."""
    metric = metric_of(results, dataset)
    own = own[own["steps"].isin(results.page["counts"][dataset])]
    mine = own[own["method"] == recipe].set_index("steps")
    # A recipe is not held against those that came after it.
    since = RECIPES[RECIPES.index(recipe) :] + (() if recipe == RECIPES[-1] else ("warm_start",))
    rivals = own[~own["method"].str.startswith(since)]
    alike = rivals["method"].isin(results.page.get("same_equilibrium") or rivals["method"])
    closed = mine.loc[mine.index.isin((1, 2)), "gap_closed"].dropna()
    parts = []
    if len(closed):
        shares = listed([f"{share:.0%}" for share in closed])
        parts.append(f"closes {shares} of the gap at {counted(list(closed.index))}")
    word = "more accurate" if metric.higher_is_better else "better"
    for field, what, known, text, higher in (
        ("metric", word, rivals, metric.text, metric.higher_is_better),
        ("distance", "nearer to the equilibrium", rivals[alike], small_text, False),
    ):
        known = known[known["steps"].isin(mine.index)].dropna(subset=field)
        pairs = zip(known[field], known["steps"].map(mine[field]), strict=True)
        ahead = [isnan(b) or ((a > b) == higher and text(a) != text(b)) for a, b in pairs]
        lost = known[ahead]
        if len(lost):
            parts.append(f"{what.capitalize()} than it: {_where(lost, len(mine))}")
        elif len(known):
            parts.append(f"No rival is {what}")
    return f"{style(recipe).name}: {'. '.join(parts) or 'nothing to compare with'}."


def _where(rows: pd.DataFrame, most: int) -> str:
    """The names of rows and their counts: `Picard and Anderson at 4 and 8; Few-step at every count`."""
    counts = rows.groupby("name", sort=False)["steps"].agg(
        lambda own: "every count" if len(own) == most > 1 else listed([f"{k:g}" for k in own])
    )
    groups = counts.groupby(counts, sort=False).groups.items()
    return "; ".join(f"{listed([plain(n) for n in names])} at {where}" for where, names in groups)


def _speed(results: Results, dataset: str, own: pd.DataFrame, recipe: str) -> str:
    """Time to the converged score: the student, the quickest solver at its fewest steps, Anderson to tolerance."""
    metric, goal = metric_of(results, dataset), results.teacher(dataset).metric
    assert goal is not None
    timed = own[own["seconds"].notna() & own["steps"].notna()].sort_values("seconds")
    near = timed[[metric.near(value, goal, within=NEAR) for value in timed["metric"]]]
    mine, solvers = near[near["method"] == recipe], near[near["method"].isin(SOLVERS)]
    what = f"within {NEAR:.0%} of the converged {metric.name} ({metric.text(goal)})"
    if not len(mine):
        return f"{style(recipe).name} does not come {what} at any count that was timed."
    student, parts = mine.iloc[0], [] if len(solvers) else ["no solver at any count that was timed"]
    rivals = pd.concat([solvers[:1], own[own["method"] == "solved"]])
    for name, steps, seconds in rivals[["name", "steps", "seconds"]].itertuples(index=False):
        solver = f"the quickest solver, {name} with {steps:g}"
        who = "Anderson run to its tolerance" if isnan(steps) else solver
        ratio = seconds / student["seconds"]
        pace = f"{max(ratio, 1 / ratio):.1f} times {'faster' if ratio > 1 else 'slower'} than"
        parts.append(f"{'as fast as' if 1 / 1.05 < ratio < 1.05 else pace} {who}")
    taken = f"{seconds_text(student['seconds'])} and {counted([student['steps']])}"
    return f"{style(recipe).name} is {what} after {taken}, {', and '.join(parts)}."


# The others.


def _ablation(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    """Which choice is best and how good the default is, or that nobody can tell; and which is best in the paper."""
    metric, page = metric_of(results, dataset), results.page
    default, sign = page["default"], 1 if metric.higher_is_better else -1
    given = {m: values["metric"] for m, values in own[["method", "published"]].values if values}
    # Where the paper has no count of its own, the first too.
    counts = {page["reported"][dataset], *([] if given else [min(page["counts"][dataset])])}
    known = own[own["steps"].isin(counts) & own["metric"].notna()].set_index("method")
    for k, here in known.groupby("steps"):
        scores, texts = here["metric"], here["metric"].map(metric.text)
        best = (sign * scores).idxmax()
        behind = abs(scores - scores[best])
        usual = ALIKE[metric.percent] * (100 / metric.factor if metric.percent else scores[best])
        noise, who = here["spread"].max(), "the seeds"
        if isnan(noise):
            noise, who = usual, "one seed"
        parts = [f"{_named(best)}{', the default,' * (best == default)} is best ({texts[best]})"]
        if behind.max() <= noise:
            ends = f"{texts[best]} to {texts[behind.idxmax()]}"
            parts = [f"{who} cannot tell the choices apart ({ends})"]
        elif default in texts and best != default:
            told = f", which {who} cannot tell from it" if behind[default] <= noise else ""
            parts.append(f"{_named(default)}, the default, has {texts[default]}{told}")
        if given:
            parts.append(f"in the paper {_named((sign * pd.Series(given)).idxmax())} is best")
        elif here["distance"].notna().any():
            near, far = here["distance"].idxmin(), small_text(here["distance"].min())
            parts.append(f"{_named(near)} is nearest to the equilibrium ({far})")
        yield f"With {counted([k])} {'; '.join(parts)}."


def _residuals(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    own = own[own["residual"].notna()]
    if len(own):
        first = own.loc[own.groupby("steps")["residual"].idxmin()].sort_values("steps")
        yield f"Smallest residual: {_where(first, len(first))}."


def _certified(results: Results, dataset: str, own: pd.DataFrame) -> Iterator[str]:
    own = certified(own)
    if len(own):
        mine, solver = (own[own["who"] == who] for who in ("certified", "solver"))
        steps = [listed([f"{k:.1f}" for k in rows["f_equivalents"]]) for rows in (mine, solver)]
        yield (
            f"To a residual of {listed(list(mine['tolerance']))} the certified student takes "
            f"{listed([f'{ratio:.2f}' for ratio in mine['ratio']])} of Anderson's time "
            f"({steps[0]} evaluations instead of {steps[1]})."
        )


LAYOUTS: dict[str, Callable[[Results, str, pd.DataFrame], Iterator[str]]] = {
    "table": _table,
    "chains": _table,
    "ablation": _ablation,
    "residuals": _residuals,
    "certified": _certified,
}
"""For the other layouts the tables are enough."""

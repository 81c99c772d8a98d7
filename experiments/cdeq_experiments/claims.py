"""What a table says, in words: each line computed from its rows, for perplexities and accuracies alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cdeq.evaluation import SOLVERS
from cdeq.evaluation import Results
from cdeq.evaluation import Point, curves, style
from cdeq_experiments.paper_table import gap_closed

Curves = dict[str, list[Point]]


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How scores of one metric are compared and named.

    `worse(a, b)` is by how much a is worse than b, negative where it is better, in units that `amount` shows;
    a score that is worse than the converged one by `near` at most has reached it, which `within` says.
    """

    metric: str
    gap: str
    show: Callable[[float], str]
    worse: Callable[[float, float], float]
    amount: Callable[[float], str]
    near: float
    within: str
    change: str
    """What a score does that gets worse: rises, or falls."""


PERPLEXITY = Wording(
    metric="perplexity",
    gap="the gap in log-perplexity",
    show=lambda value: f"{value:.1f}",
    worse=lambda a, b: a / b - 1,
    amount=lambda ratio: f"{100 * ratio:.2f}%",
    near=0.01,
    within="within 1% of the converged perplexity",
    change="rises",
)
TOP1 = Wording(
    metric="top-1 accuracy",
    gap="the gap in top-1 accuracy",
    show=lambda value: f"{100 * value:.2f}%",
    worse=lambda a, b: b - a,
    amount=lambda difference: f"{100 * difference:.2f} points",
    near=0.005,
    within="within half a point of the converged top-1 accuracy",
    change="falls",
)


def at(found: Curves, method: str, steps: int | None) -> Point | None:
    """A method's point at a number of evaluations."""
    return next((p for p in found.get(method, []) if p.steps == steps), None)


def student_line(
    results: Results,
    dataset: str,
    name: str,
    rivals: Sequence[str],
    counts: Sequence[int],
    words: Wording,
) -> str:
    """How much of the gap a student closes, who is better than it, and whether more steps ever hurt."""
    found = curves(results, dataset)
    closed = [gap_closed(results, dataset, name, k) for k in (1, 2)]
    shares = " and ".join("–" if c is None else f"{100 * c:.1f}%" for c in closed)
    lost: dict[str, list[tuple[int, float]]] = {}
    compared = []
    for k in counts:
        ours = at(found, name, k)
        theirs = [p for rival in rivals if (p := at(found, rival, k)) and p.metric is not None]
        if ours is None or ours.metric is None or not theirs:
            continue
        compared.append(k)
        for p in theirs:
            assert p.metric is not None
            behind = words.worse(ours.metric, p.metric)
            if behind > 0:
                lost.setdefault(style(p.method).name, []).append((k, behind))
    curve = [p.metric for p in found[name] if p.metric is not None]
    most = max((words.worse(b, a) for a, b in pairwise(curve)), default=0.0)
    trend = (
        f"{words.change} by at most {words.amount(most)} from one count to the next"
        if most > 0
        else f"never {words.change}"
    )
    where = ", ".join(map(str, compared))
    behind_whom = [
        f"{rival} at {', '.join(str(k) for k, _ in places)} (by {'up to ' * (len(places) > 1)}"
        f"{words.amount(max(amount for _, amount in places))})"
        for rival, places in lost.items()
    ]
    verdict = (
        f"worse than {'; '.join(behind_whom)}"
        if lost
        else f"no equilibrium rival is better at {where}"
    )
    return (
        f"{style(name).name}: closes {shares} of {words.gap} at 1 and 2 evaluations; {verdict}; "
        f"{words.metric} {trend} ({' → '.join(map(words.show, curve))})."
    )


def first_near(points: Iterable[Point], goal: float, words: Wording) -> Point | None:
    """The quickest point that has reached the goal."""
    near = [
        p
        for p in points
        if p.metric is not None and p.seconds and words.worse(p.metric, goal) <= words.near
    ]
    return min(near, key=lambda p: p.seconds or 0.0, default=None)


def speed_line(results: Results, dataset: str, words: Wording) -> str:
    """Seconds to the converged score: the student against the quickest solver at its fewest steps."""
    found, goal = curves(results, dataset), results.teacher(dataset).metric
    if goal is None:
        return ""
    solver = first_near((p for name in SOLVERS for p in found.get(name, [])), goal, words)
    student = first_near(found.get("anchored", []), goal, words)
    if student is None:
        return f"Anchored does not come {words.within}, {words.show(goal)}."
    if solver is None:
        counts = [p.steps or 0 for name in SOLVERS for p in found.get(name, [])]
        return (
            f"Anchored comes {words.within}, {words.show(goal)}, at {student.steps} evaluations, "
            f"{1000 * (student.seconds or 0):.0f} ms a batch; no solver does up to {max(counts, default=0)}."
        )
    ours, theirs = student.seconds or 0.0, solver.seconds or 0.0
    return (
        f"{words.within[0].upper()}{words.within[1:]}, {words.show(goal)}: Anchored at {student.steps} "
        f"evaluations, {1000 * ours:.0f} ms a batch; the quickest solver, {style(solver.method).name}, at "
        f"{solver.steps}, {1000 * theirs:.0f} ms: {theirs / ours:.1f} times as long."
    )


def solved_line(results: Results, dataset: str, words: Wording, tolerance: float) -> str:
    """The solver as it is used: to a tolerance, since nobody in production knows the score to stop at."""
    found, goal = curves(results, dataset), results.teacher(dataset).metric
    solved = next(iter(found.get("solved", [])), None)
    if goal is None or solved is None or not solved.seconds or solved.metric is None:
        return ""
    student = first_near(found.get("anchored", []), goal, words)
    if student is None or not student.seconds:
        return ""
    return (
        f"The teacher's own solver, Anderson, run to its tolerance of {tolerance:g}, takes "
        f"{solved.f_equivalents or 0:.1f} evaluations on average and {1000 * solved.seconds:.0f} ms a batch "
        f"({words.metric} {words.show(solved.metric)}): "
        f"{solved.seconds / student.seconds:.1f} times as long as that student."
    )


def cost_line(results: Results, dataset: str) -> str:
    """What training took, beside the teacher's."""
    teacher = results.teacher(dataset).train_seconds
    parts = []
    for name in ("anchored", "paper", "hyperdeq", "few_step"):
        spent = [r.train_seconds for r in results.rows_of(dataset) if r.method == name]
        known = [s for s in spent if s is not None]
        if not teacher or not spent:
            continue
        if len(known) < len(spent):
            parts.append(f"{style(name).name} not known")
            continue
        mean = sum(known) / len(known)
        parts.append(f"{style(name).name} {mean:.0f} s ({100 * mean / teacher:.1f}%)")
    if not teacher or not parts:
        return ""
    return (
        f"Training: the teacher {teacher:.0f} s; the others with what they learn from recorded, Few-step with the "
        f"pre-training it shares, {', '.join(parts)}."
    )


def explicit_line(results: Results, dataset: str, names: Iterable[str], words: Wording) -> str:
    """The converged teacher among explicit models."""
    goal, names = results.teacher(dataset).metric, set(names)
    rows = [r for r in results.rows_of(dataset) if r.method in names and r.metric is not None]
    if goal is None or not rows:
        return ""
    parts = [
        f"{style(row.method, explicit=True).name} {words.show(row.metric or 0)}"
        + (f" ({row.train_seconds:.0f} s)" if row.train_seconds is not None else "")
        for row in rows
    ]
    behind = max(words.worse(goal, row.metric or 0) for row in rows)
    verdict = (
        "beats or matches them all"
        if behind <= 0
        else f"is {words.amount(behind)} behind the best of them"
    )
    teacher = results.teacher(dataset).train_seconds
    longest = max((row.train_seconds or 0.0 for row in rows), default=0.0)
    if teacher and 0 < longest < 0.5 * teacher:
        verdict += f", which had at most {100 * longest / teacher:.0f}% of its training time"
    return f"Explicit models: {', '.join(parts)}; the converged teacher, {words.show(goal)}, {verdict}."

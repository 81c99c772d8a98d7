"""What a comparison shows, in a few sentences computed from its rows; where a student loses, that too."""

from __future__ import annotations

from itertools import pairwise

from cdeq.evaluation.results import Results
from cdeq.evaluation.styles import MetricStyle, metric_of, seconds_text, small_text, style
from cdeq.evaluation.table import Point, curves, kind_of

FEW = 2
"""The step count of the first finding."""
FIRST = ("corrected", "anchored")
"""Students that come first: the default recipe, and what was the default before."""


def findings(results: Results, dataset: str) -> list[str]:
    """Two or three sentences for each student, and what a reader should know before trusting them."""
    found = curves(results, dataset)
    students = [points for points in found.values() if kind_of(points) == "student"]
    students.sort(key=lambda points: _place(points[0].method))
    solvers = [p for points in found.values() if kind_of(points) == "solver" for p in points]
    lines: list[str | None] = []
    for points in students:
        lines.append(few_steps(results, dataset, points, solvers))
    for points in students:
        lines.append(time_to_teacher(results, dataset, points, solvers))
    lines += [drift(points) for points in students]
    return [line for line in lines if line] + cautions(results, dataset, solvers)


def _place(method: str) -> int:
    return FIRST.index(method) if method in FIRST else len(FIRST)


def few_steps(
    results: Results, dataset: str, points: list[Point], solvers: list[Point]
) -> str | None:
    """The student's score with few steps beside the converged teacher's and the best solver's."""
    metric, teacher = metric_of(results, dataset), results.teacher(dataset)
    if teacher.metric is None:
        return None
    scored = [p for p in points if p.metric is not None and p.steps is not None]
    if not scored:
        return f"{_student(points)} gave no finite {metric.name} at any number of steps."
    point = next((p for p in scored if p.steps == FEW), scored[0])
    assert point.metric is not None
    text = (
        f"{_student(points)} reaches {metric.phrase(point.metric)} with {_evaluations(point.steps)}"
    )
    if point.f_equivalents is not None and point.f_equivalents > 1.1 * (point.steps or 1):
        text += f" (with its start, the cost of {point.f_equivalents:.3g})"
    rival = _best([p for p in solvers if p.steps == point.steps], metric)
    if rival is not None and rival.metric is not None:
        ahead = metric.better(rival.metric, point.metric)
        text += f"; {_name(rival)} {'is ahead there, with' if ahead else 'has'} "
        text += metric.text(rival.metric)
    after = f" after {teacher.steps:.3g}" if teacher.steps is not None else ""
    return f"{text}; the converged teacher has {metric.text(teacher.metric)}{after}."


def time_to_teacher(
    results: Results, dataset: str, points: list[Point], solvers: list[Point]
) -> str | None:
    """The seconds it takes to come within 1% of the converged teacher's score, against the best solver."""
    metric, target = metric_of(results, dataset), results.teacher(dataset).metric
    if target is None:
        return None
    ours, theirs = (
        min(
            (p for p in group if metric.near(p.metric, target) and p.seconds is not None),
            key=lambda p: p.seconds or 0.0,
            default=None,
        )
        for group in (points, solvers)
    )
    goal = f"within 1% of the teacher's {metric.name}"
    if ours is None:
        most = max((p.steps for p in points if p.steps is not None), default=None)
        rest = "" if theirs is None else f"; {_name(theirs)} does with {_evaluations(theirs.steps)}"
        return f"{_student(points)} does not come {goal} with up to {_evaluations(most)}{rest}."
    text = (
        f"{_student(points)} comes {goal} with {_evaluations(ours.steps)}, "
        f"{seconds_text(ours.seconds)} per batch"
    )
    if theirs is None:
        text += "; no solver does" if solvers else ""
    elif ours.seconds and theirs.seconds:
        ratio = theirs.seconds / ours.seconds
        text += (
            f"; the fastest solver, {_name(theirs)}, with {theirs.steps}, "
            f"{seconds_text(theirs.seconds)}: {ratio:.2g} times the student's"
        )
    later = [p for p in points if (p.steps or 0) > (ours.steps or 0)]
    lost = [p for p in later if not metric.near(p.metric, target)]
    if lost:
        text += f". It does not stay there: {metric.text(lost[-1].metric)} at {lost[-1].steps}"
    return text + "."


def drift(points: list[Point]) -> str | None:
    """Whether more steps take the student away from the equilibrium."""
    known = [(p.steps, p.distance) for p in points if p.steps and p.distance is not None]
    if len(known) < 2 or all(
        small_text(b) == small_text(a) or b < a for (_, a), (_, b) in pairwise(known)
    ):
        return None
    (last, end), (at, least) = known[-1], min(known, key=lambda item: item[1])
    if at == last:
        return None
    return (
        f"{_student(points)} is nearest to the equilibrium at {at} (distance {small_text(least)}); "
        f"more steps make it worse ({small_text(end)} at {last})."
    )


def cautions(results: Results, dataset: str, solvers: list[Point]) -> list[str]:
    """What a reader should know before trusting the rest."""
    metric, teacher = metric_of(results, dataset), results.teacher(dataset)
    lines = []
    best = _best(solvers, metric)
    if best is not None and best.metric is not None and teacher.metric is not None:
        gap = abs(best.metric - teacher.metric)
        if metric.better(best.metric, teacher.metric) and gap > 0.01 * abs(teacher.metric):
            lines.append(
                f"Caution: the teacher is better before it converges ({_name(best)} at "
                f"{best.steps} steps: {metric.text(best.metric)}, converged: "
                f"{metric.text(teacher.metric)}), so its equilibrium is not its best state."
            )
    if teacher.residual is None or teacher.residual > 1e-2:
        lines.append(
            f"Caution: the teacher's residual is {small_text(teacher.residual)}: "
            "it is not at an equilibrium."
        )
    seeds = {row.seed for row in results.rows_of(dataset)}
    if len(seeds) == 1:
        lines.append("One seed only: small differences may be chance.")
    elif seeds:
        lines.append(f"All numbers are means over {len(seeds)} seeds.")
    return lines


def _best(points: list[Point], metric: MetricStyle) -> Point | None:
    scored = [p for p in points if p.metric is not None]
    sign = 1 if metric.higher_is_better else -1
    return max(scored, key=lambda p: sign * (p.metric or 0.0), default=None)


def _name(point: Point) -> str:
    return style(point.method).name


def _student(points: list[Point]) -> str:
    return f"The {_name(points[0])} student"


def _evaluations(steps: int | None) -> str:
    return f"{steps} evaluation{'' if steps == 1 else 's'}"

"""What the figures say, in plain words, computed from the rows."""

from collections.abc import Sequence
from itertools import pairwise

from cdeq.evaluation import Results
from cdeq.evaluation import (
    MetricStyle,
    Point,
    curves,
    kind_of,
    metric_of,
    seconds_text,
    small_text,
    style,
)

FEW = 2
"""The step count of the first finding."""


def findings(results: Results, dataset: str) -> list[str]:
    """What the figures say, in plain words; where a student loses, that too."""
    found = curves(results, dataset)
    kinds = {method: kind_of(points) for method, points in found.items()}
    students = [points for method, points in found.items() if kinds[method] == "student"]
    students.sort(key=lambda points: points[0].method != "anchored")  # the default recipe first
    solvers = [p for method, points in found.items() if kinds[method] == "solver" for p in points]
    explicit = [points[0] for method, points in found.items() if kinds[method] == "explicit"]
    lines: list[str | None] = []
    for points in students:
        lines.append(few_steps(results, dataset, points, solvers))
    for points in students:
        lines.append(time_to_teacher(results, dataset, points, solvers))
    for points in students:
        lines.append(distance_by_steps(points))
        lines.append(distance_against(points, solvers))
    lines += [explicit_model(results, dataset, point) for point in explicit]
    lines += cautions(results, dataset, solvers)
    return [line for line in lines if line]


def few_steps(
    results: Results, dataset: str, points: list[Point], solvers: list[Point]
) -> str | None:
    """The student's metric with few steps beside the converged teacher's and the best solver's."""
    metric, teacher = metric_of(results, dataset), results.teacher(dataset)
    scored = [p for p in points if p.metric is not None and p.steps is not None]
    if not scored:
        return f"{_who(points[0])} gave no finite {metric.name} at any number of steps."
    point = next((p for p in scored if p.steps == FEW), scored[0])
    assert point.metric is not None
    after = f" after {teacher.steps:.3g}" if teacher.steps is not None else ""
    text = (
        f"With {_evaluations(point.steps)} {_who(point, start=False)} reaches "
        f"{metric.phrase(point.metric)}, the converged teacher {metric.text(teacher.metric)}{after}"
    )
    cost = point.f_equivalents
    dear = cost is not None and point.steps is not None and cost > 1.1 * point.steps
    if dear:
        text += f" (all included, its cost is that of {cost:.3g} teacher steps)"
    rival = _best([p for p in solvers if p.steps == point.steps], metric)
    if rival is not None:
        text += "; " + _against(metric, point, rival, f"{_name(rival)} with {rival.steps}")
    if dear and cost is not None:
        equal = [p for p in solvers if p.f_equivalents is not None and p.f_equivalents <= cost]
        rival = _best(equal, metric)
        if rival is not None and rival.steps != point.steps:
            label = f"at no more than the same cost {_name(rival)}, with {rival.steps},"
            text += "; " + _against(metric, point, rival, label)
    return text + "."


def _against(metric: MetricStyle, point: Point, rival: Point, label: str) -> str:
    assert point.metric is not None
    assert rival.metric is not None
    score = metric.text(rival.metric)
    if metric.better(rival.metric, point.metric):
        return f"the student loses there: {label} reaches {score}"
    if metric.better(point.metric, rival.metric):
        return f"{label} reaches {score}"
    return f"{label} reaches the same, {score}"


def time_to_teacher(
    results: Results, dataset: str, points: list[Point], solvers: list[Point]
) -> str | None:
    """Wall-clock to come within 1% of the converged teacher's metric, against the best solver."""
    metric, target = metric_of(results, dataset), results.teacher(dataset).metric
    if target is None:
        return None
    goal = f"within 1% of the converged teacher's {metric.name}"
    ours, theirs = (
        min(
            (p for p in group if metric.near(p.metric, target) and p.seconds is not None),
            key=lambda p: p.seconds or 0.0,
            default=None,
        )
        for group in (points, solvers)
    )
    most = max((p.steps for p in points if p.steps is not None), default=None)
    if ours is None:
        text = f"{_who(points[0])} never comes {goal}, with up to {_evaluations(most)}"
        if theirs is None:
            return text + ("; nor does any solver." if solvers else ".")
        return f"{text}; {_name(theirs)} does, with {_evaluations(theirs.steps)}."
    text = (
        f"To come {goal}, {_who(ours, start=False)} needs {_evaluations(ours.steps)} and "
        f"{seconds_text(ours.seconds)} a batch"
    )
    if theirs is not None and ours.seconds and theirs.seconds:
        ratio = theirs.seconds / ours.seconds
        size = max(ratio, 1 / ratio)
        much = (
            "about the same wall-clock"
            if size < 1.05
            else f"{size:.1f} times {'less' if ratio > 1 else 'more'} wall-clock than the solver"
        )
        text += (
            f"; the best solver, {_name(theirs)}, {theirs.steps} and "
            f"{seconds_text(theirs.seconds)}: {much}"
        )
    elif solvers:
        most = max((p.steps for p in solvers if p.steps is not None), default=None)
        text += f"; no solver gets there with up to {_evaluations(most)}"
    lost = [p for p in points if (p.steps or 0) > (ours.steps or 0)]
    lost = [p for p in lost if not metric.near(p.metric, target)]
    if lost:
        text += f". But it does not stay there: {metric.text(lost[-1].metric)} at {lost[-1].steps}"
    return text + "."


def distance_by_steps(points: list[Point]) -> str | None:
    """Whether more steps bring the student closer to the equilibrium, as they should."""
    known = [(p.steps, p.distance) for p in points if p.steps and p.distance is not None]
    broken = [p.steps for p in points if p.steps and p.distance is None]
    if broken and known:
        return f"{_who(points[0])} has no finite distance at {_steps(broken)}."
    if len(known) < 2:
        return None
    (first, start), (last, end) = known[0], known[-1]
    who = f"{_name(points[0])} student: distance to the equilibrium"
    grows = [b for (_, a), (_, b) in pairwise(known) if _larger(b, a)]
    span = f"{small_text(start)} to {small_text(end)}"
    if not grows:
        return f"{who} never grows from {first} to {last} steps ({span})."
    at, least = min(known, key=lambda item: item[1])
    if at == last:
        return f"{who} falls from {first} to {last} steps ({span}), but not at every step."
    return (
        f"{who} is least at {_steps([at])} ({small_text(least)}) and has grown to "
        f"{small_text(end)} at {last}: more steps make it worse."
    )


def distance_against(points: list[Point], solvers: list[Point]) -> str | None:
    """At which step counts the student is closer to the equilibrium than every solver."""
    won, tied, lost = [], [], []
    for point in points:
        rivals = [p for p in solvers if p.steps == point.steps and p.distance is not None]
        rival = min(rivals, key=lambda p: p.distance or 0.0, default=None)
        if rival is None or rival.distance is None or point.distance is None:
            continue
        if _larger(rival.distance, point.distance):
            won.append(point.steps)
        elif _larger(point.distance, rival.distance):
            lost.append((point, rival))
        else:
            tied.append(point.steps)
    who = _who(points[0])
    if not lost:
        same = f", and as close at {listed(tied)}" if tied else ""
        return f"{who} is closer than every solver at {_steps(won)}{same}." if won else None
    point, rival = lost[-1]
    example = f"{_name(rival)} {small_text(rival.distance)} against {small_text(point.distance)}"
    where = listed([p.steps for p, _ in lost])
    if not won:
        return (
            f"{who} is at no step count closer than the best solver (at {point.steps}: {example})."
        )
    example = f"at {point.steps}: {example}" if len(lost) > 1 else example
    return (
        f"{who} is closer than every solver at {_steps(won)}, "
        f"but a solver is closer at {where} ({example})."
    )


def explicit_model(results: Results, dataset: str, point: Point) -> str | None:
    """An explicit model beside the converged teacher."""
    metric, teacher = metric_of(results, dataset), results.teacher(dataset)
    if point.metric is None or teacher.metric is None:
        return None
    return (
        f"{_name(point)}, an explicit model, reaches {metric.phrase(point.metric)} in "
        f"{seconds_text(point.seconds)} a batch; the converged teacher "
        f"{metric.text(teacher.metric)}."
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
        lines.append(f"All figures are means over {len(seeds)} seeds.")
    return lines


def _best(points: list[Point], metric: MetricStyle) -> Point | None:
    scored = [p for p in points if p.metric is not None]
    sign = 1 if metric.higher_is_better else -1
    return max(scored, key=lambda p: sign * (p.metric or 0.0), default=None)


def _larger(a: float, b: float) -> bool:
    return a > b and small_text(a) != small_text(b)


def _name(point: Point) -> str:
    return style(point.method).name


def _who(point: Point, *, start: bool = True) -> str:
    return f"{'The' if start else 'the'} {_name(point)} student"


def _evaluations(steps: int | None) -> str:
    return f"{steps} evaluation{'' if steps == 1 else 's'}"


def _steps(counts: Sequence[int | None]) -> str:
    return f"{listed(counts)} step{'' if list(counts) == [1] else 's'}"


def listed(items: Sequence[object]) -> str:
    *head, last = [str(item) for item in items]
    return f"{', '.join(head)} and {last}" if head else last

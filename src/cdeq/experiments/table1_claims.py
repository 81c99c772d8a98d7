"""What Table 1 says, in words: each line computed from its rows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from cdeq.experiments.compare import SOLVERS
from cdeq.experiments.paper_table import gap_closed, write_table
from cdeq.experiments.results import Results
from cdeq.experiments.table import Point, curves, style
from cdeq.experiments.text_plans import EXPLICIT

NEAR = 1.01
"""Perplexity within this factor of the converged teacher's is reached."""
SHOWN = (1, 2, 4, 8, 12)
"""Evaluations at which every method is scored."""
USUAL_TOLERANCE = 1e-3
"""To which the teacher's own solver is run in use: a user cannot know the perplexity to stop at."""
SAME_EQUILIBRIUM = (*SOLVERS, "hyperdeq", "paper", "anchored", "anchored_teacher_memory")

NOTES = (
    "Every token of the test split is predicted once. A text is read as parallel streams, segment by segment; each "
    "method meets the memory that it left itself, after as many evaluations as the row says. Perplexity is the "
    "exponential of the mean loss over all tokens.",
    "Picard, Anderson and Broyden solve the DEQ-Transformer that HyperDEQ, Paper and Anchored accelerate. Distance is "
    "to the states of the converged teacher, which met its own memory: it holds what wrong memory adds.",
    "Few-step is a separate DEQ-Transformer for each number of evaluations, trained on from the same shallow "
    "pre-training as the teacher, with the phantom gradient. It seeks no equilibrium of the teacher's: no distance.",
    "Anchored, teacher's memory: the same student distilled on the memory that the converged teacher leaves, which it "
    "never meets in use; one seed.",
    "Anderson, Broyden, HyperDEQ and Paper (its two-point Anderson) choose one set of mixing weights for a whole "
    "segment, so that an early token's state hears a little of later tokens: short of convergence their perplexity is "
    "not strictly causal. Picard, Few-step and Anchored are.",
    "Anchored here is the default recipe with rollouts of four steps, the student's own memory, and a task loss "
    "(lambda_2 = 5) at its first two steps, chosen on the validation text; Paper has its published task loss. HyperDEQ "
    "learns from equilibria alone, as published, from the same kind of start network as Anchored.",
    "Few-step models have fewer updates than the teacher (their seconds are in the list above); solvers are scored at "
    "their newest iterate.",
    "Gap closed: share of the way from the teacher after one step to the converged teacher, in log-perplexity.",
    "Seconds: median for one segment of all streams, from tokens to the likelihood of every next word, all equilibrium "
    "methods in turns in one process, explicit models after them. Cost in steps: the evaluations and what a method "
    "does once an input (start network, second injection), in units of one evaluation; the adaptive softmax is in the "
    "seconds alone, except for explicit models, whose cost is all their time.",
    "Explicit models have the same vocabulary, dropout and about the same number of weights, and were given about the "
    "teacher's training time; seconds of training are in the list above the table.",
)


def claims(results: Results) -> list[str]:
    """What is asked of the default recipe, and of the published one, line by line."""
    lines = []
    for dataset in results.datasets:
        found = curves(results, dataset)
        for name in ("paper", "anchored"):
            if name in found:
                lines.append(_student_line(results, dataset, found, name))
        lines += [
            _speed_line(results, dataset, found),
            _solved_line(results, dataset, found),
            _cost_line(results, dataset, found),
            _explicit_line(results, dataset, found),
            _memory_line(results, dataset),
        ]
    return [f"- {line}" for line in lines if line]


def _at(found: dict[str, list[Point]], method: str, steps: int | None) -> Point | None:
    return next((p for p in found.get(method, []) if p.steps == steps), None)


def _student_line(results: Results, dataset: str, found: dict[str, list[Point]], name: str) -> str:
    closed = [gap_closed(results, dataset, name, k) for k in (1, 2)]
    shares = " and ".join("–" if c is None else f"{100 * c:.1f}%" for c in closed)
    rivals = [*SOLVERS, "hyperdeq", "few_step", *(["paper"] if name == "anchored" else [])]
    lost, compared = [], []
    for k in SHOWN:
        ours = _at(found, name, k)
        theirs = [p for rival in rivals if (p := _at(found, rival, k)) and p.metric is not None]
        if ours is None or ours.metric is None or not theirs:
            continue
        compared.append(k)
        for p in theirs:
            assert p.metric is not None
            if p.metric < ours.metric:
                behind = 100 * (ours.metric / p.metric - 1)
                lost.append(f"{style(p.method).name} at {k} (by {behind:.2f}%)")
    curve = [p.metric for p in found[name] if p.metric is not None]
    rise = max((b / a - 1 for a, b in pairwise(curve)), default=0.0)
    rises = (
        f"rises by at most {100 * rise:.2f}% from one count to the next"
        if rise > 0
        else "never rises"
    )
    trend = " → ".join(f"{m:.1f}" for m in curve)
    where = ", ".join(map(str, compared))
    worse = (
        f"worse than {', '.join(lost)}" if lost else f"no equilibrium rival is better at {where}"
    )
    return (
        f"{style(name).name}: closes {shares} of the gap in log-perplexity at 1 and 2 evaluations; {worse}; "
        f"perplexity {rises} ({trend})."
    )


def _first_near(points: Iterable[Point], goal: float) -> Point | None:
    """The quickest point whose perplexity is near the goal."""
    near = [p for p in points if p.metric is not None and p.metric <= NEAR * goal and p.seconds]
    return min(near, key=lambda p: p.seconds or 0.0, default=None)


def _speed_line(results: Results, dataset: str, found: dict[str, list[Point]]) -> str:
    goal = results.teacher(dataset).metric
    if goal is None:
        return ""
    solver = _first_near((p for name in SOLVERS for p in found.get(name, [])), goal)
    student = _first_near(found.get("anchored", []), goal)
    if student is None:
        return f"Anchored does not come within 1% of the converged perplexity {goal:.1f}."
    if solver is None:
        return (
            f"Anchored comes within 1% of the converged perplexity {goal:.1f} at {student.steps} evaluations, "
            f"{1000 * (student.seconds or 0):.0f} ms a batch; no solver does up to 12."
        )
    ours, theirs = student.seconds or 0.0, solver.seconds or 0.0
    return (
        f"Within 1% of the converged perplexity {goal:.1f}: Anchored at {student.steps} evaluations, "
        f"{1000 * ours:.0f} ms a batch; the quickest solver, {style(solver.method).name}, at {solver.steps}, "
        f"{1000 * theirs:.0f} ms: {theirs / ours:.1f} times as long."
    )


def _solved_line(results: Results, dataset: str, found: dict[str, list[Point]]) -> str:
    """The solver as it is used: to a tolerance, since nobody in production knows the perplexity to stop at."""
    goal = results.teacher(dataset).metric
    solved = next(iter(found.get("solved", [])), None)
    if goal is None or solved is None or not solved.seconds:
        return ""
    student = _first_near(found.get("anchored", []), goal)
    if student is None or not student.seconds:
        return ""
    return (
        f"The teacher's own solver, Anderson, run to its tolerance of {USUAL_TOLERANCE:g}, takes "
        f"{solved.f_equivalents or 0:.1f} evaluations on average and {1000 * solved.seconds:.0f} ms a batch "
        f"(perplexity {solved.metric:.1f}): "
        f"{solved.seconds / student.seconds:.1f} times as long as that student."
    )


def _cost_line(results: Results, dataset: str, found: dict[str, list[Point]]) -> str:
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


def _explicit_line(results: Results, dataset: str, found: dict[str, list[Point]]) -> str:
    goal = results.teacher(dataset).metric
    rows = [r for r in results.rows_of(dataset) if r.method in EXPLICIT and r.metric is not None]
    if goal is None or not rows:
        return ""
    parts = [
        f"{style(row.method, explicit=True).name} {row.metric:.1f}"
        + (f" ({row.train_seconds:.0f} s)" if row.train_seconds is not None else "")
        for row in rows
    ]
    best = min(row.metric for row in rows if row.metric is not None)
    verdict = (
        "beats or matches them all"
        if goal <= best
        else f"is {100 * (goal / best - 1):.1f}% behind the best of them"
    )
    return f"Explicit models: {', '.join(parts)}; the converged teacher, {goal:.1f}, {verdict}."


def _memory_line(results: Results, dataset: str) -> str:
    """Both students of one seed: the other has no more."""
    rows = {(r.method, r.steps): r.metric for r in results.rows_of(dataset) if r.seed == 0}
    parts = []
    for k in SHOWN:
        own, other = rows.get(("anchored", k)), rows.get(("anchored_teacher_memory", k))
        if own is not None and other is not None:
            parts.append(f"{other - own:+.2f} at {k}")
    if not parts:
        return ""
    return (
        "What distilling on the teacher's memory costs a student that meets its own, in perplexity (seed 0): "
        + ", ".join(parts)
        + "."
    )


def write_table1(results: Results, folder: Path) -> list[Path]:
    """table1.json, table1.md and table1.png."""
    return write_table(
        results,
        folder,
        title="Table 1: word-level language modelling",
        shown=SHOWN,
        notes=NOTES,
        claims=claims(results),
        same_equilibrium=SAME_EQUILIBRIUM,
    )

"""What Table 1 says, in words: each line computed from its rows."""

from __future__ import annotations

from pathlib import Path

from cdeq.evaluation import SOLVERS
from cdeq.evaluation import Results
from cdeq.evaluation import curves
from cdeq_experiments.claims import (
    PERPLEXITY,
    cost_line,
    explicit_line,
    solved_line,
    speed_line,
    student_line,
)
from cdeq_experiments.paper_table import write_table
from cdeq_experiments.text_cells import SHOWN, TextCell
from cdeq_experiments.text_plans import EXPLICIT

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
            rivals = [*SOLVERS, "hyperdeq", "few_step", *(["paper"] if name == "anchored" else [])]
            if name in found:
                lines.append(student_line(results, dataset, name, rivals, SHOWN, PERPLEXITY))
        lines += [
            speed_line(results, dataset, PERPLEXITY),
            solved_line(results, dataset, PERPLEXITY, TextCell.tolerances.usual),
            cost_line(results, dataset),
            explicit_line(results, dataset, EXPLICIT, PERPLEXITY),
            _memory_line(results, dataset),
        ]
    return [f"- {line}" for line in lines if line]


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

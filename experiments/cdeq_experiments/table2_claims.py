"""What Table 2 says, in words: each line computed from its rows."""

from __future__ import annotations

from pathlib import Path

from cdeq.evaluation import SOLVERS
from cdeq.evaluation import Results
from cdeq.evaluation import curves
from cdeq_experiments.claims import (
    TOP1,
    at,
    cost_line,
    explicit_line,
    solved_line,
    speed_line,
    student_line,
)
from cdeq_experiments.image_cells import SHOWN, ImageCell
from cdeq_experiments.image_plans import EXPLICIT
from cdeq_experiments.paper_table import write_table

SAME_EQUILIBRIUM = (*SOLVERS, "hyperdeq", "paper", "anchored")
RIVALS = (*SOLVERS, "deq", "hyperdeq", "few_step")

NOTES = (
    "All test images, once, as they are; accuracy is of the likeliest class, top 5 of the five likeliest.",
    "Picard, Anderson and Broyden solve the MDEQ that HyperDEQ, Paper and Anchored accelerate; distance is to its "
    "equilibrium. DEQ is the single-stream model, trained by itself, under Anderson; its distance is to its own "
    "equilibrium, and is not compared.",
    "Few-step is a separate MDEQ for each number of evaluations, trained on from the same shallow pre-training as the "
    "teacher, with the phantom gradient. It seeks no equilibrium of the teacher's: no distance.",
    "Training images are moved and mirrored at random for all models; students and HyperDEQ learn from the converged "
    "teacher's states on such images.",
    "Gap closed: share of the way from the teacher after one step to the converged teacher, in top-1 accuracy.",
    "Seconds: median for one batch, from pixels to logits, all equilibrium methods in turns in one process, explicit "
    "models after them. Cost in steps: the evaluations and what a method does once an input (start network, second "
    "injection), in units of one evaluation of MDEQ.",
    "Explicit models are the published architectures at a size that fits these images, trained for fewer updates than "
    "the teacher; their seconds of training are in the list above the table. They are there for orientation: no "
    "verdict on architectures.",
)


def claims(results: Results) -> list[str]:
    """What is asked of the default recipe, and of the published one, line by line, for each set of images."""
    lines = []
    for dataset in results.datasets:
        found = curves(results, dataset)
        own = []
        for name in ("paper", "anchored"):
            rivals = [*RIVALS, *(["paper"] if name == "anchored" else [])]
            if name in found:
                own.append(student_line(results, dataset, name, rivals, SHOWN, TOP1))
        own += [
            speed_line(results, dataset, TOP1),
            solved_line(results, dataset, TOP1, ImageCell.tolerances.usual),
            _single_line(results, dataset),
            cost_line(results, dataset),
            explicit_line(results, dataset, EXPLICIT, TOP1),
        ]
        lines += [f"- **{dataset}** {line}" for line in own if line]
    return lines


def _single_line(results: Results, dataset: str) -> str:
    """The single-stream DEQ beside MDEQ, both converged."""
    single, found = ImageCell.other_teachers["deq"], curves(results, dataset)
    if not any(t.name == single and t.dataset == dataset for t in results.teachers):
        return ""
    deq, mdeq = results.teacher(dataset, single), results.teacher(dataset)
    if deq.metric is None or mdeq.metric is None:
        return ""
    last = at(found, "deq", SHOWN[-1])
    after = (
        "" if last is None or last.metric is None else f", {TOP1.show(last.metric)} at {last.steps}"
    )
    return (
        f"Converged: MDEQ {TOP1.show(mdeq.metric)} ({mdeq.steps:.1f} evaluations), single-stream DEQ "
        f"{TOP1.show(deq.metric)} ({deq.steps:.1f} evaluations{after})."
    )


def write_table2(results: Results, folder: Path) -> list[Path]:
    """table2.json, table2.md and table2.png."""
    return write_table(
        results,
        folder,
        title="Table 2: image classification",
        shown=SHOWN,
        notes=NOTES,
        claims=claims(results),
        same_equilibrium=SAME_EQUILIBRIUM,
    )

"""Inductive use: teacher and students made on one part of a graph, used on the whole with its unseen nodes.

Beside it, what a student loses when it is distilled on pieces of the graph, as graphs past memory must be.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdeq.data.graphs import NodeTask
from cdeq.data.subgraphs import grouped_tasks, induced, partition, sampled_task
from cdeq.demo.task import Batch
from cdeq.equilibrium.contract import check_contract
from cdeq.evaluation import (
    Method,
    compare,
    find_equilibria,
    solver_method,
    student_method,
)
from cdeq.evaluation import Results
from cdeq.evaluation import curves, metric_of, style
from cdeq.solvers import Anderson, Picard
from cdeq.training.draws import numbered_generator
from cdeq_experiments.graph_cells import (
    GraphCell,
    Measured,
    plans_of,
    run_graphs,
)
from cdeq_experiments.graph_tasks import ignn_task, labelled
from cdeq_experiments.options import Options
from cdeq_experiments.paper_table import write_table
from cdeq_experiments.table3 import SHOWN
from cdeq_experiments.train import distil_student, teacher_result, train_teacher

UNSEEN = 0.5
"""Share of the test nodes that teacher and student never see, neither their features nor their edges."""
PIECES = 8
"""Parts, or samples, that a student is distilled on in place of the whole."""

SETTING: dict[str, Any] = {"unseen": UNSEEN, "pieces": PIECES, "parts": PIECES**2}
"""What the cells depend on beside graph, seed and recipe."""


def seen_nodes(nodes: NodeTask, seed: int) -> Tensor:
    """The mask (N,) of the nodes that training may know: all but half of the test nodes."""
    generator = numbered_generator(seed, 0)
    drawn = torch.rand(len(nodes.labels), generator=generator)
    return ~(nodes.test & (drawn < UNSEEN))


def pieces(seen: NodeTask, seed: int) -> dict[str, list[Batch]]:
    """Batches to distil on: the seen part as it is, in groups of small parts, and in samples."""
    adjacency = seen.graph.adjacency
    parts = grouped_tasks(seen, partition(adjacency, PIECES**2, seed=seed), PIECES, seed=seed)
    size = len(seen.labels) // PIECES
    samples = [
        sampled_task(seen, size=size, generator=numbered_generator(seed, number))
        for number in range(PIECES)
    ]
    return {
        "anchored": [labelled(seen, seen.train)],
        "anchored_parts": [labelled(part, part.train) for part in parts],
        "anchored_samples": [labelled(sample, sample.train) for sample in samples],
    }


def measure(cell: GraphCell) -> Measured:
    """One graph with one seed."""
    plan, seed = cell.plan, cell.seed
    nodes = plan.load(cell.options.data, seed)
    seen = seen_nodes(nodes, seed)
    part = induced(nodes, seen.nonzero().squeeze(1))
    task = ignn_task(plan, part, seed, testing=nodes._replace(test=nodes.test & ~seen))
    with cell.bar("IGNN, seen part") as bar:
        teacher, training = train_teacher(task, cell.place("ignn-seen", SETTING), seed, bar)
    model = check_contract(teacher)
    known = find_equilibria(model, task.test, task.metric)
    cell.say("IGNN, seen part", known.metric, training)
    methods: dict[str, Method] = {
        "picard": solver_method(model, Picard()),
        "anderson": solver_method(model, Anderson()),
    }
    batches = pieces(part, seed) | {"anchored_whole": [labelled(nodes, nodes.train)]}
    for name, distilling in [("paper", batches["anchored"]), *batches.items()]:
        recipe = name.partition("_")[0]
        folder = cell.place(f"seen-{name}", {"recipe": task.plans[recipe], **SETTING})
        made = replace(task, distilling=distilling)
        student = distil_student(made, teacher, recipe, folder, seed, cell.options.progress)
        methods[name] = student_method(student)
        cell.say(f"{name} distilled")
    rows = compare(
        methods,
        model,
        task.test,
        known.states,
        task.metric,
        dataset=plan.title,
        seed=seed,
        counts=SHOWN,
        repeats=5,
    )
    return rows, [teacher_result(task, teacher, known, training)]


def inductive(options: Options) -> Results:
    """Unseen nodes; inductive.json, inductive.md and inductive.png."""
    return run_graphs(
        "inductive",
        plans_of(options),
        options,
        measure,
        SETTING,
        lambda results: write_inductive(results, options.out),
    )


NOTES = (
    "Teacher and students know only the nodes left when half of the test nodes are taken out of the graph, with all "
    "their edges; accuracy is that of the nodes taken out, in the whole graph. Distance is over the whole graph.",
    f"Anchored, parts: distilled on {PIECES} groups of {PIECES} small parts each; samples: on {PIECES} random-walk "
    "samples of an eighth of the nodes each; whole graph: distilled where features and edges of the unseen nodes are "
    "known too, for comparison. All have the same number of updates.",
)


def claims(results: Results) -> list[str]:
    """What it costs a student not to have seen the nodes, and to have been made from pieces."""
    lines = []
    for dataset in results.datasets:
        found, metric = curves(results, dataset), metric_of(results, dataset)
        for k in SHOWN[:2]:
            at = {name: next(p for p in points if p.steps == k) for name, points in found.items()}
            if not {"anchored", *PIECEMEAL} <= set(at):
                continue
            base = at["anchored"]
            others = [
                f"{style(name).name} {metric.text(at[name].metric)}"
                + (
                    f", {at[name].distance / base.distance:.2f} times as far"  # type: ignore[operator]
                    if at[name].distance and base.distance
                    else ""
                )
                for name in PIECEMEAL
            ]
            lines.append(
                f"- {dataset}, unseen nodes at {k}: Anchored {metric.text(base.metric)} (converged teacher "
                f"{metric.text(results.teacher(dataset).metric)}); {'; '.join(others)} from the equilibrium."
            )
    return lines


PIECEMEAL = ("anchored_parts", "anchored_samples", "anchored_whole")


def write_inductive(results: Results, folder: Path) -> list[Path]:
    """inductive.json, inductive.md and inductive.png."""
    return write_table(
        results,
        folder,
        title="Inductive use: unseen nodes",
        shown=SHOWN,
        notes=NOTES,
        claims=claims(results),
    )

"""Node classification: an IGNN on a graph, its students, other implicit graph networks, and explicit ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cdeq.gradients import Implicit
from cdeq.models import EIGNN, IGNN, MIGNN
from cdeq.solvers import Anderson, Picard
from cdeq.training import FitConfig, TeachConfig
from cdeq_experiments.configs import base
from cdeq_experiments.rivals.gpm import GPM
from cdeq_experiments.rivals.graph_convolutions import GAT, GCN, GCNII

SHOWN = (1, 2, 5, 10)
ALL = tuple(range(1, 11))
MIXED = {"history": "anderson", "window": 5, "agreement": 100.0}
"""Anderson mixing in the student, whose answer at each step is also to agree with the converged teacher's."""
MIGNN_SOLVER = Anderson(window=5, mixing=0.5)
"""MIGNN's own: Peaceman-Rachford steps of one sweep, which is one evaluation, under Anderson mixing."""
EXPLICIT = {"gcn": (GCN, 1e-2), "gat": (GAT, 1e-2), "gcnii": (GCNII, 1e-2), "gpm": (GPM, 5e-3)}
"""Each with its learning rate."""


@dataclass(frozen=True, kw_only=True)
class GraphData:
    """A graph by name; the share `unseen` of its test nodes is hidden from training, features and edges too."""

    name: str
    unseen: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GraphBudget:
    """Updates on a graph; one of the learned solver takes twice as long as one of a student, one of GPM longer."""

    teacher_updates: int = 100
    student_updates: int = 300
    solver_updates: int = 150
    explicit_updates: int = 100
    gpm_updates: int = 100


def graph_config(
    title: str,
    name: str,
    budget: GraphBudget,
    *,
    width: int = 64,
    kappa: float = 0.95,
    weight_decay: float = 1e-3,
    optional: bool = False,
    backprop: str = "full",
) -> base.SuiteConfig:
    """A graph at a scale; settings were chosen on the validation nodes of seed 0. `backprop` is the recipes'."""

    def fit(updates: int, rate: float = 1e-2, **fields: Any) -> FitConfig:
        return FitConfig(updates=updates, learning_rate=rate, **fields)

    warmup_updates, decay = min(10, budget.teacher_updates // 10), {"weight_decay": 1e-3}
    teaching = TeachConfig(
        fit=fit(budget.teacher_updates, warmup_updates=warmup_updates, weight_decay=weight_decay),
        gradient=Implicit(tol=1e-2, max_steps=20),
        tol=1e-3,
        depths=(20, 40),
    )
    sizes = {"width": width, "dropout": 0.5}
    teacher = base.TeacherConfig(
        title="IGNN", model=IGNN, arguments={**sizes, "kappa": kappa}, teaching=teaching
    )
    eignn = replace(teacher, title="EIGNN", model=EIGNN, arguments=sizes, solver=Picard())
    mignn = replace(teacher, title="MIGNN", model=MIGNN, arguments=sizes, solver=MIGNN_SOLVER)
    student = base.StudentConfig(recipe="paper", fit=fit(budget.student_updates))
    # Its late steps, past the depth it was trained at, have a clock to choose.
    way = {} if backprop == "full" else {"backprop": backprop}
    given: dict[str, Any] = {"changes": {**MIXED, **way}, "calibrated_steps": max(ALL)}
    anchored = replace(student, recipe="anchored", **given)
    first = {name: base.first_updates(name, budget.student_updates) for name in base.CORRECTED}
    ours = {name: replace(student, recipe=name, changes={**first[name], **way}) for name in first}
    whole = base.RecordConfig(batches=None, max_steps=40)
    updates = dict.fromkeys(EXPLICIT, budget.explicit_updates) | {"gpm": budget.gpm_updates}
    return base.SuiteConfig(
        kind="graph",
        name=name,
        title=title,
        data=GraphData(name=name),
        teacher=teacher,
        others={
            "eignn": replace(eignn, closed_form="eignn_closed"),
            "mignn": replace(mignn, teaching=replace(teaching, solver=MIGNN_SOLVER)),
        },
        students={"paper": student, "anchored": anchored, **ours},
        recording={"endpoint": whole, "full": whole},
        tolerances=base.Tolerances(max_steps=150, exact=1e-5, everyday=None),
        counts=base.Counts(shown=SHOWN, methods=ALL, solvers=ALL, timed=ALL),
        learned_solver=base.LearnedSolverConfig(
            name="ignn_solver", fit=fit(budget.solver_updates, 8e-3)
        ),
        few_step=teaching,
        few_step_distances=True,
        explicit={
            name: base.ExplicitConfig(model=model, fit=fit(updates[name], rate, **decay))
            for name, (model, rate) in EXPLICIT.items()
        },
        seeded_teacher=True,
        optional=optional,
    )


TINY = GraphBudget(
    teacher_updates=60, student_updates=60, solver_updates=30, explicit_updates=40, gpm_updates=10
)
SMALL = GraphBudget()
PAPER = GraphBudget(
    teacher_updates=500,
    student_updates=1000,
    solver_updates=500,
    explicit_updates=500,
    gpm_updates=500,
)
LARGE: dict[str, Any] = {"width": 128, "kappa": 0.98}
LONGER = GraphBudget(teacher_updates=200)

DIGITS = graph_config("Digits", "digits", TINY, width=32)
BLOCKS = graph_config("Block model", "blocks", TINY, width=16)
PUBMED = graph_config("PubMed", "pubmed", SMALL, weight_decay=0.1)
AMAZON_COMPUTERS = graph_config("Amazon Computers", "amazon-computers", SMALL, kappa=0.65)
COAUTHOR_PHYSICS = graph_config("Coauthor Physics", "coauthor-physics", SMALL, kappa=0.8)
SMALL_ARXIV = graph_config("ogbn-arxiv", "ogbn-arxiv", LONGER, optional=True, **LARGE)
ARXIV = graph_config("ogbn-arxiv", "ogbn-arxiv", PAPER, **LARGE)
PRODUCTS = graph_config("ogbn-products", "ogbn-products", PAPER, backprop="checkpointed", **LARGE)
"""Of 2.4 million nodes: all steps of a rollout at once would not fit into 80 GB."""

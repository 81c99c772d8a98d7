"""Node classification as tasks: which graph, which teacher, how both are trained at each scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cdeq.data.block_graphs import block_model
from cdeq.data.embedded import digits_graph
from cdeq.data.graph_sets import is_available, load_graph, require_files
from cdeq.data.graphs import NodeTask
from cdeq.demo.task import Batch, DistillPlan, Task
from cdeq.evaluation import accuracy
from cdeq.gradients import Implicit
from cdeq.models.graph.ignn import IGNN
from cdeq.solvers import Anderson
from cdeq.training.loop import FitConfig
from cdeq.training.task_loss import IGNORED
from cdeq.training.teaching import TeachConfig


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """Everything that is chosen for one graph; settings were chosen on the validation nodes of seed 0.

    `updates` are of an equilibrium model, `students` of a student, `solvers` of a learned solver, whose update takes
    twice as long, `rivals` of an explicit model.
    """

    name: str
    title: str
    width: int = 64
    kappa: float = 0.95
    dropout: float = 0.5
    updates: int = 100
    learning_rate: float = 1e-2
    weight_decay: float = 1e-3
    students: int = 300
    solvers: int = 150
    rivals: int = 100
    gpm_updates: int = 100
    layers: dict[str, int] = field(default_factory=dict)
    """Layers of an explicit model, where not its own default."""
    optional: bool = False
    """Left out, without a word, where its files are not there."""

    def load(self, folder: Path | None, seed: int) -> NodeTask:
        """The graph, its split drawn with the seed where it has no public one."""
        if self.name in EMBEDDED:
            return EMBEDDED[self.name](seed)
        return load_graph(self.name, folder, seed=seed)

    def require(self, folder: Path | None) -> None:
        """Refuse, by name, a graph whose files are not there; nothing is read."""
        if self.name not in EMBEDDED:
            require_files(self.name, folder)

    def is_available(self, folder: Path | None) -> bool:
        return self.name in EMBEDDED or is_available(self.name, folder)

    @property
    def teaching(self) -> FitConfig:
        """How an equilibrium model of this graph is trained."""
        return FitConfig(
            updates=self.updates,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            warmup=min(10, self.updates // 10),
        )


EMBEDDED: dict[str, Callable[[int], NodeTask]] = {
    "digits": digits_graph,
    "blocks": lambda seed: block_model(
        600, classes=4, degree=8.0, homophily=0.8, features=16, noise=2.0, seed=seed
    ),
}
"""Graphs that need no files: scikit-learn's digits, and a small stochastic block model."""


SCALES: dict[str, tuple[GraphPlan, ...]] = {
    "tiny": (
        GraphPlan(
            name="digits",
            title="Digits",
            updates=60,
            students=60,
            solvers=30,
            rivals=40,
            gpm_updates=10,
            width=32,
        ),
        GraphPlan(
            name="blocks",
            title="Block model",
            updates=60,
            students=60,
            solvers=30,
            rivals=40,
            gpm_updates=10,
            width=16,
        ),
    ),
    "small": (
        GraphPlan(name="pubmed", title="PubMed"),
        GraphPlan(name="amazon-computers", title="Amazon Computers"),
        GraphPlan(name="coauthor-physics", title="Coauthor Physics"),
        GraphPlan(
            name="ogbn-arxiv", title="ogbn-arxiv", width=128, kappa=0.98, updates=200, optional=True
        ),
    ),
    "paper": (
        GraphPlan(
            name="ogbn-arxiv",
            title="ogbn-arxiv",
            width=128,
            kappa=0.98,
            updates=500,
            learning_rate=1e-2,
            students=1000,
            solvers=500,
            rivals=500,
            gpm_updates=500,
        ),
        GraphPlan(
            name="ogbn-products",
            title="ogbn-products",
            width=128,
            kappa=0.98,
            updates=500,
            learning_rate=1e-2,
            students=1000,
            solvers=500,
            rivals=500,
            gpm_updates=500,
        ),
    ),
}
"""The graphs of each scale, in the order of the table."""


def labelled(nodes: NodeTask, mask: Tensor) -> Batch:
    """The whole graph with the labels of some of its nodes; a transductive task shares the nodes, not the labels."""
    return nodes.graph, torch.where(mask, nodes.labels, IGNORED)


def classes_of(nodes: NodeTask) -> int:
    return int(nodes.labels.max()) + 1


def features_of(nodes: NodeTask) -> int:
    return nodes.graph.features.shape[1]


def ignn_task(
    plan: GraphPlan,
    nodes: NodeTask,
    seed: int,
    *,
    testing: NodeTask | None = None,
) -> Task:
    """IGNN on a graph; `testing`: another graph to test on."""
    tested = testing or nodes
    batch = labelled(nodes, nodes.train)
    return Task(
        name=plan.name,
        dataset=plan.title,
        build=lambda: IGNN(
            features=features_of(nodes),
            width=plan.width,
            classes=classes_of(nodes),
            kappa=plan.kappa,
            dropout=plan.dropout,
        ),
        teach=TeachConfig(
            fit=plan.teaching,
            solver=Anderson(),
            gradient=Implicit(tol=1e-2, max_steps=20),
            tol=1e-3,
            depths=(20, 40),
            seed=seed,
        ),
        teaching=lambda update: batch,
        distilling=[batch],
        valid=[labelled(nodes, nodes.valid)],
        test=[labelled(tested, tested.test)],
        metric=accuracy(),
        plans={
            "paper": DistillPlan(fit=FitConfig(updates=plan.students, learning_rate=1e-2)),
            "anchored": DistillPlan(
                fit=FitConfig(updates=plan.students, learning_rate=1e-2),
                changes={"history": "anderson", "window": 5, "agreement": 100.0},
            ),
        },
    )

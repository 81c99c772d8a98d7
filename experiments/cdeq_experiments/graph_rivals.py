"""What students of graph models are compared with: other equilibrium models, learned solvers, explicit models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cdeq.data.graphs import NodeTask
from cdeq.demo.task import Task
from cdeq.equilibrium.contract import EquilibriumModel
from cdeq.evaluation import (
    Equilibria,
    Explicit,
    Method,
    Target,
    find_equilibria,
    parameter_count,
    solver_method,
)
from cdeq.evaluation import Training
from cdeq.models.graph.eignn import EIGNN
from cdeq.models.graph.mignn import MIGNN
from cdeq.models.learned_solvers import IGNNSolver, SolverLossWeights
from cdeq.solvers import Anderson, Picard, Solver
from cdeq.training.log import Progress
from cdeq.training.loop import FitConfig, fit
from cdeq.training.supervised import SupervisedObjective
from cdeq.trajectories import TrajectoryStore
from cdeq_experiments.graph_tasks import GraphPlan, classes_of, features_of, labelled
from cdeq_experiments.rivals.gpm import GPM
from cdeq_experiments.rivals.graph_convolutions import GAT, GCN, GCNII, explicit_loss
from cdeq_experiments.train import built, few_step_teaching, timed, train_solver, train_teacher

# Other equilibrium models.


def eignn_task(task: Task, plan: GraphPlan, nodes: NodeTask) -> Task:
    """EIGNN on the graph of a task, trained alike."""
    return replace(
        task,
        build=lambda: EIGNN(
            features=features_of(nodes),
            width=plan.width,
            classes=classes_of(nodes),
            dropout=plan.dropout,
        ),
    )


def mignn_task(task: Task, plan: GraphPlan, nodes: NodeTask) -> Task:
    """MIGNN on the graph of a task, trained alike but for its own solver."""
    return replace(
        task,
        build=lambda: MIGNN(
            features=features_of(nodes),
            width=plan.width,
            classes=classes_of(nodes),
            dropout=plan.dropout,
        ),
        teach=replace(task.teach, solver=MIGNN_SOLVER),
    )


MIGNN_SOLVER = Anderson(window=5, mixing=0.5)
RIVAL_TEACHERS: dict[str, tuple[Callable[[Task, GraphPlan, NodeTask], Task], Solver]] = {
    "eignn": (eignn_task, Picard()),
    "mignn": (mignn_task, MIGNN_SOLVER),
}
"""Each with the solver that is its own: EIGNN's fixed-point iteration; Peaceman-Rachford steps of one sweep, which is
one evaluation, under Anderson mixing for MIGNN."""


def rival_method(
    model: EquilibriumModel, solver: Solver, known: Equilibria, **fields: Any
) -> Method:
    """Another equilibrium model under its own solver, measured at its own equilibrium."""
    own = Target(model=model, stars=known.states)
    return solver_method(model, solver, own=own, **fields)


def closed_form(model: EIGNN) -> Explicit:
    """EIGNN without iteration: it has no step count."""

    def output(x: Any) -> Tensor:
        return model.readout(model.closed_form(x, tol=1e-5).state, model.inject(x))

    return Explicit(output=output, parameters=parameter_count(model))


def few_step_task(task: Task, steps: int) -> Task:
    """The same model trained to be good after `steps` Picard steps."""
    return replace(task, name=f"{task.name}-few{steps}", teach=few_step_teaching(task.teach, steps))


def few_step_methods(
    task: Task,
    counts: tuple[int, ...],
    place: Callable[[str, dict[str, Any]], Path],
    seed: int,
    progress: Callable[[str], Any],
) -> dict[str, Method]:
    """One model for each step count: the strongest rival that few steps allow."""
    methods = {}
    for k in counts:
        made = few_step_task(task, k)
        with progress(f"few steps ({k})") as bar:
            folder = place("few_step", {"steps": k})
            model: Any = train_teacher(made, folder, seed, bar)[0]
        known = find_equilibria(model, task.test, task.metric)
        methods[f"few_step {k}"] = rival_method(
            model, Picard(), known, counts=(k,), label="few_step"
        )
    return methods


# The learned solver.


def train_ignn_solver(
    teacher: nn.Module,
    store: TrajectoryStore,
    plan: GraphPlan,
    folder: Path,
    seed: int,
    progress: Progress | None,
) -> tuple[IGNNSolver, Training]:
    """IGNN-Solver for the teacher, on the equilibria that its students learn from."""
    solver = built(lambda: IGNNSolver(width=plan.width), seed)
    training = train_solver(
        solver,
        teacher,
        list(store),  # a graph is one batch, which is read but once
        FitConfig(updates=plan.solvers, learning_rate=8e-3),
        weights=SolverLossWeights(anneal=plan.solvers),
        folder=folder,
        seed=seed,
        progress=progress,
    )
    return solver, training


# Explicit models.


EXPLICIT: dict[str, tuple[type[nn.Module], float]] = {
    "gcn": (GCN, 1e-2),
    "gat": (GAT, 1e-2),
    "gcnii": (GCNII, 1e-2),
    "gpm": (GPM, 5e-3),
}
"""Each with its learning rate."""


def explicit_fit(name: str, plan: GraphPlan) -> FitConfig:
    """How an explicit model is trained."""
    updates = plan.gpm_updates if name == "gpm" else plan.rivals
    return FitConfig(
        updates=updates, learning_rate=EXPLICIT[name][1], weight_decay=plan.weight_decay
    )


def train_explicit(
    name: str,
    plan: GraphPlan,
    nodes: NodeTask,
    folder: Path,
    seed: int,
    progress: Progress | None,
) -> tuple[nn.Module, Training]:
    """An explicit model on the training labels of the graph."""
    extra = {"layers": plan.layers[name]} if name in plan.layers else {}
    model = built(
        lambda: EXPLICIT[name][0](features=features_of(nodes), classes=classes_of(nodes), **extra),
        seed,
    )
    batch = labelled(nodes, nodes.train)
    training = timed(
        folder,
        progress,
        lambda tick: fit(
            SupervisedObjective(model, explicit_loss, seed).train(),
            lambda update: batch,
            explicit_fit(name, plan),
            folder=folder,
            identity={"model": name, "config": model.config, "seed": seed},
            progress=tick,
        ),
    )
    return model.eval().requires_grad_(False), training


def explicit_method(model: nn.Module) -> Explicit:
    return Explicit(output=model, parameters=parameter_count(model))

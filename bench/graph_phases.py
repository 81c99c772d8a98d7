"""The phases of `graph_scale.py`: what one process does to a graph, from building it to judging its students.

Each phase is given the settings, a folder that all phases share, and what else it was called with. Graphs, weights
and recordings pass between processes on disk.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cdeq.consistency.distillation import distill
from cdeq.consistency.objective import DistillationObjective
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.student import Student
from cdeq.data.block_graphs import block_model
from cdeq.data.graphs import NodeTask, task_of_tensors, tensors_of_task
from cdeq.data.subgraphs import cut_fraction, part_tasks, partition, sampled_task
from cdeq.evaluation import (
    accuracy,
    find_equilibria,
    measure_quality,
    median_seconds,
    peak_megabytes,
    solver_method,
    student_method,
)
from cdeq.gradients import Implicit
from cdeq.models.graph.base import GraphContext
from cdeq.models.graph.ignn import IGNN
from cdeq.solvers import Anderson, Picard, solve_model
from cdeq.training.draws import numbered_generator
from cdeq.training.log import LOG
from cdeq.training.loop import FitConfig, fit
from cdeq.training.task_loss import cross_entropy
from cdeq.training.teaching import TeachConfig, teach
from cdeq.trajectories import TrajectoryBatch, TrajectoryStore, record

SOLVE_TOL = 1e-4
"""To which a recorded equilibrium is solved."""
WHOLE = "whole"
TASK = "task.safetensors"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One graph, one model, and how long to train it."""

    nodes: int = 20_000
    degree: float = 13.7  # 2.3 million directed edges at 169343 nodes, as ogbn-arxiv has
    classes: int = 40
    features: int = 128
    homophily: float = 0.65
    noise: float = 3.0
    width: int = 64
    teach_updates: int = 4
    distil_updates: int = 4
    teach_rate: float = 1e-2
    distil_rate: float = 1e-2
    tol: float = 1e-2
    depth: int = 30  # the teacher's solver gives up here
    repeats: int = 3
    parts: int = 10
    samples: int = 20
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.teach_updates, self.distil_updates) < 2:
            raise ValueError("at least two updates of each: the first is not timed")

    def fit(self, updates: int, rate: float, **more: Any) -> FitConfig:
        """`updates` updates, each in the log."""
        return FitConfig(
            updates=updates, learning_rate=rate, log_every=1, checkpoint_every=updates, **more
        )

    @property
    def distil_fit(self) -> FitConfig:
        return self.fit(self.distil_updates, self.distil_rate)


# What passes between processes.


def save_task(task: NodeTask, path: Path) -> None:
    save_file({name: t.contiguous() for name, t in tensors_of_task(task).items()}, path)


def load_task(path: Path) -> NodeTask:
    tensors = load_file(path)
    for tensor in tensors.values():
        tensor.sum()  # the file is mapped: only what was touched counts as memory
    return task_of_tensors(tensors)


def new_teacher(s: Settings, kind: type[IGNN] = IGNN) -> Any:
    """An IGNN, which is an EquilibriumModel and an nn.Module at once."""
    torch.manual_seed(s.seed)
    return kind(features=s.features, width=s.width, classes=s.classes)


def load_teacher(s: Settings, folder: Path) -> Any:
    teacher = new_teacher(s)
    teacher.load_state_dict(load_file(folder / "teacher.safetensors"))
    return teacher.eval().requires_grad_(False)


def graph_paths(folder: Path, variant: str) -> list[Path]:
    """The files of the graphs that a variant is distilled on."""
    return [folder / TASK] if variant == WHOLE else sorted((folder / variant).iterdir())


def stores_of(folder: Path, variant: str) -> list[TrajectoryStore]:
    found = sorted((folder / f"stores, {variant}").iterdir())
    return [TrajectoryStore.open(path) for path in found]


def update_seconds(folder: Path) -> float:
    """The median seconds of an update but the first, from the log of a training."""
    marks = [json.loads(line)["seconds"] for line in (folder / LOG).read_text().splitlines()]
    return statistics.median(after - before for before, after in pairwise(marks))


class CountingIGNN(IGNN):
    """An IGNN that counts its evaluations, and the products with its Jacobian's transpose."""

    evaluations = products = 0

    def step(self, z: Tensor, context: GraphContext) -> Tensor:
        self.evaluations += 1
        out = super().step(z, context)
        if out.requires_grad:
            out.register_hook(self._count_product)
        return out

    def _count_product(self, gradient: Tensor) -> None:
        self.products += 1


def build(s: Settings, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    task = block_model(
        s.nodes,
        classes=s.classes,
        degree=s.degree,
        homophily=s.homophily,
        features=s.features,
        noise=s.noise,
        seed=s.seed,
    )
    seconds = time.perf_counter() - began
    save_task(task, folder / TASK)
    edges = task.graph.adjacency.values().numel() - s.nodes  # without self-loops
    return {"seconds": seconds, "directed_edges": edges}


def teach_teacher(s: Settings, folder: Path) -> dict[str, Any]:
    """Whole-batch teaching by the implicit gradient."""
    task = load_task(folder / TASK)
    loaded = peak_megabytes()
    batch = task.labelled(task.train)
    teacher = new_teacher(s, CountingIGNN)
    config = TeachConfig(
        fit=s.fit(s.teach_updates, s.teach_rate, weight_decay=1e-3),
        gradient=Implicit(tol=s.tol, max_steps=s.depth),
        tol=s.tol,
        depths=(s.depth, s.depth),
        seed=s.seed,
    )
    began = time.perf_counter()
    teach(teacher, lambda update: batch, config, folder=folder / "teaching")
    total = time.perf_counter() - began
    save_file(teacher.state_dict(), folder / "teacher.safetensors")
    return {
        "update_seconds": update_seconds(folder / "teaching"),
        "evaluations": teacher.evaluations / s.teach_updates,
        "products": teacher.products / s.teach_updates,
        "updates": s.teach_updates,
        "total_seconds": total,
        "loaded_megabytes": loaded,
    }


def use(s: Settings, folder: Path) -> dict[str, Any]:
    """One evaluation of f, a whole solve, and a student's call; nothing is trained."""
    task = load_task(folder / TASK)
    loaded = peak_megabytes()
    graph, teacher = task.graph, load_teacher(s, folder)
    student = Student.for_example(teacher, Recipe.from_name("anchored"), graph).eval()
    with torch.no_grad():
        for weight in student.trainable().values():  # as after training: not zero
            weight.add_(0.01 * torch.randn_like(weight))
        context = teacher.inject(graph)
        z = teacher.step(teacher.start(context), context)
        solve = partial(solve_model, teacher, context, tol=SOLVE_TOL, max_steps=4 * s.depth)
        works: dict[Any, Callable[[], object]] = {
            "step": lambda: teacher.step(z, context),
            "inject": lambda: teacher.inject(graph),
            "student_1": lambda: student(graph, steps=1),
            "student_2": lambda: student(graph, steps=2),
            "solve": solve,
        }
        seconds = median_seconds(works, s.repeats)
        evaluations = solve().evaluations
    return {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "solve_evaluations": evaluations,
        "loaded_megabytes": loaded,
    }


def record_equilibria(s: Settings, folder: Path, variant: str = WHOLE) -> dict[str, Any]:
    """The teacher's equilibria on the whole graph, or on each of the subgraphs that `subgraphs` left.

    A store for each of them, since all graphs of one store must have the same number of nodes.
    """
    teacher, loaded, began = load_teacher(s, folder), 0.0, time.perf_counter()
    for path in graph_paths(folder, variant):
        task = load_task(path)  # one at a time in memory
        loaded = loaded or peak_megabytes()
        record(
            teacher,
            [task.labelled(task.train)],
            folder / f"stores, {variant}" / path.stem,
            mode="endpoint",
            tol=SOLVE_TOL,
            max_steps=4 * s.depth,
        )
    return {"seconds": time.perf_counter() - began, "loaded_megabytes": loaded}


def distil_updates(s: Settings, folder: Path, variant: str = WHOLE) -> dict[str, Any]:
    """Updates of the anchored recipe on one store or several, as `distill` makes them on one.

    Every update reads its graph anew, and every subgraph has its turn once in an epoch.
    """
    stores, teacher = stores_of(folder, variant), load_teacher(s, folder)
    weight = next(teacher.parameters())

    def batch_at(update: int) -> TrajectoryBatch:
        epoch, place = divmod(update, len(stores))
        order = torch.randperm(len(stores), generator=numbered_generator(s.seed, epoch))
        return stores[int(order[place])][0].to(weight.device, weight.dtype)

    first = batch_at(0)
    student = Student.for_example(teacher, Recipe.from_name("anchored"), first.x).train()
    del first
    began, again = time.perf_counter(), batch_at(0)
    _ = again.x, again.endpoint
    reading = time.perf_counter() - began
    del again
    loaded = peak_megabytes()
    objective = DistillationObjective(student, cross_entropy, s.seed)
    place, began = folder / f"student, {variant}", time.perf_counter()
    fit(
        objective,
        batch_at,
        s.distil_fit,
        folder=place / "run",
        after_update=lambda update: objective.update_average(),
    )
    total = time.perf_counter() - began
    student.eval().requires_grad_(False).save(place / "saved")
    return {
        "update_seconds": update_seconds(place / "run"),
        "reading_seconds": reading,
        "updates": s.distil_updates,
        "total_seconds": total,
        "loaded_megabytes": loaded,
    }


def distil(s: Settings, folder: Path) -> dict[str, Any]:
    """A student of the whole graph by `distill`, to the end, its plan for certified solving included."""
    (store,) = stores_of(folder, WHOLE)
    began, place = time.perf_counter(), folder / f"student, {WHOLE}"
    teacher = load_teacher(s, folder)
    student = distill(teacher, store, fit=s.distil_fit, folder=place / "run", seed=s.seed)
    total = time.perf_counter() - began
    student.save(place / "saved")
    return {
        "update_seconds": update_seconds(place / "run"),
        "updates": s.distil_updates,
        "total_seconds": total,
    }


def subgraphs(s: Settings, folder: Path) -> dict[str, Any]:
    """The whole graph in parts, with and without halo, and in samples as large as a part."""
    task = load_task(folder / TASK)
    began = time.perf_counter()
    parts = partition(task.graph.adjacency, s.parts, seed=s.seed)
    seconds = time.perf_counter() - began
    generator = torch.Generator().manual_seed(s.seed)
    size = max(s.nodes // s.parts, 1)
    variants = {
        "parts, no halo": part_tasks(task, parts, hops=0),
        "parts, halo of 1": part_tasks(task, parts, hops=1),
        "samples": [sampled_task(task, size=size, generator=generator) for _ in range(s.samples)],
    }
    about: dict[str, Any] = {}
    for variant, tasks in variants.items():
        (folder / variant).mkdir()
        for number, part in enumerate(tasks):
            save_task(part, folder / variant / f"{number:04d}.safetensors")
        nodes = statistics.mean(len(part.labels) for part in tasks)
        about[variant] = {"subgraphs": len(tasks), "nodes": nodes}
    cut = cut_fraction(task.graph.adjacency, parts)
    return {"partition_seconds": seconds, "cut_fraction": cut, "variants": about}


def evaluate(s: Settings, folder: Path, variants: list[str], counts: list[int]) -> dict[str, Any]:
    """Teacher and students on the whole graph's test nodes: accuracy, and distance to the equilibrium."""
    task = load_task(folder / TASK)
    batches = [task.labelled(task.test)]
    teacher, metric = load_teacher(s, folder), accuracy()
    ideal = find_equilibria(teacher, batches, metric)
    methods = {
        "Picard": solver_method(teacher, Picard()),
        "Anderson": solver_method(teacher, Anderson()),
    }
    for variant in variants:
        student = Student.load(folder / f"student, {variant}" / "saved").eval()
        methods[f"student, {variant}"] = student_method(student)
    works: dict[Any, Callable[[], object]] = {
        (name, k): partial(method.output, task.graph, k)
        for name, method in methods.items()
        for k in counts
    }
    works["converged"] = lambda: solve_model(
        teacher, teacher.inject(task.graph), tol=SOLVE_TOL, max_steps=150
    )
    with torch.no_grad():
        seconds = median_seconds(works, s.repeats)
    rows = [
        {
            "method": name,
            "steps": k,
            "accuracy": found.metric,
            "distance": found.distance,
            "seconds": seconds[name, k],
        }
        for name, method in methods.items()
        for k, found in measure_quality(
            method, teacher, batches, ideal.states, metric, tuple(counts)
        ).items()
    ]
    return {
        "converged": {
            "accuracy": ideal.metric,
            "steps": ideal.steps,
            "residual": ideal.residual,
            "seconds": seconds["converged"],
        },
        "methods": rows,
    }


PHASES: dict[str, Callable[..., dict[str, Any]]] = {
    "build": build,
    "teach": teach_teacher,
    "use": use,
    "record": record_equilibria,
    "distil updates": distil_updates,
    "distil": distil,
    "subgraphs": subgraphs,
    "evaluate": evaluate,
}


def run_phase(name: str, s: Settings, folder: Path, **more: Any) -> dict[str, Any]:
    """A phase in this process, with its seconds and the peak memory of the process."""
    torch.set_num_threads(s.threads)
    torch.manual_seed(s.seed)
    began = time.perf_counter()
    found = PHASES[name](s, folder, **more)
    seconds = time.perf_counter() - began
    return {**found, "peak_megabytes": peak_megabytes(), "phase_seconds": seconds}

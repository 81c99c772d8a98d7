"""What the paper's data sets would cost on GPUs: computed from operations counted here, not measured there.

    python bench/cost.py [--only wikitext-103 ...] [--threads 1] [--json FILE]

For each plan of the scale `paper` one update of the teacher and of its student, and one recorded solve, run here at
full width: of a text and of images on one sample, of a graph on a block model with the same degree and fewer nodes.
Their operations are counted (torch.utils.flop_counter), their CPU seconds and the bytes that they save for the gradient
measured. The rest is arithmetic: times samples and updates, divided by published speeds of a GPU and an assumed
utilisation. Sparse products are bound by memory, and counted in bytes. Beside the JSON stand the tables as Markdown.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cdeq.consistency.objective import DistillationObjective
from cdeq.consistency.student import Student
from cdeq.data.block_graphs import block_model
from cdeq.equilibrium.memory import Segment
from cdeq.equilibrium.states import tensors_of
from cdeq.solvers import Anderson, solve_model
from cdeq.training.task_loss import TaskLoss, cross_entropy
from cdeq.training.teaching import TeachConfig, TeachingObjective
from cdeq.trajectories import record
from cdeq_experiments.configs import SUITES
from cdeq_experiments.configs.base import StudentConfig, SuiteConfig
from common import Measurement, Options, markdown_table


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Published peaks: dense bfloat16 operations and bytes of memory, per second."""

    name: str
    operations: float
    bandwidth: float


GPUS = (
    Gpu(name="A100 80 GB", operations=312e12, bandwidth=2.039e12),
    Gpu(name="H100 SXM", operations=989e12, bandwidth=3.35e12),
)
"""NVIDIA's data sheets."""
UTILISATION = {"text": 0.4, "images": 0.2, "graph": 0.5}
"""Assumed: of the operations in wide matrix products, in convolutions of few channels, of the bandwidth of graphs."""
PROCESSES = 8
"""Among which a batch is shared; a graph has one."""
SIZES = {
    "wikitext-103": {"vocabulary": 267_735},
    "imagenet": {"classes": 1000},
    "ogbn-arxiv": {"features": 128, "classes": 40},
    "ogbn-products": {"features": 100, "classes": 47},
}
"""What the data give, as their homes say."""
GRAPHS = {"ogbn-arxiv": (169_343, 1_166_243), "ogbn-products": (2_449_029, 61_859_140)}
"""Nodes and undirected edges."""
NODES = 10_000
"""Of the graph that is measured."""
FLOAT = 4


@dataclass
class Cost:
    """What was counted while something ran: operations, sparse bytes, CPU seconds, bytes saved for the gradient."""

    operations: float = 0.0
    sparse_bytes: float = 0.0
    cpu_seconds: float = 0.0
    saved_bytes: float = 0.0

    def times(self, factor: float) -> Cost:
        return Cost(**{name: factor * value for name, value in asdict(self).items()})


@contextmanager
def counted(model: nn.Module) -> Iterator[Cost]:
    """Counts what runs inside. Weights that are saved for the gradient are there anyway, and left out."""
    cost, seen = Cost(), {p.untyped_storage().data_ptr() for p in model.parameters()}
    multiply, flops = torch.sparse.mm, FlopCounterMode(display=False)

    def save(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                cost.saved_bytes += storage.nbytes()
        return tensor

    def counted_multiply(matrix: Tensor, x: Tensor, *more: Any) -> Tensor:
        # A row of x is read for each entry of the matrix, and a row of the product written for each of its rows.
        cost.sparse_bytes += FLOAT * x.shape[1] * (matrix.values().numel() + matrix.shape[0])
        return multiply(matrix, x, *more)

    torch.sparse.mm = counted_multiply
    began = time.process_time()
    try:
        with flops, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            yield cost
    finally:
        torch.sparse.mm = multiply
    cost.cpu_seconds = time.process_time() - began
    cost.operations = float(flops.get_total_flops())


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What is measured: an input and its targets, and how many of it a batch of the plan has."""

    x: Any
    y: Tensor
    in_batch: float


def text_sample(config: SuiteConfig, teacher: Any) -> Sample:
    """One stream: a segment of full length, with a memory of full length."""
    data = config.data
    tokens = torch.randint(SIZES[config.name]["vocabulary"], (1, data.length))
    context = teacher.inject(Segment(tokens, ()))
    memory = teacher.remember(teacher.start(context), context)
    return Sample(x=Segment(tokens, memory), y=tokens, in_batch=data.batch)


def image_sample(config: SuiteConfig, teacher: Any) -> Sample:
    data = config.data
    x = torch.randn(1, data.channels, data.size, data.size)
    return Sample(x=x, y=torch.zeros(1, dtype=torch.int64), in_batch=data.batch)


def graph_sample(config: SuiteConfig, teacher: Any) -> Sample:
    """A graph with the degree of the plan's, of which that has so many times the nodes."""
    nodes, edges = GRAPHS[config.name]
    sizes = SIZES[config.name]
    task = block_model(NODES, seed=0, degree=2 * edges / nodes, **sizes)
    x, y = task.labelled(task.train)
    return Sample(x=x, y=y, in_batch=nodes / NODES)


SAMPLES: dict[str, Callable[[SuiteConfig, Any], Sample]] = {
    "text": text_sample,
    "images": image_sample,
    "graph": graph_sample,
}


def teacher_update(teacher: Any, config: TeachConfig, sample: Sample, loss: TaskLoss) -> Cost:
    """One update at the mean depth, its whole budget spent; in the shallow stage, that depth."""
    depth = round(sum(config.depths) / 2)
    objective = TeachingObjective(teacher, replace(config, depths=(depth, depth), tol=0.0), loss)
    with counted(teacher) as cost:
        objective((sample.x, sample.y), 0)[0].backward()
    teacher.zero_grad(set_to_none=True)
    return cost


def one_solve(teacher: Any, steps: int, sample: Sample) -> Cost:
    """A recorded solve that spends its budget."""
    with torch.no_grad(), counted(teacher) as cost:
        solve_model(teacher, teacher.inject(sample.x), Anderson(), tol=0.0, max_steps=steps)
    return cost


def student_update(teacher: Any, config: StudentConfig, sample: Sample, loss: TaskLoss) -> Cost:
    """One update of the whole student, on the teacher's own memory."""
    recipe = replace(config.resolve(), memory="teacher")
    with tempfile.TemporaryDirectory(prefix="cdeq-cost-") as room:
        recorded = record(teacher, [(sample.x, sample.y)], room, mode="endpoint", max_steps=2)[0]
        student = Student.for_example(teacher, recipe, sample.x).train()
        objective = DistillationObjective(student, loss, 0)
        with counted(student) as cost:
            objective(recorded, 0)[0].backward()
    return cost


def measure(config: SuiteConfig) -> list[dict[str, Any]]:
    """A row for each stage of a plan."""
    teacher: Any = config.teacher.build(**SIZES[config.name]).eval()
    with torch.no_grad():
        sample = SAMPLES[config.kind](config, teacher)
        context = teacher.inject(sample.x)
        numbers = sum(part.numel() for part in tensors_of(teacher.start(context)))
    loss = teacher.loss if config.kind == "text" else cross_entropy
    one_solve(teacher, 1, sample)  # what is imported and set up at the first call is not counted
    weights = sum(p.numel() for p in teacher.parameters())
    student, plan = config.students["corrected"], config.teacher
    recipe, recording = student.resolve(), config.recording["endpoint"]
    stages: list[tuple[str, float, Cost]] = []
    for name, how in (("teacher, shallow", plan.pretraining), ("teacher", plan.teaching)):
        if how is not None:
            stages.append((name, how.fit.updates, teacher_update(teacher, how, sample, loss)))
    batches = recording.batches or 1
    stages.append(("recording", batches, one_solve(teacher, recording.max_steps, sample)))
    teacher.requires_grad_(False)
    updates = recipe.start_updates + recipe.correction_updates + student.fit.updates
    stages.append(("student", updates, student_update(teacher, student, sample, loss)))
    about = {"dataset": config.title, "kind": config.kind, "weights": weights, "state": numbers}
    rows = []
    for stage, count, cost in stages:
        row = {**about, "stage": stage, "updates": count, "samples": sample.in_batch}
        row |= {f"sample_{name}": value for name, value in asdict(cost).items()}
        row |= plan_of(config.kind, count, cost.times(sample.in_batch))
        # What stays on the disk: weights and two moments; of a recording, its states.
        kept = 3 * weights if stage != "recording" else numbers * sample.in_batch * batches
        rows.append({**row, "disk_bytes": FLOAT * kept, "memory_bytes": memory_of(row, stage)})
    return rows


def plan_of(kind: str, updates: float, cost: Cost) -> dict[str, float]:
    """All updates on each GPU: hours of one GPU, since a batch shared by more takes as many in all."""
    share = UTILISATION[kind]
    found: dict[str, float] = {"operations": updates * cost.operations}
    for gpu in GPUS:
        seconds = cost.operations / (share * gpu.operations)
        if kind == "graph":  # dense and sparse parts take turns
            seconds += cost.sparse_bytes / (share * gpu.bandwidth)
        found |= {f"{gpu.name} seconds": seconds, f"{gpu.name} hours": updates * seconds / 3600}
    return found


def memory_of(row: dict[str, Any], stage: str) -> float:
    """Bytes on each of the GPUs in single precision, whose batch is its share.

    Weights, gradients and two moments; what is saved for the gradient; the states and evaluations that Anderson keeps.
    """
    processes = 1 if row["kind"] == "graph" else PROCESSES
    mixed = FLOAT * row["state"] * 2 * (Anderson().window + 1)
    batch = (row["sample_saved_bytes"] + mixed) * row["samples"] / processes
    return FLOAT * row["weights"] * (1 if stage == "recording" else 4) + batch


def matrix_rate(size: int = 1024, repeats: int = 5) -> float:
    """Operations per CPU second of a plain matrix product here."""
    a, best = torch.randn(size, size), 0.0
    for _ in range(repeats):
        began = time.process_time()
        a @ a
        best = max(best, 2 * size**3 / (time.process_time() - began))
    return best


def shown(rows: list[dict[str, Any]], rate: float) -> str:
    """The plan, and what it is computed from."""
    gpu = GPUS[0]
    plan = [
        [
            *(f"{row['dataset']}: {row['stage']}", f"{row['updates']:,}"),
            *(f"{row['operations'] / 1e18:.2g}", f"{row[f'{gpu.name} seconds']:.2g}"),
            *(f"{row[f'{one.name} hours']:.2g}" for one in GPUS),
            *(f"{row['disk_bytes'] / 1e9:.2g}", f"{row['memory_bytes'] / 1e9:.2g}"),
        ]
        for row in rows
    ]
    measured = [
        [
            *(f"{row['dataset']}: {row['stage']}", f"{row['sample_operations'] / 1e9:.3g}"),
            *(f"{row['sample_sparse_bytes'] / 1e9:.2g}", f"{row['sample_cpu_seconds']:.2g}"),
            f"{row['sample_operations'] / row['sample_cpu_seconds'] / rate:.0%}",
            f"{row['sample_saved_bytes'] / 1e6:,.0f}",
        ]
        for row in rows
    ]
    hours = [f"hours, {one.name}" for one in GPUS]
    heads = ["", "updates", "10^18 operations", f"seconds, {gpu.name}", *hours]
    first = markdown_table(
        "Computed, not measured. Seconds are of one update on one GPU, hours of all updates. Gigabytes: what stays on "
        f"the disk, and memory of each of {PROCESSES} GPUs (of one for a graph).",
        [*heads, "disk, GB", "memory, GB"],
        plan,
    )
    second = markdown_table(
        f"Measured here for one sample and one update (of a graph: {NODES:,} nodes). A plain matrix product does "
        f"{rate / 1e9:.0f} * 10^9 operations per CPU second.",
        ["", "10^9 operations", "sparse, GB", "CPU seconds", "of a matrix product", "saved, MB"],
        measured,
    )
    peaks = "; ".join(
        f"{one.name} {one.operations / 1e12:.0f} * 10^12 operations in bfloat16 and {one.bandwidth / 1e9:.0f} GB"
        for one in GPUS
    )
    shares = ", ".join(f"{share:.0%} for {kind}" for kind, share in UTILISATION.items())
    return f"{first}\nPublished peaks per second: {peaks}. Assumed share of them: {shares}.\n\n{second}"


@dataclass(frozen=True, kw_only=True)
class CostOptions(Options):
    repeats: int = 1
    only: tuple[str, ...] = ()
    """Data sets by name; all without."""


def plans() -> list[SuiteConfig]:
    return [config for configs in SUITES["paper"].values() for config in configs]


def main() -> None:
    options = tyro.cli(CostOptions, description=__doc__)
    measurement, rate = Measurement(options), matrix_rate()
    chosen = [config for config in plans() if not options.only or config.name in options.only]
    rows = [row for config in chosen for row in measure(config)]
    table = shown(rows, rate)
    print(table)
    assumed = {"utilisation": UTILISATION, "processes": PROCESSES, "matrix_rate": rate}
    measurement.finish(rows, table, gpus=[asdict(gpu) for gpu in GPUS], **assumed)


if __name__ == "__main__":
    main()

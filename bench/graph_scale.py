"""How graphs scale: seconds and memory of a teacher's and a student's work against the number of nodes.

    python bench/graph_scale.py scale [--sizes 10000 30000 ...] [--json FILE]   one update of each, size by size
    python bench/graph_scale.py train [--nodes 169343] [--json FILE]            teach and distil to the end
    python bench/graph_scale.py parts [--nodes 20000] [--json FILE]             distil on the whole, parts, samples

Graphs are block models, the model an IGNN. Every phase runs in a fresh process, so that its peak
memory (ru_maxrss) is its own; graphs, weights and recordings pass between them on disk (TMPDIR).
`loaded_megabytes` is the peak once the inputs are read, Python and torch included: what a phase
needs beyond its data is the difference. Beside the JSON of `scale` and `parts` stands a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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
from cdeq.data.graphs import Graph, NodeTask
from cdeq.data.sparse import csr_from_pointers
from cdeq.data.subgraphs import cut_fraction, part_tasks, partition, sampled_task
from cdeq.evaluation import (
    accuracy,
    find_equilibria,
    measure_quality,
    median_seconds,
    peak_megabytes,
    solver_method,
    student_method,
    write_measurements,
)
from cdeq.gradients import Implicit
from cdeq.models.graph.ignn import IGNN, GraphContext
from cdeq.solvers import Anderson, Picard, solve_model
from cdeq.training.draws import numbered_generator
from cdeq.training.log import LOG
from cdeq.training.loop import FitConfig, fit
from cdeq.training.task_loss import cross_entropy
from cdeq.training.teaching import TeachConfig, teach
from cdeq.trajectories import TrajectoryBatch, TrajectoryStore, record
from cdeq_experiments.graph_tasks import labelled

SIZES = (10_000, 30_000, 100_000, 169_343, 300_000, 1_000_000)
SOLVE_TOL = 1e-4
"""To which a recorded equilibrium is solved."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One graph, one model, and how long to train it."""

    nodes: int
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


# What passes between processes.


def save_task(task: NodeTask, path: Path) -> None:
    adjacency, features = task.graph
    assert isinstance(features, Tensor)
    tensors = {
        "pointers": adjacency.crow_indices(),
        "columns": adjacency.col_indices(),
        "values": adjacency.values(),
        "features": features,
        **{name: getattr(task, name) for name in ("labels", "train", "valid", "test")},
    }
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)


def load_task(path: Path) -> NodeTask:
    t = load_file(path)
    for tensor in t.values():
        tensor.sum()  # the file is mapped: only what was touched counts as memory
    nodes = len(t["labels"])
    adjacency = csr_from_pointers(t["pointers"], t["columns"], t["values"], (nodes, nodes))
    graph = Graph(adjacency, t["features"])
    return NodeTask(graph, t["labels"], t["train"], t["valid"], t["test"])


def new_teacher(s: Settings) -> IGNN:
    torch.manual_seed(s.seed)
    return IGNN(features=s.features, width=s.width, classes=s.classes)


def load_teacher(s: Settings, room: Path) -> Any:
    """An IGNN, which is an EquilibriumModel and an nn.Module at once."""
    teacher = new_teacher(s)
    teacher.load_state_dict(load_file(room / "teacher.safetensors"))
    return teacher.eval().requires_grad_(False)


def update_seconds(folder: Path) -> list[float]:
    """Seconds of each update but the first, from the log of a training."""
    marks = [json.loads(line)["seconds"] for line in (folder / LOG).read_text().splitlines()]
    return [after - before for before, after in pairwise(marks)]


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


# The phases. Each is given the settings, the folder of the graph, and what else it was called with.


def build_phase(s: Settings, room: Path) -> dict[str, Any]:
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
    save_task(task, room / "task.safetensors")
    edges = task.graph.adjacency.values().numel() - s.nodes  # without self-loops
    return {"seconds": seconds, "directed_edges": edges}


def teach_phase(s: Settings, room: Path) -> dict[str, Any]:
    """Whole-batch teaching by the implicit gradient."""
    task = load_task(room / "task.safetensors")
    loaded = peak_megabytes()
    batch = labelled(task, task.train)
    teacher = CountingIGNN(**new_teacher(s).config)
    teacher.load_state_dict(new_teacher(s).state_dict())
    config = TeachConfig(
        fit=FitConfig(
            updates=s.teach_updates,
            learning_rate=s.teach_rate,
            weight_decay=1e-3,
            log_every=1,
            checkpoint_every=s.teach_updates,
        ),
        gradient=Implicit(tol=s.tol, max_steps=s.depth),
        tol=s.tol,
        depths=(s.depth, s.depth),
        seed=s.seed,
    )
    began = time.perf_counter()
    teach(teacher, lambda update: batch, config, folder=room / "teaching")
    total = time.perf_counter() - began
    save_file(teacher.state_dict(), room / "teacher.safetensors")
    return {
        "update_seconds": statistics.median(update_seconds(room / "teaching")),
        "evaluations": teacher.evaluations / s.teach_updates,
        "products": teacher.products / s.teach_updates,
        "updates": s.teach_updates,
        "total_seconds": total,
        "loaded_megabytes": loaded,
    }


def use_phase(s: Settings, room: Path) -> dict[str, Any]:
    """One evaluation of f, a whole solve, and a student's call; nothing is trained."""
    task = load_task(room / "task.safetensors")
    loaded = peak_megabytes()
    graph, teacher = task.graph, load_teacher(s, room)
    student = Student.for_example(teacher, Recipe.from_name("anchored"), graph).eval()
    with torch.no_grad():
        for weight in student.trainable().values():  # as after training: not zero
            weight.add_(0.01 * torch.randn_like(weight))
        context = teacher.inject(graph)
        z = teacher.step(teacher.start(context), context)
        solve = partial(
            solve_model, teacher, context, Anderson(), tol=SOLVE_TOL, max_steps=4 * s.depth
        )
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


def record_phase(s: Settings, room: Path, variant: str = "whole") -> dict[str, Any]:
    """The teacher's equilibria on the whole graph, or on each of the pieces that `pieces_phase` left.

    A store a piece, since all graphs of one store must have the same number of nodes.
    """
    teacher, loaded, began = load_teacher(s, room), 0.0, time.perf_counter()
    for path in piece_paths(room, variant):
        piece = load_task(path)  # one at a time in memory
        loaded = loaded or peak_megabytes()
        record(
            teacher,
            [labelled(piece, piece.train)],
            room / f"stores, {variant}" / path.stem,
            mode="endpoint",
            tol=SOLVE_TOL,
            max_steps=4 * s.depth,
        )
    return {"seconds": time.perf_counter() - began, "loaded_megabytes": loaded}


def stores_of(room: Path, variant: str) -> list[TrajectoryStore]:
    return [TrajectoryStore.open(path) for path in sorted((room / f"stores, {variant}").iterdir())]


def distil_config(s: Settings) -> FitConfig:
    return FitConfig(
        updates=s.distil_updates,
        learning_rate=s.distil_rate,
        log_every=1,
        checkpoint_every=s.distil_updates,
    )


def distil_updates_phase(s: Settings, room: Path, variant: str = "whole") -> dict[str, Any]:
    """Updates of the anchored recipe on one store or several, as `distill` makes them on one.

    Every update reads its graph anew, and every piece has its turn once an epoch.
    """
    stores, teacher = stores_of(room, variant), load_teacher(s, room)
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
    folder, began = room / f"student, {variant}", time.perf_counter()
    fit(
        objective,
        batch_at,
        distil_config(s),
        folder=folder / "run",
        after_update=lambda update: objective.update_average(),
    )
    total = time.perf_counter() - began
    student.eval().requires_grad_(False).save(folder / "saved")
    return {
        "update_seconds": statistics.median(update_seconds(folder / "run")),
        "reading_seconds": reading,
        "updates": s.distil_updates,
        "total_seconds": total,
        "loaded_megabytes": loaded,
    }


def distil_phase(s: Settings, room: Path) -> dict[str, Any]:
    """A student of the whole graph by `distill`, to the end, its plan for certified solving included."""
    (store,) = stores_of(room, "whole")
    began, folder = time.perf_counter(), room / "student, whole"
    student = distill(
        load_teacher(s, room),
        store,
        fit=distil_config(s),
        folder=folder / "run",
        seed=s.seed,
    )
    total = time.perf_counter() - began
    student.save(folder / "saved")
    return {
        "update_seconds": statistics.median(update_seconds(folder / "run")),
        "updates": s.distil_updates,
        "total_seconds": total,
    }


def pieces_phase(s: Settings, room: Path) -> dict[str, Any]:
    """The whole graph in parts, with and without halo, and in samples as large as a part."""
    task = load_task(room / "task.safetensors")
    began = time.perf_counter()
    parts = partition(task.graph.adjacency, s.parts, seed=s.seed)
    seconds = time.perf_counter() - began
    generator = torch.Generator().manual_seed(s.seed)
    size = max(s.nodes // s.parts, 1)
    pieces = {
        "parts, no halo": part_tasks(task, parts, hops=0),
        "parts, halo of 1": part_tasks(task, parts, hops=1),
        "samples": [sampled_task(task, size=size, generator=generator) for _ in range(s.samples)],
    }
    about: dict[str, Any] = {}
    for variant, tasks in pieces.items():
        (room / variant).mkdir()
        for number, piece in enumerate(tasks):
            save_task(piece, room / variant / f"{number:04d}.safetensors")
        about[variant] = {
            "pieces": len(tasks),
            "nodes": statistics.mean(len(piece.labels) for piece in tasks),
        }
    cut = cut_fraction(task.graph.adjacency, parts)
    return {"partition_seconds": seconds, "cut_fraction": cut, "pieces": about}


def piece_paths(room: Path, variant: str) -> list[Path]:
    """The files of a variant's graphs."""
    if variant == "whole":
        return [room / "task.safetensors"]
    return sorted((room / variant).glob("*.safetensors"))


def evaluate_phase(
    s: Settings, room: Path, variants: list[str], counts: list[int]
) -> dict[str, Any]:
    """Teacher and students on the whole graph's test nodes: accuracy, and distance to the equilibrium."""
    task = load_task(room / "task.safetensors")
    batches = [labelled(task, task.test)]
    teacher, metric = load_teacher(s, room), accuracy()
    ideal = find_equilibria(teacher, batches, metric)
    methods = {
        "Picard": solver_method(teacher, Picard()),
        "Anderson": solver_method(teacher, Anderson()),
    }
    for variant in variants:
        student = Student.load(room / f"student, {variant}" / "saved").eval()
        methods[f"student, {variant}"] = student_method(student)
    works: dict[Any, Callable[[], object]] = {
        (name, k): partial(method.output, task.graph, k)
        for name, method in methods.items()
        for k in counts
    }
    works["converged"] = lambda: solve_model(
        teacher, teacher.inject(task.graph), Anderson(), tol=SOLVE_TOL, max_steps=150
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
    "build": build_phase,
    "teach": teach_phase,
    "use": use_phase,
    "record": record_phase,
    "distil updates": distil_updates_phase,
    "distil": distil_phase,
    "pieces": pieces_phase,
    "evaluate": evaluate_phase,
}


# Processes.


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(phase: str, s: Settings, room: Path, **more: Any) -> dict[str, Any]:
    """A phase in a process of its own."""
    order = json.dumps({"phase": phase, "settings": asdict(s), "room": str(room), "more": more})
    environment = {**os.environ, "OMP_NUM_THREADS": str(s.threads)}
    command = [sys.executable, str(Path(__file__).resolve()), "phase", order]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{phase} at {s.nodes} nodes ended with code {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    named = " ".join([phase, *(str(v) for v in more.values() if isinstance(v, str))])
    say(f"{s.nodes:>9} nodes  {named:<24}  {_brief(found)}")
    return found


def _brief(found: dict[str, Any]) -> str:
    numbers = {name: v for name, v in found.items() if isinstance(v, int | float)}
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def phase_main(order: str) -> None:
    """What the other side of `run` does."""
    given = json.loads(order)
    s = Settings(**given["settings"])
    torch.set_num_threads(s.threads)
    torch.manual_seed(s.seed)
    began = time.perf_counter()
    found = PHASES[given["phase"]](s, Path(given["room"]), **given["more"])
    found["peak_megabytes"] = peak_megabytes()
    found["phase_seconds"] = time.perf_counter() - began
    print(json.dumps(found))


# The modes.


def scale(s: Settings, sizes: list[int]) -> list[dict[str, Any]]:
    """One row a size. A size that a machine has no memory for says so, and the others go on."""
    rows = []
    for nodes in sizes:
        row: dict[str, Any] = {"nodes": nodes}
        at = replace(s, nodes=nodes)
        with tempfile.TemporaryDirectory(prefix="cdeq-scale-") as room:
            try:
                for phase in ("build", "teach", "use", "record", "distil updates"):
                    row[phase.replace(" ", "_")] = run(phase, at, Path(room))
            except RuntimeError as error:
                row["error"] = str(error)
                say(f"{nodes:>9} nodes  {error}")
        rows.append(row)
    return rows


def train(s: Settings) -> list[dict[str, Any]]:
    """The whole way once: teach, record, distil, and look at what came of it."""
    began = time.perf_counter()
    row: dict[str, Any] = {"nodes": s.nodes}
    with tempfile.TemporaryDirectory(prefix="cdeq-scale-") as room:
        for phase in ("build", "teach", "record", "distil"):
            row[phase] = run(phase, s, Path(room))
        row["total_seconds"] = time.perf_counter() - began
        row["evaluate"] = run("evaluate", s, Path(room), variants=["whole"], counts=[1, 2])
    return [row]


def parts(s: Settings) -> list[dict[str, Any]]:
    """The same teacher distilled on the whole graph and on pieces of it; all judged on the whole."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cdeq-scale-") as folder:
        room = Path(folder)
        run("build", s, room)
        run("teach", s, room)
        pieces = run("pieces", s, room)
        variants = ["whole", *pieces["pieces"]]
        for variant in variants:
            recorded = run("record", s, room, variant=variant)
            distilled = run("distil updates", s, room, variant=variant)
            about = pieces["pieces"].get(variant, {"pieces": 1, "nodes": s.nodes})
            rows.append({"variant": variant, **about, "record": recorded, "distil": distilled})
        found = run("evaluate", s, room, variants=variants, counts=[1, 2, 5])
    for row in rows:
        name = f"student, {row['variant']}"
        row["quality"] = [m for m in found["methods"] if m["method"] == name]
    solvers = [m for m in found["methods"] if not m["method"].startswith("student")]
    about = {key: pieces[key] for key in ("partition_seconds", "cut_fraction")}
    return [{"variant": "teacher", **found["converged"], **about, "quality": solvers}, *rows]


# Figures.


def draw_scale(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds and memory against nodes, both on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "seconds": {
            "one evaluation of f": ("use", "step_seconds"),
            "student, 2 steps": ("use", "student_2_seconds"),
            f"teacher solved to {SOLVE_TOL:g}": ("use", "solve_seconds"),
            "teacher, one update": ("teach", "update_seconds"),
            "distillation, one update": ("distil_updates", "update_seconds"),
        },
        "peak memory, MB": {
            "solve and student": ("use", "peak_megabytes"),
            "teaching": ("teach", "peak_megabytes"),
            "recording": ("record", "peak_megabytes"),
            "distillation": ("distil_updates", "peak_megabytes"),
        },
    }
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for label, (phase, name) in lines.items():
            points = [(row["nodes"], row[phase][name]) for row in rows if phase in row]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set(xscale="log", yscale="log", xlabel="nodes", ylabel=title)
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_parts(rows: list[dict[str, Any]], path: Path) -> None:
    """Distance to the equilibrium and accuracy by steps, a line a way of distilling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[dict[str, Any]]] = {}
    for entry in (entry for row in rows for entry in row["quality"]):
        lines.setdefault(entry["method"], []).append(entry)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for axis, name in zip(axes, ("distance", "accuracy"), strict=True):
        for method, entries in lines.items():
            axis.plot([e["steps"] for e in entries], [e[name] for e in entries], "o-", label=method)
        axis.set(xlabel="evaluations of f", ylabel=name)
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_yscale("log")
    axes[1].axhline(rows[0]["accuracy"], color="grey", linestyle="--")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    # Per mode: nodes, updates of the teacher and of the student.
    defaults = {"scale": (None, 4, 4), "train": (169_343, 60, 60), "parts": (20_000, 100, 200)}
    for mode, (nodes, teach_updates, distil_updates) in defaults.items():
        one = modes.add_parser(mode)
        if nodes is None:
            one.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
        else:
            one.add_argument("--nodes", type=int, default=nodes)
        one.add_argument("--teach-updates", type=int, default=teach_updates)
        one.add_argument("--distil-updates", type=int, default=distil_updates)
        for name in ("degree", "homophily", "noise", "width", "repeats", "threads", "seed"):
            value = getattr(Settings, name)
            one.add_argument(f"--{name}", type=type(value), default=value)
        if mode == "parts":
            one.add_argument("--parts", type=int, default=Settings.parts)
            one.add_argument("--samples", type=int, default=Settings.samples)
        one.add_argument("--json", type=Path, help="write the figures here")
    modes.add_parser("phase", help="one phase, for the other modes").add_argument("order")
    return parser


def main() -> None:
    options = vars(arguments().parse_args())
    mode = options.pop("mode")
    if mode == "phase":
        phase_main(options["order"])
        return
    target, sizes = options.pop("json"), options.pop("sizes", None)
    if min(options["teach_updates"], options["distil_updates"]) < 2:
        raise SystemExit("at least two updates of each: the first is not timed")
    s = Settings(**{"nodes": 0, **options})
    before = os.getloadavg()
    if mode == "scale":
        rows = scale(s, sizes)
    else:
        rows = {"train": train, "parts": parts}[mode](s)
    if target is None:
        print(json.dumps(rows, indent=1))
        return
    torch.set_num_threads(s.threads)  # for the description of the hardware
    write_measurements(
        target,
        rows,
        mode=mode,
        settings=asdict(s),
        load_before=before,
        load_after=os.getloadavg(),
    )
    if mode != "train":
        draw = {"scale": draw_scale, "parts": draw_parts}[mode]
        draw(rows, target.with_suffix(".png"))


if __name__ == "__main__":
    main()

"""The plans of the scale `paper` on a GPU that needs no hardware: no tensor left on the CPU, and memory added up.

    python bench/paper_plans.py [--only wikitext-103 ...] [--json FILE]

For each data set of the paper, at its full size, one update of the teacher in each of its stages, the solve of one
recorded batch, and updates of two students (the paper's recipe and the default one) run on the device of
`bench/on_paper.py`. The calls are those of `cdeq reproduce`: `teach`, the captures of `record`, `distill`. Left out are
the numbers themselves, the files, and what kernels need for themselves while they run.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from cdeq.consistency import distill
from cdeq.data.graphs import Graph
from cdeq.equilibrium.memory import Segment
from cdeq.equilibrium.states import State, map_state
from cdeq.evaluation import SOLVERS, parameter_count
from cdeq.training import FitConfig, teach
from cdeq.training.segments import full_memory
from cdeq.training.task_loss import cross_entropy
from cdeq.trajectories import TrajectoryStore
from cdeq.trajectories.capture import CAPTURES, Settings
from cdeq.trajectories.manifest import Manifest
from cdeq.trajectories.store import STATES_ON_DEVICE
from cdeq_experiments.configs import SUITES
from cdeq_experiments.configs.base import SuiteConfig
from common import Measurement, Options, markdown_table
from on_paper import DEVICE, OnPaper

LIMIT = 80.0
"""GB of a large GPU."""
STUDENTS = ("paper", "corrected")
LAST = 2
"""Updates of a student: one may be of a batch with nothing before it."""
STAGES = ("pretraining", "teaching", "record endpoint", "record full", *STUDENTS)


@dataclass(frozen=True, kw_only=True)
class GraphSize:
    """Nodes, stored entries of the adjacency (both directions and a loop for each node), features and classes."""

    nodes: int
    edges: int
    features: int
    classes: int

    @property
    def entries(self) -> int:
        return 2 * self.edges + self.nodes


WORDS = 267_735
"""Of WikiText-103 (Merity et al. 2016)."""
CLASSES = 1000
"""Of ImageNet."""
GRAPHS = {
    "ogbn-arxiv": GraphSize(nodes=169_343, edges=1_166_243, features=128, classes=40),
    "ogbn-products": GraphSize(nodes=2_449_029, edges=61_859_140, features=100, classes=47),
}
"""As published (Hu et al. 2020)."""


def sizes_of(config: SuiteConfig) -> dict[str, int]:
    """The arguments of a model that its data give."""
    if config.kind == "text":
        return {"vocabulary": WORDS}
    if config.kind == "images":
        return {"classes": CLASSES}
    graph = GRAPHS[config.name]
    return {"features": graph.features, "classes": graph.classes}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


@torch.no_grad()
def batch_of(config: SuiteConfig, model: Any) -> tuple[Any, Tensor]:
    """A training batch (x, y) of full size on the device; a text's with a full memory, as all but the first have it."""
    data, whole = config.data, torch.int64
    if config.kind == "images":
        return empty(data.batch, data.channels, data.size, data.size), empty(
            data.batch, dtype=whole
        )
    if config.kind == "graph":
        graph = GRAPHS[config.name]
        pieces = (empty(graph.nodes + 1, dtype=whole), empty(graph.entries, dtype=whole))
        size = (graph.nodes, graph.nodes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            adjacency = torch.sparse_csr_tensor(
                *pieces, empty(graph.entries), size=size, check_invariants=False
            )
        return Graph(adjacency, empty(graph.nodes, graph.features)), empty(graph.nodes, dtype=whole)
    tokens = empty(data.batch, data.length, dtype=whole)

    def left(memory: Any) -> Any:
        context = model.inject(Segment(tokens, memory))
        return model.remember(model.start(context), context)

    return Segment(tokens, full_memory(left)), empty(data.batch, data.length, dtype=whole)


class Recorded:
    """A recorded batch whose states have been read to the device, as many as are kept there."""

    size = 1
    """Of which no sample is kept out of the training: what has no numbers cannot be judged."""

    def __init__(self, batch: tuple[Any, Tensor], state: State, steps: int, index: int):
        self.x, self.y = batch
        self.like, self.steps, self.index = state, steps, index
        kept = min(steps, STATES_ON_DEVICE)
        self.states = [map_state(torch.empty_like, state) for _ in range(kept)]
        self.endpoint = map_state(torch.empty_like, state)

    def state(self, k: int) -> State:
        return self.states[k % len(self.states)]

    def to(self, device: torch.device, dtype: torch.dtype) -> Recorded:
        return self

    def part(self, rank: int, world: int) -> Recorded:
        """All of it: one process alone."""
        return self

    def before(self) -> Recorded | None:
        return None if self.index == 0 else Recorded((self.x, self.y), self.like, 0, 0)


class StoreOnPaper(TrajectoryStore):
    """What `distill` reads of a recording, without its files; a graph is one batch, and of others there are two."""

    def __init__(self, config: SuiteConfig, batch: tuple[Any, Tensor], state: State, mode: str):
        steps = config.recording[mode].max_steps if mode == "full" else 0
        manifest = Manifest(
            mode=mode,
            dtype="float32",
            steps=steps,
            batched=config.kind != "graph",
            batches_per_shard=1,
            max_batches=None,
            fingerprint={"data": []},
            complete=True,
        )
        super().__init__(Path(), manifest, verify=False)
        self.batch, self.like, self.steps = batch, state, steps

    def __len__(self) -> int:
        return 2 if self.manifest.batched else 1

    def __getitem__(self, index: int) -> Any:
        return Recorded(self.batch, self.like, self.steps, index)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def check(self, *, teacher: Any = None, loader: Any = None) -> None:
        """There are no files to compare."""

    def unconverged(self, tol: float) -> float:
        return 0.0

    def precision(self) -> Tensor:
        return torch.full((len(self),), 1e-4)


def run_plan(config: SuiteConfig, say: Callable[[str], None] = print) -> dict[str, Any]:
    """GB that the stages of a plan take at most, and the sizes of its teacher."""
    model = config.teacher.build(**sizes_of(config))
    row: dict[str, Any] = {"plan": config.name, "weights": parameter_count(model)}
    with OnPaper() as paper:
        model.to(DEVICE)
        batch = batch_of(config, model)
        for stage, work in stages(config, model, batch):
            paper.begin()
            work()
            row[stage] = paper.peak / 1e9
            say(f"{config.name}: {stage}, {row[stage]:.1f} GB")
    return row


def stages(
    config: SuiteConfig, model: Any, batch: tuple[Any, Tensor]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The stages of a plan, in the order in which they are run; each is done before the next is asked for."""
    loss = model.loss if config.kind == "text" else cross_entropy
    teacher = config.teacher
    for name, how in (("pretraining", teacher.pretraining), ("teaching", teacher.teaching)):
        if how is not None:
            once = replace(
                how, fit=shortened(how.fit), pretrain_updates=min(how.pretrain_updates, 1)
            )
            yield name, partial(teach, model, [batch], once, task_loss=loss)
    model.requires_grad_(False)
    for weight in model.parameters():
        weight.grad = None
    for mode in ("endpoint", "full"):
        yield f"record {mode}", partial(capture, config, model, batch[0], mode)
    with torch.no_grad():
        state = model.start(model.inject(batch[0]))
    for name in STUDENTS:
        student = config.students[name]
        recipe = student.resolve()
        first = {
            part: 1 for part in ("start_updates", "correction_updates") if getattr(recipe, part)
        }
        store = StoreOnPaper(config, batch, state, recipe.store_mode)
        given = {"recipe": replace(recipe, **first), "fit": shortened(student.fit, LAST)}
        yield name, partial(updates_of_student, model, store, task_loss=loss, **given)


class Trained(Exception):
    """All updates of a student are done."""


def updates_of_student(teacher: nn.Module, store: TrajectoryStore, **given: Any) -> None:
    """`distill` up to its last update; what it then measures, for certified solving, is no part of a training."""

    def watch(done: int, total: int | None, metrics: Any) -> None:
        if total == done == LAST:
            raise Trained

    with suppress(Trained):
        distill(teacher, store, progress=watch, **given)


def shortened(fit: FitConfig, updates: int = 1) -> FitConfig:
    return replace(fit, updates=updates, warmup_updates=0)


@torch.no_grad()
def capture(config: SuiteConfig, model: Any, x: Any, mode: str) -> None:
    """One batch as `record` solves it and brings it to the CPU."""
    how = config.recording[mode]
    settings = Settings(
        solver=SOLVERS["anderson"],
        max_steps=how.max_steps,
        tol=0.0 if mode == "full" else 1e-4,
        dtype=torch.float32,
    )
    model.eval()
    CAPTURES[mode](model, model.inject(x), settings)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    only: tuple[str, ...] = ()
    """Names of data sets, to run only these."""


def table(rows: list[dict[str, Any]]) -> str:
    """The plans as Markdown."""
    cells = [
        [row["plan"], f"{row['weights']:,}", *(_gigabytes(row.get(s)) for s in STAGES)]
        for row in rows
    ]
    header = ["", "weights", *STAGES]
    return markdown_table("GB at most, in single precision:", header, cells)


def _gigabytes(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def main() -> None:
    options = tyro.cli(PlanOptions, description=__doc__)
    measurement = Measurement(options)
    configs = list(chain.from_iterable(SUITES["paper"].values()))
    rows = [run_plan(c) for c in configs if not options.only or c.name in options.only]
    print(table(rows))
    measurement.finish(rows, table(rows), limit=LIMIT)
    over = [row["plan"] for row in rows if max(row.get(s, 0.0) for s in STAGES) > LIMIT]
    if over:
        sys.exit(f"more than {LIMIT:g} GB: {', '.join(over)}")


if __name__ == "__main__":
    main()

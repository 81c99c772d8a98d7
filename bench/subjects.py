"""The students that are put to use in `deploy` and `parity`: those of the demos and of the zoo, and inputs for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdeq import Student, load_pretrained
from cdeq.data import Graph
from cdeq.data.graphs import normalised_adjacency
from cdeq.data.sparse import row_indices
from cdeq.demo.run import distil_student, train_teacher
from cdeq.demo.tasks import DEMO_TASKS
from cdeq.equilibrium.memory import Segment
from cdeq.equilibrium.trees import named_tensors
from cdeq.zoo import pretrained_models, read_sample

RECIPE = "corrected"
NOISE = 0.3
"""Standard deviation of what makes many images of few, whose pixels have one of about 1."""


def subjects() -> list[str]:
    """The names of all."""
    return [*DEMO_TASKS, *(card.name for card in pretrained_models())]


@torch.enable_grad()
def student_named(name: str, folder: Path) -> Student:
    """A student of the zoo; or of a demo, trained first if it is not in the folder."""
    if name not in DEMO_TASKS:
        return load_pretrained(name)
    data, home = DEMO_TASKS[name](0), folder / name
    saved = home / f"student-{RECIPE}"
    if not (saved / "config.json").is_file():
        home.mkdir(parents=True, exist_ok=True)
        teacher, _ = train_teacher(data, home / "teacher", 0, True)
        made = distil_student(data, teacher, RECIPE, home / f"distil-{RECIPE}", 0, True)
        made.save(saved)
    return Student.load(saved)


@torch.no_grad()
def inputs_for(name: str, student: Student, batch: int) -> Any:
    """So many samples: test data of a demo, or made from the zoo's sample. A graph is one sample: so many copies of it.

    A text with memory follows another one, and has its memory.
    """
    if name in DEMO_TASKS:
        found = [x for x, _ in DEMO_TASKS[name](0).test]
        return copies(found[0], batch) if isinstance(found[0], Graph) else torch.cat(found)[:batch]
    sample, _ = read_sample(name)
    drawn = torch.Generator().manual_seed(batch)
    if isinstance(sample, Graph):
        return copies(sample, batch)
    if isinstance(sample, Tensor):
        images = sample[torch.arange(batch) % len(sample)]
        return images + NOISE * torch.randn(images.shape, generator=drawn)
    teacher: Any = student.teacher
    size = (batch, teacher.memory)
    before, after = (torch.randint(teacher.words.vocabulary, size, generator=drawn) for _ in "ab")
    context = teacher.inject(Segment(before, teacher.no_memory(batch)))
    state = student.trajectory(Segment(before, teacher.no_memory(batch)), 1)[-1]
    return Segment(after, teacher.remember(state, context))


def copies(graph: Graph, count: int) -> Graph:
    """A graph beside itself, `count` times, joined in a ring at its first node."""
    nodes = graph.adjacency.shape[0]
    edges = torch.stack([row_indices(graph.adjacency), graph.adjacency.col_indices()])
    firsts = nodes * torch.arange(count)
    ring = torch.stack([firsts, firsts.roll(1)])
    many = torch.cat([*(edges + start for start in firsts), ring], dim=1)
    features = graph.as_dense_tensors().features
    assert isinstance(features, Tensor)
    return Graph(normalised_adjacency(many, nodes * count), features.repeat(count, 1))


def named_inputs(x: Any) -> dict[str, Tensor]:
    """The inputs of an exported file by name."""
    plain = x.as_dense_tensors() if isinstance(x, Graph) else x
    return named_tensors(plain, "x" if isinstance(x, Tensor) else "")


def session_of(path: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

"""What certificates are judged on: maps of strangers, the demo's tasks and the models of the zoo, each with shifts.

A shift is data of another kind than those of calibration. Some of them were looked at when the warning of
`student.solve` was made (`TUNED`); only the others say how good the warning is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cdeq
from cdeq.consistency.student import Student
from cdeq.data import MissingDataError
from cdeq.data.embedded import pydoc_words
from cdeq.data.folders import data_folder
from cdeq.data.graph_sets import load_graph
from cdeq.data.image_folders import FolderImages, middle, read_square
from cdeq.data.image_sets import load_images, require_image_files
from cdeq.data.images import Images
from cdeq.data.text import Streams
from cdeq.data.text_sets import load_text
from cdeq.demo import tasks
from cdeq.demo.run import distil_student, train_teacher
from cdeq.demo.task import Task
from cdeq.equilibrium.memory import Segment
from cdeq.equilibrium.trees import map_tensors, tensors_in
from cdeq.zoo import pretrained_models
from cdeq_experiments.configs import SUITES
from cdeq_experiments.configs.base import SuiteConfig
from stranger_maps import STRANGERS

DEMOS = ("demo images", "demo text", "demo graph")
HELD_OUT = 4
"""Batches of a stranger's training data that its student does not see, to calibrate on."""
IMAGES, SEGMENTS = 64, 16
"""Of the zoo's models: images in a batch, and batches of text to calibrate on and to judge on."""
SHIFTED = 128
"""Samples that a shift is judged on, or a few more."""
TINY = "tiny-imagenet-40"
TUNED = frozenset({"noise", "words drawn anew"})
"""Shifts that were looked at when the warning was made."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A student, inputs to calibrate it on, inputs to judge it on, and others, by the name of their shift."""

    student: Student
    held_out: list[Any]
    test: list[Any]
    shifts: dict[str, list[Any]] = field(default_factory=dict)


def cases() -> dict[str, Callable[[Path | None], Case]]:
    """All cases by name; each is made when it is asked for, with students kept in a folder if one is given."""
    found: dict[str, Callable[[Path | None], Case]] = {}
    found |= {name: partial(stranger_case, name) for name in STRANGERS}
    found |= {name: partial(demo_case, name) for name in DEMOS}
    small = [config for kind in SUITES["small"].values() for config in kind]
    there = {card.name for card in pretrained_models()}
    for config in (one for one in small if one.pretrained in there):
        found[f"zoo {config.title}"] = partial(zoo_case, config)
    return found


def kept(folder: Path | None, name: str, teacher: Any, distil: Callable[[], Student]) -> Student:
    """The student kept under a name, or the one that is distilled now."""
    place = None if folder is None else folder / name.replace(" ", "-").replace(",", "")
    if place is not None and (place / "config.json").is_file():
        return Student.load(place, teacher=teacher)
    student = distil()
    if place is not None:
        student.save(place)
    return student


def stranger_case(name: str, folder: Path | None) -> Case:
    stranger = STRANGERS[name]()
    train, held_out = stranger.train[:-HELD_OUT], stranger.train[-HELD_OUT:] + stranger.more[::2]
    teacher = stranger.teacher.requires_grad_(False).eval()
    student = kept(folder, name, teacher, lambda: cdeq.distill(teacher, train, task_loss=None))
    test = stranger.test + stranger.more[1::2]
    return Case(student=student, held_out=held_out, test=test, shifts=plain_shifts(test))


def demo_case(name: str, folder: Path | None) -> Case:
    task: Task = getattr(tasks, name.removeprefix("demo "))(0)
    where = None if folder is None else folder / f"{name.replace(' ', '-')}-teacher"
    teacher, _ = train_teacher(task, where, 0)
    distil = partial(distil_student, task, teacher, "corrected", None, 0, False)
    student = kept(folder, name, teacher, distil)
    held_out, test = ([x for x, _ in batches] for batches in (task.valid, task.test))
    shifts = plain_shifts(test) if student.batched else {}
    return Case(student=student, held_out=held_out, test=test, shifts=shifts)


def zoo_case(config: SuiteConfig, folder: Path | None) -> Case:
    """A pretrained model on its own data; the folder is for texts and images that are kept once they are read."""
    student = cdeq.load_pretrained(config.pretrained)
    make = {"text": text_case, "images": image_case, "graph": graph_case}[config.kind]
    return make(student, config.data, folder)


# The zoo's data.


def graph_case(student: Student, data: Any, folder: Path | None) -> Case:
    """A graph is one sample: there is nothing to calibrate on."""
    return Case(student=student, held_out=[], test=[load_graph(data.name).graph])


def image_case(student: Student, data: Any, folder: Path | None) -> Case:
    """Validation images to calibrate on, test images to judge on, each the first of its split."""
    images = load_images(data.name, cache=folder)
    standard = images.standard()
    held_out, test = (
        list(standard(part.pixels[_order(part)][: count * IMAGES]).split(IMAGES))
        for part, count in ((images.valid, 6), (images.test, 4))
    )
    shifts = plain_shifts(test, ("noise", "averaged"))
    if (other := tiny_images(data.size)) is not None and data.name != TINY:
        shifts["Tiny-ImageNet"] = list(standard(other).split(IMAGES))
    return Case(student=student, held_out=held_out, test=test, shifts=shifts)


def _order(part: Images) -> Tensor:
    """As they come, or drawn once where they come class by class: a batch of one class is unlike the others."""
    order = torch.arange(len(part.labels))
    if not bool((part.labels.diff() >= 0).all()):
        return order
    return order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]


def tiny_images(size: int, count: int = SHIFTED) -> Tensor | None:
    """Images of Tiny-ImageNet in this size, as many of every class, as bytes; None if it is not there."""
    try:
        require_image_files(TINY)
    except MissingDataError:
        return None
    files = FolderImages(data_folder() / TINY, "val")
    chosen = range(0, len(files), math.ceil(len(files) / count))
    whole = partial(middle, share=1.0)
    return torch.stack([read_square(files.file(i), size, whole) for i in chosen])


def text_case(student: Student, data: Any, folder: Path | None) -> Case:
    """Segments of the validation and of the test text, with the memory that the converged teacher left."""
    corpus, words = load_text(data.name, cache=folder), pydoc_words()
    manual = corpus.vocabulary.encode(words.vocabulary.decode(words.train).splitlines())
    shown = partial(segments, student.teacher, batch=data.batch, length=data.length)
    test = shown(corpus.test, SEGMENTS)
    g = torch.Generator().manual_seed(0)

    def drawn(x: Segment) -> Segment:
        return x._replace(tokens=torch.randint(len(corpus.vocabulary), x.tokens.shape, generator=g))

    def shuffled(x: Segment) -> Segment:
        return x._replace(tokens=x.tokens[:, torch.randperm(x.tokens.shape[1], generator=g)])

    few = test[: SHIFTED // data.batch]
    return Case(
        student=student,
        held_out=shown(corpus.valid, SEGMENTS),
        test=test,
        shifts={
            "words drawn anew": [drawn(x) for x in few],
            "words shuffled": [shuffled(x) for x in few],
            "Python's manual": shown(manual, SHIFTED // data.batch),
        },
    )


@torch.no_grad()
def segments(model: Any, tokens: Tensor, count: int, *, batch: int, length: int) -> list[Segment]:
    """The first segments of streams of a text but the very first, which has no memory."""
    found = [Segment(tokens) for tokens, _ in islice(Streams(tokens, batch, length), count + 1)]
    for i in range(count):
        context = model.inject(found[i])
        z = cdeq.solve_model(model, context, tol=1e-4, max_steps=80).state
        found[i + 1] = found[i + 1]._replace(memory=model.remember(z, context))
    return found[1:]


# Shifts.


def plain_shifts(
    test: list[Any], names: tuple[str, ...] = ("noise", "averaged", "shuffled")
) -> dict[str, list[Any]]:
    """The first batches of at least `SHIFTED` samples, changed; without the changes that tokens do not have."""
    few = test[: math.ceil(SHIFTED / len(tensors_in(test[0])[0]))]
    if not any(t.is_floating_point() for t in tensors_in(test[0])):
        names = tuple(name for name in names if name in OF_WORDS)
        return {OF_WORDS[name]: [SHIFTS[name](x) for x in few] for name in names}
    return {name: [SHIFTS[name](x) for x in few] for name in names}


def noisy(x: Any) -> Any:
    """The input with noise of half its own spread; tokens drawn anew."""
    g = torch.Generator().manual_seed(0)

    def changed(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return torch.randint(int(t.max()) + 1, t.shape, generator=g)
        return t + 0.5 * t.std() * torch.randn(t.shape, generator=g, dtype=t.dtype)

    return map_tensors(changed, x)


def averaged(x: Any) -> Any:
    """Each sample averaged with the next one of its batch."""
    return map_tensors(lambda t: (t + t.roll(1, 0)) / 2 if t.is_floating_point() else t, x)


def shuffled(x: Any) -> Any:
    """The numbers of each sample in another order, the same for all samples and all tensors of a size."""

    def changed(t: Tensor) -> Tensor:
        flat = t.flatten(1)
        order = torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(0))
        return flat[:, order].view_as(t)

    return map_tensors(changed, x)


SHIFTS: dict[str, Callable[[Any], Any]] = {
    "noise": noisy,
    "averaged": averaged,
    "shuffled": shuffled,
}
OF_WORDS = {"noise": "words drawn anew", "shuffled": "words shuffled"}
"""What a change is called where an input is words."""

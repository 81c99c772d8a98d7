"""Pretrained teachers and their students: a folder for each, with a card that says what it is and how it was made.

    zoo/NAME/card.json          what it is, how it was made, how good it is
             config.json, teacher.safetensors, student.safetensors   a saved student, weights in half precision
             sample.safetensors   inputs, and what teacher and student answered, so that a copy can be checked
             vocabulary.json      of a text model

The weights are part of the repository, not of the wheel: `CDEQ_ZOO` names another folder to look in.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from cdeq.consistency.saving import StudentFolderError
from cdeq.consistency.sharing import CARD
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import Input
from cdeq.files import atomic_write_bytes, atomic_write_text
from cdeq.solvers.loop import solve_model
from cdeq.trajectories.nesting import flatten, unflatten

SAMPLE = "sample.safetensors"
SAMPLED_STEPS = (1, 2)
"""Steps after which the student's answers are kept in a sample."""


class ZooError(Exception):
    """A pretrained model that is not there, or whose folder is damaged."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of a pretrained model.

    `score`: of the converged teacher on its test data, in `metric`; `steps`: evaluations to converge, the mean;
    `converged`: share of test samples with a residual of 1e-3 or less. `depth`: for numbers of plain evaluations,
    score, distance to the equilibrium and residual. `student`: the same for numbers of its steps. `training`: what
    each stage was, with its seconds. `stage`: where the training stands, if it is to go on.
    """

    name: str
    title: str
    data: str
    licence: str
    parameters: int
    metric: str
    higher_is_better: bool
    score: float
    steps: float
    converged: float
    depth: list[dict[str, float]]
    student: list[dict[str, float]]
    training: dict[str, Any]
    command: str
    commit: str
    hardware: Any
    stage: str = "finished"
    structure: dict[str, Any] = field(default_factory=dict)
    """How the inputs of the sample are nested."""

    @classmethod
    def read(cls, folder: Path) -> Card:
        """The card in a folder; refuses one that is not there or not whole."""
        path = folder / CARD
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{f.name: found[f.name] for f in fields(cls)})
        except FileNotFoundError:
            raise ZooError(f"{path} is missing: not a pretrained model") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ZooError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def zoo_folder(given: str | Path | None = None) -> Path:
    """The folder given; else that in CDEQ_ZOO; else `zoo/` of the repository this code lies in."""
    if given is not None:
        return Path(given).expanduser()
    if named := os.environ.get("CDEQ_ZOO"):
        return Path(named).expanduser()
    return Path(__file__).parents[2] / "zoo"


def pretrained_models(folder: str | Path | None = None) -> list[Card]:
    """The cards of all pretrained models, by name."""
    place = zoo_folder(folder)
    if not place.is_dir():
        return []
    return [Card.read(one) for one in sorted(place.iterdir()) if (one / CARD).is_file()]


def pretrained_folder(name: str | Path, folder: str | Path | None = None) -> Path:
    """Where a pretrained model is; refuses one that is not there."""
    place = zoo_folder(folder)
    path = place / name
    if not (path / CARD).is_file():
        known = ", ".join(card.name for card in pretrained_models(folder))
        raise ZooError(
            f"there is no pretrained model {str(name)!r} in {place}: "
            + (
                f"there are {known}"
                if known
                else "set CDEQ_ZOO to the zoo/ of a checkout of the repository"
            )
        )
    return path


def load_pretrained(name: str | Path, folder: str | Path | None = None) -> Student:
    """A pretrained student, with its teacher in `student.teacher`, in single precision, ready for use."""
    path = pretrained_folder(name, folder)
    try:
        student = Student.load(path).float()
    except StudentFolderError as error:
        raise ZooError(str(error)) from None
    student.card = asdict(Card.read(path))
    return student


def write_pretrained(folder: Path, student: Student, card: Card, x: Input) -> Card:
    """Write a folder of the zoo: weights in half precision, and answers on `x`, made with these weights."""
    half = copy.deepcopy(student).half()
    half.save(folder)
    structure, inputs = flatten(x, "x")
    answers = sample_answers(Student.load(folder).float(), x)
    atomic_write_bytes(
        folder / SAMPLE, save({n: t.contiguous() for n, t in {**inputs, **answers}.items()})
    )
    card = Card(**{**asdict(card), "structure": {"x": structure}})
    atomic_write_text(folder / CARD, json.dumps(asdict(card), indent=1) + "\n")
    return card


@torch.no_grad()
def sample_answers(student: Student, x: Input) -> dict[str, Tensor]:
    """What the converged teacher and the student answer."""
    teacher = student.teacher
    context = teacher.inject(x)
    star = solve_model(teacher, context, tol=1e-5, max_steps=200).state
    answers = {f"student.{k}": student(x, steps=k) for k in SAMPLED_STEPS}
    return {"teacher": teacher.readout(star, context), **answers}


def read_sample(
    name: str | Path, folder: str | Path | None = None
) -> tuple[Input, dict[str, Tensor]]:
    """The few inputs that a pretrained model comes with, and the answers that were given to them."""
    place = pretrained_folder(name, folder)
    try:
        kept = load_file(place / SAMPLE)
    except (OSError, SafetensorError) as error:
        raise ZooError(f"{place / SAMPLE} cannot be read: {error}") from None
    inputs = {n: t for n, t in kept.items() if n.split(".")[0] == "x"}
    x = unflatten(Card.read(place).structure["x"], "x", inputs.__getitem__)
    return x, {n: t for n, t in kept.items() if n not in inputs}


def check_pretrained(name: str, folder: str | Path | None = None) -> float:
    """The largest difference of today's answers from those in the sample, relative to the largest of these."""
    student, (x, kept) = load_pretrained(name, folder), read_sample(name, folder)
    answers = sample_answers(student, x)
    return max(float((answers[n] - kept[n]).abs().max() / kept[n].abs().max()) for n in answers)

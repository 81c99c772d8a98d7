"""Small students of the demos' models with every weight moved, and inputs of any size for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import mdeqs
from cdeq import Recipe, Student
from cdeq.data import Graph
from cdeq.equilibrium.memory import Segment
from cdeq.equilibrium.trees import named_tensors
from cdeq.models import IGNN, ConvDEQ
from cdeq.models.text.transformer import TransformerDEQ
from graphs import FEATURES, random_graph
from teachers import Normed, Pair, Ring, Tanh, inputs, randomized, small_transformer

RECIPES = ("paper", "anchored", "corrected", "warm_start")
STEPS = (1, 2, 4)
BATCHES = (1, 7, 64)


class Kind(NamedTuple):
    """How a teacher is built, and its inputs for a number of samples."""

    build: Any
    x: Any


def seeded(build: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return build(**options).eval()


def tokens(words: int, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(words, (batch, length), generator=generator)


def images(batch: int, channels: int) -> torch.Tensor:
    return torch.randn(batch, channels, 8, 8, generator=torch.Generator().manual_seed(batch))


def segment(batch: int) -> Segment:
    """Texts of three lengths; their memory is empty, of one token, or longer than the text."""
    length, memory = {1: (6, 0), 7: (3, 1)}.get(batch, (4, 9))
    generator = torch.Generator().manual_seed(batch)
    parts = [torch.randn(batch, memory, width, generator=generator) for width in (16, 32)]
    return Segment(tokens(50, batch, length), tuple(parts))


def plain(x: Any) -> Any:
    """An input as a compiler takes it: a graph without sparse tensors."""
    return x.as_dense_tensors() if isinstance(x, Graph) else x


def named_inputs(x: Any) -> dict[str, torch.Tensor]:
    """The inputs of an exported file by name."""
    return named_tensors(plain(x), "x" if isinstance(x, torch.Tensor) else "")


SMALL = {"channels": 4, "groups": 2, "keep": 0.0, "gain": 0.2}
TEXT = {"vocabulary": 20, "width": 8, "heads": 2, "inner": 12, "length": 12}
MODELS = {
    "images": Kind(lambda: seeded(ConvDEQ, **SMALL), lambda b: images(b, 1)),
    "channels": Kind(lambda: seeded(ConvDEQ, **SMALL | {"channels": 8}), lambda b: images(b, 1)),
    "mdeq": Kind(lambda: mdeqs.contracted(2), lambda b: images(b, 3)),
    "text": Kind(lambda: seeded(TransformerDEQ, **TEXT), lambda b: tokens(20, b, 3 + b % 9)),
    "memory": Kind(lambda: small_transformer().eval(), segment),
    "graph": Kind(
        lambda: seeded(IGNN, features=FEATURES, width=4),
        lambda b: random_graph(nodes=8 + b, dtype=torch.float32),  # one sample: its nodes are open
    ),
}
"""The models of the demos and of the tables."""
OTHERS = {kind.__name__: Kind(kind, inputs) for kind in (Tanh, Pair, Ring, Normed)}


def student_of(name: str, recipe: str, scale: float = 0.05, **changes: Any) -> Student:
    build, x = (MODELS | OTHERS)[name]
    torch.manual_seed(0)
    made = Student.for_example(build(), Recipe.from_name(recipe, **changes), x(3))
    return randomized(made, scale).eval().requires_grad_(False)

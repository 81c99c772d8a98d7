"""A DEQ-Transformer in double precision, and texts, memories and states for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdeq.models.text.deq_transformer import DEQTransformer
from checks import numbers

WORDS, WIDTH, HEADS, INNER, LENGTH = 50, 16, 2, 24, 12
SETTLING = {"keep": 0.5, "direct": True}


def build(**changes: Any) -> DEQTransformer:
    torch.manual_seed(0)
    sizes = {"vocabulary": WORDS, "width": WIDTH, "heads": HEADS, "inner": INNER}
    shared = {"memory": LENGTH, "cutoffs": (10, 25), "divisor": 2}
    model = DEQTransformer(**{**sizes, **shared, **changes}).double().eval()
    with torch.no_grad():  # zero before training, which would hide them
        for bias in (model.content_bias, model.position_bias):
            bias.normal_()
    return model


def text(batch: int = 3, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def some_memory(batch: int = 3, length: int = 4) -> tuple[Tensor, Tensor]:
    """A memory of states that are no equilibria."""
    return numbers(batch, length, WIDTH, seed=2), numbers(batch, length, 2 * WIDTH, seed=4)


def some_state(batch: int = 3, length: int = LENGTH) -> Tensor:
    return numbers(batch, length, WIDTH, seed=3)

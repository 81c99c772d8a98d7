"""What the explicit language models share. Shapes: B streams, L tokens, D width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from torch import Tensor, nn

from cdeq.models.arguments import arguments_of
from cdeq.models.text.adaptive import AdaptiveVocabulary

Memory = tuple[Tensor, ...]


class WordSizes(TypedDict):
    """The arguments that all of them take: those of `LanguageModel`."""

    vocabulary: int
    width: NotRequired[int]
    cutoffs: NotRequired[tuple[int, ...]]
    divisor: NotRequired[int]
    dropout: NotRequired[float]


class LanguageModel(nn.Module):
    """Words of `width` numbers, for reading and for scoring; the network between is each model's own."""

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int = 128,
        cutoffs: tuple[int, ...] = (),
        divisor: int = 4,
        dropout: float = 0.0,
    ):
        super().__init__()
        cutoffs = tuple(cutoffs)
        self.config = arguments_of(locals())
        self.width = width
        self.words = AdaptiveVocabulary(
            vocabulary=vocabulary, width=width, cutoffs=cutoffs, divisor=divisor
        )


def check_memory(memory: Memory, expected: Sequence[tuple[int, ...]], batch: int) -> Memory:
    """The memory itself; a ValueError if it is that of another model or another number of streams."""
    given = [tuple(tensor.shape) for tensor in memory]
    if given != list(expected):
        raise ValueError(
            f"memory of shapes {given} is not of this model and {batch} streams: expected {list(expected)}"
        )
    return memory

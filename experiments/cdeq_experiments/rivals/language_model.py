"""What the explicit language models share. Shapes: B streams, L tokens, D width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from cdeq.models.text.adaptive import AdaptiveVocabulary
from cdeq_experiments.rivals.arguments import checked_arguments

Memory = tuple[Tensor, ...]


class LanguageModel(nn.Module):
    """Words of `width` numbers, for reading and for scoring; the `network` between is each model's own.

    A model maps tokens (B, L) and the memory of the segment before to features (B, L, D) and its own memory.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int = 128,
        cutoffs: tuple[int, ...] = (),
        divisor: int = 4,
        dropout: float = 0.0,
        **network: Any,
    ):
        super().__init__()
        cutoffs = tuple(cutoffs)
        self.config = checked_arguments(locals())
        self.width, self.dropout = width, nn.Dropout(dropout)
        self.words = AdaptiveVocabulary(
            vocabulary=vocabulary, width=width, cutoffs=cutoffs, divisor=divisor
        )

    def remembered(self, memory: Memory | None, shapes: Sequence[tuple[int, ...]]) -> Memory:
        """The memory given, zeros if there is none; a ValueError if it is of another model or number of streams."""
        if memory is None:
            return tuple(self.words.word_bias.new_zeros(shape) for shape in shapes)
        given = [tuple(tensor.shape) for tensor in memory]
        if given != list(shapes):
            raise ValueError(
                f"memory of shapes {given} is not of this model and {shapes[0][0]} streams: expected {list(shapes)}"
            )
        return memory

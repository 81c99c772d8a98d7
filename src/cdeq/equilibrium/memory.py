"""Long inputs in segments: a model with memory sees each segment together with what it kept of those before.

Such a model has, beside the four methods, `remember(z, context)`: the memory that a state leaves behind, a tuple of
tensors with the batch axis first, detached; and `no_memory(batch)`, the memory before the first segment. Its
input is a `Segment`. It may also have `follow(x, last)`, an `inject` that keeps what it can of the context before.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from cdeq.equilibrium.contract import Context
from cdeq.equilibrium.states import State

Memory = tuple[Tensor, ...]


class Segment(NamedTuple):
    """A part of a long input, such as tokens (B, L), and the memory of those before it; empty at the beginning."""

    tokens: Tensor
    memory: Memory = ()


@runtime_checkable
class Remembering(Protocol):
    """What a model with memory has beside the four methods."""

    def remember(self, z: State, context: Context) -> Memory:
        """The memory that a state leaves for the next segment."""

    def no_memory(self, batch: int) -> Memory:
        """The memory before the first segment of `batch` texts: the same tensors, of no tokens."""


@runtime_checkable
class Following(Remembering, Protocol):
    """What a model with memory has beside it if reading on is cheaper than reading anew."""

    def follow(self, x: Segment, last: Context) -> Context:
        """The context that `inject(x)` gives, to rounding, for the segment right after that of `last`.

        x has the memory that `last` and its state left. What `last` has of older tokens, such as their keys and values,
        is taken from it; it must have been made under the same weights. For use, not for training.
        """


def require_memory(model: Any) -> Remembering:
    """The model itself; refuses one that cannot remember."""
    if not isinstance(model, Remembering):
        raise TypeError(
            f"{type(model).__name__} has no memory: write remember(z, context) and no_memory(batch), "
            "which give a tuple of tensors"
        )
    return model

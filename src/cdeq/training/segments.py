"""Training on long texts in segments: the memory that passes from one update to the next.

Shapes: B texts, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cdeq.equilibrium.memory import Memory
from cdeq.training.draws import numbered_draws
from cdeq.training.sharding import divided_rows, own_rows


class CarriedMemory(nn.Module):
    """What an update leaves for the next one, as buffers, so that a checkpoint holds it.

    `like`: a memory of full length, which says the shapes. `period`: updates in one pass over the text; each pass
    begins with no memory. A memory of fewer tokens (axis 1 of three) than the full ones is kept at their end.
    Under torchrun `like` is that of this process's own texts: a checkpoint holds those of all.
    """

    lengths: Tensor

    def __init__(self, like: Memory, period: int):
        super().__init__()
        if period < 1:
            raise ValueError(f"a text has at least 1 segment, not {period}")
        self.period, self.count = period, len(like)
        for i, tensor in enumerate(like):
            self.register_buffer(f"memory_{i}", divided_rows(torch.zeros_like(tensor)))
        self.register_buffer("lengths", torch.zeros(max(self.count, 1), dtype=torch.int64))

    def at(self, update: int) -> Memory:
        """The memory that an update begins with."""
        if update % self.period == 0:
            return ()
        lengths = self.lengths.tolist()
        # Copies: what the update leaves is written here before its gradient is taken.
        return tuple(
            (part[:, part.shape[1] - length :] if part.ndim > 2 else part).clone()
            for part, length in zip(self._parts(), lengths, strict=False)
        )

    @torch.no_grad()
    def keep(self, memory: Memory) -> None:
        """Keep what an update leaves."""
        if len(memory) != self.count:
            raise ValueError(f"a memory of {self.count} tensors was expected, not of {len(memory)}")
        for i, (part, new) in enumerate(zip(self._parts(), memory, strict=True)):
            room = list(part.shape)
            if part.ndim > 2 and new.ndim == part.ndim:
                room[1] = min(room[1], new.shape[1])
            if list(new.shape) != room:
                raise ValueError(
                    f"tensor {i} of a memory has shape {tuple(new.shape)}, and there is room for "
                    f"{tuple(part.shape)}: make CarriedMemory like the longest memory of these texts"
                )
            if part.ndim > 2:
                self.lengths[i] = new.shape[1]
                part[:, part.shape[1] - new.shape[1] :] = new
            else:
                part.copy_(new)

    def _parts(self) -> list[Tensor]:
        return [own_rows(self.get_buffer(f"memory_{i}")) for i in range(self.count)]


def full_memory(next_memory: Callable[[Memory], Memory]) -> Memory:
    """The memory once it has stopped growing, from a function that sees one more segment."""
    memory = next_memory(())
    while True:
        longer = next_memory(memory)
        if [m.shape for m in longer] == [m.shape for m in memory]:
            return memory
        memory = longer


class ExplicitTextObjective(nn.Module):
    """The mean negative log-likelihood of the next words under an explicit language model.

    The model is called as model(tokens, memory or None) -> features, memory, and has `words.loss`.
    """

    def __init__(self, model: nn.Module, carried: CarriedMemory, seed: int):
        super().__init__()
        self.model, self.carried, self.seed = model, carried, seed

    def forward(
        self, batch: tuple[Tensor, Tensor], update: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, targets = batch
        # A run that is resumed draws the dropout masks that it would have drawn.
        with numbered_draws(self.seed, update):
            features, memory = self.model(tokens, self.carried.at(update) or None)
        self.carried.keep(memory)
        loss = self.model.words.loss(features, targets)  # type: ignore[union-attr, operator]
        return loss, {"task": loss.detach()}

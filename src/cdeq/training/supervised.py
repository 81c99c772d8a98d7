"""Training a model without an equilibrium."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from cdeq.training.draws import numbered_draws


class SupervisedObjective(nn.Module):
    """`loss(model, x, y)` of a batch (x, y); dropout is the same after a resume."""

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, Any, Tensor], Tensor], seed: int = 0
    ):
        super().__init__()
        self.model, self.loss, self.seed = model, loss, seed

    def forward(self, batch: tuple[Any, Tensor], update: int) -> tuple[Tensor, dict[str, Tensor]]:
        with numbered_draws(self.seed, update):
            loss = self.loss(self.model, *batch)
        return loss, {"task": loss.detach()}

"""Backpropagation through the iteration itself, as in a weight-tied network of fixed depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cdeq.equilibrium.states import State, StateLayout, relative_residual
from cdeq.gradients.base import Step, mix
from cdeq.solvers import Solution


@dataclass(frozen=True, kw_only=True)
class Unrolled:
    """`steps` steps z <- (1 - beta) z + beta f(z) from the start, gradient through all of them.

    `mixing` is beta. Nothing is solved: the solution is the last state, converged or not, and says
    `converged=False`, for no tolerance was asked of it.
    """

    steps: int = 8
    mixing: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"unrolling takes at least 1 step, not {self.steps}")

    def run(
        self, step: Step, z0: State, solve: Callable[[State], Solution], batched: bool = True
    ) -> Solution:
        layout = StateLayout.of(z0, batched)
        z, history = z0, []
        for _ in range(self.steps):
            fz = step(z)
            history.append(_residual(layout, z, fz))
            z = mix(z, fz, self.mixing)
        stopped = torch.zeros_like(history[-1], dtype=torch.bool)
        return Solution(
            state=z,
            converged=stopped,
            measured=stopped.clone(),
            residual=history[-1],
            steps=torch.full_like(stopped, self.steps, dtype=torch.long),
            evaluations=self.steps,
            history=torch.stack(history),
        )


@torch.no_grad()
def _residual(layout: StateLayout, z: State, fz: State) -> Tensor:
    return relative_residual(layout.flatten(z), layout.flatten(fz))

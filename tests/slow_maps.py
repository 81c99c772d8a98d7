"""A linear map on which Picard's method is slow, and learned solvers that are trained on maps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from cdeq.equilibrium.states import State, map_state
from cdeq.models.learned_solvers import LearnedSolver, SolverObjective
from cdeq.training.loop import FitConfig, fit
from teachers import Plain

WIDTH = 6


class Slow(Plain):
    """f(z, x) = W z + x with W symmetric, its eigenvalues from .3 to .9: every Picard step falls short."""

    def __init__(self, feature_axis: int = -1):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        q = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=g)).Q
        self.feature_axis = feature_axis
        self.weight = nn.Parameter(q @ torch.linspace(0.3, 0.9, WIDTH).diag() @ q.T)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        moved = z.movedim(self.feature_axis, -1) @ self.weight
        return moved.movedim(-1, self.feature_axis) + context

    def equilibrium(self, x: Tensor) -> Tensor:
        inverse = torch.linalg.inv(torch.eye(WIDTH, dtype=x.dtype) - self.weight.detach())
        moved = x.movedim(self.feature_axis, -1) @ inverse
        return moved.movedim(-1, self.feature_axis)


class ZeroStart(nn.Module):
    """z_0 = 0, and nothing to train."""

    def forward(self, context: Tensor) -> Tensor:
        return torch.zeros_like(context)


@torch.no_grad()
def rollout(solver: LearnedSolver, teacher: Any, x: Any, steps: int) -> list[State]:
    """z_0 ... z_steps of a learned solver."""
    return list(solver.rollout(teacher, teacher.inject(x), steps))


def train_solver(
    solver: LearnedSolver, teacher: Any, x: Tensor, star: State, *, updates: int, depth: int = 4
) -> None:
    """Train on 8 samples in each update, given their equilibria."""
    batches = [
        SimpleNamespace(x=x[i : i + 8], endpoint=map_state(lambda t, i=i: t[i : i + 8], star))
        for i in range(0, len(x), 8)
    ]
    fit(
        SolverObjective(solver, teacher, depth),
        lambda update: batches[update % len(batches)],
        FitConfig(updates=updates, learning_rate=1e-2),
    )

"""History modules: what a student makes of its last evaluations (z_i, h_i), the newest last.

Shapes: B samples, D numbers a sample, n = window + 1 evaluations at most.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdeq.consistency.features import FeatureLinear
from cdeq.equilibrium.states import State, StateLayout, norm_dtype, subtract, tensors_of
from cdeq.solvers.anderson import Anderson, anderson_weights

Evaluation = tuple[State, State]
"""A state z and the student's evaluation h(z) there."""


class NoHistory(nn.Module):
    """P = h(z): the newest evaluation alone."""

    def forward(self, evaluations: list[Evaluation]) -> State:
        return evaluations[-1][1]


class AndersonHistory(nn.Module):
    """P = sum_i alpha_i (beta h_i + (1 - beta) z_i), alpha as in Anderson acceleration (paper, Eq. 10).

    The weights alpha are held constant in the gradient. Mixes in at least single precision.
    """

    def __init__(self, mixing: float, batched: bool, ridge: float = 1e-6):
        super().__init__()
        self.mixing, self.batched, self.ridge = mixing, batched, ridge

    def forward(self, evaluations: list[Evaluation]) -> State:
        if len(evaluations) == 1 and self.mixing == 1.0:
            return evaluations[0][1]
        layout = StateLayout.of(evaluations[-1][0], self.batched)
        z = torch.stack([layout.flatten(z) for z, _ in evaluations], dim=1)
        h = torch.stack([layout.flatten(h) for _, h in evaluations], dim=1)
        dtype = norm_dtype(z.dtype)
        with torch.no_grad():
            residuals = subtract(h, z)
            alpha = anderson_weights(residuals @ residuals.mT, self.ridge).to(dtype)
        images = h.to(dtype)
        if self.mixing != 1.0:
            images = z.to(dtype).lerp(images, self.mixing)
        mixed = torch.bmm(alpha[:, None], images).squeeze(1)
        return layout.restore(mixed.to(z.dtype))


class RunningAnderson:
    """`AndersonHistory` along one rollout without gradients, in the solver's own ring buffers.

    Each residual meets the others once, where `AndersonHistory` forms their products anew at each step.
    """

    def __init__(self, z: State, history: AndersonHistory, window: int):
        self.layout = StateLayout.of(z, history.batched)
        self.solver = Anderson(window=window, mixing=history.mixing, ridge=history.ridge)
        self.memory = self.solver.init(self.layout.flatten(z))
        self.count = 0

    def __call__(self, z: State, h: State) -> State:
        z, h = self.layout.flatten(z), self.layout.flatten(h)
        mixed, self.memory = self.solver.update(self.count, z, h, subtract(h, z), self.memory)
        self.count += 1
        return self.layout.restore(mixed)


def _newest_two(evaluations: list[Evaluation], index: int) -> list[tuple[Tensor, Tensor]]:
    """(z, h) of one state tensor for the last two evaluations, the newest twice if it is the only one."""
    pairs = [(tensors_of(z)[index], tensors_of(h)[index]) for z, h in evaluations[-2:]]
    return pairs if len(pairs) == 2 else pairs * 2


def _like(state: State, parts: list[Tensor]) -> State:
    return parts[0] if isinstance(state, Tensor) else tuple(parts)


class MLPHistory(nn.Module):
    """P = h + MLP[h_k || h_k-1 || z_k || z_k-1]: a free map in place of mixing. Starts as P = h."""

    def __init__(self, features: tuple[int, ...], axes: tuple[int, ...]):
        super().__init__()
        self.inner = nn.ModuleList(
            FeatureLinear(4 * f, f, a) for f, a in zip(features, axes, strict=True)
        )
        self.outer = nn.ModuleList(
            _zeroed(FeatureLinear(f, f, a)) for f, a in zip(features, axes, strict=True)
        )
        self.axes = axes

    def forward(self, evaluations: list[Evaluation]) -> State:
        parts = []
        for i, axis in enumerate(self.axes):
            (z1, h1), (z2, h2) = _newest_two(evaluations, i)
            hidden = self.inner[i](torch.cat([h2, h1, z2, z1], dim=axis))
            parts.append(h2 + self.outer[i](nn.functional.gelu(hidden)))
        return _like(evaluations[-1][1], parts)


class GRUHistory(nn.Module):
    """P = h + V GRU(h_k-1, h_k): a gated memory in place of mixing. Starts as P = h."""

    def __init__(self, features: tuple[int, ...], axes: tuple[int, ...]):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(2 * f, f) for f in features)
        self.outer = nn.ModuleList(
            _zeroed(FeatureLinear(f, f, a)) for f, a in zip(features, axes, strict=True)
        )
        self.axes = axes

    def forward(self, evaluations: list[Evaluation]) -> State:
        parts = []
        for i, axis in enumerate(self.axes):
            hidden: Tensor | None = None
            shape = torch.Size()
            for z, h in _newest_two(evaluations, i):
                seen = torch.cat([z, h], dim=axis).movedim(axis, -1)
                shape = seen.shape[:-1]
                hidden = self.cells[i](seen.reshape(-1, seen.shape[-1]), hidden)
            assert hidden is not None
            memory = hidden.reshape(*shape, -1).movedim(-1, axis)
            parts.append(tensors_of(evaluations[-1][1])[i] + self.outer[i](memory))
        return _like(evaluations[-1][1], parts)


def _zeroed(layer: FeatureLinear) -> FeatureLinear:
    nn.init.zeros_(layer.linear.weight)
    nn.init.zeros_(layer.linear.bias)
    return layer

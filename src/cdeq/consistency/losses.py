"""Distances between states that a student is trained by, each averaged over the samples.

All are measured in at least single precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from cdeq.equilibrium.states import State, StateLayout, norm_dtype, subtract

Distance = Callable[[State, State], Tensor]


def mean_squared_error(state: State, target: State, batched: bool) -> Tensor:
    """d(z, z*) = |z - z*|^2 / D, the paper's metric."""
    layout = StateLayout.of(target, batched)
    z, star = layout.flatten(state), layout.flatten(target)
    dtype = norm_dtype(z.dtype)
    return functional.mse_loss(z.to(dtype), star.to(dtype))


def log_distance(state: State, target: State, batched: bool, floor: float) -> Tensor:
    """log(|z - z*|^2 / |z*|^2 + floor): late, small errors count as much as early, large ones."""
    layout = StateLayout.of(target, batched)
    z, star = layout.flatten(state), layout.flatten(target)
    dtype = norm_dtype(z.dtype)
    scale = star.to(dtype).square().sum(dim=1).clamp_min(torch.finfo(dtype).tiny)
    return torch.log(subtract(z, star).square().sum(dim=1) / scale + floor).mean()


def output_divergence(output: Tensor, reference: Tensor) -> Tensor:
    """KL(softmax(reference) || softmax(output)), the mean over all but the last axis: how far two answers differ."""
    p, q = (t.float().flatten(0, -2).log_softmax(-1) for t in (reference, output))
    return functional.kl_div(q, p, reduction="batchmean", log_target=True)

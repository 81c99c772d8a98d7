"""What a student is trained by: distances between states, and the losses made of them.

Distances are averaged over the samples, and measured in at least single precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from cdeq.equilibrium.states import (
    State,
    StateLayout,
    norm_dtype,
    row_norms,
    sizes_to_measure_by,
    subtract,
)
from cdeq.training.task_loss import TaskLoss

Distance = Callable[[State, State], Tensor]


def mean_squared_error(state: State, target: State, batched: bool) -> Tensor:
    """d(z, z*) = |z - z*|^2 / D, the paper's metric."""
    layout = StateLayout.of(target, batched)
    z, star = layout.flatten(state), layout.flatten(target)
    dtype = norm_dtype(z.dtype)
    return functional.mse_loss(z.to(dtype), star.to(dtype))


def log_distance(state: State, target: State, batched: bool, floor: float) -> Tensor:
    """log(|z - z*|^2 / |z*|^2 + floor): late, small errors count as much as early, large ones.

    Samples whose z* is all but 0 are measured as their batch is.
    """
    layout = StateLayout.of(target, batched)
    z, star = layout.flatten(state), layout.flatten(target)
    dtype = norm_dtype(z.dtype)
    scale = sizes_to_measure_by(row_norms(star)).square().clamp_min(torch.finfo(dtype).tiny)
    return torch.log(subtract(z, star).square().sum(dim=1) / scale + floor).mean()


def output_divergence(output: Tensor, reference: Tensor) -> Tensor:
    """KL(softmax(reference) || softmax(output)), the mean over all but the last axis: how far two answers differ."""
    p, q = (t.float().flatten(0, -2).log_softmax(-1) for t in (reference, output))
    return functional.kl_div(q, p, reduction="batchmean", log_target=True)


def global_loss(distance: Distance, output: State, endpoint: State) -> Tensor:
    """L_global = d(g(z_k, t_k), z*): every point is pulled to the equilibrium (paper, eq:loss_global)."""
    return distance(output, endpoint)


def local_loss(distance: Distance, output: State, neighbour: State) -> Tensor:
    """L_local = d(g(z_k, t_k), g^-(z_k-1, t_k-1)): neighbours agree, g^- the running average (paper, eq:loss_local)."""
    return distance(output, neighbour)


def supervised_loss(task_loss: TaskLoss, output: Tensor, labels: Tensor) -> Tensor:
    """L_task: the teacher's own loss at the student's readout (paper, app:task_loss)."""
    return task_loss(output, labels)


def total_loss(
    overall: Tensor,
    local: Tensor | None,
    task: Tensor | None,
    *,
    lambda_1: float,
    lambda_2: float,
) -> Tensor:
    """lambda_1 L_global + (1 - lambda_1) L_local + lambda_2 L_task (paper, eq:loss_total)."""
    loss = lambda_1 * overall
    if task is not None:
        loss = loss + lambda_2 * task
    if local is not None:
        loss = loss + (1 - lambda_1) * local
    return loss

"""Endpoint augmentation of a recorded trajectory (paper, alg:traj_aug_sampling)."""

from __future__ import annotations

import torch
from torch import Tensor


def augment_endpoints(
    steps: int,
    probability: float = 0.1,
    first: int = 3,
    last: int = 2,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Which of z_0 ... z_K are replaced by the endpoint z_K (paper, eq:traj_aug): a mask (K+1,), K = `steps`.

    Lines 7 to 12: each k from k_min = `first` to K - k_tail, k_tail = `last`, both included, is
    replaced with `probability`. So the first `first` and the last `last` states are always kept.
    """
    if steps < 0 or first < 0 or last < 0:
        raise ValueError(f"steps, first and last must not be negative: {steps}, {first}, {last}")
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be between 0 and 1, not {probability}")
    mask = torch.zeros(steps + 1, dtype=torch.bool)
    stop = steps - last + 1
    if first < stop:
        device = None if generator is None else generator.device
        u = torch.rand(stop - first, generator=generator, device=device, dtype=torch.float64)
        mask[first:stop] = (u < probability).cpu()
    return mask

"""Random draws that depend on a seed and a number alone, so that a resumed run draws what it would have."""

from __future__ import annotations

import torch


def numbered_generator(
    seed: int, number: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """The generator of one update, or one epoch, of the run with this seed."""
    return torch.Generator(device).manual_seed(seed * 1_000_003 + number)

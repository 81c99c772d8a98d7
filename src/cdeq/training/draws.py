"""Random draws that depend on a seed and a number alone, so that a resumed run draws what it would have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def numbered_generator(
    seed: int, number: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """The generator of one update, or one epoch, of the run with this seed."""
    return torch.Generator(device).manual_seed(seed * 1_000_003 + number)


@contextmanager
def numbered_draws(seed: int, number: int) -> Iterator[None]:
    """Inside, torch's own draws (of dropout, for example) depend on seed and number alone; outside nothing changes."""
    with torch.random.fork_rng():
        torch.manual_seed(numbered_generator(seed, number).initial_seed())
        yield

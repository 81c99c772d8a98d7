"""A converged model's states on the test data: one file for each batch, read when it is asked for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from cdeq.equilibrium.states import State, tensors_of
from cdeq.files import atomic_write_bytes

NAME = "equilibrium-{:06d}.safetensors"
PLAIN = "state"
"""The name of the tensor of a state that is not a tuple; those of a tuple are numbered."""


def keep_state(folder: Path, number: int, state: State) -> None:
    """Write the state of a test batch."""
    names = [PLAIN] if isinstance(state, Tensor) else map(str, range(len(state)))
    parts = zip(names, (part.contiguous() for part in tensors_of(state)), strict=True)
    atomic_write_bytes(folder / NAME.format(number), save(dict(parts)))


class KeptStates:
    """The states that `keep_state` wrote to a folder, by the number of their batch."""

    def __init__(self, folder: Path, device: torch.device):
        self.folder, self.device = folder, device

    def __getitem__(self, number: int) -> State:
        parts = load_file(self.folder / NAME.format(number), str(self.device))
        plain = parts.pop(PLAIN, None)
        return tuple(parts[str(i)] for i in range(len(parts))) if plain is None else plain

"""Checkpoints: one safetensors file a run, replaced atomically, so that a kill leaves the last one whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from cdeq.files import atomic_write_bytes

NAME = "checkpoint.safetensors"


class CheckpointError(Exception):
    """A checkpoint that is damaged, or of another run."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that training from `update` on depends on; random draws depend on the update's number."""

    update: int
    tensors: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        objective: nn.Module,
        weights: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        update: int,
    ) -> Checkpoint:
        """Trained weights, all buffers (running averages are buffers), and the optimizer's moments."""
        tensors = {f"weight.{name}": p.detach() for name, p in weights.items()}
        tensors |= {f"buffer.{name}": b for name, b in _dense_buffers(objective)}
        for name, p in weights.items():
            for key, value in optimizer.state.get(p, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        return cls(update, {k: t.contiguous() for k, t in tensors.items()})

    def restore(
        self,
        objective: nn.Module,
        weights: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Put everything back."""
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(self.tensors[f"weight.{name}"])
            for name, b in _dense_buffers(objective):
                b.copy_(self.tensors[f"buffer.{name}"])
        for name, p in weights.items():
            suffix = f".{name}"
            optimizer.state[p] = {
                key.removeprefix("optimizer.").removesuffix(suffix): tensor.clone()
                for key, tensor in self.tensors.items()
                if key.startswith("optimizer.") and key.split(".", 2)[2] == name
            }


def _dense_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, b) for name, b in module.named_buffers() if b.layout == torch.strided]


def write_checkpoint(folder: Path, checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"update": str(checkpoint.update), "identity": json.dumps(identity, sort_keys=True)}
    atomic_write_bytes(folder / NAME, save(checkpoint.tensors, metadata=about))


def read_checkpoint(folder: Path, identity: dict[str, Any]) -> Checkpoint | None:
    """The folder's checkpoint, or None; refuses one that was made by another run."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        update, made_by = int(about["update"]), json.loads(about["identity"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): delete it to start this run anew"
        ) from None
    identity = json.loads(json.dumps(identity))
    if made_by != identity:
        keys = sorted(k for k in {*made_by, *identity} if made_by.get(k) != identity.get(k))
        raise CheckpointError(
            f"{path} belongs to another run: it differs in {', '.join(keys)}. Use another folder, or delete it."
        )
    return Checkpoint(update, tensors)

"""Checkpoints: one safetensors file for each run, replaced atomically, so that a kill leaves the last one whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from cdeq.files import atomic_write_bytes, differences

CHECKPOINT = "checkpoint.safetensors"


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
        # Copies: safetensors refuses two views of one memory.
        copies = {k: t.clone(memory_format=torch.contiguous_format) for k, t in tensors.items()}
        return cls(update, copies)

    def restore(
        self,
        objective: nn.Module,
        weights: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Put everything back; refuses tensors that are not this objective's."""
        kept = {f"weight.{name}": p.detach() for name, p in weights.items()}
        kept |= {f"buffer.{name}": b for name, b in _dense_buffers(objective)}
        theirs = {k: t.shape for k, t in self.tensors.items() if not k.startswith("optimizer.")}
        if theirs != {k: t.shape for k, t in kept.items()}:
            odd = sorted(
                k for k in {*theirs, *kept} if k not in kept or theirs.get(k) != kept[k].shape
            )
            raise CheckpointError(
                f"the checkpoint was made for other weights: {', '.join(odd[:5])} do not match"
            )
        for key, tensor in kept.items():
            tensor.copy_(self.tensors[key])
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
    atomic_write_bytes(folder / CHECKPOINT, save(checkpoint.tensors, metadata=about))


def read_checkpoint(folder: Path, identity: dict[str, Any]) -> Checkpoint | None:
    """The folder's checkpoint, or None; refuses one that was made by another run."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        update, provenance = int(about["update"]), json.loads(about["identity"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): delete it to start this run again"
        ) from None
    identity = json.loads(json.dumps(identity))
    if provenance != identity:
        found = differences(provenance, identity)
        raise CheckpointError(
            f"{path} belongs to another run: it differs in {', '.join(found)}. "
            "Use another folder, or delete it."
        )
    return Checkpoint(update, tensors)

"""Checkpoints: one safetensors file for each run, replaced atomically, so that a kill leaves the last one whole.

What is divided among processes is in a folder beside it, which the file names and which no other checkpoint shares.
"""

from __future__ import annotations

import json
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from cdeq.files import atomic_write_bytes, differences
from cdeq.training.parallel import from_main_process, is_main_process
from cdeq.training.sharding import (
    copy_into,
    divided_sizes,
    is_divided,
    read_divided,
    write_divided,
)

CHECKPOINT, DIVIDED = "checkpoint.safetensors", "checkpoint-"


class CheckpointError(Exception):
    """A checkpoint that is damaged, or of another run."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that training from `update` on depends on; random draws depend on the update's number."""

    update: int
    tensors: dict[str, Tensor]
    divided: Path | None = None
    """Where those tensors are that were divided among the processes that wrote it."""

    @classmethod
    def of(
        cls,
        objective: nn.Module,
        weights: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        update: int,
    ) -> Checkpoint:
        """Trained weights, all buffers (running averages are buffers), and the optimizer's moments."""
        tensors = _kept(objective, weights)
        for name, p in weights.items():
            for key, value in optimizer.state.get(p, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        return cls(update, tensors)

    def restore(
        self,
        objective: nn.Module,
        weights: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Put everything back, whoever holds it now; refuses tensors that are not this objective's."""
        kept = _kept(objective, weights)
        saved = {key: tensor.shape for key, tensor in self.tensors.items()}
        if self.divided is not None:
            saved |= divided_sizes(self.divided)
        theirs = {key: shape for key, shape in saved.items() if not key.startswith("optimizer.")}
        if theirs != {k: t.shape for k, t in kept.items()}:
            odd = sorted(
                k for k in {*theirs, *kept} if k not in kept or theirs.get(k) != kept[k].shape
            )
            raise CheckpointError(
                f"the checkpoint was made for other weights: {', '.join(odd[:5])} do not match"
            )
        for name, p in weights.items():
            optimizer.state[p] = {}
            for key in saved:
                if key.startswith("optimizer.") and key.split(".", 2)[2] == name:
                    field = key.split(".", 2)[1]
                    # A moment is where its weight is, and divided as that is; the number of steps is neither.
                    like = self.tensors[key] if field == "step" else p
                    kept[key] = torch.zeros_like(like, requires_grad=False)
                    optimizer.state[p][field] = kept[key]
        for key, tensor in kept.items():
            if key in self.tensors:
                copy_into(tensor, self.tensors[key])
        if self.divided is not None:
            read_divided(self.divided, {k: t for k, t in kept.items() if k not in self.tensors})


def _kept(objective: nn.Module, weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """What an objective consists of, but for sparse buffers, which are data."""
    found = {f"weight.{name}": p.detach() for name, p in weights.items()}
    buffers = {f"buffer.{name}": b for name, b in objective.named_buffers()}
    return found | {key: b for key, b in buffers.items() if b.layout == torch.strided}


def write_checkpoint(folder: Path, checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """All processes make this call: each writes what is divided among them, and the first one the rest."""
    divided = {key: t for key, t in checkpoint.tensors.items() if is_divided(t)}
    place = folder
    if divided:
        place = folder / f"{DIVIDED}{from_main_process(secrets.token_hex(4))}"
        write_divided(place, divided)
    if not is_main_process():
        return
    folder.mkdir(parents=True, exist_ok=True)
    about = {"update": str(checkpoint.update), "identity": json.dumps(identity, sort_keys=True)}
    about |= {"divided": place.name} if divided else {}
    # Copies: safetensors refuses two views of one memory.
    copies = {
        key: tensor.clone(memory_format=torch.contiguous_format)
        for key, tensor in checkpoint.tensors.items()
        if key not in divided
    }
    atomic_write_bytes(folder / CHECKPOINT, save(copies, metadata=about))
    for older in folder.glob(f"{DIVIDED}*"):
        if older != place:
            shutil.rmtree(older)


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
        divided = folder / about["divided"] if "divided" in about else None
        if divided is not None and not divided.is_dir():
            raise ValueError(f"{divided} is missing")
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
    return Checkpoint(update, tensors, divided)

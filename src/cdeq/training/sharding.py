"""What processes hold of one model: a copy each, or a part each, by FSDP2; and the checkpoints of divided tensors.

A divided tensor is torch's DTensor. Checkpoints of them are torch's own (torch.distributed.checkpoint), each process
writing what it holds, through its safetensors writer: the default one would add a pickle. Its reader puts the parts
together for any number of processes.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cdeq.training.parallel import process_rank

# torch's modules for this take seconds to import, so only those who divide tensors import them.


def is_divided(tensor: Tensor) -> bool:
    """Whether a process holds only a part of it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every process."""
    return tensor.full_tensor() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def own_rows(tensor: Tensor) -> Tensor:
    """The part that this process holds, in the same memory."""
    return tensor.to_local() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def divided_rows(rows: Tensor) -> Tensor:
    """The tensor of which each process holds as many rows; the rows themselves for one process."""
    world = process_rank()[1]
    if world == 1:
        return rows
    _require_safetensors()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(rows.device.type, (world,))
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Fill a tensor, or this process's part of it, from a whole one."""
    if is_divided(target):
        from torch.distributed.tensor import distribute_tensor

        mesh, places = target.device_mesh, target.placements  # type: ignore[attr-defined]
        source = distribute_tensor(source.to(target.device), mesh, places, src_data_rank=None)
    target.copy_(source)


def replicate(objective: nn.Module) -> nn.Module:
    """The objective with gradients averaged over the processes; itself if there is one, or if it is divided."""
    if process_rank()[1] == 1 or any(is_divided(weight) for weight in objective.parameters()):
        return objective
    for weight in objective.parameters():
        dist.broadcast(weight.detach(), src=0)
    with warnings.catch_warnings():
        # Newer versions of torch warn of this option, which they recommend for buffers that differ by process.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers")
        # Not init_sync, which would copy buffers too, such as the memory of the first process's own texts.
        # Some weights, such as those of a history module, take part in only some of the updates.
        return DistributedDataParallel(
            objective, broadcast_buffers=False, find_unused_parameters=True, init_sync=False
        )


def shard_weights(objective: nn.Module) -> None:
    """Divide the weights, and so their gradients and Adam's moments, among the processes (FSDP2's `fully_shard`).

    The objective is the unit: its weights are gathered once for each update, and its gradients divided at the end. The
    block of an equilibrium model is evaluated dozens of times in an update, and would be gathered as often.
    """
    if process_rank()[1] > 1:
        from torch.distributed.fsdp import fully_shard

        _require_safetensors()
        fully_shard(objective)


def join_weights(objective: nn.Module) -> None:
    """Whole weights in place of divided ones, on every process; the objective is not trained after this."""
    joined: dict[Tensor, nn.Parameter] = {}
    for weight in filter(is_divided, objective.parameters()):
        joined[weight] = nn.Parameter(whole(weight.detach()), requires_grad=weight.requires_grad)
    for module in objective.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight in joined:  # perhaps in two places
                setattr(module, name, joined[weight])


def _require_safetensors() -> None:
    """Refuse at once, not at the first checkpoint, a torch whose distributed checkpoints are pickles only."""
    from torch.distributed import checkpoint

    if not hasattr(checkpoint, "HuggingFaceStorageWriter"):
        raise RuntimeError(
            f"torch {torch.__version__} cannot write what is divided among processes as safetensors: use a newer one"
        )


def write_divided(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write divided tensors, each process its part; all processes make this call."""
    from torch.distributed import checkpoint

    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        checkpoint.save(dict(tensors), storage_writer=writer)
    except checkpoint.CheckpointException as error:
        if process_rank()[0] == 0:  # by now no process writes any more
            shutil.rmtree(folder, ignore_errors=True)
        why, _ = next(iter(error.failures.values()))
        raise OSError(f"{folder} cannot be written: {why}") from error


def divided_sizes(folder: Path) -> dict[str, torch.Size]:
    """The whole size of each tensor that `write_divided` wrote."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    found: dict[str, Any] = (
        HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    )
    return {name: about.size for name, about in found.items()}


def read_divided(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors, whole or divided among any number of processes, with what `write_divided` wrote."""
    from torch.distributed import checkpoint

    reader = checkpoint.HuggingFaceStorageReader(str(folder))
    alone = process_rank()[1] == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single")
        checkpoint.load(dict(targets), storage_reader=reader, no_dist=alone)

"""Data-parallel training under torchrun: nothing here is needed by a single process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from cdeq.equilibrium.trees import map_tensors

T = TypeVar("T")


def process_rank() -> tuple[int, int]:
    """(rank, number of processes); (0, 1) outside a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def is_main_process() -> bool:
    """Whether this is the process that writes files; True outside torchrun."""
    return process_rank()[0] == 0


def from_main_process(value: Any) -> Any:
    """The main process's value, on every process."""
    if process_rank()[1] == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gathered(work: Callable[[], T]) -> list[T]:
    """What `work()` gives in each process, by rank. If it fails in one it fails in all, so that none waits forever."""
    world = process_rank()[1]
    if world == 1:
        return [work()]
    mine, problem = None, None
    try:
        mine = work()
    except Exception as error:
        problem = error
    words = None if problem is None else f"{type(problem).__name__}: {problem}"
    found: list[Any] = [None] * world
    dist.all_gather_object(found, (mine, words))
    if problem is not None:
        raise problem
    for rank, (_, words) in enumerate(found):
        if words is not None:
            raise RuntimeError(f"process {rank} failed: {words}")
    return [value for value, _ in found]


def on_main_process(work: Callable[[], T]) -> T:
    """What `work()`, done by the main process alone, gives: on every process."""
    return gathered(lambda: work() if is_main_process() else None)[0]  # type: ignore[return-value]


def own_part(batch: Any) -> Any:
    """This process's share of a batch: of each tensor in it an equal part of the first axis, by rank."""
    rank, world = process_rank()

    def cut(tensor: Tensor) -> Tensor:
        if len(tensor) % world:
            raise ValueError(
                f"a batch of {len(tensor)} samples cannot be shared evenly by {world} processes; "
                "drop the last batch, or change the batch size"
            )
        return tensor.chunk(world)[rank]

    return batch if world == 1 else map_tensors(cut, batch)


@contextmanager
def process_group() -> Iterator[None]:
    """The process group that torchrun set up, if it did: gloo on CPU, nccl on GPUs."""
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The others wait while the main process writes, scores or records, which may take long.
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(days=1))
    try:
        yield
        dist.barrier()  # none leaves while another still talks to it
    finally:
        gc.collect()  # a wrapped model in a cycle would keep the group's threads until the interpreter is gone: abort
        dist.destroy_process_group()


def mean_over_processes(metrics: dict[str, Tensor | float]) -> dict[str, float]:
    """Scalars averaged over the processes."""
    values = torch.stack([torch.as_tensor(v, dtype=torch.float64).cpu() for v in metrics.values()])
    world = process_rank()[1]
    if world > 1:
        if dist.get_backend() == "nccl":
            values = values.cuda()
        dist.all_reduce(values)
        values = values / world
    return dict(zip(metrics, values.tolist(), strict=True))

"""Some samples of a batch alone: their rows in contexts and memories."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdeq.equilibrium.contract import Context, EquilibriumModel
from cdeq.equilibrium.trees import map_tensors, tensors_in


def rows_of_context(model: EquilibriumModel, context: Context, rows: Tensor, batch: int) -> Context:
    """The context of some samples, by index (n,), of a batch.

    A model may have its own `select(context, rows)`. Otherwise each dense tensor whose first axis is as long as the
    batch is taken for one that has the samples there: a guess, to be tried before it is used.
    """
    select = getattr(model, "select", None)
    if select is not None:
        return select(context, rows)
    return map_tensors(lambda t: t[rows] if _has_samples(t, batch) else t, context)


def rows_of_memory(memory: Any, rows: Tensor) -> Any:
    """The memory of some samples: all its tensors have the samples first."""
    return map_tensors(lambda t: t[rows], memory)


def is_by_sample(memory: Any, batch: int) -> bool:
    """Whether all tensors of a memory have as many rows as there are samples."""
    return all(_has_samples(tensor, batch) for tensor in tensors_in(memory))


def _has_samples(tensor: Tensor, batch: int) -> bool:
    return tensor.layout == torch.strided and tensor.ndim > 0 and len(tensor) == batch

"""The loss of a task: what labels say about an output."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from cdeq.labels import IGNORED

TaskLoss = Callable[[Tensor, Tensor], Tensor]
"""(output, labels) -> scalar, averaged over the samples."""


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits (..., C) with labels (...); 0 where no label counts."""
    logits, flat = output.reshape(-1, output.shape[-1]), labels.reshape(-1)
    total = functional.cross_entropy(logits, flat, ignore_index=IGNORED, reduction="sum")
    return total / (flat != IGNORED).sum().clamp_min(1)

"""A task: a teacher, data and a metric. Everything that experiments know of a domain is in here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from cdeq.evaluation.metrics import Metric
from cdeq.training.loop import FitConfig
from cdeq.training.teaching import TeachConfig

Batch = tuple[Any, Tensor]


@dataclass(frozen=True, kw_only=True)
class DistillPlan:
    """How one recipe is run on a task: fields of the recipe that the task changes, and the training."""

    fit: FitConfig
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """`build()` makes an untrained teacher; `teaching(update)` its batches; `distilling`, `valid` and `test`
    are fixed lists of batches of which the test ones are never trained on (a graph shares its nodes, not its
    test labels)."""

    name: str
    dataset: str
    build: Callable[[], nn.Module]
    teach: TeachConfig
    teaching: Callable[[int], Batch]
    distilling: list[Batch]
    valid: list[Batch]
    test: list[Batch]
    metric: Metric
    plans: dict[str, DistillPlan]
    distill_steps: int = 40
    distill_tol: float = 1e-4

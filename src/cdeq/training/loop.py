"""The one training loop of teachers and students: resumable to the bit, alone or under torchrun."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cdeq.files import remove_leftovers
from cdeq.placement import Placement, Precision
from cdeq.training.batches import moved_batches
from cdeq.training.checkpoint import CHECKPOINT, Checkpoint, read_checkpoint, write_checkpoint
from cdeq.training.log import LOG, JsonLines, Progress, shown_progress
from cdeq.training.parallel import is_main_process, mean_over_processes
from cdeq.training.sharding import replicate, whole

Objective = nn.Module
"""forward(batch, update) -> (loss, metrics): a scalar to minimise and scalars to show."""


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How long and how fast to train. Adam, linear warm-up, cosine decay to `final_fraction` of the rate."""

    updates: int = 500
    learning_rate: float = 3e-3
    warmup_updates: int = 0
    final_fraction: float = 0.05
    weight_decay: float = 0.0
    clip: float | None = 1.0
    checkpoint_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise ValueError(f"updates must be at least 1, not {self.updates}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, not {self.learning_rate}")
        for name in ("checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.warmup_updates < 0:
            raise ValueError(f"warmup_updates must not be negative, not {self.warmup_updates}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive, or None, not {self.clip}")

    def rate(self, update: int) -> float:
        """The learning rate of an update: a function of its number alone, so nothing need be saved."""
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / self.warmup_updates
        done = (update - self.warmup_updates) / max(self.updates - self.warmup_updates, 1)
        low = self.final_fraction
        return self.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def fit(
    objective: Objective,
    batch_at: Callable[[int], Any],
    config: FitConfig,
    *,
    folder: Path | None = None,
    identity: dict[str, Any] | None = None,
    after_update: Callable[[int], None] | None = None,
    factors: Mapping[str, float] | None = None,
    device: str | torch.device | None = None,
    precision: Precision = "fp32",
    progress: bool | Progress | None = None,
    title: str = "train",
) -> None:
    """Minimise the objective over `config.updates` updates.

    An objective whose weights `shard_weights` divided among the processes stays so; any other is replicated.
    `batch_at(update)` must depend on the number alone; then a run that was cut short goes on from its last
    checkpoint in `folder` as if nothing had happened. `identity` says what is trained: a checkpoint with another
    identity is refused. `after_update(update)` is called after each step of the optimizer (an EMA, a projection).
    `factors`: of the learning rate, for weights whose names begin so.
    `device`: where to train, if not where the objective is; it is moved, and batches follow. `precision`: of the
    products inside models; weights and states stay in single precision (see `cdeq.placement`).
    `progress`: True draws a bar with the `title` on standard error; or a function `(done, total, metrics)`.
    """
    placement = Placement.of(objective, device, precision, training=True)
    identity = dict(identity or {})
    if precision != "fp32":
        identity["precision"] = precision
    weights = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        _groups(weights, factors or {}), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    first, log = 0, None
    if folder is not None:
        saved = read_checkpoint(folder, identity)
        if saved is not None:
            first = saved.update
            saved.restore(objective, weights, optimizer)
        if first >= config.updates:
            return  # done before: nothing is written, so that others may load the same run at the same time
        if is_main_process():
            for name in (CHECKPOINT, LOG):
                remove_leftovers(folder, name)
            log = JsonLines(folder / LOG, keep_below=first)
    with shown_progress(progress and is_main_process() and progress, title) as show:
        _run(
            objective,
            moved_batches(batch_at, placement.device),
            config,
            placement,
            weights,
            optimizer,
            first,
            folder,
            identity,
            log,
            after_update,
            show,
        )


def _groups(
    weights: Mapping[str, nn.Parameter], factors: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The weights in groups of the same factor, as an optimizer takes them."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, weight in weights.items():
        factor = next((f for start, f in factors.items() if name.startswith(start)), 1.0)
        groups.setdefault(factor, []).append(weight)
    return [{"params": group, "factor": factor} for factor, group in groups.items()]


def _run(
    objective: Objective,
    batch_at: Callable[[int], Any],
    config: FitConfig,
    placement: Placement,
    weights: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    first: int,
    folder: Path | None,
    identity: dict[str, Any],
    log: JsonLines | None,
    after_update: Callable[[int], None] | None,
    show: Progress | None,
) -> None:
    """The updates from `first` on."""
    model, scaler = replicate(objective), placement.scaler()
    began = time.perf_counter()
    for update in range(first, config.updates):
        for group in optimizer.param_groups:
            group["lr"] = config.rate(update) * group["factor"]
        with placement.computing():
            loss, metrics = model(batch_at(update), update)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        size = nn.utils.clip_grad_norm_(
            weights.values(), math.inf if config.clip is None else config.clip
        )
        # In fp16 such a gradient is left out, and the next ones are scaled less.
        if not (scaler.is_enabled() or bool(torch.isfinite(whole(size)))):
            raise FloatingPointError(
                f"the gradient is not finite at update {update}; lower the learning rate"
            )
        scaler.step(optimizer)
        scaler.update()
        if after_update is not None:
            after_update(update)

        done = update + 1
        if done % config.log_every == 0 or done == config.updates or done == 1:
            shown = mean_over_processes({"loss": loss.detach(), **metrics})
            if log is not None:
                log.write({"update": update, **shown, "seconds": time.perf_counter() - began})
            if show is not None:
                show(done, config.updates, shown)
        if folder is not None and (done % config.checkpoint_every == 0 or done == config.updates):
            write_checkpoint(folder, Checkpoint.of(objective, weights, optimizer, done), identity)

"""What a distillation rests on: how exact its targets are, whether plain iteration converges, which weights change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cdeq.equilibrium.states import StateLayout, row_norms, subtract

if TYPE_CHECKING:
    from cdeq.consistency.student import Student
    from cdeq.training.task_loss import TaskLoss
    from cdeq.trajectories import TrajectoryBatch, TrajectoryStore

ROUNDS = 12
"""Of the power iteration; the last third of them counts."""


@dataclass(frozen=True, kw_only=True)
class DistillationReport:
    """In `student.report`, and as one line in the log `cdeq`.

    `target_error`, `worst_target_error`: estimated relative distance of the recorded equilibria from the true ones, the
    median and the largest. `rates` (B,): how much one plain evaluation shrinks a small error at the equilibrium, for
    each sample of the first batch. `changed_weights`: numbers in the teacher's weights that the student changes;
    `kept_weights`: in those that it does not. `outside_step`: names of weights that no step depends on, such as those
    of the readout, where the recipe changes weights. `missing_labels`: a task loss without
    labels to learn from. `undone`: stages of the training, or the correction, that brought the student no nearer and
    were taken back.
    """

    target_error: float
    worst_target_error: float
    rates: tuple[float, ...]
    changed_weights: int
    kept_weights: int
    outside_step: tuple[str, ...]
    missing_labels: bool
    undone: tuple[str, ...] = ()

    @property
    def converging(self) -> float:
        """The share of samples at which plain iteration converges from nearby."""
        return sum(rate < 1 for rate in self.rates) / len(self.rates)

    @property
    def taken_back(self) -> str:
        """What `undone` means, in words."""
        return f"taken back, since it did not help: {', '.join(self.undone)}"

    def __str__(self) -> str:
        slowest = max(self.rates)
        iteration = f"plain iteration converges, by a factor of {slowest:.2g} or less at each step"
        if self.converging < 1:
            iteration = (
                f"plain iteration diverges from the equilibrium for {1 - self.converging:.0%} of the samples "
                f"(factor {slowest:.2g}), so a solver is needed"
            )
        weights = "no weight of the teacher is changed"
        if self.changed_weights:
            weights = f"{self.changed_weights:,} of the teacher's weights are changed"
            if self.kept_weights:
                weights += f", {self.kept_weights:,} are not"
            if self.outside_step:
                more = len(self.outside_step) - 3
                names = ", ".join(self.outside_step[:3]) + f" and {more} more" * (more > 0)
                weights += f" (no step depends on {names})"
        return (
            f"targets are within {self.target_error:.1e} of the equilibrium (median; {self.worst_target_error:.1e} at "
            f"worst, estimated); {iteration}; {weights}"
            + "; no task loss, since batches have no labels" * self.missing_labels
            + f"; {self.taken_back}" * bool(self.undone)
        )


def describe_distillation(
    student: Student, store: TrajectoryStore, batch: TrajectoryBatch, task_loss: TaskLoss | None
) -> DistillationReport:
    """Read off the recording and the student before it is trained; costs a few evaluations on one batch."""
    errors = store.precision()
    sizes = {name: p.numel() for name, p in student.methods.model.named_parameters()}
    changed = set(student.deltas.names)
    outside = tuple(name for name in sizes if name not in changed) if changed else ()
    return DistillationReport(
        target_error=float(errors.median()),
        worst_target_error=float(errors.max()),
        rates=tuple(local_rates(student, batch).tolist()),
        changed_weights=sum(sizes[name] for name in changed),
        kept_weights=sum(sizes[name] for name in outside),
        outside_step=outside,
        missing_labels=bool(student.recipe.lambda_2 and task_loss and batch.y is None),
    )


@torch.no_grad()
def local_rates(student: Student, batch: TrajectoryBatch, rounds: int = ROUNDS) -> Tensor:
    """|J v| / |v| (B,) at the recorded equilibria, v after some rounds of power iteration with differences of f."""
    context, star = student.teacher.inject(batch.x), batch.endpoint
    layout = StateLayout.of(star, student.batched)
    z = layout.flatten(star)
    f = layout.flatten(student.teacher.step(star, context))
    # Drawn on the CPU: the same on every device.
    v = torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=z.dtype).to(z.device)
    reach = torch.finfo(z.dtype).eps ** 0.5 * row_norms(z).clamp_min(1.0).to(z.dtype)
    growth = []
    for _ in range(rounds):
        v = v * (reach / row_norms(v).clamp_min(torch.finfo(z.dtype).tiny).to(z.dtype))[:, None]
        moved = subtract(layout.flatten(student.teacher.step(layout.restore(z + v), context)), f)
        growth.append(row_norms(moved) / row_norms(v))
        v = moved.to(z.dtype)
    last = torch.stack(growth[-max(rounds // 3, 1) :]).double()
    return last.clamp_min(1e-12).log().mean(dim=0).exp()

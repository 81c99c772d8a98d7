"""Training a teacher: a DEQ whose equilibrium, not its tenth step, gives the answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdeq.equilibrium.contract import EquilibriumModel, check_contract
from cdeq.equilibrium.memory import Segment, require_memory
from cdeq.equilibrium.states import tensors_of
from cdeq.gradients import Gradient, Phantom, Unrolled, jacobian_penalty, solve_with_gradient
from cdeq.placement import Precision, in_single
from cdeq.solvers import TOL, Anderson, Picard, Solver
from cdeq.training.batches import Batches, batches_by_number
from cdeq.training.draws import numbered_draws, numbered_generator
from cdeq.training.log import Progress
from cdeq.training.loop import FitConfig, fit
from cdeq.training.segments import CarriedMemory
from cdeq.training.sharding import join_weights, shard_weights
from cdeq.training.task_loss import TaskLoss, cross_entropy


@dataclass(frozen=True, kw_only=True)
class TeachConfig:
    """How a teacher is trained.

    `solver`: finds the equilibria; `student.as_solver()` has a student of this model, or of an earlier one, do it.
    `depths`: the solver's budget is drawn for each update from this range, so that the model does not fit
        one depth only. `penalty`: weight of the Jacobian penalty, which pushes the map towards a contraction.
    `pretrain_updates`: this many first updates are shallow, `pretrain_depth` unrolled steps.
    """

    fit: FitConfig
    solver: Solver = field(default_factory=Anderson)
    gradient: Gradient = field(default_factory=Phantom)
    tol: float = TOL
    depths: tuple[int, int] = (15, 30)
    penalty: float = 0.0
    pretrain_updates: int = 0
    pretrain_depth: int = 4
    seed: int = 0


class TeachingObjective(nn.Module):
    """Task loss at the equilibrium, plus the Jacobian penalty there.

    With `carried` the inputs are the segments of a long text, each with the memory that the last one left.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TeachConfig,
        task_loss: TaskLoss,
        carried: CarriedMemory | None = None,
    ):
        super().__init__()
        self.model, self.config, self.task_loss = model, config, task_loss
        self.carried = carried

    def forward(self, batch: tuple[Any, Tensor], update: int) -> tuple[Tensor, dict[str, Tensor]]:
        # A run that is resumed draws the dropout masks that it would have drawn.
        with numbered_draws(self.config.seed, update):
            return self._loss(batch, update)

    def _loss(self, batch: tuple[Any, Tensor], update: int) -> tuple[Tensor, dict[str, Tensor]]:
        (x, y), config = batch, self.config
        model: EquilibriumModel = self.model  # type: ignore[assignment]
        generator = numbered_generator(config.seed, update)
        low, high = config.depths
        depth = int(torch.randint(low, high + 1, (), generator=generator))
        shallow = update < config.pretrain_updates
        if self.carried is not None:
            x = Segment(x, self.carried.at(update))
        context = model.inject(x)
        solution = solve_with_gradient(
            model,
            context,
            solver=config.solver,
            gradient=Unrolled(steps=config.pretrain_depth) if shallow else config.gradient,
            tol=config.tol,
            max_steps=depth,
        )
        loss = self.task_loss(in_single(model.readout(solution.state, context)), y)
        if self.carried is not None:
            self.carried.keep(require_memory(model).remember(solution.state, context))
        metrics = {
            "task": loss.detach(),
            "residual": solution.residual.mean(),
            "evaluations": solution.steps.float().mean(),
        }
        if config.penalty > 0 and not shallow:
            # The estimate draws its signs where the state is.
            device = tensors_of(solution.state)[0].device
            signs = numbered_generator(config.seed, update, device)
            penalty = jacobian_penalty(
                lambda z: model.step(z, context), solution.state, generator=signs
            )
            loss = loss + config.penalty * penalty
            metrics["penalty"] = penalty.detach()
        return loss, metrics


def teach(
    model: nn.Module,
    data: Batches,
    config: TeachConfig,
    *,
    task_loss: TaskLoss = cross_entropy,
    carried: CarriedMemory | None = None,
    sharded: bool = False,
    folder: Path | None = None,
    identity: dict[str, Any] | None = None,
    device: str | torch.device | None = None,
    precision: Precision = "fp32",
    progress: bool | Progress | None = None,
) -> None:
    """Train `model` in place on batches (x, y). Resumes from `folder` as `fit` does.

    `data` is a loader, repeated as often as needed, or a function `batch_at(update)`.
    `device`: where to train, if not where the model is; the model is moved there, and batches follow. `precision`:
    "bf16" or "fp16" for products inside the model in half precision; weights, states and residuals stay in single.

    With `carried` the batches are consecutive segments (tokens, targets), and their memory passes through it.
    A model that offers `project()` is projected back onto its well-posed set after each update.
    With `sharded` the processes of torchrun divide its weights, gradients and moments among them (FSDP2), for models
    that would not fit otherwise; afterwards it is whole again in each. Its checkpoints are taken up by any number of
    processes, divided or not.
    """
    check_contract(model)
    if carried is not None:
        require_memory(model)
    project = getattr(model, "project", None)
    if sharded and project is not None:
        raise ValueError(
            f"{type(model).__name__} projects its weights after each update, which needs them whole: sharded=False"
        )
    objective = TeachingObjective(model.train(), config, task_loss, carried)
    if sharded:
        shard_weights(objective)
    fit(
        objective,
        batches_by_number(data),
        config.fit,
        folder=folder,
        identity=identity,
        device=device,
        precision=precision,
        after_update=None if project is None else lambda update: project(),
        progress=progress,
        title="teach",
    )
    if sharded:
        join_weights(objective)
    model.eval()


PHANTOM_STEPS = 5
"""Evaluations that the gradient of a few-step model reaches back through."""


def few_step_teaching(config: TeachConfig, steps: int) -> TeachConfig:
    """How to train a model that is good after `steps` Picard steps: with the phantom gradient of the last five.

    Up to five steps that gradient reaches back to the start: it is the unrolled one.
    """
    gradient: Gradient = Unrolled(steps=steps)
    if steps > PHANTOM_STEPS:
        gradient = Phantom(steps=PHANTOM_STEPS, damping=1.0)
    before = max(steps - PHANTOM_STEPS, 1)
    return replace(config, solver=Picard(), gradient=gradient, tol=0.0, depths=(before, before))

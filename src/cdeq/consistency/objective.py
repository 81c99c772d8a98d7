"""The distillation objective (paper, eq:loss_total and alg:training), on the teacher's states or the student's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from cdeq.consistency.clock import TIME_MAPS
from cdeq.consistency.losses import (
    Distance,
    global_loss,
    local_loss,
    log_distance,
    mean_squared_error,
    output_divergence,
    supervised_loss,
    total_loss,
)
from cdeq.consistency.parts import Prepared, StepMemory, TimePoint
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import Input
from cdeq.equilibrium.memory import Segment, require_memory
from cdeq.equilibrium.states import State, map_state, relative_distance
from cdeq.training.draws import numbered_generator
from cdeq.training.task_loss import TaskLoss
from cdeq.trajectories import TrajectoryBatch, augment_endpoints

Metrics = dict[str, Tensor]

DEFAULT_FLOOR = 1e-3
"""Of the log loss, where neither the recipe nor the precision of the targets says."""


class DistillationObjective(nn.Module):
    """forward(batch, update) -> loss, metrics. All random draws depend on `seed` and the update's number."""

    def __init__(
        self,
        student: Student,
        task_loss: TaskLoss | None,
        seed: int,
        log_floor: float | None = None,
    ):
        super().__init__()
        log_floor = student.recipe.log_floor or log_floor or DEFAULT_FLOOR
        self.student, self.task_loss, self.seed = student, task_loss, seed
        recipe = student.recipe
        self.recipe = recipe
        self.distance: Distance = {
            "mse": partial(mean_squared_error, batched=student.batched),
            "log": partial(log_distance, batched=student.batched, floor=log_floor),
        }[recipe.loss]
        steps = torch.arange(1, recipe.depth + 1, dtype=torch.float64) ** -recipe.early
        self.weights = (steps * recipe.depth / steps.sum()).tolist()
        self._average: AveragedModel | None = None
        self._target: Student | None = None
        if recipe.lambda_1 < 1:
            self._begin_average()

    def _begin_average(self) -> None:
        """phi^-, the running average of the student, and the student that runs with it; the teacher is shared."""
        parts = self.student.own_parts()
        average = AveragedModel(parts, multi_avg_fn=get_ema_multi_avg_fn(self.recipe.ema))
        average.requires_grad_(False).n_averaged.fill_(1)  # else the first update would copy
        for i, weight in enumerate(average.parameters()):
            # The same memory, as buffers: checkpoints hold it, and no optimizer sees it.
            self.register_buffer(f"average_{i}", weight.data)
        for name, module in (
            ("_average", average),
            ("_target", self.student.with_parts(average.module)),  # type: ignore[arg-type]
        ):
            object.__setattr__(self, name, module)  # not submodules

    def update_average(self) -> None:
        """phi^- <- mu phi^- + (1 - mu) phi (paper, eq:ema)."""
        if self._average is not None:
            self._average.update_parameters(self.student.own_parts())

    def forward(self, batch: TrajectoryBatch, update: int) -> tuple[Tensor, Metrics]:
        x = self._input(batch, update)
        return (
            self._on_own_states(x, batch)
            if self.recipe.states == "own"
            else self._on_teacher_states(x, batch, update)
        )

    @torch.no_grad()
    def _input(self, batch: TrajectoryBatch, update: int) -> Input:
        """The recorded input; where the recipe says so, with the student's memory of the segment before it.

        The number of steps that the memory is made with is drawn, since in use it is as many as the user takes.
        """
        if self.recipe.memory == "teacher":
            return batch.x
        remembering = require_memory(self.student.teacher)
        if not isinstance(batch.x, Segment):
            raise ValueError(
                f"recipe {self.recipe.name!r}: memory='own' needs the segments of a text, and these inputs have "
                "no memory: record them with carried=True"
            )
        before = batch.before()
        if before is None:
            return batch.x
        student, drawn = self.student, numbered_generator(self.seed, update)
        steps = int(torch.randint(1, self.recipe.depth + 1, (), generator=drawn))
        prepared = student.prepare(before.x)
        *_, z = student.rollout(prepared, steps)
        memory = remembering.remember(z, prepared.base)
        return batch.x._replace(memory=memory)

    def _loss(
        self,
        output: State,
        neighbour: State | None,
        fraction: float,
        prepared: Prepared,
        batch: TrajectoryBatch,
    ) -> Tensor:
        """The total loss at one point; the task loss is early in solver time only, where there are labels."""
        r, task = self.recipe, None
        if r.lambda_2 and self.task_loss and batch.y is not None and fraction <= r.task_until:
            answer = self.student.teacher.readout(output, prepared.base)
            task = supervised_loss(self.task_loss, answer, batch.y)
        return total_loss(
            global_loss(self.distance, output, batch.endpoint),
            None if neighbour is None else local_loss(self.distance, output, neighbour),
            task,
            lambda_1=r.lambda_1,
            lambda_2=r.lambda_2,
        )

    # On the teacher's trajectory.

    def _on_teacher_states(
        self, x: Input, batch: TrajectoryBatch, update: int
    ) -> tuple[Tensor, Metrics]:
        r, last = self.recipe, batch.steps
        generator = numbered_generator(self.seed, update)
        replaced = augment_endpoints(
            last, r.augment_probability, r.augment_first, r.augment_last, generator
        )
        k = int(torch.randint(r.first_index, last + 1, (), generator=generator))

        def state(i: int) -> State:
            return batch.endpoint if replaced[i] else batch.state(i)

        output, prepared = self._at(self.student, k, state, x, batch.steps)
        neighbour = k - 1 if r.direction == "later" else k + 1
        local_target: State | None = None
        if self._target is not None and 0 <= neighbour <= last:
            with torch.no_grad():
                # The end of the trajectory is its own exact target.
                ended = r.direction == "earlier" and neighbour == last
                local_target = (
                    batch.endpoint
                    if ended
                    else self._at(self._target, neighbour, state, x, batch.steps)[0]
                )
        loss = self._loss(output, local_target, self._fraction(k, last), prepared, batch)
        return loss, {"distance": self.shown_distance(output, batch)}

    def _fraction(self, k: int, last: int) -> float:
        return TIME_MAPS[self.recipe.time_map](k, last, self.recipe.rho)

    def _at(
        self, student: Student, k: int, state: Callable[[int], State], x: Input, last: int
    ) -> tuple[State, Prepared]:
        """g(z_<=k, t_k): the window of states up to k, each evaluated at its own time."""
        prepared, memory = student.prepare(x), None
        first = k if self.recipe.history == "none" else max(0, k - self.recipe.window)
        for i in range(first, k + 1):
            point = student.time_point_at(self._fraction(i, last))
            output, memory = student.advance(state(i), point, memory, prepared)
        return output, prepared

    # On the student's own rollout.

    def _on_own_states(self, x: Input, batch: TrajectoryBatch) -> tuple[Tensor, Metrics]:
        student, r = self.student, self.recipe
        prepared = student.prepare(x)
        answer, local = self._teacher_answer(batch, prepared), self._local_targets(x)
        z = student.begin(prepared)
        losses = LossSum(list(student.trainable().values()), at_once=r.backprop == "truncated")
        if student.start_network is not None:
            losses.add(self.distance(z, batch.endpoint))
        points: list[Point] = [Point(z, None, student.time_point(0))]
        shown = {}
        for j in range(r.depth):
            here = points[j]
            if r.backprop == "truncated" and j:
                here = _detached(here)
            z, memory = self._step(here, prepared)
            if j + 1 < r.depth:
                points.append(Point(z, memory, student.time_point(j + 1)))
            neighbour = j - 1 if r.direction == "later" else j + 1
            target = local(points[neighbour]) if 0 <= neighbour < r.depth else None
            fraction = (here.time.time - r.eps) / (r.end - r.eps)
            loss = self._loss(z, target, fraction, prepared, batch)
            if answer is not None:
                own = student.teacher.readout(z, prepared.base)
                loss = loss + r.agreement * output_divergence(own, answer)
            losses.add(self.weights[j] * loss)
            if r.backprop == "truncated":
                points = [_detached(point) for point in points]
            if j == 0:
                shown["distance_1"] = self.shown_distance(z, batch)
        shown["distance"] = self.shown_distance(z, batch)
        return losses.total() / r.depth, shown

    @torch.no_grad()
    def _teacher_answer(self, batch: TrajectoryBatch, prepared: Prepared) -> Tensor | None:
        """The converged teacher's output, where the recipe asks the student to agree with it."""
        if self.recipe.agreement == 0:
            return None
        return self.student.teacher.readout(batch.endpoint, prepared.base)

    def _step(self, here: Point, prepared: Prepared) -> tuple[State, StepMemory]:
        arguments = (here.z, here.time, here.memory, prepared)
        if self.recipe.backprop == "checkpointed":
            return checkpoint(self.student.advance, *arguments, use_reentrant=False)
        return self.student.advance(*arguments)

    @torch.no_grad()
    def _local_targets(self, x: Input) -> Callable[[Point], State | None]:
        """From a point of the rollout to the average student's output there; nothing where no loss is local."""
        target = self._target
        if target is None:
            return lambda point: None
        prepared = target.prepare(x)

        @torch.no_grad()
        def at(point: Point) -> State:
            return target.advance(point.z, point.time, point.memory, prepared)[0]

        return at

    def shown_distance(self, z: State, batch: TrajectoryBatch) -> Tensor:
        with torch.no_grad():
            return relative_distance(z, batch.endpoint, self.student.batched).mean()


class Point(NamedTuple):
    """A state of a rollout, what the history remembers there, and its point on the clock."""

    z: State
    memory: StepMemory | None
    time: TimePoint


def _detached(point: Point) -> Point:
    """A copy that no gradient flows through."""
    memory = point.memory
    if memory is not None and memory.history is not None:
        kept = [
            (map_state(Tensor.detach, a), map_state(Tensor.detach, b)) for a, b in memory.history
        ]
        memory = memory._replace(history=kept)
    return Point(map_state(Tensor.detach, point.z), memory, point.time)


class LossSum:
    """The sum of losses; `at_once` each is differentiated when added, so that what it was computed from can go.

    The gradient of the sum is the same either way: at once, it is put together from the gradients kept.
    """

    def __init__(self, weights: list[nn.Parameter], *, at_once: bool):
        self.weights, self.at_once = weights, at_once
        self.sum: Tensor | float = 0.0
        self.gradients: list[Tensor | None] = [None] * len(weights)

    def add(self, loss: Tensor) -> None:
        if not (self.at_once and loss.requires_grad):
            self.sum = self.sum + loss
            return
        # Losses share what was computed before the rollout, which one backward pass must not free for the next.
        found = torch.autograd.grad(loss, self.weights, retain_graph=True, allow_unused=True)
        self.gradients = [
            new if old is None else old if new is None else old + new
            for old, new in zip(self.gradients, found, strict=True)
        ]
        self.sum = self.sum + loss.detach()

    def total(self) -> Tensor:
        total = self.sum
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            if gradient is not None:
                product = (weight * gradient).sum()
                total = total + product - product.detach()
        assert isinstance(total, Tensor)
        return total

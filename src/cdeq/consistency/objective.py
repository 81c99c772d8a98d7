"""The distillation objective (paper, Eq. 14 and Algorithm 2), on the teacher's states or the student's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cdeq.consistency.clock import TIME_MAPS
from cdeq.consistency.copying import copy_of
from cdeq.consistency.history import Evaluation
from cdeq.consistency.losses import (
    Distance,
    log_distance,
    mean_squared_error,
    output_divergence,
)
from cdeq.consistency.parts import Moment, Prepared
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import Input
from cdeq.equilibrium.memory import Segment, require_memory
from cdeq.equilibrium.states import State, map_state, relative_distance
from cdeq.training.draws import numbered_generator
from cdeq.training.task_loss import TaskLoss
from cdeq.trajectories import TrajectoryBatch, augment_endpoints

Metrics = dict[str, Tensor]


class DistillationObjective(nn.Module):
    """forward(batch, update) -> loss, metrics. All random draws depend on `seed` and the update's number."""

    def __init__(self, student: Student, task_loss: TaskLoss | None, seed: int):
        super().__init__()
        self.student, self.task_loss, self.seed = student, task_loss, seed
        recipe = student.recipe
        self.recipe = recipe
        self.distance: Distance = {
            "mse": partial(mean_squared_error, batched=student.batched),
            "log": partial(log_distance, batched=student.batched, floor=recipe.log_floor),
        }[recipe.loss]
        self._target: Student | None = None
        if recipe.lambda_1 < 1:
            self._set_target()

    def _set_target(self) -> None:
        """A running average of the student, kept as buffers so that checkpoints hold it; the teacher is shared."""
        target = copy_of(self.student, shared=[self.student.methods]).requires_grad_(False)
        for i, weight in enumerate(self._averaged(target)):
            self.register_buffer(f"average_{i}", weight.data)
        object.__setattr__(
            self, "_target", target
        )  # not a submodule: its weights are the buffers above

    def _averaged(self, student: Student) -> list[nn.Parameter]:
        names = self.student.trainable()
        return [p for name, p in student.named_parameters() if name in names]

    @torch.no_grad()
    def update_target(self) -> None:
        """phi- <- mu phi- + (1 - mu) phi."""
        if self._target is not None:
            for average, weight in zip(
                self._averaged(self._target), self.student.trainable().values(), strict=True
            ):
                average.lerp_(weight, 1 - self.recipe.ema)

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

    def _task(
        self, z: State, prepared: Prepared, batch: TrajectoryBatch, fraction: float
    ) -> Tensor | float:
        """lambda_2 L_task, early in solver time only, where there are labels."""
        r = self.recipe
        if r.lambda_2 == 0 or self.task_loss is None or batch.y is None or fraction > r.task_until:
            return 0.0
        return r.lambda_2 * self.task_loss(self.student.teacher.readout(z, prepared.base), batch.y)

    def _total(
        self, output: State, endpoint: State, local_target: State | None, task: Tensor | float
    ) -> Tensor:
        """lambda_1 L_global + (1 - lambda_1) L_local + lambda_2 L_task."""
        loss = self.recipe.lambda_1 * self.distance(output, endpoint) + task
        if local_target is not None:
            loss = loss + (1 - self.recipe.lambda_1) * self.distance(output, local_target)
        return loss

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
        task = self._task(output, prepared, batch, self._fraction(k, last))
        loss = self._total(output, batch.endpoint, local_target, task)
        return loss, {"distance": self._shown_distance(output, batch)}

    def _fraction(self, k: int, last: int) -> float:
        return TIME_MAPS[self.recipe.time_map](k, last, self.recipe.rho)

    def _at(
        self, student: Student, k: int, state: Callable[[int], State], x: Input, last: int
    ) -> tuple[State, Prepared]:
        """g(z_<=k, t_k): the window of states up to k, each evaluated at its own time."""
        prepared = student.prepare(x)
        evaluations: list[Evaluation] = []
        first = k if self.recipe.history == "none" else max(0, k - self.recipe.window)
        for i in range(first, k + 1):
            z, moment = state(i), student.moment_at(self._fraction(i, last))
            evaluations.append((z, student.evaluate(z, moment, prepared)))
        return student.combine(evaluations, moment), prepared

    # On the student's own rollout.

    def _on_own_states(self, x: Input, batch: TrajectoryBatch) -> tuple[Tensor, Metrics]:
        student, r = self.student, self.recipe
        prepared = student.prepare(x)
        answer, local = self._teacher_answer(batch, prepared), self._local_targets(x)
        z = student.begin(prepared)
        losses = LossSum(list(student.trainable().values()), at_once=r.backprop == "truncated")
        if student.start_network is not None:
            losses.add(self.distance(z, batch.endpoint))
        points: list[Point] = [Point(z, [], student.moment(0))]
        shown = {}
        for j in range(r.depth):
            here = points[j]
            if r.backprop == "truncated" and j:
                here = _detached(here)
            z, evaluations = self._step(here, prepared)
            if j + 1 < r.depth:
                points.append(Point(z, evaluations, student.moment(j + 1)))
            neighbour = j - 1 if r.direction == "later" else j + 1
            target = local(points[neighbour]) if 0 <= neighbour < r.depth else None
            fraction = (here.moment.time - r.eps) / (r.end - r.eps)
            task = self._task(z, prepared, batch, fraction)
            loss = self._total(z, batch.endpoint, target, task)
            if answer is not None:
                own = student.teacher.readout(z, prepared.base)
                loss = loss + r.agreement * output_divergence(own, answer)
            losses.add(loss)
            if r.backprop == "truncated":
                points = [_detached(point) for point in points]
            if j == 0:
                shown["distance_1"] = self._shown_distance(z, batch)
        shown["distance"] = self._shown_distance(z, batch)
        return losses.total() / r.depth, shown

    @torch.no_grad()
    def _teacher_answer(self, batch: TrajectoryBatch, prepared: Prepared) -> Tensor | None:
        """The converged teacher's output, where the recipe asks the student to agree with it."""
        if self.recipe.agreement == 0:
            return None
        return self.student.teacher.readout(batch.endpoint, prepared.base)

    def _step(self, here: Point, prepared: Prepared) -> tuple[State, list[Evaluation]]:
        arguments = (here.z, here.moment, here.evaluations, prepared)
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
            return target.advance(point.z, point.moment, point.evaluations, prepared)[0]

        return at

    def _shown_distance(self, z: State, batch: TrajectoryBatch) -> Tensor:
        with torch.no_grad():
            return relative_distance(z, batch.endpoint, self.student.batched).mean()


class Point(NamedTuple):
    """A state of a rollout, with the evaluations remembered there and its moment."""

    z: State
    evaluations: list[Evaluation]
    moment: Moment


def _detached(point: Point) -> Point:
    evaluations = [
        (map_state(Tensor.detach, a), map_state(Tensor.detach, b)) for a, b in point.evaluations
    ]
    return Point(map_state(Tensor.detach, point.z), evaluations, point.moment)


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

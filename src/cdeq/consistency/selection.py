"""What a stage of training must show: the student is nearer to the equilibrium than it was without it.

A later stage can undo what an earlier one learned. On a slow graph a correction that was fitted on few residuals threw
away a start that was all but exact. So the student is judged before and after each stage, as it is used.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from cdeq.equilibrium.states import (
    map_state,
    sample_norms,
    sizes_to_measure_by,
    subtract,
)
from cdeq.training.parallel import from_main_process

if TYPE_CHECKING:
    from cdeq.consistency.student import Student
    from cdeq.trajectories import TrajectoryBatch

LOGGER = logging.getLogger("cdeq")

REACH = 2
"""The judged rollout is so many times as long as that of training: what helps at first may harm later."""
THROWN = 0.3
"""A training that soon has the log distance so much larger than before was thrown off by its first updates."""
WORTH = 0.02
"""By so much must a correction lower the log distance: it costs time at every step, and less may be chance."""


class ThrownOff(ArithmeticError):
    """A training that at its beginning undid what was learned before it."""


class Selection:
    """Keeps the better of the student before and after a stage. `undone`: what was taken back.

    `batches()`: what it is judged on. `floor`: distances below it cannot be told apart, since the recorded equilibria
    are no more exact.
    """

    def __init__(
        self, student: Student, batches: Callable[[], Iterable[TrajectoryBatch]], floor: float
    ):
        self.student, self.batches, self.floor = student, batches, floor
        self.undone: list[str] = []
        self.best = self.score()

    def attempt(self, name: str, *ways: Callable[[], object], judged: bool = True) -> None:
        """Train in the first of these ways that helps; where none does, the student stays as it was.

        Without `judged` the first that comes to its end is taken: what it learns may be no distance.
        """
        parts = self.student.own_parts()
        before = {key: value.clone() for key, value in parts.state_dict().items()}
        for way in ways:
            score = self._score_after(way, last=way is ways[-1])
            LOGGER.debug("stage %s: log distance %.3f, before %.3f", name, score, self.best)
            if score <= self.best if judged else math.isfinite(score):
                self.best = score
                return
            parts.load_state_dict(before)
        self.undone.append(name)

    def _score_after(self, way: Callable[[], object], *, last: bool) -> float:
        """Infinite where gradients were not finite, unless that is the last word, and where it was thrown off."""
        try:
            way()
        except FloatingPointError:
            if last:
                raise
            return math.inf
        except ThrownOff:
            return math.inf
        return self.score()

    def require_its_hold(self) -> None:
        """Refuse a training that has just been thrown off: it would spend its time on what was known before it."""
        if self.score() > self.best + THROWN:
            raise ThrownOff

    def drop_useless_correction(self) -> None:
        """A correction that brings the student hardly nearer than plain steps only costs time: it is left out."""
        student = self.student
        kept = student.correction, student.gains, student.recipe
        student.correction, student.gains = None, None
        student.recipe = kept[2].without_correction()
        score = self.score()
        if score < self.best + WORTH:
            self.best = score
            self.undone.append("correction")
            LOGGER.debug("the student is as near without its correction, which is left out")
        else:
            student.correction, student.gains, student.recipe = kept

    @torch.no_grad()
    def score(self) -> float:
        """The logarithm of the mean distance, averaged over the steps of a rollout as the loss weighs them."""
        student, recipe = self.student, self.student.recipe
        was_training = student.training
        student.eval()
        steps = REACH * recipe.depth
        sums, samples = [0.0] * (steps + 1), 0
        for batch in self.batches():
            size = sizes_to_measure_by(sample_norms(batch.endpoint, student.batched))
            for j, z in enumerate(student.rollout(student.prepare(batch.x), steps)):
                away = map_state(subtract, z, batch.endpoint)
                distance = sample_norms(away, student.batched) / size
                sums[j] += float(distance.double().sum())
            samples += distance.numel()
        student.train(was_training)
        weights = [j**-recipe.early for j in range(1, steps + 1)]
        logs = [math.log(max(total / samples, self.floor)) for total in sums[1:]]
        total = sum(w * log for w, log in zip(weights, logs, strict=True)) / sum(weights)
        return from_main_process(math.inf if math.isnan(total) else total)

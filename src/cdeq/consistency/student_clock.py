"""When a student's steps are: on its clock, at each point of which it has more or less of a say."""

from __future__ import annotations

import torch

from cdeq.consistency.boundary import out_coefficient
from cdeq.consistency.clock import inference_fraction, solver_time
from cdeq.consistency.parts import TimePoint
from cdeq.consistency.student_parts import StudentParts

NEGLIGIBLE_STRENGTH = 1e-6
"""Below this share of the student's change a step is the teacher's own."""


class StudentClock(StudentParts):
    """A student's parts with the times of its steps: as trained, learned, or calibrated."""

    def time_point_at(self, fraction: float) -> TimePoint:
        """The point at a fraction of solver time."""
        r = self.recipe
        t = solver_time(fraction, r.eps, r.end)
        strength = out_coefficient(t, gamma=r.gamma, eps=r.eps, end=r.end)
        return TimePoint(t, strength if strength >= NEGLIGIBLE_STRENGTH else 0.0)

    def time_point(self, j: int) -> TimePoint:
        """The point of inference step j = 0, 1, ...: calibrated, or as in training."""
        known = len(self.calibrated)
        if not known or self.recipe.schedule == "leap":
            return self.trained_time_point(j)
        rest = 1.0 - self.calibrated[min(j, known - 1)]
        return self.time_point_at(1.0 - rest * self.recipe.decay ** max(j - known + 1, 0))

    def trained_time_point(self, j: int) -> TimePoint:
        """The point of step j on the clock of training: a leap or none, learned, or fraction 1 - decay^j."""
        if self.recipe.schedule == "leap":
            return self.time_point_at(0.0 if j < self.recipe.leap else 1.0)
        if self.rates is None or j == 0:
            return self.time_point_at(inference_fraction(j, self.recipe.decay))
        rates = torch.sigmoid(self.rates)
        left = rates[: min(j, len(rates))].prod() * rates[-1] ** max(j - len(rates), 0)
        point = self.time_point_at(1.0 - float(left.detach()))
        if not left.requires_grad:
            return point
        return point._replace(strength=1.0 - (1.0 - left) ** self.recipe.gamma)

"""The first stages of a training: the start alone, then the correction alone; what each of them minimises."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdeq.consistency.least_squares import residuals_along
from cdeq.consistency.objective import DistillationObjective, Metrics
from cdeq.consistency.student import Student
from cdeq.equilibrium.states import map_state
from cdeq.trajectories import TrajectoryBatch


class PartObjective(nn.Module):
    """A first stage of training, of one network of the student alone, which a subclass names."""

    network_name: str

    def __init__(self, objective: DistillationObjective):
        super().__init__()
        self.network: nn.Module = getattr(objective.student, self.network_name)
        self._of = [objective]  # not a submodule: only the network is trained

    @property
    def whole(self) -> tuple[DistillationObjective, Student]:
        """The objective of all of the student, and the student."""
        return self._of[0], self._of[0].student


class StartObjective(PartObjective):
    """The distance of the start alone: it needs no evaluation of f."""

    network_name = "start_network"

    def forward(self, batch: TrajectoryBatch, update: int) -> tuple[Tensor, Metrics]:
        objective, student = self.whole
        with torch.no_grad():
            prepared = student.prepare(batch.x)
        z = student.begin(prepared)
        return objective.distance(z, batch.endpoint), {
            "distance": objective.shown_distance(z, batch)
        }


class CorrectionObjective(PartObjective):
    """How far one corrected step goes past the equilibrium, or falls short: |z + r + N(r) - z*|, along a rollout.

    Neither the rollout nor f is differentiated, so that an update costs a third of one of the whole student.
    """

    network_name = "correction"

    def __init__(self, objective: DistillationObjective):
        super().__init__(objective)
        self.gains = objective.student.gains

    def forward(self, batch: TrajectoryBatch, update: int) -> tuple[Tensor, Metrics]:
        objective, student = self.whole
        with torch.no_grad():
            prepared = student.prepare(batch.x)
            visited = residuals_along(student, prepared, student.recipe.depth)
        gates, losses = None, []
        for number, (z, r) in enumerate(visited):
            gates = student.gates(map_state(torch.add, z, r), prepared.base, number, gates)
            change = student.correction_of(r, number, gates)
            moved = map_state(lambda a, b, c: a + b + c, z, r, change)
            losses.append(objective.distance(moved, batch.endpoint))
        return torch.stack(losses).mean(), {"distance": objective.shown_distance(moved, batch)}

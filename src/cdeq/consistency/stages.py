"""The training of a student, stage by stage: its start, its correction, then all of it.

The cheap stages come first. With `selection` each must bring the student nearer, or is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from cdeq.consistency.first_stages import CorrectionObjective, PartObjective, StartObjective
from cdeq.consistency.least_squares import fit_correction, fit_start
from cdeq.consistency.objective import DistillationObjective
from cdeq.consistency.selection import Selection
from cdeq.consistency.shares import Shares
from cdeq.consistency.student import Student
from cdeq.placement import Precision
from cdeq.training.log import Progress
from cdeq.training.loop import FitConfig, fit
from cdeq.training.task_loss import TaskLoss

POLISHED = {"student.correction.": 1 / 3, "student.gains": 1 / 3}
"""The learning rate of corrections that were trained before, relative to that of the rest."""
RATES = {".": 1.0, "slow": 0.3, "slower": 0.1}
"""Shares of the learning rate, by the folder of a training: where a stage does harm at one, the next is tried.

How large a step may be depends on the map, and now and then on the seed."""
EARLY, LONG = 8, 100
"""A training of so many updates or more is looked at after the first of as many parts of it."""
START_BATCHES, FITTED_BATCHES = 32, 8
"""Batches that the last layers of a start, and the linear part of a correction, are fitted on."""


@dataclass(frozen=True, kw_only=True)
class StudentTraining:
    """How a student is trained: what `distill` was given."""

    config: FitConfig
    folder: Path | None
    task_loss: TaskLoss | None
    seed: int
    precision: Precision
    progress: bool | Progress | None


class Stages:
    """The stages of one student; `known_to` is the relative distance below which its targets are not exact."""

    def __init__(
        self, student: Student, shares: Shares, training: StudentTraining, known_to: float
    ):
        self.student, self.shares, self.training = student, shares, training
        self.recipe, self.known_to = student.recipe, known_to
        self.selection = (
            Selection(student, shares.judged, known_to) if self.recipe.selection else None
        )
        values = asdict(training.config).items()
        self.identity = {
            "recipe": self.recipe.to_dict(),
            "training": {k: v for k, v in values if k not in ("log_every", "checkpoint_every")},
            "data": shares.store.manifest.fingerprint,
            "seed": training.seed,
            "start_network": None if student.start_network is None else str(student.start_network),
            "correction": None if student.correction is None else str(student.correction),
        }

    def run(self) -> tuple[str, ...]:
        """Train the student; the names of what was undone."""
        recipe, student, selection = self.recipe, self.student, self.selection
        if recipe.start_updates:
            self._part("start", StartObjective, recipe.start_updates)
            if selection is not None:
                fitted = self.shares.fitted(START_BATCHES)
                selection.attempt("start, in closed form", partial(fit_start, student, fitted))
        if student.correction is not None:
            self._attempt("correction, in closed form", self._fit_correction)
        if recipe.correction_updates:
            self._part("correction", CorrectionObjective, recipe.correction_updates)
        if selection is not None and student.correction is not None:
            selection.drop_useless_correction()
        ways = {place: partial(self._whole, rate, place) for place, rate in RATES.items()}
        if selection is not None and self._has_labels:
            # Labels and answers are no distances: what it learns of them is not judged by one.
            selection.attempt("whole", *ways.values(), judged=False)
        else:
            self._attempt("whole", ways["."], ways["slower"])
        return () if selection is None else tuple(selection.undone)

    @property
    def _has_labels(self) -> bool:
        return bool(self.recipe.lambda_2 or self.recipe.agreement)

    def _attempt(self, name: str, *ways: Callable[[], object]) -> None:
        if self.selection is None:
            ways[0]()
        else:
            self.selection.attempt(name, *ways)

    def _fit_correction(self) -> None:
        fitted = self.shares.fitted(FITTED_BATCHES)
        fit_correction(self.student, fitted, steps=self.recipe.depth, floor=self.known_to)

    def _part(self, name: str, objective: type[PartObjective], updates: int) -> None:
        """A first stage, of one part of the student."""

        def at(rate: float, place: str) -> None:
            how = replace(self._slowed(rate), updates=updates, warmup_updates=0)
            self._train(f"the {name}", objective(self._objective()), how, place)

        self._attempt(name, partial(at, 1.0, name), partial(at, RATES["slower"], f"{name}-slower"))

    def _whole(self, rate: float, place: str) -> None:
        objective, updates = self._objective(), self.training.config.updates

        def after_update(update: int) -> None:
            objective.update_average()
            is_early = updates >= LONG and update + 1 == updates // EARLY
            if self.selection is not None and self._has_labels and is_early and place != "slower":
                self.selection.require_its_hold()

        factors = POLISHED if self.recipe.correction_updates else None
        given: dict[str, Any] = {"after_update": after_update, "factors": factors}
        self._train(self.recipe.name, objective, self._slowed(rate), place, **given)

    def _objective(self) -> DistillationObjective:
        """Its running average begins with the student as it is."""
        training, floor = self.training, self.known_to**2
        return DistillationObjective(
            self.student, training.task_loss, training.seed, log_floor=floor
        )

    def _slowed(self, rate: float) -> FitConfig:
        """The same training at a share of its learning rate."""
        config = self.training.config
        return replace(config, learning_rate=rate * config.learning_rate)

    def _train(
        self, title: str, objective: nn.Module, config: FitConfig, place: str, **more: Any
    ) -> None:
        training = self.training
        fit(
            objective,
            self.shares.batch_at,
            config,
            folder=None if training.folder is None else training.folder / place,
            identity=self.identity,
            precision=training.precision,
            progress=training.progress,
            title=f"distil {title}",
            **more,
        )

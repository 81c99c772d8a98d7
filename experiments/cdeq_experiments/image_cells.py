"""A set of images as a cell of experiments: how its models are trained, scored and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, overload

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cdeq.equilibrium.states import State, tensors_of
from cdeq.evaluation import Explicit, Method, Quality, measure_quality, parameter_count
from cdeq.evaluation import Metric, accuracy, top_accuracy
from cdeq.evaluation import Training
from cdeq.models.learned_solvers import HyperDEQ
from cdeq.solvers import Anderson, solve_model
from cdeq.training.log import Progress
from cdeq.training.loop import fit
from cdeq.training.supervised import SupervisedObjective
from cdeq.training.task_loss import TaskLoss, cross_entropy
from cdeq.training.teaching import TeachConfig, teach
from cdeq_experiments.image_data import Batch, ImageData
from cdeq_experiments.image_plans import EXPLICIT, ImagePlan
from cdeq_experiments.model_cells import ModelCell, solved_output, taught
from cdeq_experiments.subjects import StudentPlan, Teacher, Tolerances
from cdeq_experiments.train import built, timed

STARS = "equilibria-{:05d}.safetensors"
SHOWN = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class ImageCell(ModelCell):
    """A set of images with its plan, and the folders of what is trained on it."""

    plan: ImagePlan

    students: ClassVar = {
        "paper": StudentPlan(recipe="paper"),
        "anchored": StudentPlan(recipe="anchored", changes={"depth": 4, "lambda_2": 2.0}),
    }
    teacher_name: ClassVar = "MDEQ"
    other_teachers: ClassVar = {"deq": "DEQ (single-stream)"}
    shown: ClassVar = SHOWN
    solved: ClassVar = (1, 2, 3, 4, 6, 8, 10, 12, 16)
    tolerances: ClassVar = Tolerances(budget=60)

    @cached_property
    def data(self) -> ImageData:
        return self.plan.open(self.options.data, self.options.runs / "images")

    @property
    def data_key(self) -> dict[str, Any]:
        return {"images": self.data.digest}

    def recorded_key(self, mode: str) -> dict[str, int]:
        full = mode == "full"
        return {"batches": self.plan.full_batches if full else self.plan.recorded}

    @property
    def metric(self) -> Metric:
        return accuracy()

    @property
    def top5(self) -> Metric:
        return top_accuracy(5)

    # Training.

    def build_teacher(self) -> nn.Module:
        return self.plan.build(self.data.classes)

    def teach(self, model: Teacher, config: TeachConfig, folder: Path, progress: Progress) -> None:
        teach(
            model,
            self.data.batch_at,
            config,
            folder=folder,
            identity={"teach": repr(config), "model": model.config},
            progress=progress,
        )

    def build_hyperdeq(self, teacher: Teacher) -> HyperDEQ:
        """With the student's kind of start."""
        return HyperDEQ(
            width=tuple(self.plan.channels), initial=teacher.start_network(), feature_axis=1
        )

    def record_batches(self, mode: str) -> Iterator[Batch]:
        """Training images, augmented as the teacher met them."""
        for number in range(self.recorded_key(mode)["batches"]):
            yield self.data.batch_at(number)

    def task_loss(self, teacher: Teacher) -> TaskLoss:
        return cross_entropy

    @property
    def explicit_names(self) -> tuple[str, ...]:
        return tuple(EXPLICIT)

    def explicit_config(self, name: str) -> dict[str, Any]:
        return {"fit": self.plan.explicit_fit(name), "body": self.plan.bodies.get(name, {})}

    def trained_explicit(self, name: str) -> tuple[nn.Module, Training]:
        """An explicit classifier, trained on the same images with the same augmentation."""
        model = built(lambda: self.plan.build_explicit(name, self.data.classes), seed=0)
        config = self.explicit_config(name)
        folder = self.place(name, config)
        with self.bar(name) as bar:
            training = timed(
                folder,
                bar,
                lambda tick: fit(
                    SupervisedObjective(model, _loss).train(),
                    self.data.batch_at,
                    config["fit"],
                    folder=folder,
                    identity={"model": name, "config": model.config},
                    progress=tick,
                ),
            )
        return model.eval().requires_grad_(False), training

    def other_teacher_config(self, name: str) -> dict[str, Any]:
        return {"body": self.plan.single, "teach": self.plan.single_stream()}

    def trained_other_teacher(self, name: str) -> tuple[Teacher, Training]:
        """The single-stream DEQ: shallow, then at its equilibrium."""
        model = built(lambda: self.plan.build(self.data.classes, **self.plan.single), seed=0)
        config = self.other_teacher_config(name)
        before, after = config["teach"]
        first = taught(self, model, before, self.place(f"{name}-pretrain", config), "DEQ, shallow")
        second = taught(self, model, after, self.place(name, config), "DEQ")
        return model.requires_grad_(False), second.after(first.seconds)

    # Scores.

    @torch.no_grad()
    def _converged(
        self,
        model: Teacher,
        tol: float,
        keep: Callable[[int, State], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, Any]:
        top1, top5, steps, residuals = [], [], [], []
        batches = list(self.data.test())
        for number, (x, y) in enumerate(batches):
            context = model.inject(x)
            found = solve_model(
                model, context, Anderson(), tol=tol, max_steps=self.tolerances.budget
            )
            output = model.readout(found.state, context)
            top1.append(self.metric.part(output, y))
            top5.append(self.top5.part(output, y))
            steps.append(found.steps.double())
            residuals.append(found.residual.double())
            if keep is not None:
                keep(number, found.state)
            if progress is not None:
                progress(number + 1, len(batches))
        return {
            "metric": self.metric.score(top1),
            "top5": self.top5.score(top5),
            "steps": float(torch.cat(steps).mean()),
            "residual": float(torch.cat(residuals).mean()),
        }

    def score_teacher(self, teacher: Teacher) -> dict[str, Any]:
        folder = self.place("teacher")

        def keep(number: int, state: State) -> None:
            parts = {str(i): part.contiguous() for i, part in enumerate(tensors_of(state))}
            save_file(parts, folder / STARS.format(number))

        return self._converged(teacher, self.tolerances.reference, keep)

    def score_solved(self, teacher: Teacher) -> dict[str, Any]:
        return self._converged(teacher, self.tolerances.usual)

    def score_method(
        self,
        method: Method,
        model: Teacher,
        counts: tuple[int, ...],
        progress: Callable[[int, int], None] | None,
    ) -> dict[int, Quality]:
        batches = list(self.data.test())
        stars = None if method.own else KeptStates(self.place("teacher"), len(batches))
        return measure_quality(
            method, model, batches, stars, self.metric, counts, top5=self.top5, progress=progress
        )

    def score_other_teacher(
        self,
        model: Teacher,
        method: Method,
        counts: tuple[int, ...],
        progress: Callable[[int, int], None] | None,
    ) -> tuple[dict[str, Any], dict[int, Quality]]:
        stars: dict[int, State] = {}
        known = self._converged(model, self.tolerances.reference, stars.__setitem__)
        batches = list(self.data.test())
        found = measure_quality(
            method,
            model,
            batches,
            [stars[i] for i in range(len(batches))],
            self.metric,
            counts,
            top5=self.top5,
            progress=progress,
        )
        return known, found

    @torch.no_grad()
    def score_explicit(self, model: nn.Module) -> dict[str, Any]:
        outputs = [(model(x), y) for x, y in self.data.test()]
        return {
            "metric": self.metric.score([self.metric.part(*pair) for pair in outputs]),
            "top5": self.top5.score([self.top5.part(*pair) for pair in outputs]),
        }

    # Timing: from images to logits.

    def timed_input(self) -> Tensor:
        """As many test images as a training batch has."""
        return next(iter(self.data.test()))[0][: self.plan.batch]

    def timed_method(self, method: Method, model: Teacher, x: Tensor) -> Method:
        return method

    def timed_explicit(self, model: nn.Module, x: Tensor) -> Explicit:
        return Explicit(output=model, parameters=parameter_count(model))

    def timed_solved(self, teacher: Teacher, x: Tensor) -> Explicit:
        return Explicit(
            output=lambda x: solved_output(teacher, x, self.tolerances),
            parameters=parameter_count(teacher),
        )


class KeptStates(Sequence[State]):
    """The converged teacher's states on the test images, a batch a file, read when asked for."""

    def __init__(self, folder: Path, batches: int):
        self.folder, self.batches = folder, batches

    def __len__(self) -> int:
        return self.batches

    @overload
    def __getitem__(self, number: int) -> State: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[State]: ...

    def __getitem__(self, number: int | slice) -> State | Sequence[State]:
        if isinstance(number, slice):
            return [self[i] for i in range(self.batches)[number]]
        if not 0 <= number < self.batches:
            raise IndexError(number)
        with safe_open(self.folder / STARS.format(number), framework="pt") as file:
            return tuple(file.get_tensor(name) for name in sorted(file.keys(), key=int))


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)

"""The models of a text: trained, resumed where they were cut short, and timed; each in a folder of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdeq.consistency.distill import distill
from cdeq.consistency.recipes import recipe_named
from cdeq.consistency.student import Student
from cdeq.data.text import Corpus, Streams
from cdeq.equilibrium.memory import Memory, Segment
from cdeq.experiments.cells import Cells
from cdeq.experiments.options import Options
from cdeq.experiments.provenance import Training
from cdeq.experiments.text_plans import CHECKPOINT_EVERY, TextPlan
from cdeq.experiments.train import (
    PHANTOM_STEPS,
    SOLVER_DEPTH,
    built,
    few_step_teaching,
    timed,
    train_solver,
)
from cdeq.models.learned_solvers import HyperDEQ, SolverLossWeights
from cdeq.training.log import Progress, ProgressBar
from cdeq.training.loop import FitConfig, fit
from cdeq.training.segments import CarriedMemory, ExplicitTextObjective, full_memory
from cdeq.training.teach import TeachConfig, teach
from cdeq.trajectories import TrajectoryStore, record

Teacher = Any
"""A DEQTransformer: an equilibrium model whose state is one tensor, with `words`, `loss` and memory."""

SAVED = "student"
"""The folder of a finished student, inside that of its training."""
RECORD_STEPS = {"endpoint": 40, "full": 30}
"""Budget of a recorded solve: to its tolerance, or of all its states."""

SHALLOW = {"depth": 4, "lambda_2": 5.0}
"""Rollouts of four steps, the first two of which are also asked for the next words."""
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("paper", {}),
    "anchored": ("anchored", {"memory": "own", **SHALLOW}),
    "anchored_teacher_memory": ("anchored", SHALLOW),
}
"""Each student's recipe, and the fields of it that are changed."""


@dataclass(frozen=True, kw_only=True)
class TextCell:
    """A text with its plan, and the folders of what is trained on it."""

    plan: TextPlan
    options: Options

    def place(self, name: str, config: dict[str, Any] | None = None) -> Path:
        """The folder of one training; `config` is what it depends on beside the text and the teacher."""
        return Cells(self.options.runs).place(f"{self.plan.name}-{name}", self._whole(config or {}))

    def result(self, name: str, config: dict[str, Any], work: Callable[[], Any]) -> Any:
        """What `work()` gives, now or before; `config` as for `place`."""
        return Cells(self.options.runs).result(
            f"{self.plan.name}-{name}", self._whole(config), work
        )

    def _whole(self, config: dict[str, Any]) -> dict[str, Any]:
        """A configuration with what everything depends on: the plan of the teacher, and the text itself."""
        return {"plan": self.plan.base, "text": self.corpus.digest, **config}

    def bar(self, title: str) -> AbstractContextManager[ProgressBar | None]:
        return self.options.bar(f"{self.plan.title}: {title}")

    def say(self, what: str) -> None:
        self.options.say(f"{self.plan.title}: {what}")

    @cached_property
    def corpus(self) -> Corpus:
        return self.plan.load(self.options.data, self.options.runs / "texts")

    @cached_property
    def training_streams(self) -> Streams:
        return self.plan.streams(self.corpus.train)

    def batch_at(self, update: int) -> tuple[Tensor, Tensor]:
        """The segments of the training text, one after another, again and again."""
        return self.training_streams.segment(update % len(self.training_streams))


# Equilibrium models.


def pretrained(cell: TextCell) -> tuple[Teacher, Training]:
    """The teacher as a shallow model, which every equilibrium model begins from."""
    model = built(lambda: cell.plan.build(cell.corpus), seed=0)
    training = _taught(cell, model, cell.plan.pretraining, cell.place("pretrain"), "pre-train")
    return model, training


def trained_teacher(cell: TextCell) -> tuple[Teacher, Training]:
    """The teacher at its equilibrium; its training includes the shallow one."""
    return _continued(cell, cell.plan.teaching, cell.place("teacher"), "DEQ")


def few_step_model(cell: TextCell, steps: int) -> tuple[Teacher, Training]:
    """A model trained on from the pre-trained one to be good after `steps` Picard steps."""
    plan = cell.plan
    usual = plan.teaching
    fit_config = replace(usual.fit, updates=plan.few, warmup=min(plan.warmup, plan.few // 4))
    config = few_step_teaching(replace(usual, fit=fit_config, penalty=0.0), steps)
    folder = cell.place("few_step", few_step_config(plan, steps))
    return _continued(cell, config, folder, f"{steps} steps")


def few_step_config(plan: TextPlan, steps: int) -> dict[str, Any]:
    """What a few-step model depends on beside the teacher's pre-training."""
    return {"steps": steps, "updates": plan.few, "phantom": PHANTOM_STEPS}


def _continued(
    cell: TextCell, config: TeachConfig, folder: Path, title: str
) -> tuple[Teacher, Training]:
    """The pre-trained model, trained on; the seconds of both."""
    model, before = pretrained(cell)
    training = _taught(cell, model, config, folder, title)
    return model.requires_grad_(False), _with(training, before.seconds)


def _taught(
    cell: TextCell, model: Teacher, config: TeachConfig, folder: Path, title: str
) -> Training:
    def left(memory: Memory) -> Memory:
        with torch.no_grad():
            context = model.inject(Segment(cell.batch_at(0)[0], memory))
            return model.remember(model.start(context), context)

    carried = CarriedMemory(full_memory(left), len(cell.training_streams))

    def run(tick: Progress) -> None:
        teach(
            model,
            cell.batch_at,
            config,
            task_loss=model.loss,
            carried=carried,
            folder=folder,
            identity={"teach": repr(config), "model": model.config},
            progress=tick,
        )

    with cell.bar(title) as bar:
        return timed(folder, bar, run)


# What is made from the teacher.


def recorded(cell: TextCell, teacher: Teacher, mode: str) -> tuple[TrajectoryStore, float]:
    """The teacher's equilibria, or all its states, on the first segments of the training text; and the seconds."""
    segments = min(cell.plan.recorded, len(cell.training_streams))
    config = {"mode": mode, "segments": segments, "steps": RECORD_STEPS[mode]}
    folder = cell.place("record", config) / "trajectories"

    def work() -> dict[str, float]:
        began = time.perf_counter()
        with cell.bar(f"record ({mode})") as bar:
            record(
                teacher,
                [cell.batch_at(i) for i in range(segments)],
                folder,
                max_steps=RECORD_STEPS[mode],
                mode=mode,
                carried=True,
                progress=bar,
            )
        return {"seconds": time.perf_counter() - began}

    took = cell.result("record", config, work)
    return TrajectoryStore.open(folder), took["seconds"]


def student_config(plan: TextPlan, name: str, seed: int) -> dict[str, Any]:
    """What a student depends on beside the teacher."""
    published = name == "paper"
    updates = plan.papers if published else plan.students
    fit_config = FitConfig(
        updates=updates,
        learning_rate=plan.paper_rate if published else plan.student_rate,
        warmup=updates // 20,
        checkpoint_every=CHECKPOINT_EVERY,
    )
    base, changes = RECIPES[name]
    recipe = recipe_named(base, **changes)
    return {"recipe": recipe, "fit": fit_config, "segments": plan.recorded, "seed": seed}


def trained_student(
    cell: TextCell, teacher: Teacher, name: str, seed: int
) -> tuple[Student, Training]:
    """A student by one of `RECIPES`; its training includes the recording of what it learns from."""
    config = student_config(cell.plan, name, seed)
    store, before = recorded(cell, teacher, config["recipe"].store_mode)
    folder = cell.place(name, config)

    def run(tick: Progress) -> None:
        if not (folder / SAVED).exists():
            distill(
                teacher,
                store,
                recipe=config["recipe"],
                fit_config=config["fit"],
                folder=folder,
                task_loss=teacher.loss,
                seed=seed,
                progress=cell.options.progress,
            ).save(folder / SAVED)

    training = timed(folder, None, run)
    return Student.load(folder / SAVED), _with(training, before)


def hyperdeq_config(plan: TextPlan, seed: int) -> dict[str, Any]:
    """What HyperDEQ depends on beside the teacher."""
    fit_config = FitConfig(
        updates=plan.solvers, learning_rate=plan.solver_rate, checkpoint_every=CHECKPOINT_EVERY
    )
    weights = SolverLossWeights(anneal=plan.solvers)
    return {
        "fit": fit_config,
        "segments": plan.recorded,
        "depth": SOLVER_DEPTH,
        "loss": weights,
        "seed": seed,
    }


def trained_hyperdeq(cell: TextCell, teacher: Teacher, seed: int) -> tuple[HyperDEQ, Training]:
    """HyperDEQ for the teacher, on the equilibria that its students learn from."""
    plan = cell.plan
    store, before = recorded(cell, teacher, "endpoint")
    # The student's kind of start, which sees the tokens before a segment, as the published one would not.
    solver = built(lambda: HyperDEQ(width=plan.width, initial=teacher.start_network()), seed)
    config = hyperdeq_config(plan, seed)
    folder = cell.place("hyperdeq", config)
    with cell.bar(f"HyperDEQ, seed {seed}") as bar:
        training = train_solver(
            solver,
            teacher,
            store,
            config["fit"],
            weights=config["loss"],
            folder=folder,
            seed=seed,
            progress=bar,
        )
    return solver, _with(training, before)


def _with(training: Training, seconds: float | None) -> Training:
    """A training together with what was done before it."""
    known = training.seconds is not None and seconds is not None
    return replace(training, seconds=(training.seconds or 0) + (seconds or 0) if known else None)


# Explicit models.


def explicit_config(plan: TextPlan, name: str) -> dict[str, Any]:
    """What an explicit model depends on beside the text."""
    fit_config = FitConfig(
        updates=plan.explicit[name],
        learning_rate=plan.explicit_rate,
        warmup=min(plan.warmup, plan.explicit[name] // 4),
        checkpoint_every=CHECKPOINT_EVERY,
    )
    return {"fit": fit_config, "body": plan.body(name)}


def trained_explicit(cell: TextCell, name: str) -> tuple[nn.Module, Training]:
    """An explicit language model, trained on the same text with the same vocabulary and dropout."""
    plan = cell.plan
    model = built(lambda: plan.build_explicit(name, cell.corpus), seed=0)

    def left(memory: Memory) -> Memory:
        with torch.no_grad():
            return model(cell.batch_at(0)[0], memory or None)[1]

    config = explicit_config(plan, name)
    carried = CarriedMemory(full_memory(left), len(cell.training_streams))
    folder = cell.place(name, config)
    with cell.bar(name) as bar:
        training = timed(
            folder,
            bar,
            lambda tick: fit(
                ExplicitTextObjective(model, carried, seed=0).train(),
                cell.batch_at,
                config["fit"],
                folder=folder,
                identity={"model": name, "config": model.config},
                progress=tick,
            ),
        )
    return model.eval().requires_grad_(False), training

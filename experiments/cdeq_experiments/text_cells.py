"""A text as a cell of experiments: how its models are trained, scored with memory, and timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cdeq.data.text import Corpus, Streams
from cdeq.equilibrium.memory import Memory, Segment
from cdeq.evaluation import Explicit, Method, Quality, parameter_count
from cdeq.evaluation import Metric, perplexity
from cdeq.evaluation import Training
from cdeq.evaluation import (
    Segments,
    find_text_equilibria,
    measure_text_quality,
    score_explicit_text,
)
from cdeq.models.learned_solvers import HyperDEQ
from cdeq.training.log import Progress
from cdeq.training.loop import fit
from cdeq.training.segments import CarriedMemory, ExplicitTextObjective, full_memory
from cdeq.training.task_loss import TaskLoss
from cdeq.training.teaching import TeachConfig, teach
from cdeq_experiments.model_cells import ModelCell, solved_output
from cdeq_experiments.subjects import StudentPlan, Teacher
from cdeq_experiments.text_plans import EXPLICIT, TextPlan
from cdeq_experiments.train import built, timed

STARS = "equilibria.safetensors"
SHOWN = (1, 2, 4, 8, 12)

SHALLOW = {"depth": 4, "lambda_2": 5.0}
"""Rollouts of four steps, the first two of which are also asked for the next words."""


@dataclass(frozen=True, kw_only=True)
class TextCell(ModelCell):
    """A text with its plan, and the folders of what is trained on it."""

    plan: TextPlan

    students: ClassVar = {
        "paper": StudentPlan(recipe="paper"),
        "anchored": StudentPlan(recipe="anchored", changes={"memory": "own", **SHALLOW}),
        "anchored_teacher_memory": StudentPlan(recipe="anchored", changes=SHALLOW, once=True),
    }
    teacher_name: ClassVar = "DEQ-Transformer"
    shown: ClassVar = SHOWN
    solved: ClassVar = (1, 2, 3, 4, 6, 8, 12)
    carried: ClassVar = True

    @cached_property
    def corpus(self) -> Corpus:
        return self.plan.load(self.options.data, self.options.runs / "texts")

    @cached_property
    def training_streams(self) -> Streams:
        return self.plan.streams(self.corpus.train)

    @property
    def test_segments(self) -> Segments:
        """The whole test text."""
        return list(self.plan.streams(self.corpus.test))

    @property
    def data_key(self) -> dict[str, Any]:
        return {"text": self.corpus.digest}

    def recorded_key(self, mode: str) -> dict[str, int]:
        return {"segments": self.plan.recorded}

    @property
    def metric(self) -> Metric:
        return perplexity()

    def batch_at(self, update: int) -> tuple[Tensor, Tensor]:
        """The segments of the training text, one after another, again and again."""
        return self.training_streams.segment(update % len(self.training_streams))

    # Training.

    def build_teacher(self) -> nn.Module:
        return self.plan.build(self.corpus)

    def teach(self, model: Teacher, config: TeachConfig, folder: Path, progress: Progress) -> None:
        def left(memory: Memory) -> Memory:
            with torch.no_grad():
                context = model.inject(Segment(self.batch_at(0)[0], memory))
                return model.remember(model.start(context), context)

        teach(
            model,
            self.batch_at,
            config,
            task_loss=model.loss,
            carried=CarriedMemory(full_memory(left), len(self.training_streams)),
            folder=folder,
            identity={"teach": repr(config), "model": model.config},
            progress=progress,
        )

    def build_hyperdeq(self, teacher: Teacher) -> HyperDEQ:
        """With the student's kind of start, which sees the tokens before a segment, as the published one would not."""
        return HyperDEQ(width=self.plan.width, initial=teacher.start_network())

    def record_batches(self, mode: str) -> list[Any]:
        """The first segments; a text may have fewer than are asked for."""
        count = min(self.plan.recorded, len(self.training_streams))
        return [self.batch_at(i) for i in range(count)]

    def task_loss(self, teacher: Teacher) -> TaskLoss:
        return teacher.loss

    @property
    def explicit_names(self) -> tuple[str, ...]:
        return tuple(EXPLICIT)

    def explicit_config(self, name: str) -> dict[str, Any]:
        return {"fit": self.plan.explicit_fit(name), "body": self.plan.body(name)}

    def trained_explicit(self, name: str) -> tuple[nn.Module, Training]:
        """An explicit language model, trained on the same text with the same vocabulary and dropout."""
        model = built(lambda: self.plan.build_explicit(name, self.corpus), seed=0)

        def left(memory: Memory) -> Memory:
            with torch.no_grad():
                return model(self.batch_at(0)[0], memory or None)[1]

        config = self.explicit_config(name)
        carried = CarriedMemory(full_memory(left), len(self.training_streams))
        folder = self.place(name, config)
        with self.bar(name) as bar:
            training = timed(
                folder,
                bar,
                lambda tick: fit(
                    ExplicitTextObjective(model, carried, seed=0).train(),
                    self.batch_at,
                    config["fit"],
                    folder=folder,
                    identity={"model": name, "config": model.config},
                    progress=tick,
                ),
            )
        return model.eval().requires_grad_(False), training

    # Scores.

    def score_teacher(self, teacher: Teacher) -> dict[str, Any]:
        known, last = find_text_equilibria(
            teacher, self.test_segments, self.metric, self.tolerances
        )
        states = {f"{i:06d}": z for i, z in enumerate(known.states) if isinstance(z, Tensor)}
        memory = {f"memory.{i}": part.contiguous() for i, part in enumerate(last.memory)}
        save_file(
            {**states, **memory, "tokens": last.tokens.contiguous()}, self.place("teacher") / STARS
        )
        return {"metric": known.metric, "steps": known.steps, "residual": known.residual}

    def score_solved(self, teacher: Teacher) -> dict[str, Any]:
        usual = replace(self.tolerances, reference=self.tolerances.usual)
        known, _ = find_text_equilibria(teacher, self.test_segments, self.metric, usual)
        return {"metric": known.metric, "steps": known.steps, "residual": known.residual}

    def score_method(
        self,
        method: Method,
        model: Teacher,
        counts: tuple[int, ...],
        progress: Callable[[int, int], None] | None,
    ) -> dict[int, Quality]:
        stars: list[Any] | None = None if method.own else self._kept(str.isdigit)
        return measure_text_quality(
            method, model, self.test_segments, stars, self.metric, counts, progress
        )

    def score_explicit(self, model: nn.Module) -> dict[str, Any]:
        return {"metric": score_explicit_text(model, self.test_segments, self.metric)}

    def _kept(self, wanted: Callable[[str], bool]) -> list[Tensor]:
        """The converged teacher's states on the test text, or what was kept of the segment to time on."""
        with safe_open(self.place("teacher") / STARS, framework="pt") as file:
            return [file.get_tensor(name) for name in sorted(filter(wanted, file.keys()))]

    # Timing. The words' likelihood is in the output: what a perplexity takes, from tokens to a number.

    def timed_input(self) -> Segment:
        memory = self._kept(lambda name: name.startswith("memory."))
        [tokens] = self._kept(lambda name: name == "tokens")
        return Segment(tokens, tuple(memory))

    def timed_method(self, method: Method, model: Teacher, x: Segment) -> Method:
        def output(x: Segment, steps: int) -> Tensor:
            # The tokens are as good as the next words: their likelihood takes as long.
            return model.words.nll(method.output(x, steps), x.tokens)

        return replace(method, output=output)

    def timed_explicit(self, model: nn.Module, x: Segment) -> Explicit:
        """On a segment whose memory is another model's; timed with a memory as it would have."""
        held: list[Any] = []

        def output(x: Segment) -> Tensor:
            if not held:
                held.append(model(x.tokens, None)[1])
            features, _ = model(x.tokens, held[0])
            return model.words.nll(features, x.tokens)  # type: ignore[union-attr, operator]

        return Explicit(output=output, parameters=parameter_count(model))

    def timed_solved(self, teacher: Teacher, x: Segment) -> Explicit:
        def output(x: Segment) -> Tensor:
            return teacher.words.nll(solved_output(teacher, x, self.tolerances), x.tokens)

        return Explicit(output=output, parameters=parameter_count(teacher))

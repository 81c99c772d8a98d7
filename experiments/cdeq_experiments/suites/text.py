"""A text as a suite: read in segments, each with the memory that the ones before it leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from cdeq import evaluation
from cdeq.data.embedded import pydoc_words
from cdeq.data.text import Corpus, Streams
from cdeq.data.text_sets import load_text, require_text_files
from cdeq.equilibrium.memory import Memory, Segment
from cdeq.evaluation import Method, Metric, Quality, Results
from cdeq.generation import VOCABULARY
from cdeq.models.learned_solvers import HyperDEQ
from cdeq.solvers import Anderson, solve_model
from cdeq.training import is_main_process, own_part
from cdeq.training.segments import CarriedMemory, ExplicitTextObjective, full_memory
from cdeq.training.task_loss import TaskLoss
from cdeq_experiments.suites.base import Suite
from cdeq_experiments.suites.contract import Batch, Data, Keep, Model

PROBES = 6
"""Test segments that residuals are measured on."""

EMBEDDED: dict[str, Callable[[], Corpus]] = {"manual": lru_cache(maxsize=1)(pydoc_words)}
"""Texts that need no files."""


class TextSuite(Suite):
    """A text, its DEQ-Transformer and what is made from it."""

    def require_data(self) -> None:
        if self.config.data.name not in EMBEDDED:
            require_text_files(self.config.data.name, self.options.data)

    @cached_property
    def corpus(self) -> Corpus:
        name = self.config.data.name
        if name in EMBEDDED:
            return EMBEDDED[name]()
        return load_text(name, self.options.data, self.options.runs / "texts")

    def open_data(self) -> Data:
        """The segments of the training text come one after another, then from the beginning again."""
        corpus, train = self.corpus, self.training
        return Data(
            digest=corpus.digest,
            sizes={"vocabulary": len(corpus.vocabulary)},
            batch_at=lambda update: train.segment(update % len(train)),
            valid=lambda: self.streams(corpus.valid),
            test=lambda: self.streams(corpus.test),
        )

    @property
    def metrics(self) -> dict[str, Metric]:
        return {"metric": evaluation.perplexity()}

    def streams(self, tokens: Tensor) -> Streams:
        return Streams(tokens, self.config.data.batch, self.config.data.length)

    @cached_property
    def training(self) -> Streams:
        return self.streams(self.corpus.train)

    def recorded_batches(self, mode: str, inputs: str) -> list[Batch]:
        """A text may have fewer segments than are asked for."""
        return list(super().recorded_batches(mode, inputs))[: len(self.training)]

    # Models.

    def task_loss(self, model: Model) -> TaskLoss:
        return model.loss

    def carried_memory(self, model: Model) -> CarriedMemory:
        def left(memory: Memory) -> Memory:
            context = model.inject(Segment(own_part(self.data.batch_at(0)[0]), memory))
            return model.remember(model.start(context), context)

        return self._carried(left)

    def explicit_objective(self, model: Model) -> nn.Module:
        tokens = own_part(self.data.batch_at(0)[0])
        carried = self._carried(lambda memory: model(tokens, memory or None)[1])
        return ExplicitTextObjective(model, carried, seed=self.teacher_seed)

    @torch.no_grad()
    def _carried(self, left: Callable[[Memory], Memory]) -> CarriedMemory:
        return CarriedMemory(full_memory(left), len(self.training))

    def build_learned_solver(self, teacher: Model) -> HyperDEQ:
        """With the student's kind of start, which sees the tokens before a segment, as the published one would not."""
        return HyperDEQ(width=teacher.config["width"], initial=teacher.start_network())

    # Scores.

    def converge(
        self, model: Model, batches: Iterable[Batch], tol: float, keep: Keep | None = None
    ) -> dict[str, Any]:
        metric, limit = self.metrics["metric"], self.config.tolerances.max_steps
        found, _ = evaluation.find_text_equilibria(
            model, list(batches), metric, tol=tol, max_steps=limit
        )
        if keep is not None:
            for number, state in enumerate(found.states):
                keep(number, state)
        about = {"steps": found.steps, "residual": found.residual, "converged": found.converged}
        return {"metric": found.metric, **about}

    def score_method(
        self, method: Method, model: Model, equilibria: Any, counts: tuple[int, ...], told: Any
    ) -> dict[int, Quality]:
        data, metric = list(self.data.test()), self.metrics["metric"]
        return evaluation.measure_text_quality(
            method, model, data, equilibria, metric, counts, told
        )

    def score_explicit(self, model: Any) -> dict[str, Any]:
        data, metric = list(self.data.test()), self.metrics["metric"]
        return {"metric": evaluation.score_explicit_text(model, data, metric)}

    @torch.no_grad()
    def probes(self, teacher: Model) -> Iterator[Segment]:
        """Segments with the memory that the converged teacher leaves."""
        memory: Memory = ()
        for tokens, _ in list(self.data.test())[:PROBES]:
            x = Segment(tokens, memory)
            yield x
            context = teacher.inject(x)
            z = solve_model(teacher, context, Anderson(), tol=1e-4, max_steps=60).state
            memory = teacher.remember(z, context)

    # Seconds.

    @torch.no_grad()
    def timed_input(self) -> Segment:
        """The last segment of full length, with the converged teacher's memory."""
        data, states = list(self.data.test()), self.find_equilibria()
        full = [tokens for tokens, _ in data if tokens.shape == data[0][0].shape]
        memory: Memory = ()
        for number, tokens in enumerate(full[:-1]):
            context = self.teacher.inject(Segment(tokens, memory))
            memory = self.teacher.remember(states[number], context)
        return Segment(full[-1], memory)

    def finish(self, model: Model, output: Tensor, x: Segment) -> Tensor:
        """The likelihood of words, as a perplexity takes it; that of the tokens takes as long as the next words'."""
        return model.words.nll(output, x.tokens)

    def explicit_output(self, model: Model) -> Callable[[Segment], Tensor]:
        """On a segment whose memory is another model's; with a memory of the shape it would have."""
        held: list[Any] = []

        def output(x: Segment) -> Tensor:
            if not held:
                held.append(model(x.tokens, None)[1])
            return model(x.tokens, held[0])[0]

        return output

    def sample_input(self) -> Segment:
        return Segment(next(iter(self.data.test()))[0][:2, :16], ())

    def publish(self, results: Results) -> str:
        """With its words, so that it can generate."""
        told = super().publish(results)
        folder = self.options.runs.parent / "models" / self.config.pretrained
        if is_main_process():
            self.corpus.vocabulary.to_json(folder / VOCABULARY)
        return f"{told}: see cdeq generate --help"

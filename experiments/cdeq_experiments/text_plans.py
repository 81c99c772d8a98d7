"""Language modelling as plans: which text, which model, how everything is trained at each scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from cdeq.data.embedded import pydoc_words
from cdeq.data.text import Corpus, Streams
from cdeq.data.text_sets import load_text, require_text_files
from cdeq.models.text.deq_transformer import DEQTransformer
from cdeq_experiments.plans import ModelPlan
from cdeq_experiments.rivals.qrnn import QRNN
from cdeq_experiments.rivals.text_convolutions import TCN, GatedConvNet
from cdeq_experiments.rivals.transformer_xl import TransformerXL


@dataclass(frozen=True, kw_only=True)
class TextPlan(ModelPlan):
    """A text and the DEQ-Transformer on it, beside what every plan has; `length` tokens a segment."""

    width: int = 128
    heads: int = 4
    inner: int = 1024
    memory: int = 64
    cutoffs: tuple[int, ...] = (1000, 5000, 15000)
    divisor: int = 2
    dropout: float = 0.05
    keep: float = 1.0
    direct: bool = False
    length: int = 64

    def require(self, folder: Path | None) -> None:
        """Refuse, by name, a text whose files are not there; nothing is read."""
        if self.name not in EMBEDDED:
            require_text_files(self.name, folder)

    def load(self, folder: Path | None, cache: Path | None) -> Corpus:
        return (
            EMBEDDED[self.name]() if self.name in EMBEDDED else load_text(self.name, folder, cache)
        )

    def streams(self, tokens: Any) -> Streams:
        return Streams(tokens, self.batch, self.length)

    def build(self, corpus: Corpus) -> DEQTransformer:
        """The untrained teacher."""
        return DEQTransformer(
            heads=self.heads,
            inner=self.inner,
            memory=self.memory,
            keep=self.keep,
            direct=self.direct,
            **self._words(corpus),
        )

    def build_explicit(self, name: str, corpus: Corpus) -> nn.Module:
        """An untrained explicit model of about the teacher's size."""
        return EXPLICIT[name](**self._words(corpus), **self.body(name))

    def body(self, name: str) -> dict[str, Any]:
        """The sizes of an explicit model: its own defaults, but for what the plan says."""
        given = {**self._words(None), "vocabulary": 0}
        usual = {
            argument.name: argument.default
            for argument in signature(EXPLICIT[name]).parameters.values()
            if argument.name not in given
        }
        if "memory" in usual:
            usual["memory"] = self.memory
        return {**usual, **self.bodies.get(name, {})}

    def _words(self, corpus: Corpus | None) -> dict[str, Any]:
        """What all models of a text share; without a corpus, all but the vocabulary."""
        known = {} if corpus is None else {"vocabulary": len(corpus.vocabulary)}
        return {
            **known,
            "width": self.width,
            "cutoffs": self.cutoffs,
            "divisor": self.divisor,
            "dropout": self.dropout,
        }


EXPLICIT: dict[str, type[nn.Module]] = {
    "tcn": TCN,
    "gcnn": GatedConvNet,
    "awd_qrnn": QRNN,
    "transformer_xl": TransformerXL,
}


@lru_cache(maxsize=1)
def _manual() -> Corpus:
    return pydoc_words()


EMBEDDED: dict[str, Callable[[], Corpus]] = {"manual": _manual}
"""Texts that need no files."""


SCALES: dict[str, TextPlan] = {
    "tiny": TextPlan(
        name="manual",
        title="Python manual (words)",
        width=32,
        heads=2,
        inner=64,
        memory=16,
        length=16,
        cutoffs=(200, 1000),
        pretrain=60,
        updates=40,
        recorded=16,
        students=40,
        papers=40,
        solvers=20,
        few=20,
        warmup=10,
        explicit=dict.fromkeys(EXPLICIT, 60),
        bodies={
            "tcn": {"channels": 32, "levels": 2},
            "gcnn": {"channels": 32, "levels": 1},
            "awd_qrnn": {"channels": 48, "layers": 2},
            "transformer_xl": {"heads": 2, "inner": 64, "layers": 2},
        },
    ),
    "small": TextPlan(
        name="wikitext-2",
        title="WikiText-2",
        # About as long as the teacher each.
        explicit={"tcn": 6500, "gcnn": 6500, "awd_qrnn": 6500, "transformer_xl": 4300},
        bodies={"awd_qrnn": {"weight_dropout": 0.1}},
    ),
    "paper": TextPlan(
        name="wikitext-103",
        title="WikiText-103",
        width=700,
        heads=10,
        inner=48_000,
        memory=150,
        cutoffs=(20_000, 40_000, 200_000),
        divisor=4,
        batch=56,
        length=150,
        pretrain=32_000,
        pretrain_depth=2,
        pretrain_rate=2.5e-4,
        updates=268_000,
        learning_rate=2.5e-4,
        depths=(25, 35),
        phantom=5,
        penalty=0.0,
        warmup=16_000,
        recorded=100,
        students=20_000,
        papers=60_000,
        student_rate=3e-4,
        paper_rate=3e-4,
        solvers=10_000,
        solver_rate=3e-4,
        few=50_000,
        explicit=dict.fromkeys(EXPLICIT, 300_000),
        bodies={
            "tcn": {"channels": 1450, "levels": 6},
            "gcnn": {"channels": 960, "levels": 6},
            "awd_qrnn": {"channels": 2950, "layers": 4, "weight_dropout": 0.1},
            "transformer_xl": {"heads": 10, "inner": 2800, "layers": 11},
        },
        explicit_rate=2.5e-4,
    ),
}
"""The text of each scale. The model of `paper` is DEQ-Transformer as published: 10 heads of 70, 97M weights."""

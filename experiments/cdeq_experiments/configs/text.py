"""Language modelling: a DEQ-Transformer on a text, its students, and explicit models of about its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cdeq.models import DEQTransformer
from cdeq_experiments.configs import base
from cdeq_experiments.rivals.qrnn import QRNN
from cdeq_experiments.rivals.text_convolutions import TCN, GatedConvNet
from cdeq_experiments.rivals.transformer_xl import TransformerXL

EXPLICIT = {"tcn": TCN, "gcnn": GatedConvNet, "awd_qrnn": QRNN, "transformer_xl": TransformerXL}
SHOWN = (1, 2, 4, 8, 12)
SCORED = (1, 2, 3, 4, 5, 8, 12)
SOLVED = (1, 2, 3, 4, 5, 6, 8, 12)
SHALLOW = {"depth": 4, "lambda_2": 5.0}
"""Rollouts of four steps, the first two of which are also asked for the next words."""
LABELLED = {"lambda_2": 2.0, "task_until": 1.0}
"""All steps of a rollout are also asked for the next words, the first ones most."""


@dataclass(frozen=True, kw_only=True)
class TextData:
    """A text by name, read as `batch` streams in segments of `length` tokens."""

    name: str
    batch: int = 16
    length: int = 64


def text_config(
    title: str,
    data: TextData,
    budget: base.Budget,
    *,
    words: base.Arguments,
    teacher: base.Arguments,
    explicit: Mapping[str, base.Arguments],
    recorded: tuple[int, int],
    labelled: base.Arguments = LABELLED,
) -> base.SuiteConfig:
    """A text at a scale; `words` are arguments of all models, `teacher` and `explicit` those of each.

    `labelled`: how the default recipe and its control learn from the next words.
    """
    teacher_memory = replace(budget.student("anchored", **SHALLOW), once=True)
    return base.SuiteConfig(
        kind="text",
        name=data.name,
        title=title,
        data=data,
        teacher=budget.teacher("DEQ-Transformer", DEQTransformer, {**words, **teacher}),
        students={
            "paper": budget.student("paper"),
            "anchored": budget.student("anchored", memory="own", **SHALLOW),
            "anchored_teacher_memory": teacher_memory,
            **{name: budget.student(name, memory="own", **labelled) for name in base.CORRECTED},
        },
        recording=base.record_configs(*recorded),
        tolerances=base.Tolerances(),
        counts=base.Counts(shown=SHOWN, methods=SCORED, solvers=SOLVED, timed=SOLVED),
        learned_solver=budget.hyperdeq(),
        few_step=budget.teach_few_steps(),
        explicit=budget.explicit_models(EXPLICIT, words, explicit),
    )


MANUAL = text_config(
    "Python manual (words)",
    TextData(name="manual", length=16),
    base.Budget(
        pretraining=base.Updates(60, 2e-3),
        teaching=base.Updates(40, 1e-3),
        paper=base.Updates(40, 1e-3),
        anchored=base.Updates(40, 6e-3),
        corrected=base.Updates(40, 3e-3),
        learned_solver=base.Updates(20, 3e-3),
        explicit=base.Updates(60, 2e-3),
        few_step=base.Updates(20, 1e-4),
        warmup_updates=10,
    ),
    words={"width": 32, "cutoffs": (200, 1000), "divisor": 2, "dropout": 0.05},
    teacher={"heads": 2, "inner": 64, "memory": 16},
    explicit={
        "tcn": {"channels": 32, "levels": 2},
        "gcnn": {"channels": 32, "levels": 1},
        "awd_qrnn": {"channels": 48, "layers": 2},
        "transformer_xl": {"heads": 2, "inner": 64, "layers": 2, "memory": 16},
    },
    recorded=(16, 16),
)

WIKITEXT_2 = text_config(
    "WikiText-2",
    TextData(name="wikitext-2"),
    base.Budget(
        pretraining=base.Updates(16_000, 2e-3),
        teaching=base.Updates(4000, 1e-3),
        explicit=base.Updates(20_000, 2e-3),  # as many passes over the text as the teacher
    ),
    words={"width": 128, "cutoffs": (1000, 5000, 15000), "divisor": 2, "dropout": 0.1},
    teacher={"heads": 4, "inner": 1024, "memory": 64, "fading": 0.5},
    explicit={"awd_qrnn": {"weight_dropout": 0.1}, "transformer_xl": {"memory": 64}},
    recorded=(128, 64),
)

WIKITEXT_103 = text_config(
    "WikiText-103",
    TextData(name="wikitext-103", batch=56, length=150),
    base.Budget(
        pretraining=base.Updates(32_000, 2.5e-4),
        teaching=base.Updates(268_000, 2.5e-4),
        paper=base.Updates(60_000, 3e-4),
        anchored=base.Updates(20_000, 3e-4),
        corrected=base.Updates(20_000, 3e-4),
        learned_solver=base.Updates(10_000, 3e-4),
        explicit=base.Updates(300_000, 2.5e-4),
        few_step=base.Updates(50_000, 2.5e-5),
        pretraining_depth=2,
        depths=(25, 35),
        phantom_steps=5,
        penalty=0.0,
        warmup_updates=16_000,
    ),
    words={"width": 700, "cutoffs": (20_000, 40_000, 200_000), "divisor": 4, "dropout": 0.05},
    teacher={"heads": 10, "inner": 48_000, "memory": 150},
    explicit={
        "tcn": {"channels": 1450, "levels": 6},
        "gcnn": {"channels": 960, "levels": 6},
        "awd_qrnn": {"channels": 2950, "layers": 4, "weight_dropout": 0.1},
        "transformer_xl": {"heads": 10, "inner": 2800, "layers": 11, "memory": 150},
    },
    recorded=(100, 100),
    labelled={},  # the likelihood of so many words, at six steps of a rollout, would take 60 GB
)
"""DEQ-Transformer as published: 10 heads of 70, 97M weights."""

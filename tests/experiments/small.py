"""Data sets and configurations on which every experiment takes a second."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from brief import leave_out_plans, shorten_stages
from cdeq.data.block_graphs import block_model
from cdeq.data.images import Images, ImageSet
from cdeq.data.text import Corpus, Vocabulary
from cdeq.evaluation import timing
from cdeq_experiments import configs
from cdeq_experiments.configs.base import Budget, Updates
from cdeq_experiments.configs.graphs import GraphBudget, graph_config
from cdeq_experiments.configs.images import ImageData, image_config
from cdeq_experiments.configs.text import TextData, text_config
from cdeq_experiments.suites import KINDS, graphs, images, text

WORDS = [f"w{i}" for i in range(30)]


def corpus(tokens=100):
    """A text in which a word mostly follows the one before it in the alphabet."""
    draw = torch.Generator().manual_seed(0)
    steps = 1 + (torch.rand(3 * tokens, generator=draw) < 0.2).long()
    places = (steps.cumsum(0) % len(WORDS)).split(tokens)
    lines = [[" ".join(WORDS[i] for i in part.tolist())] for part in places]
    vocabulary = Vocabulary.of(lines[0])
    return Corpus("steps", vocabulary, *(vocabulary.encode(part) for part in lines))


def few_digits():
    """Fifty random images whose class is their brightest column."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 100, (50, 1, 8, 8), generator=draw, dtype=torch.uint8)
    labels = torch.randint(8, (50,), generator=draw)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        image[:, :, label] += 120
    sizes = [25, 5, 20]
    train, valid, test = (
        Images(pixels=p, labels=y)
        for p, y in zip(pixels.split(sizes), labels.split(sizes), strict=True)
    )
    classes = tuple("abcdefgh")
    return ImageSet(name="few", train=train, valid=valid, test=test, classes=classes, digest="few")


def few_nodes(seed=0, nodes=80):
    return block_model(nodes, classes=3, degree=6.0, homophily=0.8, features=8, seed=seed)


BUDGET = Budget(
    pretraining=Updates(8, 2e-3),
    teaching=Updates(6, 1e-3),
    paper=Updates(4, 1e-3),
    anchored=Updates(4, 6e-3),
    corrected=Updates(4, 3e-3),
    learned_solver=Updates(4, 3e-3),
    explicit=Updates(4, 2e-3),
    few_step=Updates(3, 1e-4),
    depths=(3, 5),
    warmup_updates=2,
)

TEXT = text_config(
    "Steps",
    TextData(name="steps", batch=3, length=5),
    BUDGET,
    words={"width": 8, "cutoffs": (10,), "divisor": 2, "dropout": 0.05},
    # One that settles: without an equilibrium, rounding alone makes another student.
    teacher={"heads": 2, "inner": 16, "memory": 6, "keep": 0.5, "direct": True},
    explicit={
        "tcn": {"channels": 8, "levels": 1},
        "gcnn": {"channels": 8, "levels": 1},
        "awd_qrnn": {"channels": 8, "layers": 2},
        "transformer_xl": {"heads": 2, "inner": 8, "layers": 1, "memory": 6},
    },
    recorded=(4, 4),
)
IMAGES = image_config(
    "digits",
    ImageData(name="digits", size=8, channels=1, padding=1, flip=False, batch=8, test_batch=10),
    BUDGET,
    teacher={
        **{"channels": (4, 8), "expand": 1, "groups": 2, "fuse_groups": 2, "stem": 4},
        **{"strides": (1, 1), "head": (2, 4), "final": 8},
    },
    single_stream={"channels": (4,), "head": (2,)},
    single_updates=(3, 2),
    explicit={
        "alexnet": {"width": 8, "hidden": 8, "batch_norm": True},
        "inception_v2": {"width": 0.0625, "blocks": (1, 1, 1)},
        "hrnet": {
            **{"width": 2, "stages": 2, "modules": (1, 1), "blocks": 1},
            **{"stem": 4, "head": 2, "features": 8},
        },
    },
    recorded=(3, 2),
)
GRAPH = graph_config(
    "Few nodes",
    "few-nodes",
    GraphBudget(
        teacher_updates=8, student_updates=4, solver_updates=3, explicit_updates=4, gpm_updates=2
    ),
    width=8,
)
BY_KIND = {"text": TEXT, "images": IMAGES, "graph": GRAPH}


def _timed_once(median_times, works, repeats):
    return median_times(works, 1)


def use_small_data(patch: pytest.MonkeyPatch) -> None:
    """The scale tiny on the data above; students in a part of their time, and all work timed once."""
    shorten_stages(patch)
    leave_out_plans(patch)
    patch.setattr(timing, "median_times", partial(_timed_once, timing.median_times))
    patch.setitem(text.EMBEDDED, "steps", corpus)
    patch.setattr(images, "digits_set", few_digits)
    patch.setitem(graphs.EMBEDDED, "few-nodes", few_nodes)
    patch.setitem(configs.SUITES, "tiny", {kind: (one,) for kind, one in BY_KIND.items()})


def suite(options, kind, **changes):
    """The suite of a kind; `changes` are fields of its configuration."""
    return KINDS[kind](config=replace(BY_KIND[kind], **changes), options=options)

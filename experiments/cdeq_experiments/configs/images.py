"""Image classification: an MDEQ on a set of images, its students, a single-stream DEQ, and explicit models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cdeq.models import MDEQ
from cdeq_experiments.configs import base
from cdeq_experiments.rivals.alexnet import AlexNet
from cdeq_experiments.rivals.hrnet import HRNet
from cdeq_experiments.rivals.inception import InceptionV2

EXPLICIT = {"alexnet": AlexNet, "inception_v2": InceptionV2, "hrnet": HRNet}
SHOWN = (1, 2, 4, 8)
SCORED = (1, 2, 3, 4, 5, 8, 12)
SOLVED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Images by name, in training moved by up to `padding` pixels and, if `flip`, mirrored.

    If `streamed` they are read from class folders as they are needed, and cropped to their size.
    """

    name: str
    size: int
    channels: int = 3
    batch: int = 64
    test_batch: int = 250
    padding: int = 4
    flip: bool = True
    streamed: bool = False


def image_config(
    title: str,
    data: ImageData,
    budget: base.Budget,
    *,
    teacher: base.Arguments,
    single_stream: base.Arguments,
    single_updates: tuple[int, int],
    explicit: Mapping[str, base.Arguments],
    recorded: tuple[int, int],
) -> base.SuiteConfig:
    """Images at a scale; `single_stream` are the arguments in which that DEQ differs from the teacher.

    It has its own updates, shallow and at the equilibrium. Of the `recorded` batches those with all their states, for
    the published recipe, may be fewer, since they are large.
    """
    shallow, deep = single_updates
    single = replace(
        budget,
        pretraining=replace(budget.pretraining, count=shallow),
        teaching=replace(budget.teaching, count=deep),
    )
    arguments = {"in_channels": data.channels, **teacher}
    pixels = {"in_channels": data.channels, "image_size": data.size}
    return base.SuiteConfig(
        kind="images",
        name=data.name,
        title=title,
        data=data,
        teacher=budget.teacher("MDEQ", MDEQ, arguments),
        others={"deq": single.teacher("DEQ (single-stream)", MDEQ, {**arguments, **single_stream})},
        students={
            "paper": budget.student("paper"),
            "anchored": budget.student("anchored", depth=4, lambda_2=2.0),
            **{name: budget.student(name) for name in base.CORRECTED},
        },
        recording=base.record_configs(*recorded),
        tolerances=base.Tolerances(max_steps=60),
        counts=base.Counts(shown=SHOWN, methods=SCORED, solvers=SOLVED, timed=SOLVED),
        learned_solver=budget.hyperdeq(),
        few_step=budget.teach_few_steps(),
        explicit=budget.explicit_models(EXPLICIT, pixels, explicit),
    )


DIGITS = image_config(
    "digits",
    ImageData(name="digits", size=8, channels=1, padding=1, flip=False),
    base.Budget(
        pretraining=base.Updates(60, 2e-3),
        teaching=base.Updates(40, 1e-3),
        paper=base.Updates(40, 1e-3),
        anchored=base.Updates(30, 6e-3),
        corrected=base.Updates(30, 3e-3),
        learned_solver=base.Updates(20, 3e-3),
        explicit=base.Updates(40, 2e-3),
        few_step=base.Updates(20, 1e-3),
        depths=(6, 12),
        warmup_updates=10,
        weight_decay=0.01,
    ),
    teacher={
        **{"channels": (8, 16), "expand": 1, "groups": 4, "stem": 8},
        **{"strides": (1, 1), "head": (4, 8), "final": 32},
    },
    single_stream={"channels": (8,), "head": (4,)},
    single_updates=(40, 20),
    explicit={
        "alexnet": {"width": 8, "hidden": 32, "batch_norm": True},
        "inception_v2": {"width": 0.0625},
        "hrnet": {
            **{"width": 4, "stages": 2, "modules": (1, 1), "blocks": 1},
            **{"stem": 8, "head": 4, "features": 32},
        },
    },
    recorded=(8, 8),
)


def small_images(
    title: str, data: ImageData, strides: tuple[int, int], updates: tuple[int, int]
) -> base.SuiteConfig:
    """What CIFAR-10 and Tiny-ImageNet have in common; `updates` are shallow and at the equilibrium."""
    shallow, deep = updates
    return image_config(
        title,
        data,
        base.Budget(
            pretraining=base.Updates(shallow, 4e-3),
            teaching=base.Updates(deep, 1.5e-3),
            paper=base.Updates(300, 1e-3),
            anchored=base.Updates(300, 6e-3),
            learned_solver=base.Updates(80, 3e-3),
            explicit=base.Updates(shallow + deep, 2e-3),  # as many passes as the teacher
            few_step=base.Updates(deep // 4, 1.5e-3),
            pretraining_depth=3,
            depths=(8, 16),
            penalty=0.0,
            weight_decay=0.05,
        ),
        teacher={
            **{"channels": (16, 32, 64), "expand": 2, "groups": 4, "stem": 24},
            **{"strides": strides, "head": (4, 8, 16), "final": 128},
        },
        single_stream={"channels": (32,), "head": (16,)},
        single_updates=(800, 300),
        explicit={
            "alexnet": {"width": 16, "hidden": 64, "batch_norm": True},
            "inception_v2": {"width": 0.125},
            "hrnet": {
                **{"width": 8, "stages": 3, "modules": (1, 1, 1), "blocks": 1},
                **{"stem": 16, "head": 8, "features": 128},
            },
        },
        recorded=(128, 48),
    )


CIFAR = ImageData(name="cifar-10", size=32)
TINY = ImageData(name="tiny-imagenet-40", size=64, padding=8)
CIFAR_10 = small_images("CIFAR-10", CIFAR, (2, 1), (36_000, 4000))
TINY_IMAGENET = small_images("Tiny-ImageNet (40 classes)", TINY, (2, 2), (10_000, 2000))

IMAGENET = image_config(
    "ImageNet",
    ImageData(name="imagenet", size=224, batch=128, test_batch=128, streamed=True),
    base.Budget(
        pretraining=base.Updates(510_000, 1e-3),
        teaching=base.Updates(500_000, 5e-4),
        paper=base.Updates(100_000, 3e-4),
        anchored=base.Updates(50_000, 1e-3),
        corrected=base.Updates(50_000, 1e-3),
        learned_solver=base.Updates(10_000, 1e-3),
        explicit=base.Updates(1_000_000, 1e-3),
        few_step=base.Updates(200_000, 5e-4),
        pretraining_depth=4,
        depths=(20, 26),
        phantom_steps=5,
        penalty=0.0,
        warmup_updates=5000,
        weight_decay=5e-5,
    ),
    teacher={
        **{"channels": (32, 64, 128, 256), "expand": 5, "groups": 8, "stem": 64},
        **{"strides": (2, 2), "head": (24, 48, 96, 192), "final": 2048},
    },
    single_stream={"channels": (128,), "head": (96,)},
    single_updates=(510_000, 500_000),
    explicit={},
    recorded=(1000, 100),
)
"""MDEQ-small for ImageNet as published, trained with Adam in place of SGD."""

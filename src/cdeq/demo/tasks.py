"""The three demo tasks: embedded data, a small teacher that is well trained in about a minute."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cdeq.data.embedded import Examples, digits_graph, digits_images, pydoc_text, text_windows
from cdeq.demo.task import StudentConfig, Task
from cdeq.evaluation import Batch, accuracy, perplexity
from cdeq.gradients import Implicit, Phantom
from cdeq.models.graph.ignn import IGNN
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.models.vision.conv import ConvDEQ
from cdeq.training.draws import numbered_generator
from cdeq.training.loop import FitConfig
from cdeq.training.teaching import TeachConfig


def _draws(examples: Examples, batch: int, seed: int) -> Callable[[int], Batch]:
    """Random training batches, each a function of the update's number alone."""

    def draw(update: int) -> Batch:
        generator = numbered_generator(seed, update)
        chosen = torch.randint(len(examples.y), (batch,), generator=generator)
        return examples.x[chosen], examples.y[chosen]

    return draw


def _shifted(draw: Callable[[int], Batch], seed: int) -> Callable[[int], Batch]:
    """The same images moved by up to a pixel."""

    def shifted(update: int) -> Batch:
        x, y = draw(update)
        generator = numbered_generator(seed, update)
        down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
        return torch.roll(x, (down, right), (2, 3)), y

    return shifted


def _batches(examples: Examples, batch: int) -> list[Batch]:
    """All examples once, in order, the last batch maybe smaller."""
    return list(zip(examples.x.split(batch), examples.y.split(batch), strict=True))


def _corrected(fit: FitConfig) -> dict[str, StudentConfig]:
    """The default recipe, and the control that shows what its correction adds, trained alike."""
    return {name: StudentConfig(fit=fit) for name in ("warm_start", "corrected")}


def images(seed: int = 0) -> Task:
    """Handwritten digits, a convolutional DEQ."""
    splits = digits_images(seed)
    return Task(
        name="images",
        dataset="digits (images)",
        build=lambda: ConvDEQ(channels=32),
        teach=TeachConfig(
            fit=FitConfig(updates=260, learning_rate=2e-3, warmup_updates=20, weight_decay=1e-2),
            gradient=Implicit(tol=1e-3, max_steps=20),
            tol=1e-3,
            depths=(15, 30),
            penalty=1.0,
            pretrain_updates=80,
            pretrain_depth=3,
            seed=seed,
        ),
        teaching=_shifted(_draws(splits.train, 64, seed), seed),
        distilling=_batches(splits.train, 128)[:-1],
        valid=_batches(splits.valid, 128),
        test=_batches(splits.test, 128),
        metric=accuracy(),
        students={
            "paper": StudentConfig(fit=FitConfig(updates=300, learning_rate=3e-3)),
            "anchored": StudentConfig(
                fit=FitConfig(updates=200, learning_rate=5e-3),
                changes={"history": "anderson", "window": 3},
            ),
            **_corrected(FitConfig(updates=200, learning_rate=5e-3)),
        },
    )


def text(seed: int = 0) -> Task:
    """The prose of Python's manual, character by character, an equilibrium transformer."""
    prose = pydoc_text()
    length, batch = 64, 32
    train = text_windows(prose.train, length)
    kept = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(seed))[: 24 * batch]
    return Task(
        name="text",
        dataset="Python manual (text)",
        build=lambda: TransformerDEQ(vocabulary=prose.vocabulary, length=length),
        teach=TeachConfig(
            fit=FitConfig(updates=370, learning_rate=4e-3, warmup_updates=20),
            gradient=Phantom(steps=3, damping=1.0),
            tol=1e-3,
            depths=(10, 20),
            penalty=0.6,
            pretrain_updates=250,
            pretrain_depth=3,
            seed=seed,
        ),
        teaching=_draws(text_windows(prose.train, length, stride=16), batch, seed),
        distilling=_batches(Examples(train.x[kept], train.y[kept]), batch),
        valid=_batches(text_windows(prose.valid, length), batch)[:4],
        test=_batches(text_windows(prose.test, length), batch)[:12],
        metric=perplexity(),
        students={
            "paper": StudentConfig(fit=FitConfig(updates=300, learning_rate=3e-3)),
            "anchored": StudentConfig(fit=FitConfig(updates=300, learning_rate=5e-3)),
            **_corrected(FitConfig(updates=300, learning_rate=5e-3)),
        },
    )


def graph(seed: int = 0) -> Task:
    """The digits as a nearest-neighbour graph, an implicit graph network."""
    nodes = digits_graph(seed)
    training = nodes.labelled(nodes.train)
    return Task(
        name="graph",
        dataset="digits (graph)",
        build=lambda: IGNN(features=64),
        teach=TeachConfig(
            fit=FitConfig(updates=200, learning_rate=1e-2, warmup_updates=20, weight_decay=1e-3),
            gradient=Phantom(steps=6, damping=1.0),
            tol=1e-3,
            depths=(20, 40),
            seed=seed,
        ),
        teaching=lambda update: training,
        distilling=[training],
        valid=[nodes.labelled(nodes.valid)],
        test=[nodes.labelled(nodes.test)],
        metric=accuracy(),
        students={
            "paper": StudentConfig(fit=FitConfig(updates=600, learning_rate=1e-2)),
            "anchored": StudentConfig(
                fit=FitConfig(updates=500, learning_rate=1e-2),
                changes={"history": "anderson", "window": 5},
            ),
            **_corrected(FitConfig(updates=500, learning_rate=1e-2)),
        },
    )


DEMO_TASKS: dict[str, Callable[[int], Task]] = {"images": images, "text": text, "graph": graph}

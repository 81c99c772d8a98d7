"""Which data sets each table has at each scale, and which stand for their kind in figures and ablations.

A new data set is a `SuiteConfig` and its name here; CONTRIBUTING.md has the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cdeq_experiments.configs import graphs, images, text
from cdeq_experiments.configs.base import KINDS, Kind, SuiteConfig
from cdeq_experiments.options import ExperimentError

SUITES: dict[str, dict[Kind, tuple[SuiteConfig, ...]]] = {
    "tiny": {
        "text": (text.MANUAL,),
        "images": (images.DIGITS,),
        "graph": (graphs.DIGITS, graphs.BLOCKS),
    },
    "small": {
        "text": (text.WIKITEXT_2,),
        "images": (images.CIFAR_10, images.TINY_IMAGENET),
        "graph": (
            *(graphs.PUBMED, graphs.AMAZON_COMPUTERS),
            *(graphs.COAUTHOR_PHYSICS, graphs.SMALL_ARXIV),
        ),
    },
    "paper": {
        "text": (text.WIKITEXT_103,),
        "images": (images.IMAGENET,),
        "graph": (graphs.ARXIV, graphs.PRODUCTS),
    },
}
"""In the order of the tables."""


def table_configs(kind: Kind, scale: str) -> list[SuiteConfig]:
    """The data sets of the table of a kind of data."""
    return list(SUITES[scale][kind])


def figure_configs(scale: str, kinds: Sequence[Kind] = KINDS, place: int = 0) -> list[SuiteConfig]:
    """The data set of each kind that figures and ablations are made on: the first of its table.

    It has one teacher for all seeds, without other equilibrium models, and recorded trajectories of 30 steps.
    """
    found = []
    for config in (one for kind in kinds for one in SUITES[scale][kind][place : place + 1]):
        full = replace(config.recording["full"], max_steps=30)
        alone = replace(config, others={}, seeded_teacher=False)
        found.append(replace(alone, recording={**config.recording, "full": full}))
    return found


def select(configs: Sequence[SuiteConfig], only: Sequence[str]) -> list[SuiteConfig]:
    """Those data sets that are named, or whose kind is; all of them without names."""
    names = [config.name for config in configs]
    kinds = dict.fromkeys(config.kind for config in configs)
    for name in only:
        if name not in {*names, *kinds}:
            raise ExperimentError(
                f"this experiment has no data set {name!r} at this scale; there are "
                f"{', '.join(dict.fromkeys(names))} (of kind {', '.join(kinds)})"
            )
    return [config for config in configs if not only or {config.name, config.kind} & set(only)]

"""Graphs of any size with known classes: the stochastic block model (Holland et al. 1983).

Shapes: N nodes, E undirected edges, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from cdeq.data.graphs import NodeTask, mask_of, node_task

ROWS = 1 << 16  # of the features, made at once


def block_model(
    nodes: int,
    *,
    seed: int,
    classes: int = 10,
    degree: float = 14.0,
    homophily: float = 0.7,
    features: int = 128,
    noise: float = 1.0,
    train: float = 0.54,
    valid: float = 0.18,
    per_class_train: int | None = None,
) -> NodeTask:
    """x_i = mu_c(i) + noise * e_i, and E = N degree / 2 edges, each within a class with probability `homophily`.

    Classes have equal sizes, to one node. Within classes as between them, all sets of that many pairs are equally
    likely (to the one node). Class means mu (C, F) have length about 1, e is standard normal: with noise 1 the
    features alone tell little, and a node's neighbourhood tells much. `train` and `valid` are shares of the nodes, the
    rest tests; `per_class_train` nodes of each class train instead if given. Time and memory grow as N F + E.
    """
    _check(nodes, classes, degree, homophily, features, noise, train, valid)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(nodes, generator=generator)
    labels = torch.empty(nodes, dtype=torch.long)
    labels[order] = torch.arange(nodes) % classes
    return node_task(
        block_edges(labels, round(nodes * degree / 2), homophily, generator=generator),
        _gaussian_features(labels, classes, features, noise, generator),
        labels,
        _split(labels, train, valid, per_class_train, generator),
    )


def block_edges(labels: Tensor, edges: int, homophily: float, *, generator: Generator) -> Tensor:
    """Undirected edges (2, E), all different, no loops; each joins nodes of one label with chance `homophily`."""
    within = int(torch.rand(edges, generator=generator).lt(homophily).sum())
    nodes, sizes = len(labels), labels.bincount()
    members = torch.argsort(labels, stable=True)  # class by class
    starts = sizes.cumsum(0) - sizes
    pairs_within = int((sizes * (sizes - 1) // 2).sum())
    pairs_between = nodes * (nodes - 1) // 2 - pairs_within
    if within > pairs_within or edges - within > pairs_between:
        raise ValueError(
            f"{within} edges within classes and {edges - within} between do not fit: there are "
            f"{pairs_within} and {pairs_between} pairs; lower the degree or change the homophily"
        )

    def same_class(count: int) -> tuple[Tensor, Tensor]:
        first = torch.randint(nodes, (count,), generator=generator)
        label = labels[first]
        # Doubles: a float32 could not tell the members of a large class apart.
        place = torch.rand(count, generator=generator, dtype=torch.float64) * sizes[label]
        second = members[starts[label] + place.long()]
        different = first != second
        return first[different], second[different]

    def other_class(count: int) -> tuple[Tensor, Tensor]:
        first, second = torch.randint(nodes, (2, count), generator=generator)
        different = labels[first] != labels[second]
        return first[different], second[different]

    keys = torch.cat(
        [
            _distinct_pairs(same_class, within, nodes, generator),
            _distinct_pairs(other_class, edges - within, nodes, generator),
        ]
    )
    return torch.stack([keys // nodes, keys % nodes])


def _distinct_pairs(
    draw: Callable[[int], tuple[Tensor, Tensor]], wanted: int, nodes: int, generator: Generator
) -> Tensor:
    """`wanted` different undirected pairs as keys first * nodes + second, first < second.

    Pairs are drawn until there are enough; too many are thinned at random, so that every set is equally likely.
    """
    keys = torch.empty(0, dtype=torch.long)
    while (missing := wanted - len(keys)) > 0:
        # Some more than missing: of the last free pairs of a dense block, few draws hit one.
        first, second = draw(missing + missing // 16 + wanted // 8 + 16)
        low, high = torch.minimum(first, second), torch.maximum(first, second)
        keys = torch.unique(torch.cat([keys, low * nodes + high]))
    return keys[torch.randperm(len(keys), generator=generator)[:wanted]]


def _gaussian_features(
    labels: Tensor, classes: int, features: int, noise: float, generator: Generator
) -> Tensor:
    means = torch.randn(classes, features, generator=generator) / features**0.5
    x = torch.randn(len(labels), features, generator=generator).mul_(noise)
    for rows, classes_of_rows in zip(x.split(ROWS), labels.split(ROWS), strict=True):
        rows += means[classes_of_rows]
    return x


def _split(
    labels: Tensor, train: float, valid: float, per_class: int | None, generator: Generator
) -> tuple[Tensor, Tensor, Tensor]:
    nodes = len(labels)
    order = torch.randperm(nodes, generator=generator)
    if per_class is None:
        training = order[: round(train * nodes)]
    else:
        smallest = int(labels.bincount().min())
        if not 0 < per_class <= smallest:
            raise ValueError(f"per_class_train must be 1 to {smallest}, not {per_class}")
        members = (order[labels[order] == label] for label in range(int(labels.max()) + 1))
        training = torch.cat([nodes_of_class[:per_class] for nodes_of_class in members])
    train_mask = mask_of(training, nodes)
    rest = order[~train_mask[order]]
    valid_mask = mask_of(rest[: round(valid * nodes)], nodes)
    return train_mask, valid_mask, ~(train_mask | valid_mask)


def _check(
    nodes: int,
    classes: int,
    degree: float,
    homophily: float,
    features: int,
    noise: float,
    train: float,
    valid: float,
) -> None:
    if not 1 <= classes <= nodes:
        raise ValueError(f"classes must be 1 to the number of nodes {nodes}, not {classes}")
    if features < 1:
        raise ValueError(f"features must be at least 1, not {features}")
    if degree < 0 or noise < 0:
        raise ValueError(f"degree {degree} and noise {noise} must not be negative")
    if not 0 <= homophily <= 1:
        raise ValueError(f"homophily is a probability, not {homophily}")
    if min(train, valid) < 0 or train + valid > 1:
        raise ValueError(f"train {train} and valid {valid} must be shares of the nodes, at most 1")

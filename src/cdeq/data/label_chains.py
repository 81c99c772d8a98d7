"""Chains whose label stands at one end: the task that implicit graph networks were invented for.

From Gu et al. 2020 (IGNN, two classes) and Liu et al. 2021 (EIGNN, any number of classes).
Shapes: N nodes, L nodes of a chain, F features, C classes.
"""

from __future__ import annotations

import torch

from cdeq.data.graphs import NodeTask, mask_of, node_task


def chain_graphs(
    length: int,
    *,
    seed: int,
    classes: int = 2,
    chains: int = 20,
    features: int = 100,
    noise: float = 0.0,
    train: float = 0.05,
    valid: float = 0.1,
) -> NodeTask:
    """`chains` chains of each class, N = C chains L nodes; only a chain's first node has its class, one-hot.

    All other features are zero, or uniform in [-noise, noise]. So a node knows its class only by what has come from the
    end, up to L - 1 hops away. Nodes are numbered chain after chain. `train` and `valid` are shares of all nodes, drawn
    by the seed, the rest tests (Liu et al.; Gu et al. have 20, 100 and 200 nodes). An edge joins two nodes both ways;
    in the code of both papers it leads away from the end only, and what a node knows then fades more slowly.
    """
    _check(length, classes, chains, features, noise, train, valid)
    generator = torch.Generator().manual_seed(seed)
    nodes = torch.arange(classes * chains * length).view(-1, length)
    labels = torch.arange(classes).repeat_interleave(chains * length)
    x = torch.rand(nodes.numel(), features, generator=generator).mul_(2).sub_(1).mul_(noise)
    ends = nodes[:, 0]
    x[ends, labels[ends]] += 1
    order = torch.randperm(nodes.numel(), generator=generator)
    sizes = [int(train * nodes.numel()), int(valid * nodes.numel())]
    parts = order.split([*sizes, nodes.numel() - sum(sizes)])
    masks = [mask_of(part, nodes.numel()) for part in parts]
    edges = torch.stack([nodes[:, :-1].flatten(), nodes[:, 1:].flatten()])
    return node_task(edges, x, labels, (masks[0], masks[1], masks[2]))


def _check(
    length: int,
    classes: int,
    chains: int,
    features: int,
    noise: float,
    train: float,
    valid: float,
) -> None:
    for name, count in {"length": length, "classes": classes, "chains": chains}.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    if features < classes:
        raise ValueError(f"features must be at least the {classes} classes, not {features}")
    if noise < 0:
        raise ValueError(f"noise must not be negative, not {noise}")
    if min(train, valid) < 0 or train + valid > 1:
        raise ValueError(f"train {train} and valid {valid} must be shares of the nodes, at most 1")

"""Graphs as tensors. Shapes: N nodes, E directed edges, F features a node."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor


class Graph(NamedTuple):
    """One graph: a sparse CSR adjacency (N, N), symmetric and normalised, and features (N, F)."""

    adjacency: Tensor
    features: Tensor


class NodeTask(NamedTuple):
    """Node classification on one graph: labels (N,) and a boolean mask (N,) a split."""

    graph: Graph
    labels: Tensor
    train: Tensor
    valid: Tensor
    test: Tensor


def normalised_adjacency(edges: Tensor, nodes: int) -> Tensor:
    """D^-1/2 (A + I) D^-1/2 as CSR, from undirected edges (2, E); repeated ones count once.

    Its largest eigenvalue is 1, so that |W|_inf < 1 makes an implicit graph network well-posed.
    """
    loops = torch.arange(nodes, device=edges.device)
    rows = torch.cat([edges[0], edges[1], loops])
    columns = torch.cat([edges[1], edges[0], loops])
    keys = torch.unique(rows * nodes + columns)
    rows, columns = keys // nodes, keys % nodes
    degree = torch.bincount(rows, minlength=nodes)
    scale = degree.to(torch.get_default_dtype()).rsqrt()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            torch.cat([degree.new_zeros(1), degree.cumsum(0)]),
            columns,
            scale[rows] * scale[columns],
            size=(nodes, nodes),
            check_invariants=True,  # unset, torch warns
        )


def nearest_neighbours(features: Tensor, neighbours: int) -> Tensor:
    """Edges (2, E) from each node to its `neighbours` nearest others in Euclidean distance."""
    distances = torch.cdist(features.double(), features.double())
    distances.fill_diagonal_(torch.inf)
    nearest = distances.topk(neighbours, dim=1, largest=False).indices
    sources = torch.arange(len(features), device=features.device).repeat_interleave(neighbours)
    return torch.stack([sources, nearest.reshape(-1)])

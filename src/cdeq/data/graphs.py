"""Graphs as tensors. Shapes: N nodes, E directed edges, F features of a node."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdeq.data.sparse import Edges, SparseMatrix, csr_from_entries, csr_from_pointers, row_indices


class Graph(NamedTuple):
    """One graph: a CSR adjacency (N, N), symmetric and normalised, and features (N, F), dense or sparse."""

    adjacency: Tensor
    features: Tensor | SparseMatrix

    def as_dense_tensors(self) -> Graph:
        """The same graph without sparse tensors, for torch's compiler and for export: edges, and features in full."""
        features = self.features if isinstance(self.features, Tensor) else self.features.matrix
        whole = features if features.layout == torch.strided else features.to_dense()
        return Graph(Edges.of(self.adjacency), whole)  # type: ignore[arg-type]


class NodeTask(NamedTuple):
    """Node classification on one graph: labels (N,) and a boolean mask (N,) for each split."""

    graph: Graph
    labels: Tensor
    train: Tensor
    valid: Tensor
    test: Tensor

    def labelled(self, mask: Tensor) -> tuple[Graph, Tensor]:
        """A batch (x, y): the whole graph, and the labels where `mask` is true, -100 elsewhere: no loss counts them."""
        return self.graph, torch.where(mask, self.labels, -100)


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
    pointers = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    return csr_from_pointers(pointers, columns, scale[rows] * scale[columns], (nodes, nodes))


def nearest_neighbours(features: Tensor, neighbours: int) -> Tensor:
    """Edges (2, E) from each node to its `neighbours` nearest others in Euclidean distance."""
    distances = torch.cdist(features.double(), features.double())
    distances.fill_diagonal_(torch.inf)
    nearest = distances.topk(neighbours, dim=1, largest=False).indices
    sources = torch.arange(len(features), device=features.device).repeat_interleave(neighbours)
    return torch.stack([sources, nearest.reshape(-1)])


def node_task(
    edges: Tensor,
    features: Tensor | SparseMatrix,
    labels: Tensor,
    split: tuple[Tensor, Tensor, Tensor],
) -> NodeTask:
    """A task from undirected edges (2, E), in one direction or both, and a split into three masks (N,).

    What does not fit together is a ValueError here, before it becomes a wrong graph.
    """
    nodes = features.shape[0]
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.is_floating_point():
        raise ValueError(f"edges must be whole numbers (2, E), not {edges.dtype} {edges.shape}")
    if edges.numel() and not (int(edges.min()) >= 0 and int(edges.max()) < nodes):
        raise ValueError(
            f"edges join nodes {int(edges.min())} to {int(edges.max())}, but there are {nodes}"
        )
    if labels.shape != (nodes,) or labels.is_floating_point():
        raise ValueError(
            f"labels must be one class for each node ({nodes},), not {labels.dtype} {tuple(labels.shape)}"
        )
    for mask in split:
        if mask.shape != (nodes,) or mask.dtype != torch.bool:
            raise ValueError(f"a split must be masks ({nodes},), not {mask.dtype} {mask.shape}")
    adjacency = normalised_adjacency(edges.long(), nodes)
    return NodeTask(Graph(adjacency, features), labels.long(), *split)


def tensors_of_task(task: NodeTask) -> dict[str, Tensor]:
    """A task with dense features as tensors by name, to be kept in a file."""
    adjacency, features = task.graph
    if not isinstance(features, Tensor):
        raise TypeError("only dense features are kept")
    named = {"features": features, **task._asdict()}
    del named["graph"]
    named |= {"pointers": adjacency.crow_indices(), "columns": adjacency.col_indices()}
    return named | {"weights": adjacency.values()}


def task_of_tensors(parts: dict[str, Tensor]) -> NodeTask:
    """The inverse of `tensors_of_task`."""
    nodes = len(parts["labels"])
    adjacency = csr_from_pointers(
        parts["pointers"], parts["columns"], parts["weights"], (nodes, nodes)
    )
    split = (parts[name] for name in ("labels", "train", "valid", "test"))
    return NodeTask(Graph(adjacency, parts["features"]), *split)


def mask_of(indices: Tensor, nodes: int) -> Tensor:
    """The boolean mask (N,) of some nodes' indices."""
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < nodes):
        raise ValueError(f"a split names node {int(indices.max())}, but there are {nodes}")
    mask = torch.zeros(nodes, dtype=torch.bool, device=indices.device)
    mask[indices] = True
    return mask


def csr_from_arrays(
    pointers: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, int]
) -> Tensor:
    """A CSR matrix, float32, from arrays as scipy saves them: a row's columns may come in any order."""
    starts = torch.from_numpy(pointers.astype(np.int64))
    counts = starts.diff()
    fits = starts.ndim == 1 and columns.ndim == 1 and columns.shape == values.shape
    if not fits or len(starts) != shape[0] + 1 or starts[0] != 0 or starts[-1] != len(columns):
        raise ValueError(f"not the arrays of a CSR matrix of shape {shape}: their lengths differ")
    if (counts < 0).any():
        raise ValueError("not the arrays of a CSR matrix: the row pointers decrease")
    rows = torch.repeat_interleave(torch.arange(shape[0]), counts)
    entries = torch.from_numpy(values.astype(np.float32))
    return csr_from_entries(rows, torch.from_numpy(columns.astype(np.int64)), entries, shape)


def row_normalised(features: Tensor) -> Tensor:
    """Each row of features (N, F), dense or CSR, over its Euclidean length; rows of zeros stay zero.

    Rows are often divided by their sum; with hundreds of words in a row that leaves a layer almost no signal, and
    training takes twice as long to begin.
    """
    if features.layout != torch.sparse_csr:
        return features / _nonzero(torch.linalg.vector_norm(features, dim=1, keepdim=True))
    rows, values = row_indices(features), features.values()
    lengths = values.new_zeros(features.shape[0]).index_add_(0, rows, values.square()).sqrt()
    return csr_from_pointers(
        features.crow_indices(),
        features.col_indices(),
        values / _nonzero(lengths)[rows],
        (features.shape[0], features.shape[1]),
    )


def _nonzero(lengths: Tensor) -> Tensor:
    return torch.where(lengths > 0, lengths, torch.ones_like(lengths))

"""Amazon and Coauthor graphs as the gnn-benchmark repository keeps them (Shchur et al. 2018): one .npz for each graph.

Shapes: N nodes, E edges, F features.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cdeq.data.graphs import NodeTask, csr_from_arrays, mask_of, node_task, row_normalised
from cdeq.data.sparse import SparseMatrix, csr_from_entries, row_indices


def read_npz_graph(
    path: str | Path,
    *,
    seed: int,
    per_class: int = 20,
    valid_per_class: int = 30,
    largest_component: bool = False,
) -> NodeTask:
    """A graph from its CSR arrays adj_*, features attr_* (or a dense attr_matrix) and labels.

    Edges count in both directions. Features, binary for Amazon and counts of words for Coauthor, are divided by the
    Euclidean length of their row; sparse ones stay sparse. The split is drawn with `seed`: `per_class` nodes of each
    class to train, `valid_per_class` to validate, all others to test. `largest_component` keeps only the nodes of the
    largest connected component, as the published evaluation does.
    """
    arrays = _arrays(Path(path))
    try:
        adjacency = _matrix(arrays, "adj")
        features = _matrix(arrays, "attr") if "attr_data" in arrays else _dense(arrays)
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
        edges = torch.stack([row_indices(adjacency), adjacency.col_indices()])
        edges = edges[:, adjacency.values() != 0]
        if adjacency.shape[0] != adjacency.shape[1] or len(adjacency) != len(features):
            raise ValueError(f"{tuple(adjacency.shape)} edges, {tuple(features.shape)} features")
        if labels.shape != (len(features),) or labels.min() < 0:
            raise ValueError(f"labels {tuple(labels.shape)} for {len(features)} nodes")
        if largest_component:
            kept = largest_component_mask(edges, len(features))
            edges, features, labels = _restricted(kept, edges, features, labels)
        split = split_by_class(labels, per_class, valid_per_class, seed=seed)
    except KeyError as error:
        raise ValueError(f"{path} has no array {error}; it has {', '.join(arrays)}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    features = row_normalised(features)
    sparse = features.layout == torch.sparse_csr
    return node_task(edges, SparseMatrix.of(features) if sparse else features, labels, split)


def split_by_class(
    labels: Tensor, per_class: int, valid_per_class: int, *, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Masks (N,): `per_class` nodes of each class to train, `valid_per_class` to validate, the rest to test."""
    counts = labels.bincount()
    smallest = int(counts[counts > 0].min())
    if smallest < per_class + valid_per_class:
        raise ValueError(
            f"a class has only {smallest} nodes: too few for {per_class} to train "
            f"and {valid_per_class} to validate"
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, valid = [], []
    for label in counts.nonzero().flatten().tolist():
        members = order[labels[order] == label]
        train.append(members[:per_class])
        valid.append(members[per_class : per_class + valid_per_class])
    masks = mask_of(torch.cat(train), len(labels)), mask_of(torch.cat(valid), len(labels))
    return *masks, ~(masks[0] | masks[1])


def largest_component_mask(edges: Tensor, nodes: int) -> Tensor:
    """The mask (N,) of the largest connected component; of equal ones, that with the first node.

    Every node takes the smallest name among its neighbours, then the name of the node so named, until none changes:
    the second step makes the number of rounds grow with the logarithm of the longest path, and not with the path.
    """
    names = torch.arange(nodes)
    while True:
        smaller = names.clone()
        for source, target in (edges, edges.flip(0)):
            # Renaming the node a name belongs to as well hooks whole components at once.
            for holder in (target, names[target]):
                smaller.scatter_reduce_(0, holder, names[source], "amin")
        smaller = smaller[smaller]
        if torch.equal(smaller, names):
            return names == names.bincount().argmax()
        names = smaller


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz that hold numbers, without unpickling anything."""
    wanted = ("adj_", "attr_data", "attr_indices", "attr_indptr", "attr_shape", "attr_matrix")
    try:
        with np.load(path, allow_pickle=False) as file:
            names = [name for name in file.files if name.startswith((*wanted, "labels"))]
            return {name: file[name] for name in names}
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no .npz of plain numbers: {error}") from None


def _matrix(arrays: dict[str, np.ndarray], name: str) -> Tensor:
    indptr, indices, data = (arrays[f"{name}_{part}"] for part in ("indptr", "indices", "data"))
    rows, columns = arrays[f"{name}_shape"].tolist()
    return csr_from_arrays(indptr, indices, data, (rows, columns))


def _dense(arrays: dict[str, np.ndarray]) -> Tensor:
    features = torch.from_numpy(arrays["attr_matrix"].astype(np.float32))
    if features.ndim != 2:
        raise ValueError(f"attr_matrix must have two axes, not {features.ndim}")
    return features


def _restricted(
    kept: Tensor, edges: Tensor, features: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Edges, features and labels of the nodes in a mask, renumbered in the old order."""
    numbers = kept.cumsum(0) - 1
    edges = numbers[edges[:, kept[edges[0]] & kept[edges[1]]]]
    if features.layout != torch.sparse_csr:
        return edges, features[kept], labels[kept]
    rows = row_indices(features)
    inside = kept[rows]
    features = csr_from_entries(
        numbers[rows[inside]],
        features.col_indices()[inside],
        features.values()[inside],
        (int(kept.sum()), features.shape[1]),
    )
    return edges, features, labels[kept]

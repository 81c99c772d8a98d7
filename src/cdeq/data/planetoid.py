"""Cora, CiteSeer and PubMed as the Planetoid repository keeps them (Yang et al. 2016), with its public split.

Shapes: N nodes, F words, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cdeq.data.graphs import NodeTask, csr_from_arrays, mask_of, node_task, row_normalised
from cdeq.data.sparse import SparseMatrix, csr_from_entries, row_indices
from cdeq.data.unpickle import CsrArrays, read_pickle

PLANETOID_NAMES = ("cora", "citeseer", "pubmed")
PLANETOID_PARTS = ("y", "tx", "ty", "allx", "ally", "graph", "test.index")


def read_planetoid(folder: str | Path, name: str, *, valid: int = 500) -> NodeTask:
    """A citation graph from `ind.NAME.*`: bags of words (N, F), sparse, each row of length 1.

    The public split: train on as many of the first nodes as y has, validate on the `valid` after them, test on
    those in test.index. The features of test nodes are stored in the order of that file. A node that is missing from
    it (CiteSeer has 15, with citations but without a text) has features of zero, label 0, and is in no split.
    """
    if name not in PLANETOID_NAMES:
        raise ValueError(f"no Planetoid graph {name!r}; there are {', '.join(PLANETOID_NAMES)}")
    paths = {part: Path(folder) / f"ind.{name}.{part}" for part in PLANETOID_PARTS}
    first, rest = _matrix(paths["allx"]), _matrix(paths["tx"])
    first_classes, rest_classes = _one_hot(paths["ally"]), _one_hot(paths["ty"])
    training = len(_one_hot(paths["y"]))
    testing = _test_indices(paths["test.index"])
    edges = _edges(paths["graph"])

    known = first.shape[0]
    if (
        len(first_classes) != known
        or not len(rest_classes) == rest.shape[0] == len(testing)
        or first.shape[1] != rest.shape[1]
        or first_classes.shape[1] != rest_classes.shape[1]
        or int(testing.min()) < known
        or training + valid > known
    ):
        raise ValueError(f"the files ind.{name}.* in {folder} do not belong together")

    nodes = 1 + max(int(testing.max()), int(edges.max()) if edges.numel() else 0)
    words = csr_from_entries(
        torch.cat([row_indices(first), testing[row_indices(rest)]]),
        torch.cat([first.col_indices(), rest.col_indices()]),
        torch.cat([first.values(), rest.values()]),
        (nodes, first.shape[1]),
    )
    labels = torch.zeros(nodes, dtype=torch.long)
    labels[:known] = first_classes.argmax(dim=1)
    labels[testing] = rest_classes.argmax(dim=1)
    split = (
        mask_of(torch.arange(training), nodes),
        mask_of(torch.arange(training, training + valid), nodes),
        mask_of(testing, nodes),
    )
    return node_task(edges, SparseMatrix.of(row_normalised(words)), labels, split)


def _matrix(path: Path) -> Tensor:
    arrays = read_pickle(path)
    if not isinstance(arrays, CsrArrays):
        raise ValueError(f"{path} holds no CSR matrix")
    try:
        return csr_from_arrays(arrays.indptr, arrays.indices, arrays.data, arrays.shape)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _one_hot(path: Path) -> Tensor:
    """Classes (nodes, C), a 1 at each node's class."""
    classes = read_pickle(path)
    if not isinstance(classes, np.ndarray) or classes.ndim != 2:
        raise ValueError(f"{path} holds no matrix of classes")
    return torch.from_numpy(classes)


def _test_indices(path: Path) -> Tensor:
    try:
        indices = torch.tensor([int(line) for line in path.read_text().split()], dtype=torch.long)
    except ValueError:
        raise ValueError(f"{path} must hold one whole number in each line") from None
    if not len(indices) or len(indices.unique()) != len(indices):
        raise ValueError(f"{path} must name each test node once")
    return indices


def _edges(path: Path) -> Tensor:
    """Edges (2, E) of a dict from each node to the list of its neighbours."""
    neighbours = read_pickle(path)
    if not isinstance(neighbours, Mapping):
        raise ValueError(f"{path} holds no dict of neighbours")
    try:
        pairs = [(node, other) for node, others in neighbours.items() for other in others]
        return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).t()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{path} names nodes by other than whole numbers") from None

"""torch_geometric's `Data` as an input format, without needing the package: only its attributes are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdeq.data.graphs import Graph, NodeTask, mask_of, node_task
from cdeq.data.sparse import SparseMatrix, csr_from_entries


def from_pyg(data: Any, *, split: tuple[Tensor, Tensor, Tensor] | None = None) -> NodeTask:
    """The task in a `Data` with x (N, F), dense or torch sparse, edge_index (2, E), y (N,) or (N, 1), and masks.

    `split` takes the place of the data's train_mask, val_mask and test_mask: three masks (N,), or the indices of
    nodes. Edges count in both directions and once, without weights; features are kept as given.
    """
    features, edges, labels = (_tensor(data, name) for name in ("x", "edge_index", "y"))
    if features.ndim != 2:
        raise ValueError(f"x must be features (N, F), not {tuple(features.shape)}")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels.flatten()
    nodes = features.shape[0]
    masks = _masks(data) if split is None else split
    train, valid, test = (_as_mask(mask, nodes) for mask in masks)
    return node_task(edges, _features(features), labels, (train, valid, test))


def is_pyg(batch: Any) -> bool:
    """Whether this is a `Data`, or several as one `Batch`."""
    return any(kind.__module__.startswith("torch_geometric.data") for kind in type(batch).__mro__)


def pyg_batch(data: Any) -> tuple[Graph, Tensor | None]:
    """A `Data`, or a `Batch` of a torch_geometric loader, as a batch (x, y): its graph, and a label for each node.

    With a train_mask only its nodes have labels, the others -100, which no loss counts. Without y there are none.
    """
    features, edges = _tensor(data, "x"), _tensor(data, "edge_index")
    nodes, labels = features.shape[0], getattr(data, "y", None)
    everywhere = torch.ones(nodes, dtype=torch.bool, device=features.device)
    known = torch.where(everywhere, -100, 0) if labels is None else _tensor(data, "y")
    if known.shape not in ((nodes,), (nodes, 1)):
        raise ValueError(
            f"y must be a class for each of the {nodes} nodes, not {tuple(known.shape)}; "
            "without labels of nodes, set it to None"
        )
    task = node_task(edges, _features(features), known.reshape(nodes), (everywhere,) * 3)
    if labels is None:
        return task.graph, None
    mask = getattr(data, "train_mask", None)
    return task.labelled(everywhere if mask is None else _as_mask(mask, nodes))


def _tensor(data: Any, name: str) -> Tensor:
    value = getattr(data, name, None)
    if not isinstance(value, Tensor):
        kind = "nothing" if value is None else type(value).__name__
        raise ValueError(f"the data must have a tensor {name}, not {kind}")
    return value


def _masks(data: Any) -> tuple[Tensor, Tensor, Tensor]:
    names = ("train_mask", "val_mask", "test_mask")
    missing = [name for name in names if getattr(data, name, None) is None]
    if missing:
        raise ValueError(
            f"the data has no {', no '.join(missing)}: pass split=(train, valid, test), "
            "three masks or index tensors"
        )
    train, valid, test = (_tensor(data, name) for name in names)
    if train.ndim > 1 or valid.ndim > 1 or test.ndim > 1:
        raise ValueError(
            "the data has several splits: pass one, as split=(data.train_mask[:, 0], "
            "data.val_mask[:, 0], data.test_mask[:, 0])"
        )
    return train, valid, test


def _as_mask(nodes_of_split: Tensor, nodes: int) -> Tensor:
    if nodes_of_split.dtype == torch.bool:
        return nodes_of_split
    if nodes_of_split.is_floating_point() or nodes_of_split.ndim != 1:
        raise ValueError(
            f"a split must be masks or indices, not {nodes_of_split.dtype} {nodes_of_split.ndim}-D"
        )
    if nodes_of_split.dtype == torch.uint8:
        raise ValueError("a split in uint8 may be masks or indices: convert it to bool or long")
    return mask_of(nodes_of_split.long(), nodes)


def _features(x: Tensor) -> Tensor | SparseMatrix:
    if x.layout == torch.strided:
        return x.float()
    entries = x.to_sparse_coo().coalesce()
    rows, columns = entries.indices()
    shape = (x.shape[0], x.shape[1])
    return SparseMatrix.of(csr_from_entries(rows, columns, entries.values().float(), shape))

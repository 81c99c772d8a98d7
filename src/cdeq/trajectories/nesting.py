"""Inputs as a flat table of named tensors and a description of how they were nested.

The description is JSON: "tensor", null, {"tuple": [..]}, {"list": [..]}, {"dict": [[key, ..]]},
{"named": [class, [[field, ..]]]} for a named tuple or "csr" for a sparse matrix, whose shape is among its
tensors, since one graph has more nodes than another.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cdeq.data.huggingface import is_table
from cdeq.data.pyg import is_pyg, pyg_batch
from cdeq.equilibrium.trees import children, is_named_tuple
from cdeq.trajectories.sparse import dense_pieces, from_pieces

Structure = Any
CSR_PIECES = ("rows", "columns", "values")
CSR_SHAPE = "shape"


def flatten(value: Any, name: str) -> tuple[Structure, dict[str, Tensor]]:
    """The structure of a tree of tensors, and its tensors by dotted name: `x`, `x.0`, `x.key`."""
    if value is None:
        return None, {}
    if isinstance(value, Tensor):
        return _flatten_tensor(value, name)
    kind = _kind(value)
    if kind is None:
        raise TypeError(
            f"{name} is of type {type(value).__name__}; "
            "an input is a tensor or a (named) tuple, list or dict of them, nested as you like"
        )
    parts = children(value)
    if kind == "dict" and not all(isinstance(key, str) for key in parts):
        raise TypeError(f"{name} is a dict whose keys are not all strings: {list(parts)}")
    structures: list[Structure] = []
    table: dict[str, Tensor] = {}
    for key, part in parts.items():
        structure, tensors = flatten(part, _child(name, key))
        structures.append(structure if kind in ("tuple", "list") else [key, structure])
        table |= tensors
    if kind == "named":
        path = f"{type(value).__module__}:{type(value).__qualname__}"
        return {kind: [path, structures]}, table
    return {kind: structures}, table


def unflatten(structure: Structure, name: str, read: Callable[[str], Tensor]) -> Any:
    """The inverse of `flatten`; `read` gives the tensor of a name."""
    if structure is None:
        return None
    if structure == "tensor":
        return read(name)
    if structure == "csr":
        pieces = {piece: read(f"{name}.{piece}") for piece in CSR_PIECES}
        return from_pieces(torch.sparse_csr, pieces, read(f"{name}.{CSR_SHAPE}").tolist())
    ((kind, entries),) = structure.items()
    path, entries = entries if kind == "named" else ("", entries)
    keyed: Any = enumerate(entries) if kind in ("tuple", "list") else entries
    parts: dict[Any, Any] = {key: unflatten(part, _child(name, key), read) for key, part in keyed}
    if kind == "dict":
        return parts
    if kind == "named":
        return _named_tuple(path, list(parts))(*parts.values())
    return tuple(parts.values()) if kind == "tuple" else list(parts.values())


def check_loader(loader: Any) -> None:
    """Refuse one batch, or single samples, where batches are asked for."""
    if isinstance(loader, Tensor):
        raise TypeError(
            f"a tensor {tuple(loader.shape)} is one batch: give a loader, or a list of batches, [x] or [(x, y)]"
        )
    if is_pyg(loader):
        raise TypeError("a graph is one batch: give a loader, or a list of batches, [data]")
    if is_table(loader):
        raise TypeError(
            "a table of Hugging Face gives single rows: say which columns are input and labels, as "
            "cdeq.data.from_hf(table, x='image', y='label', batch_size=64)"
        )
    if isinstance(loader, Dataset):
        raise TypeError(
            f"a {type(loader).__name__} gives single samples: batch them, DataLoader(dataset, batch_size=64)"
        )
    if (
        isinstance(loader, tuple)
        and len(loader) == 2
        and all(isinstance(t, Tensor) for t in loader)
    ):
        shapes = " and ".join(str(tuple(t.shape)) for t in loader)
        raise TypeError(
            f"a pair of tensors {shapes} is one batch (x, y): give a list of batches, [(x, y)]"
        )


def split_batch(batch: Any) -> tuple[Any, Any]:
    """A loader's batch as (x, y): two elements are (x, y), one is (x,), all else is x itself.

    A graph of torch_geometric is a pair, too: see `pyg_batch`.
    """
    if is_pyg(batch):
        return pyg_batch(batch)
    if type(batch) in (tuple, list) and len(batch) in (1, 2):
        return batch[0], batch[1] if len(batch) == 2 else None
    return batch, None


def flatten_batch(x: Any, y: Any) -> tuple[dict[str, Structure], dict[str, Tensor]]:
    """`flatten` for x and y together."""
    x_structure, x_tensors = flatten(x, "x")
    y_structure, y_tensors = flatten(y, "y")
    return {"x": x_structure, "y": y_structure}, {**x_tensors, **y_tensors}


def _flatten_tensor(tensor: Tensor, name: str) -> tuple[Structure, dict[str, Tensor]]:
    if tensor.layout == torch.strided:
        return "tensor", {name: tensor}
    if tensor.layout != torch.sparse_csr:
        raise TypeError(
            f"{name} is a {tensor.layout} tensor, which cannot be stored; "
            "pass its indices and values, or keep it in the model"
        )
    pieces = dense_pieces(tensor) | {CSR_SHAPE: torch.tensor(tensor.shape)}
    return "csr", {f"{name}.{piece}": part for piece, part in pieces.items()}


def _kind(value: Any) -> str | None:
    if isinstance(value, dict):
        return "dict"
    if is_named_tuple(value):
        return "named"
    return type(value).__name__ if type(value) in (tuple, list) else None


def _child(name: str, key: str | int) -> str:
    """Dots separate names, so a dot inside a key is escaped."""
    return f"{name}.{str(key).replace('%', '%25').replace('.', '%2E')}"


def _named_tuple(path: str, fields: list[str]) -> Any:
    """The class of a named tuple if it is imported with these fields, else a plain one like it."""
    module, _, name = path.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    if getattr(found, "_fields", None) == tuple(fields):
        return found
    return namedtuple(name.rpartition(".")[2], fields)

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

from cdeq.trajectories.sparse import dense_pieces, from_pieces

Structure = Any
CSR_PIECES = ("rows", "columns", "values")
CSR_SHAPE = "shape"


def flatten(value: Any, name: str) -> tuple[Structure, dict[str, Tensor]]:
    """The structure of a nest of tensors, and its tensors by dotted name: `x`, `x.0`, `x.key`."""
    if value is None:
        return None, {}
    if isinstance(value, Tensor):
        if value.layout == torch.sparse_csr:
            table = {f"{name}.{p}": t for p, t in dense_pieces(value).items()}
            return "csr", table | {f"{name}.{CSR_SHAPE}": torch.tensor(value.shape)}
        if value.layout != torch.strided:
            raise TypeError(
                f"{name} is a {value.layout} tensor, which cannot be stored; "
                "pass its indices and values, or keep it in the model"
            )
        return "tensor", {name: value}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{name} is a dict whose keys are not all strings: {list(value)}")
        parts = [(key, flatten(v, f"{name}.{_escape(key)}")) for key, v in value.items()]
        structure: Structure = {"dict": [[key, s] for key, (s, _) in parts]}
        return structure, {n: t for _, (_, table) in parts for n, t in table.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = [(f, flatten(getattr(value, f), f"{name}.{f}")) for f in value._fields]
        structure = {"named": [_class_path(value), [[f, s] for f, (s, _) in named]]}
        return structure, {n: t for _, (_, table) in named for n, t in table.items()}
    if type(value) in (tuple, list):
        items = [flatten(v, f"{name}.{i}") for i, v in enumerate(value)]
        structure = {type(value).__name__: [s for s, _ in items]}
        return structure, {n: t for _, table in items for n, t in table.items()}
    raise TypeError(
        f"{name} is of type {type(value).__name__}; "
        "an input is a tensor or a (named) tuple, list or dict of them, nested as you like"
    )


def unflatten(structure: Structure, name: str, read: Callable[[str], Tensor]) -> Any:
    """The inverse of `flatten`; `read` gives the tensor of a name."""
    if structure is None:
        return None
    if structure == "tensor":
        return read(name)
    if structure == "csr":
        pieces = {piece: read(f"{name}.{piece}") for piece in CSR_PIECES}
        return from_pieces(torch.sparse_csr, pieces, read(f"{name}.{CSR_SHAPE}").tolist())
    ((kind, children),) = structure.items()
    if kind == "dict":
        return {key: unflatten(s, f"{name}.{_escape(key)}", read) for key, s in children}
    if kind == "named":
        path, fields = children
        parts = [unflatten(s, f"{name}.{f}", read) for f, s in fields]
        return _named_tuple(path, [f for f, _ in fields])(*parts)
    items = [unflatten(s, f"{name}.{i}", read) for i, s in enumerate(children)]
    return tuple(items) if kind == "tuple" else items


def map_nest(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `function` to every tensor of a nest."""
    structure, table = flatten(value, "x")
    return unflatten(structure, "x", lambda name: function(table[name]))


def split_batch(batch: Any) -> tuple[Any, Any]:
    """A loader's batch as (x, y): two elements are (x, y), one is (x,), all else is x itself."""
    if type(batch) in (tuple, list) and len(batch) in (1, 2):
        return batch[0], batch[1] if len(batch) == 2 else None
    return batch, None


def flatten_batch(x: Any, y: Any) -> tuple[dict[str, Structure], dict[str, Tensor]]:
    """`flatten` for x and y together."""
    x_structure, x_tensors = flatten(x, "x")
    y_structure, y_tensors = flatten(y, "y")
    return {"x": x_structure, "y": y_structure}, {**x_tensors, **y_tensors}


def _class_path(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _named_tuple(path: str, fields: list[str]) -> Any:
    """The class of a named tuple if it is imported with these fields, else a plain one like it."""
    module, _, name = path.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    if getattr(found, "_fields", None) == tuple(fields):
        return found
    return namedtuple(name.rpartition(".")[2], fields)


def _escape(key: str) -> str:
    """Dots separate names, so a dot inside a key is spelt otherwise."""
    return key.replace("%", "%25").replace(".", "%2E")

"""Trees: tensors in dicts, lists, tuples, named tuples and dataclasses, nested as a model likes.

Inputs and contexts come in such trees. Whatever else is met in one is a leaf, and is left as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def children(tree: Any) -> dict[Any, Any]:
    """The parts of a node by key, index or field, in order; empty for a leaf."""
    if isinstance(tree, dict):
        return tree
    if is_named_tuple(tree):
        return tree._asdict()
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type | nn.Module):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return {}


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if tree is None:
        return []
    parts = tree if isinstance(tree, (list, tuple)) else children(tree).values()
    return [tensor for part in parts for tensor in tensors_in(part)]


def named_tensors(tree: Any, name: str) -> dict[str, Tensor]:
    """The tensors of a tree by name, in order: `name`, or for a part of it `name_key`."""
    if isinstance(tree, Tensor):
        return {name: tree}
    found: dict[str, Tensor] = {}
    for key, part in children(tree).items():
        found |= named_tensors(part, f"{name}_{key}" if name else str(key))
    return found


def map_tensors(function: Callable[..., Tensor], *trees: Any) -> Any:
    """The first tree with function(a, b, ...) in place of each tensor, b, ... from the same place in the others."""
    return map_leaves(lambda *x: function(*x) if isinstance(x[0], Tensor) else x[0], *trees)


def map_leaves(function: Callable[..., Any], *trees: Any) -> Any:
    """The same for leaves of any kind. A node is itself, not a copy, where none of its leaves is replaced."""
    parts, *others = map(children, trees)
    if not parts:
        return function(*trees)
    if any(other.keys() != parts.keys() for other in others):
        raise ValueError(
            f"trees of different structure: {list(parts)} and {[list(other) for other in others]}"
        )
    mapped = {key: map_leaves(function, *(t[key] for t in (parts, *others))) for key in parts}
    if all(mapped[key] is part for key, part in parts.items()):
        return trees[0]
    return _rebuilt(trees[0], mapped)


def is_named_tuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def _rebuilt(node: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(node, dict):
        return parts
    if isinstance(node, list | tuple):
        return type(node)(*parts.values()) if is_named_tuple(node) else type(node)(parts.values())
    # Only the fields of a dataclass: what an instance computed from them and cached would be the old one's.
    rebuilt = object.__new__(type(node))
    for name, part in parts.items():  # also of a frozen class, and fields without init
        object.__setattr__(rebuilt, name, part)
    return rebuilt

"""The tensors of a state as groups that share their positions, each seen as one array of features.

A network that corrects or starts a state works on groups: all tensors with the same batch and positions are joined
along their features, so that what belongs together is seen together. Shapes: B samples, F features, ... positions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cdeq.equilibrium.contract import Context, EquilibriumModel, Input, is_batched
from cdeq.equilibrium.memory import Segment
from cdeq.equilibrium.states import State, tensors_of
from cdeq.equilibrium.trees import map_tensors, tensors_in


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors of a state that share their positions.

    `members`: their places in the state. `features`: of each of them. `axis`: the axis of the features. `sources`: the
    context's tensors, by place, on the same positions, and `source_features`, of all of them together.
    """

    members: tuple[int, ...]
    features: tuple[int, ...]
    axis: int
    ndim: int
    sources: tuple[int, ...]
    source_features: int

    @property
    def width(self) -> int:
        """Features of all members together."""
        return sum(self.features)

    @property
    def is_image(self) -> bool:
        """(B, C, H, W): positions have neighbours in two directions."""
        return self.ndim == 4 and self.axis == 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Group:
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**plain)


def context_tensors(context: Context) -> list[Tensor]:
    """The dense floating tensors of a context, in order."""
    return [
        tensor
        for tensor in tensors_in(context)
        if tensor.layout == torch.strided and tensor.is_floating_point()
    ]


def shared_tensors(teacher: EquilibriumModel, x: Input, context: Context, state: State) -> set[int]:
    """Places of the context's tensors that belong to no single sample of a batch with a state like this one.

    A table of positions may by chance be as long as the batch and the text; with another number of samples it stays
    as it is. Of a text's memory, which may be as long as the text, there may be none for the next input.
    """
    tensors = context_tensors(context)
    memory = {id(tensor) for tensor in (x.memory if isinstance(x, Segment) else ())}
    shared = {i for i, tensor in enumerate(tensors) if id(tensor) in memory}
    if not is_batched(teacher):
        return shared
    size = len(tensors_of(state)[0])
    rows = [0, 0] if size == 1 else [0]

    def cut(tensor: Tensor) -> Tensor:
        own = tensor.layout == torch.strided and tensor.ndim and len(tensor) == size
        return tensor[rows] if own else tensor

    try:
        others = context_tensors(teacher.inject(map_tensors(cut, x)))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return shared  # its inputs cannot be cut like that: no more is known
    if len(others) == len(tensors):
        shared |= {i for i, other in enumerate(others) if other.shape[:1] != (len(rows),)}
    return shared


def groups_of(
    context: Context, state: State, axes: list[int], shared: Collection[int] = ()
) -> list[Group]:
    """The groups of states like this one, and what each of them sees of the context that is not `shared`."""
    tensors, places = context_tensors(context), dict[tuple[Any, ...], list[int]]()
    parts = tensors_of(state)
    for i, (z, axis) in enumerate(zip(parts, axes, strict=True)):
        places.setdefault((axis, z.ndim, _without(z.shape, axis)), []).append(i)
    groups = []
    for (axis, ndim, positions), members in places.items():
        sources = [
            i
            for i, u in enumerate(tensors)
            if i not in shared and u.ndim == ndim and _without(u.shape, axis) == positions
        ]
        groups.append(
            Group(
                members=tuple(members),
                features=tuple(parts[i].shape[axis] for i in members),
                axis=axis,
                ndim=ndim,
                sources=tuple(sources),
                source_features=sum(tensors[i].shape[axis] for i in sources),
            )
        )
    return groups


def joined(group: Group, state: State) -> Tensor:
    """The members of a group side by side along their features."""
    parts = tensors_of(state)
    if len(group.members) == 1:
        return parts[group.members[0]]
    return torch.cat([parts[i] for i in group.members], dim=group.axis)


def sources_of(group: Group, context: Context) -> list[Tensor]:
    """What a network may know of the context at a position."""
    tensors = context_tensors(context)
    return [tensors[i] for i in group.sources]


def seen(group: Group, context: Context, state: State) -> Tensor:
    """What a network may know of a position: the context there, and the state."""
    found = [*sources_of(group, context), joined(group, state)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=group.axis)


def state_like(state: State, groups: list[Group], arrays: list[Tensor]) -> State:
    """The inverse of `joined`, group by group."""
    if isinstance(state, Tensor):
        return arrays[0]
    parts = list(state)
    for group, array in zip(groups, arrays, strict=True):
        pieces = array.split(list(group.features), dim=group.axis)
        for i, piece in zip(group.members, pieces, strict=True):
            parts[i] = piece
    return tuple(parts)


def _without(shape: torch.Size, axis: int) -> tuple[int, ...]:
    return tuple(size for i, size in enumerate(shape) if i != axis)

"""Tables of Hugging Face `datasets` as batches (x, y), without needing the package: only their methods are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AS_TENSORS = ("torch", "custom")
"""Formats of a table that are left as they are; `custom` is that of `set_transform`."""


def is_table(data: Any) -> bool:
    """Whether this is a `datasets.Dataset` or `IterableDataset`."""
    return any(kind.__module__.startswith("datasets.") for kind in type(data).__mro__)


def from_hf(
    data: Any, *, x: str | Sequence[str], y: str | None = None, batch_size: int = 64
) -> TableBatches:
    """Batches for `distill`, `evaluate` and `teach` from a `datasets.Dataset` or `IterableDataset`.

    `x`: the column of inputs, or several, which become a dict. `y`: that of labels; without it batches are `(x,)`.
    A table without a format is read as tensors; one with `set_transform` gives what that makes of it.
    `data` may also be a loader whose batches are dicts, which has its own batch size.
    """
    columns = (x,) if isinstance(x, str) else tuple(x)
    known = getattr(data, "column_names", None)
    _require_columns((*columns, *([] if y is None else [y])), known)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    if is_table(data) and (getattr(data, "format", None) or {}).get("type") not in AS_TENSORS:
        data = data.with_format("torch")
    return TableBatches(data, columns, y, batch_size, single=isinstance(x, str))


@dataclass(frozen=True)
class TableBatches:
    """Batches (x, y) of a table, from its beginning each time."""

    data: Any
    columns: tuple[str, ...]
    label: str | None
    batch_size: int
    single: bool

    def __len__(self) -> int:
        rows = len(self.data)
        return -(-rows // self.batch_size) if is_table(self.data) else rows

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        batches = self.data.iter(self.batch_size) if is_table(self.data) else self.data
        for batch in batches:
            if not isinstance(batch, Mapping):
                raise TypeError(f"a batch must be a dict of columns, not a {type(batch).__name__}")
            label = [] if self.label is None else [self.label]
            _require_columns((*self.columns, *label), batch)
            inputs = {name: _stacked(batch[name], name) for name in self.columns}
            x = inputs[self.columns[0]] if self.single else inputs
            yield (x, *(_stacked(batch[name], name) for name in label))


def _require_columns(names: tuple[str, ...], known: Iterable[str] | None) -> None:
    """`known` is None for a stream whose columns are seen only when it is read."""
    absent = [name for name in names if known is not None and name not in known]
    if known is not None and absent:
        raise ValueError(f"there is no column {absent[0]!r}; there are {', '.join(known)}")


def _stacked(value: Any, name: str) -> Tensor:
    """A column of a batch as one tensor."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.stack([torch.as_tensor(row) for row in value])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the rows of column {name!r} are not numbers of one shape: encode, crop or pad them first, "
            f"by map or set_transform ({error})"
        ) from error

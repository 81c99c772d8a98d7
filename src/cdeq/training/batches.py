"""Batches by the number of the update: what a training that can be resumed asks for, from any loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from cdeq.placement import moved

Batches = Iterable[Any] | Callable[[int], Any]
"""A loader, repeated as often as needed; or a function from the number of an update to its batch."""


def batches_by_number(data: Batches) -> Callable[[int], Any]:
    """`batch_at(update)` of a loader, or the function itself.

    A training that is resumed at update k begins k batches into the loader. It meets the same batches as one that
    was not cut short if the loader gives the same order again: without shuffling, or with a seeded sampler.
    """
    if isinstance(data, Sequence):
        if not data:
            raise ValueError("there are no batches to train on")
        return lambda update: data[update % len(data)]
    if isinstance(data, Iterable):
        return _Numbered(data)
    if callable(data):
        return data
    raise TypeError(f"batches come from a loader or a function, not from {type(data).__name__}")


class FirstBatches(Sequence[Any]):
    """The first `count` batches of a function of the update's number, each made when it is asked for."""

    def __init__(self, batch_at: Callable[[int], Any], count: int):
        self.batch_at, self.length = batch_at, count

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.length:
            raise IndexError(f"batch {number} of {self.length}")
        return self.batch_at(number)


def moved_batches(batch_at: Callable[[int], Any], device: torch.device) -> Callable[[int], Any]:
    """The same batches on a device; one that comes again and again, as a graph does, is moved once."""
    last: list[Any] = [None, None]

    def at(update: int) -> Any:
        batch = batch_at(update)
        if batch is not last[0]:
            last[:] = batch, moved(batch, device)
        return last[1]

    return at


class _Numbered:
    """The batches of a loader in order, from the beginning again when it ends."""

    def __init__(self, loader: Iterable[Any]):
        self.loader, self.next = loader, 0
        self.iterator: Iterator[Any] | None = None

    def __call__(self, update: int) -> Any:
        if self.iterator is None or update < self.next:
            self.iterator, self.next = iter(self.loader), 0
        while True:
            batch = self._take()
            self.next += 1
            if self.next > update:
                return batch

    def _take(self) -> Any:
        assert self.iterator is not None
        for batch in self.iterator:
            return batch
        self.iterator = iter(self.loader)
        for batch in self.iterator:
            return batch
        raise ValueError("there are no batches to train on, or the loader can be read only once")

"""Fingerprints: what a recording depends on, in a form that can be compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from cdeq.trajectories.nesting import Structure, flatten_batch, split_batch
from cdeq.trajectories.sparse import dense_pieces

Fingerprint = dict[str, Any]


def teacher_fingerprint(model: Any) -> Fingerprint:
    """The class's name, and a SHA-256 of it and of the state dict: names, shapes, dtypes and bytes.

    What the state dict does not hold is not seen: code, plain attributes, what a closure hides.
    """
    name = type(model).__qualname__
    digest = hashlib.sha256(name.encode())
    state = model.state_dict() if hasattr(model, "state_dict") else {}
    for key in sorted(state):
        if isinstance(state[key], Tensor):
            update_with_tensor(digest, key, state[key])
        else:
            digest.update(json.dumps([key, repr(state[key])]).encode())
    return {"class": name, "sha256": digest.hexdigest()}


def solver_fingerprint(solver: Any, max_steps: int, tol: float) -> Fingerprint:
    """A solver's class and fields, the budget and the tolerance."""
    if not dataclasses.is_dataclass(solver) or isinstance(solver, type):
        raise TypeError(
            f"the solver {type(solver).__name__} is not a dataclass, whose fields could be recorded"
        )
    fields = {f.name: _plain(getattr(solver, f.name)) for f in dataclasses.fields(solver)}
    return {
        "class": type(solver).__qualname__,
        "fields": fields,
        "max_steps": int(max_steps),
        "tol": float(tol),
    }


class BatchDigest:
    """A running SHA-256 over batches: their structure, and every tensor of x and y."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, structure: Structure, tensors: dict[str, Tensor]) -> None:
        self._digest.update(json.dumps(structure).encode())
        for name, tensor in tensors.items():
            update_with_tensor(self._digest, name, tensor)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def data_fingerprint(loader: Iterable[Any], size: int, limit: int | None) -> list[str]:
    """A SHA-256 for each `size` batches of a loader, `limit` batches in all."""
    digests: list[BatchDigest] = []
    for i, batch in enumerate(islice(loader, limit)):
        if i % size == 0:
            digests.append(BatchDigest())
        digests[-1].update(*flatten_batch(*split_batch(batch)))
    return [digest.hexdigest() for digest in digests]


def update_with_tensor(digest: Any, name: str, tensor: Tensor) -> None:
    """Add a tensor to a running hash: name, dtype, shape, bytes."""
    tensor = tensor.detach()
    for part, piece in dense_pieces(tensor).items():
        header = [name, part, str(piece.dtype), list(tensor.shape), list(piece.shape)]
        digest.update(json.dumps(header).encode())
        digest.update(piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)

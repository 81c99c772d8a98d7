"""Tensors made from files, kept with a description of what they were made from, so that nothing stale is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cdeq.files import atomic_write_bytes

KEY_DIGITS = 16  # of a key, in the names of files; the files hold all of it


def key_of(**sources: Any) -> str:
    """A digest of all that kept tensors depend on."""
    return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()


def keep_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write tensors, with `about` and a checksum of each; the file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    atomic_write_bytes(path, save(tensors, metadata=about | _checksums(tensors)))


def kept_tensors(path: Path, about: dict[str, str]) -> dict[str, Tensor] | None:
    """What `keep_tensors` wrote; None if there is nothing, something damaged, or something about other sources."""
    try:
        with safe_open(path, framework="pt") as file:
            recorded = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    return tensors if recorded == about | _checksums(tensors) else None


def _checksums(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Of type and shape, too: a damaged header may read the same bytes as something else."""
    found = {}
    for name, tensor in tensors.items():
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().numpy().data)
        found[name] = digest.hexdigest()
    return found

"""Copies of modules, also of those that hold sparse matrices, which deepcopy refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def copy_of(module: Module, shared: Iterable[nn.Module] = ()) -> Module:
    """A deep copy that has the sparse matrices, and the modules in `shared`, in common with the original."""
    memo: dict[int, Any] = {id(part): part for part in shared}
    for part in module.modules():
        for value in (*part.buffers(recurse=False), *vars(part).values()):
            if isinstance(value, Tensor) and value.layout != torch.strided:
                memo[id(value)] = value
    return copy.deepcopy(module, memo)


def frozen_copy(teacher: nn.Module) -> nn.Module:
    """A deep copy in evaluation mode, without gradients; sparse matrices are shared, not copied."""
    return copy_of(teacher).eval().requires_grad_(False)

"""Copies of modules, also of those that hold sparse matrices, which deepcopy refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def copy_of(module: Module, shared: Iterable[nn.Module | Tensor] = ()) -> Module:
    """A deep copy that has the sparse matrices, and what is in `shared`, in common with the original."""
    memo: dict[int, Any] = {id(part): part for part in shared}
    for part in module.modules():
        for value in (*part.buffers(recurse=False), *vars(part).values()):
            if not isinstance(value, Tensor):
                continue
            if value.layout != torch.strided:
                memo[id(value)] = value
            elif value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()  # deepcopy refuses what a graph computed
    return copy.deepcopy(module, memo)


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that are plain attributes of a model's modules, neither parameters nor buffers, by name."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def frozen_copy(teacher: nn.Module) -> nn.Module:
    """A deep copy in evaluation mode, without gradients; sparse matrices are shared, not copied."""
    return copy_of(teacher).eval().requires_grad_(False)

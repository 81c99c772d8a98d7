"""A GPU on paper: torch's meta device, which knows shapes and no numbers, as if it were one.

Inside `OnPaper()` every tensor on the meta device counts as one in a GPU's memory until nothing refers to it, and an
operation that meets one there and one on the CPU is an error, as it would be on a GPU. Where a program asks the device
for a number, to decide how to go on, the answer is yes, or 1: solvers then spend their budget, and of places to choose
from all are chosen, which is the most that memory can be asked for.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
CPU = torch.device("cpu")
FEW = 4096
"""Numbers up to which a copy to the CPU is a real tensor, of ones; a larger one knows its shape alone, as here."""
MANY = 2**24
"""Numbers above which memory on the CPU, of recorded trajectories, is not taken for real either."""

aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)


class WrongDevice(Exception):
    """A tensor on the CPU where the device's own are computed with."""


class OnPaper(TorchDispatchMode):
    """Adds up the bytes of all tensors on the device: `live` now, `peak` at most since `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._counted: dict[int, weakref.ref[Any]] = {}
        self._on_host: dict[int, weakref.ref[Any]] = {}

    def begin(self) -> None:
        """From here on `peak` is counted anew."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        hosted = [t for t in given if not self._is_here(t) and t.ndim]
        if func not in COPIES and hosted and any(self._is_here(t) for t in given):
            sizes = ", ".join(str(tuple(t.shape)) for t in hosted)
            raise WrongDevice(
                f"{func} meets tensors on the device and on the CPU, of shape {sizes}"
            )
        result = self._answer(func, args, kwargs)
        # Where it says, or where what it is made of is; what is made of nothing, on the CPU.
        on_host = (kwargs.get("device") or CPU) == CPU and (bool(hosted) or not given)
        on_host = on_host or kwargs.get("device") == CPU
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device == DEVICE:
                self._keep(tensor, on_host)
        return result

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operation gives; shapes that would depend on numbers are as large as they can be."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        known = first is None or first.device != DEVICE
        if func is aten._local_scalar_dense.default and not known:
            return 1
        if func is aten._to_copy.default and not known and kwargs.get("device") == CPU:
            like: Any = {"dtype": kwargs.get("dtype") or first.dtype}
            if first.numel() <= FEW:
                return torch.ones(first.shape, **like)
            return torch.empty(first.shape, device=DEVICE, **like)
        if func is aten.copy_.default and known and args[1].device == DEVICE:
            return first  # to the CPU: what it is there is not known
        if func is aten.nonzero.default and not known:
            return first.new_empty((first.numel(), first.ndim), dtype=torch.int64)
        if func is aten.mm.default and first.layout == torch.sparse_csr and not known:
            return args[1].new_empty(
                (first.shape[0], args[1].shape[1])
            )  # torch has no such product
        if func is aten.empty.memory_format and _is_large_on_host(args[0], kwargs):
            return func(*args, **{**kwargs, "device": DEVICE})
        return func(*args, **kwargs)

    def _is_here(self, tensor: Tensor) -> bool:
        """On the device; not on the CPU, nor what stands for something large there."""
        if tensor.device != DEVICE:
            return False
        return tensor.layout != torch.strided or id(tensor.untyped_storage()) not in self._on_host

    def _keep(self, tensor: Tensor, on_host: bool) -> None:
        """Count what holds the tensor, once, until it is gone."""
        if tensor.layout != torch.strided:
            return  # its indices and values are tensors of their own
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._counted or key in self._on_host:
            return
        if on_host:
            self._on_host[key] = weakref.ref(storage, lambda _: self._on_host.pop(key, None))
            return

        def forget(_: Any) -> None:
            if self._counted.pop(key, None) is not None:
                self.live -= size

        self._counted[key] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


def _is_large_on_host(shape: Any, kwargs: Any) -> bool:
    on_host = (kwargs.get("device") or CPU) == CPU
    return on_host and torch.Size(shape).numel() > MANY

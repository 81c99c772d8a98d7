"""Where a model and its batches are, and how finely its products are computed.

Weights, states and residuals are kept in at least single precision. With `bf16` or `fp16` the products inside a model
are computed in half precision by torch's autocast; what a model answers is put back to single precision where it
becomes a state (`in_single`), and the solvers' own products, sums over a whole state, are not cast (`not_cast`).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from cdeq.equilibrium.states import State, map_state, tensors_of
from cdeq.equilibrium.trees import map_tensors

Precision = Literal["fp32", "bf16", "fp16"]
AnyState = TypeVar("AnyState", bound=State)
HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PlacementError(ValueError):
    """A device that is not there, or a precision that it cannot compute in; the message is all that a user needs."""


def find_device(name: str | torch.device) -> torch.device:
    """The device of this name; refuses, in one line, one that this torch or this machine does not have.

    Under torchrun `cuda` is that of the process, by its number on the machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PlacementError(
            f"device {name}: torch knows no such device; some are cpu, cuda, cuda:1 and mps"
        ) from None
    if device.type == "cuda" and not torch.backends.cuda.is_built():
        raise PlacementError(f"device {name}: this torch has no CUDA")
    if device == torch.device("cuda") and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "meta":
        raise PlacementError("device meta: it knows shapes only, and computes no numbers")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise PlacementError(f"device {name} is not available here: {why}") from None
    return device


def representative_tensor(model: object) -> Tensor:
    """A tensor whose device and dtype stand for the model's; one of single precision on the CPU if it has none."""
    tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    return next((t for t in tensors if t.is_floating_point()), torch.empty(0))


def dtype_beside(model: object, state: State) -> torch.dtype:
    """The dtype of what works on a model's states: theirs or that of its weights, if it has any; single at least."""
    return torch.promote_types(representative_tensor(model).dtype, tensors_of(state)[0].dtype)


def moved(tree: Any, device: torch.device) -> Any:
    """A batch, nested as it likes, with all its tensors on a device; itself where they are there already."""
    return map_tensors(lambda tensor: tensor.to(device), tree)


def beside(model: object, batch: Any) -> Any:
    """A batch where the model's weights are; as it is for a model without any."""
    if not isinstance(model, nn.Module) or not [*model.parameters(), *model.buffers()]:
        return batch
    return moved(batch, representative_tensor(model).device)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A device and a precision that go together; made by `of`, which checks that they do."""

    device: torch.device
    precision: Precision = "fp32"

    @classmethod
    def of(
        cls,
        model: object,
        device: str | torch.device | None = None,
        precision: Precision = "fp32",
        *,
        training: bool = False,
    ) -> Placement:
        """The model's own device; or another one, to which the model is then moved in place."""
        if precision not in get_args(Precision):
            raise PlacementError(
                f"precision is one of {', '.join(get_args(Precision))}, not {precision}"
            )
        place = representative_tensor(model).device if device is None else find_device(device)
        if training and precision == "fp16" and place.type == "cpu":
            raise PlacementError(
                "precision fp16: nothing is trained in it on a CPU, which is slow in it; use bf16"
            )
        if device is not None and isinstance(model, nn.Module):
            model.to(place)
        return cls(device=place, precision=precision)

    def computing(self) -> AbstractContextManager[Any]:
        """Inside, models compute their products in this precision."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, HALF[self.precision])

    def scaler(self) -> torch.amp.GradScaler:
        """What keeps small gradients from vanishing in fp16; it does nothing in other precisions."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")


ON_CPU = Placement(device=torch.device("cpu"))


def not_cast(like: State) -> AbstractContextManager[Any]:
    """Inside, products of tensors on the device of `like` are computed in their own precision, autocast or not."""
    kind = tensors_of(like)[0].device.type
    return torch.autocast(kind, enabled=False) if _is_cast(kind) else nullcontext()


def in_single(state: AnyState) -> AnyState:
    """What a model answers under autocast, in at least single precision; as it is where nothing is cast."""
    if not _is_cast(tensors_of(state)[0].device.type):
        return state
    return map_state(lambda t: t.to(torch.promote_types(t.dtype, torch.float32)), state)  # type: ignore[return-value]


def is_plain(*states: State) -> bool:
    """Whether nothing but numbers of one dtype are computed from these: no gradients, no autocast, no graph."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    tensors = [tensor for state in states for tensor in tensors_of(state)]
    same = len({tensor.dtype for tensor in tensors}) == 1
    return same and not _is_cast(tensors[0].device.type)


def _is_cast(kind: str) -> bool:
    return kind != "meta" and torch.is_autocast_enabled(kind)  # of which torch knows no autocast

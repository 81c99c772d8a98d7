"""States: a tensor or a tuple of tensors, seen by the mathematics as one matrix.

Shapes: B samples, D numbers in each sample (all tensors of the state together).
A state with a batch axis has it first in every tensor; a state without one is a single sample, B = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

State = Tensor | tuple[Tensor, ...]
"""A tensor, or the tensors of a multiscale model; a batch is along their first axis."""


def tensors_of(state: State) -> tuple[Tensor, ...]:
    """The tensors of a state, in order."""
    return (state,) if isinstance(state, Tensor) else tuple(state)


def map_state(function: Callable[..., Tensor], *states: State) -> State:
    """Apply `function` tensor by tensor to states of the same structure."""
    if isinstance(states[0], Tensor):
        return function(*states)
    return tuple(function(*parts) for parts in zip(*states, strict=True))


@dataclass(frozen=True)
class StateLayout:
    """How a state is laid out, so that it can be flattened to (B, D) and restored."""

    shapes: tuple[torch.Size, ...]
    is_tuple: bool
    batched: bool

    @classmethod
    def of(cls, state: State, batched: bool = True) -> StateLayout:
        tensors = tensors_of(state)
        if not tensors or not all(isinstance(t, Tensor) for t in tensors):
            raise TypeError(
                f"a state is a tensor or a tuple of tensors, not {type(state).__name__}"
            )
        if not all(t.is_floating_point() for t in tensors):
            raise TypeError("a state must be of a floating-point dtype")
        if len({(t.dtype, t.device) for t in tensors}) != 1:
            raise TypeError("the tensors of a state must share one dtype and one device")
        if batched:
            if any(t.ndim == 0 for t in tensors):
                raise ValueError(
                    "a state with a batch axis needs at least one axis; or say batched=False"
                )
            sizes = {t.shape[0] for t in tensors}
            if len(sizes) != 1:
                raise ValueError(
                    f"the tensors of a state disagree on the batch size: {sorted(sizes)}"
                )
        return cls(tuple(t.shape for t in tensors), not isinstance(state, Tensor), batched)

    @property
    def batch(self) -> int:
        return self.shapes[0][0] if self.batched else 1

    @cached_property
    def sizes(self) -> list[int]:
        """How many numbers each sample has in each tensor; they add up to D."""
        return [(s[1:] if self.batched else s).numel() for s in self.shapes]

    def resized(self, batch: int) -> StateLayout:
        """The layout of the same states of another number of samples."""
        if not self.batched or batch == self.batch:
            return self
        shapes = tuple(torch.Size((batch, *shape[1:])) for shape in self.shapes)
        return StateLayout(shapes, self.is_tuple, self.batched)

    def flatten(self, state: State) -> Tensor:
        """The state as a matrix (B, D); a view where memory allows."""
        if isinstance(state, Tensor) and not self.is_tuple and state.shape == self.shapes[0]:
            return state.reshape(self.batch, self.sizes[0])  # the usual case, at every step
        tensors = tensors_of(state)
        shapes = tuple(t.shape for t in tensors)
        if shapes != self.shapes or isinstance(state, Tensor) == self.is_tuple:
            wanted, got = ([tuple(s) for s in each] for each in (self.shapes, shapes))
            raise ValueError(f"a state of shapes {wanted} was expected, not one of {got}")
        parts = [t.reshape(self.batch, n) for t, n in zip(tensors, self.sizes, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def restore(self, flat: Tensor) -> State:
        """The inverse of `flatten`."""
        if not self.is_tuple:
            return flat.reshape(self.shapes[0])
        parts = flat.split(self.sizes, dim=1)
        return tuple(p.reshape(s) for p, s in zip(parts, self.shapes, strict=True))


def sample_norms(state: State, batched: bool = True) -> Tensor:
    """Euclidean norm of each sample, (B,), in at least single precision."""
    return row_norms(StateLayout.of(state, batched).flatten(state))


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half-precision states are measured and mixed in single precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_norms(rows: Tensor) -> Tensor:
    """Euclidean norm of each row of (B, D); not finite if a number in the row is not."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=norm_dtype(rows.dtype))


FAINT = 0.01
"""An equilibrium smaller than this share of those beside it has no size of its own to measure distances by."""


def sizes_to_measure_by(norms: Tensor) -> Tensor:
    """Norms |z*| (B,), none of them far below the others: where z* is 0, any other state would be infinitely far."""
    usual = torch.where(norms > 0, norms, torch.nan).nanmedian()
    return norms.maximum(torch.where(usual.isnan(), 1.0, FAINT * usual))


def relative_norms(difference: Tensor, reference: Tensor) -> Tensor:
    """|difference| / |reference| for each row of (B, D), with 0 / 0 = 0."""
    top = row_norms(difference)
    return torch.where(top == 0, top, top / row_norms(reference))


def residual_ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """`top` / `bottom`, norms of a residual and its state; where `bottom` is 0, 1 (or 0 for 0 / 0)."""
    bottom = torch.where(bottom > 0, bottom, top)
    return top / bottom.clamp_min(torch.finfo(top.dtype).tiny)


def relative_residual(z: Tensor, fz: Tensor) -> Tensor:
    """|f(z) - z| / |z| for each row of (B, D); at z = 0, where that has no value, 1 (or 0 if f(0) = 0).

    It is 0 at the root of F(z) = f(z) - z (paper, eq:root-finding).
    """
    return residual_ratio(row_norms(subtract(fz, z)), row_norms(z))


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """a - b, subtracted in at least single precision."""
    dtype = norm_dtype(a.dtype)
    return a.to(dtype) - b.to(dtype)


def relative_distance(state: State, target: State, batched: bool = True) -> Tensor:
    """|z - z*| / |z*| for each sample, (B,)."""
    layout = StateLayout.of(target, batched)
    z, star = layout.flatten(state), layout.flatten(target)
    return relative_norms(subtract(z, star), star)

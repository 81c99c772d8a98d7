"""The four-method contract: all that cdeq assumes of an equilibrium model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cdeq.equilibrium.states import State, map_state

Context = Any
Input = Any


@runtime_checkable
class EquilibriumModel(Protocol):
    """A model whose output is read off the equilibrium z = step(z, context).

    Some attributes are optional. `batched` (default True) says whether states have a batch axis, the first
    of every tensor; a graph is one sample and sets it to False. `start_network()` may offer a small module
    `(context) -> state`, the change of `start` that a student learns. `config`, a dict of the class's keyword
    arguments, lets a saved student rebuild its teacher. `project()` is called after each update of training.
    `causal` says that a position of a state (B, L, D) depends on none after it: solvers and students then keep to that.
    `correction_network()` may offer a module for corrected steps, as consistency/correction.py has them.
    `select(context, rows)` gives the context of some samples, by index; without it, see `rows_of_context`.
    `contraction(context)` declares by what factor the map contracts: a `Contraction`, a number q < 1 for the Euclidean
    norm, or None; it may be a plain number instead of a method.
    """

    def inject(self, x: Input) -> Context:
        """All that the map needs of the input, computed once."""

    def start(self, context: Context) -> State:
        """The fixed initial state, usually zeros."""

    def step(self, z: State, context: Context) -> State:
        """One evaluation of the map f, whose equilibrium is z* = f(z*, x) (paper, eq:deq_fixed_point)."""

    def readout(self, z: State, context: Context) -> Tensor:
        """The output at a state."""


class Contraction(NamedTuple):
    """|f(z) - f(y)| <= factor |z - y| for all z, y, with factor < 1, whatever the input.

    Used is only what follows from it, |z - z*| <= |f(z) - z| / (1 - factor), which a model may know that does not
    contract: steps z -> P(z - a G(z)) of a G that is strongly monotone by m and Lipschitz with L have it with the
    factor 1 - a m / (1 + a L).
    `norm`: norms (B,) of the samples of a state; Euclidean over all tensors of a sample if None. `norm_name`: in words.
    """

    factor: float
    norm: Callable[[State], Tensor] | None = None
    norm_name: str = "Euclidean"


def declared_contraction(model: EquilibriumModel, context: Context) -> Contraction | None:
    """What the model declares of itself in this context; None if nothing, or no contraction."""
    declared = getattr(model, "contraction", None)
    if callable(declared):
        declared = declared(context)
    if declared is None:
        return None
    found = declared if isinstance(declared, Contraction) else Contraction(float(declared))
    if not found.factor >= 0:
        raise ValueError(f"a contraction's factor must not be negative, not {found.factor}")
    return found if found.factor < 1 else None


def is_batched(model: EquilibriumModel) -> bool:
    """Whether the model's states have a batch axis."""
    return bool(getattr(model, "batched", True))


def causal_positions(model: EquilibriumModel, z: State) -> int | None:
    """L, for states (B, L, D) of a model that says it is causal; None for all others."""
    if getattr(model, "causal", False) and isinstance(z, Tensor) and z.ndim == 3:
        return z.shape[1]
    return None


def fading_of(model: object) -> float:
    """How much less a position counts for the mixing weights of each one further on: 1 unless a causal model says."""
    return float(getattr(model, "fading", 1.0))


def check_contract(model: object) -> EquilibriumModel:
    """The model itself; refuses, by name, an object that lacks one of the four methods."""
    missing = [
        m for m in ("inject", "start", "step", "readout") if not callable(getattr(model, m, None))
    ]
    if missing:
        raise TypeError(
            f"{type(model).__name__} is not an equilibrium model: it has no {', '.join(missing)}. "
            "Write these methods, or wrap plain functions with cdeq.from_functions."
        )
    return model  # type: ignore[return-value]


class FunctionModel(nn.Module):
    """An equilibrium model from plain functions or modules; see `from_functions`."""

    def __init__(
        self,
        step: Callable[[State, Context], State],
        start: Callable[[Context], State] | None,
        inject: Callable[[Input], Context] | None,
        readout: Callable[[State], Tensor] | None,
        batched: bool,
    ):
        super().__init__()
        self.batched = batched
        # Assigning a module here also registers its parameters.
        self.step_function = step
        self.start_function = start
        self.inject_function = inject
        self.readout_function = readout

    def inject(self, x: Input) -> Context:
        return x if self.inject_function is None else self.inject_function(x)

    def start(self, context: Context) -> State:
        if self.start_function is not None:
            return self.start_function(context)
        return map_state(torch.zeros_like, context)

    def step(self, z: State, context: Context) -> State:
        return self.step_function(z, context)

    def readout(self, z: State, context: Context) -> Tensor:
        return z if self.readout_function is None else self.readout_function(z)  # type: ignore[return-value]


def from_functions(
    step: Callable[[State, Context], State],
    *,
    start: Callable[[Context], State] | None = None,
    inject: Callable[[Input], Context] | None = None,
    readout: Callable[[State], Tensor] | None = None,
    batched: bool = True,
) -> FunctionModel:
    """An equilibrium model from plain functions or modules.

    Modules passed here are registered, so that their weights are distilled; plain functions that close
    over a module hide its weights. Without `start` the context itself gives the shape of a zero state.
    """
    return FunctionModel(step, start, inject, readout, batched)

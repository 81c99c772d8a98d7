"""What every solver is, and the defaults that all solves share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from cdeq.equilibrium.contract import Context, EquilibriumModel
from cdeq.equilibrium.states import State
from cdeq.placement import in_single


class Solver(Protocol):
    """Frozen hyper-parameters and a pure update rule on flat states (B, D).

    Its memory is a tree of tensors with the samples first, and numbers. Some methods are optional.
    `for_input(model, context, z0)`: the solver that suits a model and its input. `start(model, context)`: a better
    first state than the model's own. `missing(k, z, fz, residual, memory)`: its estimate of |z* - z_k| (B,), or None,
    and the memory for the update that follows. `handed_over(memory)` (B,): whether it has gone over from what it
    learned to a plain method. `end(memory)`: the solve that began with this memory is over.
    """

    def init(self, z: Tensor) -> Any:
        """Empty memory for states like `z`."""

    def update(
        self, k: int, z: Tensor, fz: Tensor, residual: Tensor, memory: Any
    ) -> tuple[Tensor, Any]:
        """z_{k+1} from z_k, f(z_k) and f(z_k) - z_k in at least single precision; and the new memory."""


def solver_for(solver: Solver, model: EquilibriumModel, context: Context, z0: State) -> Solver:
    """The solver itself, or what it makes of itself for this model and input."""
    suited = getattr(solver, "for_input", None)
    return solver if suited is None else suited(model, context, z0)


def first_state(solver: Solver | None, model: EquilibriumModel, context: Context) -> State:
    """Where a solve begins: where the solver says, or the model."""
    start = getattr(solver, "start", None)
    return in_single(model.start(context) if start is None else start(model, context))


Callback = Callable[[int, State], None]

TOL = 1e-4
"""The relative residual at which a solve stops, unless a tolerance is given."""
MAX_STEPS = 50
"""Evaluations of f that a solve may spend, unless a budget is given."""


def check_mixing(mixing: float) -> None:
    """Refuse a mixing (the paper's beta) outside (0, 1]."""
    if not 0 < mixing <= 1:
        raise ValueError(f"mixing must be above 0 and at most 1, not {mixing}")

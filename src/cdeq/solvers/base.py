"""What every solver is, and the defaults that all solves share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from cdeq.equilibrium.states import State


class Solver(Protocol):
    """Frozen hyper-parameters and a pure update rule on flat states (B, D)."""

    def init(self, z: Tensor) -> Any:
        """Empty memory for states like `z`."""

    def update(
        self, k: int, z: Tensor, fz: Tensor, residual: Tensor, memory: Any
    ) -> tuple[Tensor, Any]:
        """z_{k+1} from z_k, f(z_k) and f(z_k) - z_k in at least single precision; and the new memory."""


Callback = Callable[[int, State], None]

TOL = 1e-4
"""The relative residual at which a solve stops, unless a tolerance is given."""
MAX_STEPS = 50
"""Evaluations of f that a solve may spend, unless a budget is given."""


def check_mixing(mixing: float) -> None:
    """Refuse a mixing (the paper's beta) outside (0, 1]."""
    if not 0 < mixing <= 1:
        raise ValueError(f"mixing must be above 0 and at most 1, not {mixing}")

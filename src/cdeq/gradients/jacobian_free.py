"""Jacobian-free backpropagation (Fung et al. 2022), also known as the one-step gradient."""

from __future__ import annotations

from dataclasses import dataclass

from cdeq.equilibrium.states import State
from cdeq.gradients.base import AtEquilibrium, Step, detached


@dataclass(frozen=True, kw_only=True)
class JacobianFree(AtEquilibrium):
    """One step with gradient from the detached equilibrium: the implicit gradient with J = 0."""

    def attach(self, step: Step, z_star: State, batched: bool = True) -> State:
        return step(detached(z_star))

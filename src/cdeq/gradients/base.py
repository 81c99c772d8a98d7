"""What a gradient is: a way from a map and a start to a state that remembers where it came from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cdeq.equilibrium.states import State, map_state
from cdeq.solvers import Solution

Step = Callable[[State], State]


class Gradient(Protocol):
    """Frozen hyper-parameters, and the forward pass they ask for."""

    def run(
        self, step: Step, z0: State, solve: Callable[[State], Solution], batched: bool = True
    ) -> Solution:
        """An equilibrium of `step` whose state carries the gradient.

        `solve(z0)` finds the equilibrium without one; a gradient that needs none does not call it.
        """


@dataclass(frozen=True, kw_only=True)
class AtEquilibrium(ABC):
    """Gradients attached to a solved equilibrium: they need not know how it was found."""

    @abstractmethod
    def attach(self, step: Step, z_star: State, batched: bool = True) -> State:
        """A state next to `z_star`, with a gradient to all that `step` depends on but z."""

    def run(
        self, step: Step, z0: State, solve: Callable[[State], Solution], batched: bool = True
    ) -> Solution:
        solution = solve(z0)
        if not torch.is_grad_enabled():
            return solution
        return replace(solution, state=self.attach(step, solution.state, batched))


def mix(z: State, fz: State, weight: float) -> State:
    """(1 - weight) z + weight f(z)."""
    if weight == 1.0:
        return fz
    return map_state(lambda a, b: (1 - weight) * a + weight * b, z, fz)


def detached(z: State) -> State:
    """The same numbers without their past."""
    return map_state(lambda t: t.detach(), z)

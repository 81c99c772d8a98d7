"""The unrolling-based phantom gradient (Geng et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from cdeq.equilibrium.states import State
from cdeq.gradients.base import AtEquilibrium, Step, detached, mix


@dataclass(frozen=True, kw_only=True)
class Phantom(AtEquilibrium):
    """`steps` damped steps z <- (1 - tau) z + tau f(z) from the detached equilibrium.

    `damping` is tau. A truncated Neumann series of the implicit gradient: biased, but cheap, and
    there is no system whose solution may fail.
    """

    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"a phantom gradient takes at least 1 step, not {self.steps}")
        if not 0 < self.damping <= 1:
            raise ValueError(f"the damping is in (0, 1], not {self.damping}")

    def attach(self, step: Step, z_star: State, batched: bool = True) -> State:
        z = detached(z_star)
        for _ in range(self.steps):
            z = mix(z, step(z), self.damping)
        return z

"""Solver time: where on the student's clock, t in [eps, T), a state stands."""

from __future__ import annotations

import math
from collections.abc import Callable

TimeMap = Callable[[int, int, float], float]
"""(k, K, rho) -> the fraction of solver time at which z_k of z_0 ... z_K stands; 1 at most, at k = K."""


def exponential_fraction(k: int, steps: int, rho: float) -> float:
    """1 - e^(-rho k) (paper, eq:tau_rk)."""
    return 1.0 - math.exp(-rho * k)


def linear_fraction(k: int, steps: int, rho: float) -> float:
    """k / K (paper, tab:mapping_function_ablation)."""
    return k / steps


def cosine_fraction(k: int, steps: int, rho: float) -> float:
    """1 - cos(pi k / 2K) (paper, tab:mapping_function_ablation)."""
    return min(1.0 - math.cos(0.5 * math.pi * k / steps), 1.0)  # rounding may pass the end


TIME_MAPS: dict[str, TimeMap] = {
    "exponential": exponential_fraction,
    "linear": linear_fraction,
    "cosine": cosine_fraction,
}


def inference_fraction(j: int, decay: float) -> float:
    """1 - beta^j: the clock of multi-step inference (paper, appendix:time)."""
    return 1.0 - decay**j


def solver_time(fraction: float, eps: float, end: float) -> float:
    """t = eps + fraction (T - eps)."""
    return eps + fraction * (end - eps)

"""Problems z = f(z) whose fixed points are known, for the solvers and all that is built on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdeq.equilibrium.states import State, map_state


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A map, a start and the fixed point, all of one dtype; `picard` tells whether plain iteration converges."""

    f: Callable[[Any], Any]
    z0: State
    solution: State
    batched: bool = True
    picard: bool = True


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _matrix(size: int, norm: float, symmetric: bool) -> Tensor:
    a = torch.randn(size, size, generator=_generator(), dtype=torch.float64)
    a = a + a.T if symmetric else a
    return norm * a / torch.linalg.matrix_norm(a, 2)


def _linear(dtype: torch.dtype, symmetric: bool) -> Problem:
    """z = A z + b, so z = (I - A)^-1 b."""
    a = _matrix(12, 0.85, symmetric)
    b = torch.randn(4, 12, generator=_generator(), dtype=torch.float64)
    star = torch.linalg.solve(torch.eye(12, dtype=torch.float64) - a, b.T).T
    a, b = a.to(dtype), b.to(dtype)
    return Problem(f=lambda z: z @ a.T + b, z0=torch.zeros_like(b), solution=star.to(dtype))


def symmetric_linear(dtype: torch.dtype) -> Problem:
    """A symmetric contraction: real eigenvalues."""
    return _linear(dtype, symmetric=True)


def nonsymmetric_linear(dtype: torch.dtype) -> Problem:
    """A nonsymmetric contraction: complex eigenvalues."""
    return _linear(dtype, symmetric=False)


def rotation(dtype: torch.dtype) -> Problem:
    """A quarter turn about c: every Picard iterate is as far from c as the start."""
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=dtype)
    c = torch.tensor([[1.0, 2.0], [-3.0, 0.5]], dtype=dtype)
    return Problem(
        f=lambda z: (z - c) @ turn.T + c, z0=torch.zeros_like(c), solution=c, picard=False
    )


def tanh(dtype: torch.dtype) -> Problem:
    """z = tanh(W z + x) on (B, tokens, width), solved by long iteration in double precision."""
    w = _matrix(6, 0.9, symmetric=False)
    x = torch.randn(3, 5, 6, generator=_generator(), dtype=torch.float64)
    star = torch.zeros_like(x)
    for _ in range(500):
        star = torch.tanh(star @ w.T + x)
    w, x = w.to(dtype), x.to(dtype)
    return Problem(
        f=lambda z: torch.tanh(z @ w.T + x), z0=torch.zeros_like(x), solution=star.to(dtype)
    )


def coupled_tuple(dtype: torch.dtype) -> Problem:
    """Two tensors of different shapes: u = v / 2 + 1 (for each channel) and v = mean(u) / 2 + 1, so 2 and 2."""
    u, v = torch.zeros(3, 4, 2, dtype=dtype), torch.zeros(3, 4, dtype=dtype)

    def f(z: State) -> State:
        u, v = z
        return v[:, :, None].expand(-1, -1, 2) / 2 + 1, u.mean(dim=2) / 2 + 1

    solution = map_state(lambda t: torch.full_like(t, 2), (u, v))
    return Problem(f=f, z0=(u, v), solution=solution)


def unbatched(dtype: torch.dtype) -> Problem:
    """A ring graph as one sample: z = A z / 2 + b with A the mean of two neighbours."""
    b = torch.randn(9, 3, generator=_generator(), dtype=torch.float64)
    ring = (torch.eye(9, dtype=torch.float64).roll(1, 0) + torch.eye(9).roll(-1, 0)) / 2
    star = torch.linalg.solve(torch.eye(9, dtype=torch.float64) - 0.8 * ring, b)
    ring, b = ring.to(dtype), b.to(dtype)
    return Problem(
        f=lambda z: 0.8 * ring @ z + b,
        z0=torch.zeros_like(b),
        solution=star.to(dtype),
        batched=False,
    )


def square_root(dtype: torch.dtype) -> Problem:
    """The Babylonian square root of 2, a scalar without any axis."""
    return Problem(
        f=lambda z: (z + 2 / z) / 2,
        z0=torch.tensor(1.0, dtype=dtype),
        solution=torch.tensor(math.sqrt(2), dtype=dtype),
        batched=False,
    )


PROBLEMS: dict[str, Callable[[torch.dtype], Problem]] = {
    problem.__name__: problem
    for problem in (
        symmetric_linear,
        nonsymmetric_linear,
        rotation,
        tanh,
        coupled_tuple,
        unbatched,
        square_root,
    )
}


def diverging(z: Tensor) -> Tensor:
    """z^2 + z + 1 has no fixed point; plain iteration overflows within a dozen steps."""
    return z * z + z + 1


def drifting(z: Tensor) -> Tensor:
    """z + 1 has no fixed point, and all its residuals are the same."""
    return z + 1


class Counting:
    """A map that counts its calls and remembers its arguments."""

    def __init__(self, f: Callable[[State], State]):
        self.f, self.arguments = f, []  # type: ignore[var-annotated]

    @property
    def calls(self) -> int:
        return len(self.arguments)

    def __call__(self, z: State) -> State:
        self.arguments.append(map_state(torch.clone, z))
        return self.f(z)


class Spoiled(Counting):
    """A map that answers NaN for some samples from a certain call on (counted from 0)."""

    def __init__(self, f: Callable[[State], State], samples: list[int], since: int):
        super().__init__(f)
        self.samples, self.since = samples, since

    def __call__(self, z: State) -> State:
        image = super().__call__(z)
        if self.calls > self.since:
            image = map_state(torch.clone, image)
            assert isinstance(image, Tensor)
            image[self.samples] = torch.nan
        return image

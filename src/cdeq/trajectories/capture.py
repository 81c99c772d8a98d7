"""What is kept of one solve: all its states, or its endpoint.

Shapes: B samples, K steps, a state (B, ...), a trajectory (K+1, B, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cdeq.equilibrium.contract import Context, EquilibriumModel, is_batched
from cdeq.equilibrium.states import State, StateLayout, relative_residual, tensors_of
from cdeq.solvers.loop import Callback, Solver, solve_model
from cdeq.solvers.solution import Solution


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to solve, and the dtype to keep states in."""

    solver: Solver
    max_steps: int
    tol: float
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What is kept of one batch, on the CPU.

    `tensors` by name: `states.j` (K+1, B, ...) or `endpoint.j` (B, ...) for the j-th tensor of the
    state; `residual` (B,), of the endpoint before it was rounded to the dtype it is kept in; and `error` (B,),
    its estimated distance from the equilibrium. `endpoint` is the state itself, where and as it was solved.
    """

    tensors: dict[str, Tensor]
    endpoint: State

    @property
    def is_tuple(self) -> bool:
        return not isinstance(self.endpoint, Tensor)


Capture = Callable[[EquilibriumModel, Context, Settings], Captured]


def capture_full(model: EquilibriumModel, context: Context, settings: Settings) -> Captured:
    """z_0 ... z_K by the solve loop's callback; after an early stop the last state repeats."""
    kept: list[Tensor] = []
    newest: list[tuple[int, State]] = []

    def keep(k: int, z: State) -> None:
        parts = tensors_of(z)
        if k == 0:
            shapes = [(settings.max_steps + 1, *part.shape) for part in parts]
            kept.extend(torch.empty(shape, dtype=settings.dtype) for shape in shapes)
        for trajectory, part in zip(kept, parts, strict=True):
            trajectory[k] = part
        newest[:] = [(k, z)]

    _solve(model, context, settings, keep)
    [(k, endpoint)] = newest
    for trajectory in kept:
        trajectory[k + 1 :] = trajectory[k]
    tensors = {f"states.{j}": trajectory for j, trajectory in enumerate(kept)}
    residual = measure_residual(model, endpoint, context)
    return _captured(tensors, endpoint, residual, residual)


def capture_endpoint(model: EquilibriumModel, context: Context, settings: Settings) -> Captured:
    """The solution's state alone."""
    solution = _solve(model, context, settings, None)
    residual, error = solution.residual, solution.error
    assert error is not None
    if not bool(solution.measured.all()):
        residual = measure_residual(model, solution.state, context)
    parts = tensors_of(solution.state)
    # Copies, since the tensors of a tuple may be views of one.
    copies = [part.to("cpu", settings.dtype, copy=True).contiguous() for part in parts]
    tensors = {f"endpoint.{j}": copy for j, copy in enumerate(copies)}
    return _captured(tensors, solution.state, residual, error)


CAPTURES: dict[str, Capture] = {"full": capture_full, "endpoint": capture_endpoint}


def measure_residual(model: EquilibriumModel, z: State, context: Context) -> Tensor:
    """|f(z) - z| / |z| of each sample, (B,), for one evaluation."""
    layout = StateLayout.of(z, is_batched(model))
    return relative_residual(layout.flatten(z), layout.flatten(model.step(z, context)))


def _solve(
    model: EquilibriumModel, context: Context, settings: Settings, callback: Callback | None
) -> Solution:
    """Endpoints are solved until their estimated error, not their residual alone, is within the tolerance."""
    return solve_model(
        model,
        context,
        settings.solver,
        tol=settings.tol,
        max_steps=settings.max_steps,
        callback=callback,
        measure="residual" if callback else "error",
    )


def _captured(
    tensors: dict[str, Tensor], endpoint: State, residual: Tensor, error: Tensor
) -> Captured:
    for tensor in tensors.values():
        if not bool(torch.isfinite(tensor).all()):
            advice = "bfloat16" if tensor.dtype == torch.float16 else "float64"
            raise OverflowError(
                f"the teacher's states exceed the range of {tensor.dtype}: "
                f"record with dtype=torch.{advice}, which has a wider one"
            )
    return Captured(
        tensors={
            **tensors,
            "residual": residual.to("cpu", torch.float32),
            "error": error.to("cpu", torch.float32, copy=True),  # it may be the residual
        },
        endpoint=endpoint,
    )

"""The one solve loop: counts every evaluation, stops each sample by itself, never loses a good state.

Shapes: B samples, D numbers in each sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from cdeq.equilibrium.contract import Context, EquilibriumModel, causal_positions, is_batched
from cdeq.equilibrium.states import State, StateLayout, residual_ratio, row_norms, subtract
from cdeq.solvers.anderson import Anderson
from cdeq.solvers.base import MAX_STEPS, TOL, Callback, Solver
from cdeq.solvers.error import ErrorEstimate
from cdeq.solvers.solution import Solution


@torch.no_grad()
def solve(
    f: Callable[[State], State],
    z0: State,
    solver: Solver | None = None,
    *,
    tol: float = TOL,
    max_steps: int = MAX_STEPS,
    batched: bool = True,
    callback: Callback | None = None,
    measured_only: bool = False,
    measure: Literal["residual", "error"] = "residual",
) -> Solution:
    """Solve z = f(z) from `z0` with at most `max_steps` evaluations of f, without recording gradients.

    `solver`: Anderson's method unless another is given.
    `tol` bounds the relative residual |f(z) - z| / |z| of each sample; 0 spends the whole budget.
    `callback(k, z_k)` sees every state, z_0 included, before it is changed; z_k has cost k evaluations.
    `measure`: what `tol` bounds; "error" is the estimated distance to the equilibrium, which for a slow map is many
    times the residual (see `Solution`). A sample whose residual is at rounding stops as well.
    `measured_only` returns no state whose residual is unknown: the best one measured, not the newest.
    A sample that has stopped, by convergence or by a number that is not finite, stays at its best state.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, not {max_steps}")
    if not tol >= 0:
        raise ValueError(f"tol must not be negative, not {tol}")
    layout = StateLayout.of(z0, batched)
    z = layout.flatten(z0)
    size = row_norms(z)  # |z_k|, which also tells whether z_k is finite without another pass
    if not bool(size.isfinite().all()):
        raise ValueError("z0 must be finite, and so must its norm")
    if callback is not None:
        callback(0, z0)

    infinity, threshold = torch.full_like(size, torch.inf), torch.full_like(size, tol)
    best, best_residual, residual = z, infinity, infinity
    active, all_active = torch.ones_like(size, dtype=torch.bool), True
    history: list[Tensor] = []
    active_history: list[Tensor] = []
    solver = solver or Anderson()
    memory = solver.init(z)
    estimate = ErrorEstimate() if measure == "error" else None
    error = infinity

    for k in range(max_steps):
        fz = _evaluate(f, z, layout)
        difference = subtract(fz, z)
        measured = residual_ratio(row_norms(difference), size)
        # A stopped sample repeats its last residual, which cannot be better than its best.
        residual = measured if all_active else torch.where(active, measured, residual)
        history.append(residual)
        active_history.append(active)
        improved = residual < best_residual  # not where it is NaN
        best = _rows(improved, z, best)
        best_residual = torch.fmin(residual, best_residual)
        if estimate is None:
            active = active & (residual > threshold)  # stops at NaN, too
        else:
            found = estimate(z, difference, size, measured)
            error = torch.where(active & improved, found, error)
            active = active & (found > threshold) & (residual > estimate.rounding(z.dtype))

        if bool(active.any()):
            proposal, memory = solver.update(k, z, fz, difference, memory)
            size = row_norms(proposal)
            active = active & (size < infinity)
            all_active = bool(active.all())
            z = proposal if all_active else torch.where(active[:, None], proposal, best)
        else:
            z, all_active = best, False
        if callback is not None:
            callback(k + 1, layout.restore(z))
        if not all_active and not bool(active.any()):
            break

    # A sample still running has an unmeasured newest state: kept if the last residual was its best.
    newest = active & (residual <= best_residual) & (not measured_only)
    return Solution(
        state=layout.restore(_rows(newest, z, best)),
        converged=(best_residual if estimate is None else error) <= threshold,
        measured=~newest,
        residual=best_residual,
        steps=torch.stack(active_history).sum(dim=0),
        evaluations=len(history),
        history=torch.stack(history),
        error=None if estimate is None else error,
    )


def _evaluate(f: Callable[[State], State], z: Tensor, layout: StateLayout) -> Tensor:
    """f at a flat state, flat, in the dtype of the state (under autocast f may answer in another)."""
    image = f(layout.restore(z))
    try:
        return layout.flatten(image).to(z.dtype)
    except ValueError as error:
        raise ValueError(f"f must return a state like the one it is given: {error}") from None


def _rows(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The rows of `new` where the mask (B,) holds, of `old` elsewhere; no copy if it holds everywhere."""
    return new if bool(mask.all()) else torch.where(mask[:, None], new, old)


def solve_model(
    model: EquilibriumModel,
    context: Context,
    solver: Solver | None = None,
    *,
    z0: State | None = None,
    tol: float = TOL,
    max_steps: int = MAX_STEPS,
    callback: Callback | None = None,
    measured_only: bool = False,
    measure: Literal["residual", "error"] = "residual",
) -> Solution:
    """Solve for a model's equilibrium in a given context, from its own start unless `z0` is given.

    Anderson's method mixes the states of a causal model position by position.
    """
    z0 = model.start(context) if z0 is None else z0
    solver = solver or Anderson()
    if isinstance(solver, Anderson) and solver.positions is None:
        solver = replace(solver, positions=causal_positions(model, z0))
    return solve(
        lambda z: model.step(z, context),
        z0,
        solver,
        tol=tol,
        max_steps=max_steps,
        batched=is_batched(model),
        callback=callback,
        measured_only=measured_only,
        measure=measure,
    )

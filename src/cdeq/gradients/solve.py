"""The one entry point: solve without gradient, then let the chosen gradient in."""

from __future__ import annotations

import torch

from cdeq.equilibrium.contract import Context, EquilibriumModel, is_batched
from cdeq.equilibrium.states import State
from cdeq.gradients.base import Gradient
from cdeq.placement import in_single
from cdeq.solvers import MAX_STEPS, TOL, Solution, Solver, solve_model
from cdeq.solvers.base import first_state


def solve_with_gradient(
    model: EquilibriumModel,
    context: Context,
    *,
    solver: Solver | None = None,
    gradient: Gradient,
    tol: float = TOL,
    max_steps: int = MAX_STEPS,
    z0: State | None = None,
) -> Solution:
    """The equilibrium z* = step(z*, context), with a gradient to the weights and to the context.

    Where gradients are disabled this is `solve_model`, and nothing more is evaluated. Where they
    are enabled the state has passed through the gradient's own steps (one for `Implicit` and
    `JacobianFree`, `steps` for `Phantom`); residual and counts remain those of the solve.
    `Unrolled` solves nothing and reads neither `tol` nor `max_steps`, and of `solver` only where to start.
    With `solver=student.as_solver()` a student finds the equilibrium, also that of a model that has been trained
    further since it was distilled: the gradient is that of the model alone.
    """

    def solve(start: State) -> Solution:
        with torch.no_grad():
            return solve_model(model, context, solver, z0=start, tol=tol, max_steps=max_steps)

    return gradient.run(
        lambda z: in_single(model.step(z, context)),
        first_state(solver, model, context) if z0 is None else z0,
        solve,
        is_batched(model),
    )

"""An algorithm as a teacher: a family of quadratic programs, solved by a splitting method, made fast.

    python examples/quadratic_programs.py

    minimise x'Px/2 + q'x   subject to   low <= A x <= high

The costs q and the bounds change from problem to problem, as in model predictive control; P and A stay. One step of the
splitting method is an equilibrium map without weights (ADMM as in OSQP, its matrix inverted once). A student learns
where to start and how to correct the residual; the field calls the first of these a learned warm start. What it returns
is measured: the residual of the map, and how far the bounds are violated.
"""

from __future__ import annotations

import torch
from torch import Tensor

import cdeq

UNKNOWNS, CONSTRAINTS = 20, 30
PENALTY, RELAXATION = 0.3, 1.6


def problem_family() -> tuple[Tensor, Tensor]:
    """P (N, N) and A (M, N), the same for all problems."""
    draw = torch.Generator().manual_seed(0)
    root = torch.randn(UNKNOWNS, UNKNOWNS, generator=draw)
    p = root @ root.T / UNKNOWNS + 0.05 * torch.eye(UNKNOWNS)
    return p, torch.randn(CONSTRAINTS, UNKNOWNS, generator=draw) / UNKNOWNS**0.5


def problems(count: int, seed: int) -> dict[str, Tensor]:
    """Costs q (B, N) and bounds (B, M)."""
    draw = torch.Generator().manual_seed(seed)
    bound = 0.2 + 0.5 * torch.rand(count, CONSTRAINTS, generator=draw)
    return {"q": torch.randn(count, UNKNOWNS, generator=draw), "low": -bound, "high": bound}


def splitting_method(p: Tensor, a: Tensor) -> cdeq.EquilibriumModel:
    """The state (B, N + M) is x, and the point whose projection on the bounds is the value of A x."""
    inverse = torch.linalg.inv(p + 1e-6 * torch.eye(UNKNOWNS) + PENALTY * a.T @ a)

    def start(context: dict[str, Tensor]) -> Tensor:
        return context["q"].new_zeros(len(context["q"]), UNKNOWNS + CONSTRAINTS)

    def step(z: Tensor, context: dict[str, Tensor]) -> Tensor:
        x, point = z.split([UNKNOWNS, CONSTRAINTS], dim=1)
        value = torch.clamp(point, context["low"], context["high"])
        dual = point - value
        solved = (1e-6 * x - context["q"] + PENALTY * (value - dual) @ a) @ inverse.T
        x = RELAXATION * solved + (1 - RELAXATION) * x
        point = RELAXATION * solved @ a.T + (1 - RELAXATION) * value + dual
        return torch.cat([x, point], dim=1)

    def readout(z: Tensor) -> Tensor:
        return z[:, :UNKNOWNS]

    return cdeq.from_functions(step, start=start, readout=readout)


def violation(x: Tensor, problem: dict[str, Tensor], a: Tensor) -> float:
    """The largest amount by which a bound is missed."""
    value = x @ a.T
    return float(torch.maximum(value - problem["high"], problem["low"] - value).max().clamp_min(0))


def main(updates: int = 300) -> dict[str, float]:
    p, a = problem_family()
    solver = splitting_method(p, a)
    train = [problems(64, seed) for seed in range(100, 116)]
    student = cdeq.distill(solver, train, fit=cdeq.FitConfig(updates=updates), progress=True)
    print(student.report)

    test = problems(256, seed=0)
    context = solver.inject(test)
    exact = cdeq.solve_model(solver, context, tol=1e-7, max_steps=5000)
    found: dict[str, float] = {}
    print(
        f"{'evaluations':>12} {'ADMM':>10} {'Anderson':>10} {'student':>10}   distance to the solution"
    )
    for steps in (1, 2, 3, 5, 8, 12, 20):
        states = {"student": student.trajectory(test, steps)[-1]}
        for name, method in (("ADMM", cdeq.Picard()), ("Anderson", cdeq.Anderson())):
            budget = {"tol": 0.0, "max_steps": steps}
            states[name] = cdeq.solve_model(solver, context, method, **budget).state
        gaps = {
            name: float(((z - exact.state).norm(dim=1) / exact.state.norm(dim=1)).mean())
            for name, z in states.items()
        }
        found |= {f"{name} {steps}": gap for name, gap in gaps.items()}
        print(f"{steps:12d} {gaps['ADMM']:10.2g} {gaps['Anderson']:10.2g} {gaps['student']:10.2g}")

    result = student.solve(test, tol=1e-4)
    alone = cdeq.solve_model(solver, context, tol=1e-4)
    print(result)
    print(f"Anderson alone: {float(alone.steps.double().mean()):.1f} evaluations on average")
    print(f"largest violation of a bound: {violation(result.output, test, a):.1e}")
    return found | {"violation": violation(result.output, test, a)}


if __name__ == "__main__":
    main()

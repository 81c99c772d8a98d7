"""How an equilibrium is found: one solve loop, and one file for each solver."""

from cdeq.solvers.anderson import Anderson
from cdeq.solvers.base import MAX_STEPS, TOL, Solver
from cdeq.solvers.broyden import Broyden
from cdeq.solvers.loop import solve, solve_model
from cdeq.solvers.picard import Picard
from cdeq.solvers.solution import Solution

SOLVERS: dict[str, type] = {"picard": Picard, "anderson": Anderson, "broyden": Broyden}
"""Classes of solvers, by name."""

__all__ = [
    "MAX_STEPS",
    "SOLVERS",
    "TOL",
    "Anderson",
    "Broyden",
    "Picard",
    "Solution",
    "Solver",
    "solve",
    "solve_model",
]

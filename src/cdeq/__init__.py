"""cdeq: deep equilibrium models in one to a few evaluations, with a certificate.

student = cdeq.distill(teacher, loader)
logits = student(x, steps=2)
result = student.solve(x, tol=1e-3)
"""

from cdeq.consistency import (
    RECIPES,
    CertifiedSolution,
    Recipe,
    RecipeError,
    Student,
    distill,
    recipe_named,
)
from cdeq.equilibrium import EquilibriumModel, from_functions
from cdeq.equilibrium.torchdeq import from_torchdeq
from cdeq.gradients import Implicit, JacobianFree, Phantom, Unrolled, solve_with_gradient
from cdeq.solvers import Anderson, Broyden, Picard, Solution, solve, solve_model
from cdeq.training import FitConfig, TeachConfig, process_group, teach
from cdeq.trajectories import TrajectoryStore, record

__version__ = "0.2.0"

__all__ = [
    "RECIPES",
    "Anderson",
    "Broyden",
    "CertifiedSolution",
    "EquilibriumModel",
    "FitConfig",
    "Implicit",
    "JacobianFree",
    "Phantom",
    "Picard",
    "Recipe",
    "RecipeError",
    "Solution",
    "Student",
    "TeachConfig",
    "TrajectoryStore",
    "Unrolled",
    "distill",
    "from_functions",
    "from_torchdeq",
    "process_group",
    "recipe_named",
    "record",
    "solve",
    "solve_model",
    "solve_with_gradient",
    "teach",
]

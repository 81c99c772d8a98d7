"""cdeq: deep equilibrium models in one to a few evaluations, and how far each answer is from the equilibrium.

student = cdeq.distill(teacher, loader)
logits = student(x, steps=2)
result = student.solve(x, tol=1e-3)
"""

from typing import TYPE_CHECKING, Any

from cdeq.consistency import (
    RECIPES,
    CertifiedSolution,
    ExportError,
    HubError,
    Recipe,
    RecipeError,
    Student,
    StudentFolderError,
    distill,
)
from cdeq.equilibrium import EquilibriumModel, from_functions
from cdeq.equilibrium.torchdeq import from_torchdeq
from cdeq.gradients import Implicit, JacobianFree, Phantom, Unrolled, solve_with_gradient
from cdeq.solvers import Anderson, Broyden, Picard, Solution, solve, solve_model
from cdeq.training import (
    CheckpointError,
    FitConfig,
    PlacementError,
    Progress,
    ProgressBar,
    TeachConfig,
    fit,
    is_main_process,
    own_part,
    process_group,
    process_rank,
    teach,
)
from cdeq.trajectories import StoreError, TrajectoryStore, record
from cdeq.zoo import ZooError, load_pretrained

if TYPE_CHECKING:
    from cdeq.evaluation import evaluate

__version__ = "0.2.0"

__all__ = [
    "RECIPES",
    "Anderson",
    "Broyden",
    "CertifiedSolution",
    "CheckpointError",
    "EquilibriumModel",
    "ExportError",
    "FitConfig",
    "HubError",
    "Implicit",
    "JacobianFree",
    "Phantom",
    "Picard",
    "PlacementError",
    "Progress",
    "ProgressBar",
    "Recipe",
    "RecipeError",
    "Solution",
    "StoreError",
    "Student",
    "StudentFolderError",
    "TeachConfig",
    "TrajectoryStore",
    "Unrolled",
    "ZooError",
    "distill",
    "evaluate",
    "fit",
    "from_functions",
    "from_torchdeq",
    "is_main_process",
    "load_pretrained",
    "own_part",
    "process_group",
    "process_rank",
    "record",
    "solve",
    "solve_model",
    "solve_with_gradient",
    "teach",
]


def __getattr__(name: str) -> Any:
    """`cdeq.evaluate`, imported when it is asked for: it needs the models, which take a while to import."""
    if name == "evaluate":
        from cdeq.evaluation import evaluate

        return evaluate
    raise AttributeError(f"module 'cdeq' has no attribute {name!r}")

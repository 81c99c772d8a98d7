"""The student: its clock, boundary, history and start; recipes, distillation and certified solving."""

from cdeq.consistency.certify import CertifiedSolution
from cdeq.consistency.distillation import distill
from cdeq.consistency.recipes import RECIPES, Recipe, RecipeError
from cdeq.consistency.saving import StudentFolderError
from cdeq.consistency.student import Student
from cdeq.export import ExportError
from cdeq.hub import HubError

__all__ = [
    "RECIPES",
    "CertifiedSolution",
    "ExportError",
    "HubError",
    "Recipe",
    "RecipeError",
    "Student",
    "StudentFolderError",
    "distill",
]

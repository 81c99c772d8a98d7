"""Students in a part of the time: few updates in the first stages of recipes, no plan for certified solving.

`python brief.py SCRIPT ARGUMENT ...` runs a script with the few updates, in a process of its own.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from cdeq.consistency.recipes import RECIPES, Recipe

if TYPE_CHECKING:
    import pytest

STAGES = ("start_updates", "correction_updates")


def brief_recipes(updates: int = 10) -> dict[str, Callable[[], Recipe]]:
    """`RECIPES` with so many updates, in place of hundreds, in each first stage that a recipe has."""
    return {name: partial(_brief, make, updates) for name, make in RECIPES.items()}


def _brief(make: Callable[[], Recipe], updates: int) -> Recipe:
    recipe = make()
    return recipe.changed(**{stage: updates for stage in STAGES if getattr(recipe, stage)})


def shorten_stages(patch: pytest.MonkeyPatch) -> None:
    for name, make in brief_recipes().items():
        patch.setitem(RECIPES, name, make)


def leave_out_plans(patch: pytest.MonkeyPatch) -> None:
    for module in ("calibration", "distillation"):
        patch.setattr(f"cdeq.consistency.{module}.plan_handover", lambda student, inputs: {})


if __name__ == "__main__":
    RECIPES |= brief_recipes()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

"""A student with every weight moved, and what is the same in a student that was saved and read again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cdeq import Recipe, Student
from checks import same_tensors
from teachers import randomized

FILES = ("config.json", "teacher.safetensors", "student.safetensors")


def make(
    teacher: nn.Module,
    x: Any,
    recipe: str = "anchored",
    start_network: nn.Module | None = None,
    correction: nn.Module | None = None,
    **changes: Any,
) -> Student:
    torch.manual_seed(0)
    chosen = Recipe.from_name(recipe, **changes)
    student = randomized(Student.for_example(teacher, chosen, x, start_network, correction))
    student.calibrated = (0.0, 0.25, 0.5)
    student.plan = {1e-1: 1, 1e-3: 4}
    return student.eval().requires_grad_(False)


def require_same(student: Student, again: Student, x: Any) -> None:
    """Outputs, weights and all that is known of the student."""
    for steps in range(6):
        assert torch.equal(student(x, steps=steps), again(x, steps=steps))
    for name in ("recipe", "shapes", "calibrated", "plan", "certificate"):
        assert getattr(again, name) == getattr(student, name)
    assert same_tensors(again.state_dict(), student.state_dict())

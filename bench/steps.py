"""What a student's step costs beside a plain evaluation of f.

    python bench/steps.py [--threads 1] [--repeats 15] [--steps 1 2 4 8] [--json FILE]

Times the J steps of a student's rollout, from z_0 on, over J plain evaluations of the teacher's f, on a
text-sized and an image-sized teacher, in one run, taking turns; a ratio of 1.10 means 10 % on top. Beside it
the whole call, input to output: student(x, steps=J), its start network included, over inject, start,
J evaluations, readout. On a busy machine the ratio of CPU time says more than that of wall time
(with one thread). For the default recipe, for it without mixing and with a leap, and for `anchored`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from cdeq.consistency.recipes import Recipe
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import EquilibriumModel, check_contract
from cdeq.evaluation import median_times
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.models.vision.conv import ConvDEQ
from common import Measurement, Options

TARGETS = {"corrected": 1.15, "warm_start": 1.15, "anchored": 1.10}
WIDTH = 100

RECIPES = {
    "corrected, as it stands": Recipe.from_name("corrected"),
    "corrected without mixing": Recipe.from_name(
        "corrected", history="none", window=1, safeguard=False
    ),
    "corrected with a leap of one step": Recipe.from_name("corrected", leap=1),
    "warm_start": Recipe.from_name("warm_start"),
    "anchored, as it stands (no history)": Recipe.from_name("anchored"),
    'anchored with history="anderson", window=3 (the images demo\'s)': Recipe.from_name(
        "anchored", history="anderson", window=3
    ),
}


def teachers() -> dict[str, tuple[nn.Module, Tensor]]:
    """A teacher and a batch of inputs, by name."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, (16, 128), generator=generator)
    images = torch.randn(64, 3, 32, 32, generator=generator)
    return {
        "text (16 x 128 x 256)": (
            TransformerDEQ(vocabulary=100, width=256, heads=8, inner=1024, length=128),
            tokens,
        ),
        "images (64 x 48 x 32 x 32)": (ConvDEQ(in_channels=3, channels=48, image_size=32), images),
    }


def disturbed(student: Student) -> Student:
    """A student with non-zero changes, as after training."""
    with torch.no_grad():
        for weight in student.trainable().values():
            weight.add_(0.01 * torch.randn_like(weight))
    return student.eval()


@torch.no_grad()
def measure(
    teacher: nn.Module, recipe: Recipe, x: Tensor, counts: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """A row for each number of steps J."""
    model: EquilibriumModel = check_contract(teacher.eval())
    student = disturbed(Student.for_example(teacher, recipe, x))
    prepared, context = student.prepare(x), model.inject(x)
    z0 = student.begin(prepared)

    def plain_steps(steps: int) -> Tensor:
        z = z0
        for _ in range(steps):
            z = model.step(z, context)
        return z

    def student_steps(steps: int) -> Callable[[], object]:
        states = student.rollout(prepared, steps)
        next(states)  # z_0, by the start network: once for each input, and in the whole call
        return lambda: [None for _ in states]

    def plain_call(steps: int) -> Tensor:
        inner = model.inject(x)
        z = model.start(inner)
        for _ in range(steps):
            z = model.step(z, inner)
        return model.readout(z, inner)

    works: dict[Any, Callable[[], Callable[[], object]]] = {}
    for j in counts:
        works["plain", j] = lambda j=j: lambda: plain_steps(j)
        works["student", j] = lambda j=j: student_steps(j)
        works["plain call", j] = lambda j=j: lambda: plain_call(j)
        works["student call", j] = lambda j=j: lambda: student(x, steps=j)
    times = median_times(works, repeats)
    seconds = {name: wall for name, (wall, _) in times.items()}
    return [
        {
            "steps": j,
            "plain_seconds": seconds["plain", j],
            "student_seconds": seconds["student", j],
            "ratio": seconds["student", j] / seconds["plain", j],
            "cpu_ratio": times["student", j][1] / times["plain", j][1],
            "call_ratio": seconds["student call", j] / seconds["plain call", j],
            "target": TARGETS[recipe.name],
        }
        for j in counts
    ]


def table_of(recipe: str, rows: list[dict[str, Any]]) -> Table:
    """The rows of one recipe."""
    table = Table(title=f"recipe {recipe}", title_justify="left")
    table.add_column("teacher", no_wrap=True)
    names = ("J", "evals, ms", "steps, ms", "ratio", "CPU", "target", "whole call")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        colour = "green" if row["ratio"] <= row["target"] else "red"
        table.add_row(
            row["teacher"],
            str(row["steps"]),
            f"{1e3 * row['plain_seconds']:.1f}",
            f"{1e3 * row['student_seconds']:.1f}",
            f"[{colour}]{row['ratio']:.3f}[/]",
            f"{row['cpu_ratio']:.3f}",
            f"{row['target']:.2f}",
            f"{row['call_ratio']:.3f}",
        )
    return table


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    steps: tuple[int, ...] = (1, 2, 4, 8)


def main() -> None:
    options = tyro.cli(StepOptions, description=__doc__)
    measurement = Measurement(options)
    console = Console(width=WIDTH)
    found: list[dict[str, Any]] = []
    for title, recipe in RECIPES.items():
        rows = [
            {"recipe": title, "teacher": name, **row}
            for name, (teacher, x) in teachers().items()
            for row in measure(teacher, recipe, x, options.steps, options.repeats)
        ]
        console.print(table_of(title, rows))
        found += rows
    console.print(
        "ratio: J steps of the student's rollout over J plain evaluations (red misses the target)."
    )
    console.print("CPU: the same in CPU time, which a busy machine disturbs less.")
    console.print("whole call: input to output, with start network and injection.")
    measurement.finish(found, targets=TARGETS)


if __name__ == "__main__":
    main()

"""What a student's step costs beside a plain evaluation of f.

Times J steps of an anchored student over J plain evaluations of the teacher's f, on a text-sized and an
image-sized teacher, in one run, taking turns; a ratio of 1.10 means 10 % on top for mixing weights and contexts.
Beside it the whole call, input to output: student(x, steps=J) over inject, J evaluations, readout.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from cdeq.consistency.recipes import recipe_named
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import EquilibriumModel, check_contract
from cdeq.experiments.compare import median_seconds
from cdeq.experiments.results import current_command, current_commit, current_hardware
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.models.vision.conv import ConvDEQ

TARGET = 1.10


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
    teacher: nn.Module, x: Tensor, counts: list[int], repeats: int
) -> list[dict[str, float]]:
    model: EquilibriumModel = check_contract(teacher.eval())
    student = disturbed(Student.for_example(teacher, recipe_named("anchored"), x))
    prepared, context = student.prepare(x), model.inject(x)
    z0 = student.begin(prepared)

    def plain_steps(steps: int) -> Tensor:
        z = z0
        for _ in range(steps):
            z = model.step(z, context)
        return z

    def student_steps(steps: int) -> Tensor:
        z, evaluations = z0, []
        for j in range(steps):
            z, evaluations = student.advance(z, student.moment(j), evaluations, prepared)
        return z

    def plain_call(steps: int) -> Tensor:
        inner = model.inject(x)
        z = model.start(inner)
        for _ in range(steps):
            z = model.step(z, inner)
        return model.readout(z, inner)

    works = {}
    for j in counts:
        works["plain", j] = lambda j=j: plain_steps(j)
        works["student", j] = lambda j=j: student_steps(j)
        works["plain call", j] = lambda j=j: plain_call(j)
        works["student call", j] = lambda j=j: student(x, steps=j)
    seconds = median_seconds(works, repeats)
    return [
        {
            "steps": j,
            "plain_seconds": seconds["plain", j],
            "student_seconds": seconds["student", j],
            "ratio": seconds["student", j] / seconds["plain", j],
            "call_ratio": seconds["student call", j] / seconds["plain call", j],
        }
        for j in counts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    before = os.getloadavg()
    table = Table(
        "teacher", "J", "J evaluations (ms)", "J steps (ms)", f"ratio (<= {TARGET})", "whole call"
    )
    found = []
    for name, (teacher, x) in teachers().items():
        for row in measure(teacher, x, options.steps, options.repeats):
            found.append({"teacher": name, **row})
            table.add_row(
                name,
                str(row["steps"]),
                f"{1e3 * row['plain_seconds']:.1f}",
                f"{1e3 * row['student_seconds']:.1f}",
                f"{row['ratio']:.3f}",
                f"{row['call_ratio']:.3f}",
            )
    Console().print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "command": current_command(),
            "commit": current_commit(),
            "hardware": current_hardware(),
            "load_before": before,
            "load_after": os.getloadavg(),
            "target": TARGET,
            "rows": found,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

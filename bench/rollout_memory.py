"""Memory and time of distilling through a rollout: whole, checkpointed, or cut at every step.

    python bench/rollout_memory.py [--steps 2 4 8] [--batch 64] [--repeats 3] [--threads 1] [--json FILE]

The small scale's MDEQ (untrained) and its anchored student, on images of 32 pixels. Every case runs in a fresh
process, so that its peak memory (ru_maxrss) is its own; `megabytes` is what the updates add to it once the student
stands. Seconds are the median of an update; ratios are to `full` at the same number of steps. Beside the JSON stands
the table as Markdown.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import tyro

from cdeq.consistency.objective import DistillationObjective
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.student import Student
from cdeq.evaluation import peak_megabytes
from cdeq.training.task_loss import cross_entropy
from cdeq.trajectories import record
from cdeq_experiments.configs.images import CIFAR_10
from common import Measurement, Options, markdown_table

Mode = Literal["full", "checkpointed", "truncated"]


def one_case(mode: Mode, steps: int, batch: int, updates: int) -> dict[str, float]:
    """Updates of a student in this process: what they add to its memory, and their median seconds."""
    teacher = CIFAR_10.teacher.build(classes=10).eval().requires_grad_(False)
    x, y = torch.randn(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)
    changes = {} if mode == "full" else {"backprop": mode}
    student = Student.for_example(teacher, Recipe.from_name("anchored", depth=steps, **changes), x)
    objective = DistillationObjective(student.train(), cross_entropy, 0)
    with tempfile.TemporaryDirectory(prefix="cdeq-rollout-") as room:
        recorded = record(teacher, [(x, y)], room, mode="endpoint", max_steps=2)[0]
        loaded, times = peak_megabytes(), []
        for update in range(updates + 1):
            began = time.perf_counter()
            loss, _ = objective(recorded, update)
            loss.backward()
            times.append(time.perf_counter() - began)
    return {"megabytes": peak_megabytes() - loaded, "seconds": statistics.median(times[1:])}


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    repeats: int = 3
    steps: tuple[int, ...] = (2, 4, 8)
    batch: int = 64
    case: Mode | None = None
    """Run one case in this process, and print it as JSON."""


def measure(options: MemoryOptions) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    shared = {name: getattr(options, name) for name in ("batch", "threads", "repeats")}
    for steps in options.steps:
        found: dict[str, dict[str, float]] = {}
        for mode in get_args(Mode):
            given = {"case": mode, "steps": steps, **shared}
            command = [sys.executable, __file__]
            command += [part for name, value in given.items() for part in (f"--{name}", str(value))]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[mode] = json.loads(done.stdout)
        for mode, values in found.items():
            ratios = {f"{name}_ratio": values[name] / found["full"][name] for name in values}
            rows.append({"steps": steps, "backprop": mode, **values, **ratios})
    return rows


def markdown_of(rows: list[dict[str, Any]], batch: int) -> str:
    return markdown_table(
        f"Distilling MDEQ's anchored student on batches of {batch} images: what updates add to the process's memory.",
        ("backprop", "rollout", "MB", "of full", "seconds per update", "of full"),
        [
            (
                row["backprop"],
                f"{row['steps']}",
                f"{row['megabytes']:.0f}",
                f"{row['megabytes_ratio']:.2f}",
                f"{row['seconds']:.2f}",
                f"{row['seconds_ratio']:.2f}",
            )
            for row in rows
        ],
    )


def main() -> None:
    options = tyro.cli(MemoryOptions, description=__doc__)
    measurement = Measurement(options)
    if options.case is not None:
        print(json.dumps(one_case(options.case, options.steps[0], options.batch, options.repeats)))
        return
    rows = measure(options)
    table = markdown_of(rows, options.batch)
    print(table)
    measurement.finish(rows, table, batch=options.batch)


if __name__ == "__main__":
    main()

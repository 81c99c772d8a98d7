"""Memory and time of distilling through a rollout: whole, checkpointed, or cut at every step.

    python bench/rollout_memory.py [--steps 2 4 8] [--batch 64] [--threads 1] [--json FILE]

The small scale's MDEQ (untrained) and its anchored student, on images of 32 pixels. Every case runs in a fresh
process, so that its peak memory (ru_maxrss) is its own; `megabytes` is what the updates add to it once the student
stands. Seconds are the median of an update; ratios are to `full` at the same number of steps. Beside the JSON stands
the table as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from cdeq.consistency.objective import DistillationObjective
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.student import Student
from cdeq.evaluation import peak_megabytes, write_measurements
from cdeq.files import atomic_write_text
from cdeq.training.task_loss import cross_entropy
from cdeq.trajectories import record
from cdeq_experiments.image_scales import SCALES

MODES = ("full", "checkpointed", "truncated")


def one_case(mode: str, steps: int, batch: int, updates: int) -> dict[str, float]:
    """Updates of a student in this process: what they add to its memory, and their median seconds."""
    teacher = SCALES["small"][0].build(10).eval().requires_grad_(False)
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


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for steps in options.steps:
        found: dict[str, dict[str, float]] = {}
        for mode in MODES:
            command = [sys.executable, __file__, "--case", mode, "--steps", str(steps)]
            command += ["--batch", str(options.batch), "--threads", str(options.threads)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[mode] = json.loads(done.stdout)
        for mode, figures in found.items():
            ratios = {f"{name}_ratio": figures[name] / found["full"][name] for name in figures}
            rows.append({"steps": steps, "backprop": mode, **figures, **ratios})
    return rows


def markdown_of(rows: list[dict[str, Any]], batch: int) -> str:
    lines = [
        f"Distilling MDEQ's anchored student, {batch} images a batch: what updates add to the process's memory.",
        "",
        "| rollout | backprop | MB | of full | seconds an update | of full |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['steps']} | {row['backprop']} | {row['megabytes']:.0f} | {row['megabytes_ratio']:.2f} | "
            f"{row['seconds']:.2f} | {row['seconds_ratio']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", choices=MODES, help="run one case here, and print it as JSON")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.case:
        figures = one_case(options.case, options.steps[0], options.batch, options.updates)
        print(json.dumps(figures))
        return
    load = os.getloadavg()
    rows = measure(options)
    print(markdown_of(rows, options.batch))
    if options.json:
        write_measurements(
            options.json, rows, load_before=load, load_after=os.getloadavg(), batch=options.batch
        )
        atomic_write_text(options.json.with_suffix(".md"), markdown_of(rows, options.batch))


if __name__ == "__main__":
    main()

"""The command line: `cdeq demo`. Only here are seeds set, threads chosen and lines printed."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small equilibrium model on embedded data, distil it with both recipes, and compare.

    Prints one table and writes results.json, plots and report.html to runs/demo-<task>/.
    """

    task: Literal["images", "text", "graph"] = "images"
    """What to demonstrate on."""
    out: Path | None = None
    """Where to write; default runs/demo-<task>. A run cut short there is resumed."""
    seed: int = 0
    """Seed of data split, teacher and students."""
    threads: int | None = None
    """Threads to compute with; default: all cores."""


def demo(options: Demo) -> int:
    from cdeq.experiments.demo import run_demo
    from cdeq.experiments.demo_tasks import DEMO_TASKS
    from cdeq.experiments.table import results_table
    from cdeq.training.log import ProgressBar

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)  # wide enough for the table
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    torch.manual_seed(options.seed)
    folder = options.out or Path("runs") / f"demo-{options.task}"
    began = time.perf_counter()
    task = DEMO_TASKS[options.task](options.seed)
    results = run_demo(task, folder, seed=options.seed, progress=ProgressBar, say=console.print)
    console.print(results_table(results, task.dataset))
    console.print(
        f"{time.perf_counter() - began:.0f} seconds in all. Read {folder / 'report.html'}; figures in {folder}/"
    )
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `cdeq` command."""
    options = tyro.extras.subcommand_cli_from_dict(
        {"demo": Demo},
        prog="cdeq",
        description="Deep equilibrium models in a few evaluations.",
        args=arguments,
    )
    try:
        return demo(options)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())

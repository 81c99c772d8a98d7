"""How graphs scale: seconds and memory of a teacher's and a student's work against the number of nodes.

    python bench/graph_scale.py scale [--sizes 10000 30000 ...] [--json FILE]   one update of each, size by size
    python bench/graph_scale.py train [--nodes 169343] [--json FILE]            teach and distil to the end
    python bench/graph_scale.py parts [--nodes 20000] [--json FILE]             distil on the whole, parts, samples

Graphs are block models, the model an IGNN. Every phase runs in a fresh process, so that its peak
memory (ru_maxrss) is its own; graphs, weights and recordings pass between them on disk (TMPDIR).
`loaded_megabytes` is the peak once the inputs are read, Python and torch included: what a phase
needs beyond its data is the difference. Beside the JSON of `scale` and `parts` stands a plot.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch
import tyro

from cdeq.evaluation import write_measurements
from graph_phases import SOLVE_TOL, WHOLE, Settings, run_phase

SIZES = (10_000, 30_000, 100_000, 169_343, 300_000, 1_000_000)
TRAIN = Settings(nodes=169_343, teach_updates=60, distil_updates=60)
PARTS = Settings(nodes=20_000, teach_updates=100, distil_updates=200)
Rows = list[dict[str, Any]]
Points = Sequence[tuple[float, float]]


# Processes.


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(name: str, s: Settings, folder: Path, **more: Any) -> dict[str, Any]:
    """A phase in a process of its own."""
    order = dumps({"phase": name, "settings": asdict(s), "folder": str(folder), "more": more})
    environment = {**os.environ, "OMP_NUM_THREADS": str(s.threads)}
    command = [sys.executable, str(Path(__file__).resolve()), "phase", order]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} at {s.nodes} nodes ended with code {done.returncode}")
    found = loads(done.stdout.splitlines()[-1])
    named = " ".join([name, *(str(v) for v in more.values() if isinstance(v, str))])
    numbers = {key: v for key, v in found.items() if isinstance(v, int | float)}
    brief = "  ".join(f"{key} {value:.4g}" for key, value in numbers.items())
    say(f"{s.nodes:>9} nodes  {named:<24}  {brief}")
    return found


def phase(order: tyro.conf.Positional[str]) -> None:
    """One phase in this process, for the other modes."""
    given = loads(order)
    s, folder = Settings(**given["settings"]), Path(given["folder"])
    print(dumps(run_phase(given["phase"], s, folder, **given["more"])))


def finish(
    mode: str,
    s: Settings,
    measure: Callable[[], Rows],
    json: Path | None,
    draw: Callable[[Rows, Path], None] | None = None,
) -> None:
    """Measure, and write what was found, or print it."""
    before, rows = os.getloadavg(), measure()
    if json is None:
        print(dumps(rows, indent=1))
        return
    torch.set_num_threads(s.threads)  # for the description of the hardware
    load = {"load_before": before, "load_after": os.getloadavg()}
    write_measurements(json, rows, mode=mode, settings=asdict(s), **load)
    if draw is not None:
        draw(rows, json.with_suffix(".png"))


# The modes.


def scale(
    settings: Settings = Settings(),  # noqa: B008
    sizes: tuple[int, ...] = SIZES,
    json: Path | None = None,
) -> None:
    """One update of each, size by size. A size that a machine has no memory for says so, and the others go on."""

    def measure() -> Rows:
        rows = []
        for nodes in sizes:
            row: dict[str, Any] = {"nodes": nodes}
            with tempfile.TemporaryDirectory(prefix="cdeq-scale-") as folder:
                try:
                    for name in ("build", "teach", "use", "record", "distil updates"):
                        found = run(name, replace(settings, nodes=nodes), Path(folder))
                        row[name.replace(" ", "_")] = found
                except RuntimeError as error:
                    row["error"] = str(error)
                    say(f"{nodes:>9} nodes  {error}")
            rows.append(row)
        return rows

    finish("scale", settings, measure, json, draw_scale)


def train(settings: Settings = TRAIN, json: Path | None = None) -> None:
    """The whole way once: teach, record, distil, and look at what came of it."""

    def measure() -> Rows:
        began = time.perf_counter()
        row: dict[str, Any] = {"nodes": settings.nodes}
        with tempfile.TemporaryDirectory(prefix="cdeq-scale-") as folder:
            for name in ("build", "teach", "record", "distil"):
                row[name] = run(name, settings, Path(folder))
            row["total_seconds"] = time.perf_counter() - began
            chosen = {"variants": [WHOLE], "counts": [1, 2]}
            row["evaluate"] = run("evaluate", settings, Path(folder), **chosen)
        return [row]

    finish("train", settings, measure, json)


def parts(settings: Settings = PARTS, json: Path | None = None) -> None:
    """The same teacher distilled on the whole graph and on subgraphs of it; all are judged on the whole."""
    with tempfile.TemporaryDirectory(prefix="cdeq-scale-") as folder:
        measure = partial(measure_parts, settings, Path(folder))
        finish("parts", settings, measure, json, draw_parts)


def measure_parts(s: Settings, folder: Path) -> Rows:
    run("build", s, folder)
    run("teach", s, folder)
    subgraphs = run("subgraphs", s, folder)
    variants = {WHOLE: {"subgraphs": 1, "nodes": s.nodes}, **subgraphs.pop("variants")}
    rows: Rows = []
    for variant, about in variants.items():
        recorded = run("record", s, folder, variant=variant)
        distilled = run("distil updates", s, folder, variant=variant)
        rows.append({"variant": variant, **about, "record": recorded, "distil": distilled})
    found = run("evaluate", s, folder, variants=list(variants), counts=[1, 2, 5])
    for row in rows:
        name = f"student, {row['variant']}"
        row["quality"] = [m for m in found["methods"] if m["method"] == name]
    solvers = [m for m in found["methods"] if not m["method"].startswith("student")]
    return [{"variant": "teacher", **found["converged"], **subgraphs, "quality": solvers}, *rows]


# Plots.


def draw_scale(rows: Rows, path: Path) -> None:
    """Seconds and memory against nodes, both on logarithmic axes."""
    panels = {
        "seconds": {
            "one evaluation of f": ("use", "step_seconds"),
            "student, 2 steps": ("use", "student_2_seconds"),
            f"teacher solved to {SOLVE_TOL:g}": ("use", "solve_seconds"),
            "teacher, one update": ("teach", "update_seconds"),
            "distillation, one update": ("distil_updates", "update_seconds"),
        },
        "peak memory, MB": {
            "solve and student": ("use", "peak_megabytes"),
            "teaching": ("teach", "peak_megabytes"),
            "recording": ("record", "peak_megabytes"),
            "distillation": ("distil_updates", "peak_megabytes"),
        },
    }
    lines = {
        title: {
            label: [(row["nodes"], row[name][key]) for row in rows if name in row]
            for label, (name, key) in panel.items()
        }
        for title, panel in panels.items()
    }
    draw_panels(lines, path, xlabel="nodes", xscale="log", yscales=("log", "log"))


def draw_parts(rows: Rows, path: Path) -> None:
    """Distance to the equilibrium and accuracy by steps, one line for each way of distilling."""
    entries = [entry for row in rows for entry in row["quality"]]
    methods = dict.fromkeys(entry["method"] for entry in entries)
    lines = {
        name: {m: [(e["steps"], e[name]) for e in entries if e["method"] == m] for m in methods}
        for name in ("distance", "accuracy")
    }
    steps = sorted({entry["steps"] for entry in entries})
    lines["accuracy"]["converged"] = [(count, rows[0]["accuracy"]) for count in steps]
    draw_panels(lines, path, xlabel="evaluations of f", xscale="linear", yscales=("log", "linear"))


def draw_panels(
    panels: Mapping[str, Mapping[str, Points]],
    path: Path,
    *,
    xlabel: str,
    xscale: str,
    yscales: Sequence[str],
) -> None:
    """Panels beside each other, each with its lines by name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(11, 4.5), constrained_layout=True)
    for axis, (title, lines), yscale in zip(axes, panels.items(), yscales, strict=True):
        for label, points in lines.items():
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set(xscale=xscale, yscale=yscale, xlabel=xlabel, ylabel=title)
        axis.grid(True, which="both", alpha=0.3)
        if any(lines.values()):
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    modes = {"scale": scale, "train": train, "parts": parts, "phase": phase}
    tyro.extras.subcommand_cli_from_dict(
        modes, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)
    )


if __name__ == "__main__":
    main()

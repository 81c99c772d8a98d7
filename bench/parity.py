"""How far an exported student is from the eager one: the largest difference of any number in its answers.

    python bench/parity.py [--models NAME ...] [--steps 1 2 4] [--batches 1 7 64] [--folder runs/deploy] [--json FILE]

The students of the demos and of the zoo; those of the demos are trained first if they are not in the folder. Each
count of steps is one file of each format, which answers all batches. The answers are output, residual and, of a text
with memory, what it remembers. A graph is one sample: a batch of 7 is a graph of seven times as many nodes.

Two ways of computing in single precision differ by what both round. So beside the difference stands how far each of
the two is from the eager student in double precision, and how far they are apart when both compute in double
precision: what is left there is not rounding. That is for `.pt2` alone: ONNX keeps constants in single precision, and
onnxruntime has no convolutions in double.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from cdeq import Student
from cdeq.equilibrium.trees import map_tensors
from common import Measurement, Options, markdown_table
from subjects import inputs_for, named_inputs, session_of, student_named, subjects

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before onnxruntime is imported

LARGEST = 1e-5
FORMATS = (".onnx", ".pt2")


@dataclass(frozen=True, kw_only=True)
class ParityOptions(Options):
    models: tuple[str, ...] = ()
    """Without any, all."""
    steps: tuple[int, ...] = (1, 2, 4)
    batches: tuple[int, ...] = (1, 7, 64)
    folder: Path = Path("runs/deploy")
    """Where teachers and students of the demos are kept."""


def reader_of(path: Path, threads: int) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    """What gives the outputs of a file for inputs by name."""
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()
        return lambda given: list(module(*given.values()))
    run = session_of(path, threads).run
    return lambda given: [
        torch.from_numpy(found)
        for found in run(None, {name: tensor.numpy() for name, tensor in given.items()})
    ]


def eager_answers(student: Student, x: Any, steps: int) -> list[Tensor]:
    """What the student itself answers; the other outputs are those of its module, which is not exported."""
    module = student.unrolled(steps)
    return [student(x, steps=steps), *module(x)[1:]]


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of any number."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def in_double(x: Any) -> Any:
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, x)


def exported_answers(
    student: Student, suffix: str, inputs: dict[int, Any], steps: int, threads: int
) -> dict[int, list[Tensor]]:
    """What one file answers for each batch."""
    with tempfile.TemporaryDirectory() as folder:
        (path,) = student.export(Path(folder) / f"s{suffix}", next(iter(inputs.values())), steps)
        read = reader_of(path, threads)
        return {batch: read(named_inputs(x)) for batch, x in inputs.items()}


@torch.no_grad()
def measure(name: str, student: Student, options: ParityOptions) -> Iterator[dict[str, Any]]:
    """A row for each format, number of steps and batch."""
    inputs = {batch: inputs_for(name, student, batch) for batch in options.batches}
    exact = copy.deepcopy(student).double()
    exact_inputs = {batch: in_double(x) for batch, x in inputs.items()}
    for steps in options.steps:
        expected = {batch: eager_answers(student, x, steps) for batch, x in inputs.items()}
        truth = {batch: eager_answers(exact, x, steps) for batch, x in exact_inputs.items()}
        for suffix in FORMATS:
            found = exported_answers(student, suffix, inputs, steps, options.threads)
            double = {}
            if suffix == ".pt2":
                double = exported_answers(exact, suffix, exact_inputs, steps, options.threads)
            for batch in inputs:
                yield {
                    "model": name,
                    "format": suffix,
                    "steps": steps,
                    "batch": batch,
                    "difference": furthest(found[batch], expected[batch]),
                    "rounding": furthest(expected[batch], truth[batch]),
                    "exported_rounding": furthest(found[batch], truth[batch]),
                    "double": furthest(double[batch], truth[batch]) if double else None,
                    "largest": max(float(y.abs().max()) for y in expected[batch]),
                }


def table_of(rows: list[dict[str, Any]], options: ParityOptions) -> str:
    """Models and formats by counts of steps, each cell the largest over the batches."""
    lines = []
    for name, suffix in dict.fromkeys((row["model"], row["format"]) for row in rows):
        own = [row for row in rows if (row["model"], row["format"]) == (name, suffix)]
        cells = [max(r["difference"] for r in own if r["steps"] == k) for k in options.steps]
        cells += [max(row[kind] for row in own) for kind in ("rounding", "exported_rounding")]
        doubles = [row["double"] for row in own if row["double"] is not None]
        size = max(row["largest"] for row in own)
        double = f"{max(doubles):.0e}" if doubles else "-"
        lines.append(
            [f"{name}, {suffix}", *(f"{cell:.1e}" for cell in cells), double, f"{size:.3g}"]
        )
    batches = ", ".join(map(str, options.batches))
    return markdown_table(
        f"Largest difference of an exported student from the eager one, batches of {batches} from one file",
        [
            *("model, format", *(f"{k} step{'s' * (k > 1)}" for k in options.steps)),
            *("eager, from double precision", "exported, from double precision"),
            *("both in double precision", "largest number"),
        ],
        lines,
    )


def verdicts(rows: list[dict[str, Any]]) -> str:
    """Whether the target is met, by model."""
    lines = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        worst, rounding = (max(row[kind] for row in own) for kind in ("difference", "rounding"))
        met = "PASS" if worst <= LARGEST else "FAIL"
        line = f"- {met} {name}: at most {worst:.1e}, target {LARGEST:g}"
        if worst > LARGEST:
            line += f"; eager is {rounding:.1e} from double precision itself"
        lines.append(f"{line}\n")
    return "".join(lines)


def main() -> None:
    options = tyro.cli(ParityOptions, description=__doc__)
    measurement = Measurement(options)
    rows: list[dict[str, Any]] = []
    for name in options.models or subjects():
        for row in measure(name, student_named(name, options.folder), options):
            print(f"{name} {row['format']} {row['steps']} {row['batch']}: {row['difference']:.1e}")
            rows.append(row)
    shown = f"{table_of(rows, options)}\n{verdicts(rows)}"
    print(shown)
    measurement.finish(rows, shown, target=LARGEST)


if __name__ == "__main__":
    main()

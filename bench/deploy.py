"""What a student costs when it is put to use: eager, compiled, exported, under onnxruntime.

    python bench/deploy.py [--repeats 15] [--steps 2] [--models NAME ...] [--folder runs/deploy] [--json FILE]

The zoo's students on images and text, and the demos', trained first if they are not in the folder; all of the default
recipe. One sample and 64, from input to output, all ways in turns in one run. Beside them the eager teacher under
Anderson's method to a residual of 1e-3. "bfloat16" is the eager student in that precision, "channels_last" with that
layout of images. "checked" also measures the teacher's residual of its answer, which is one more evaluation. Ratios are
of CPU time, which a busy machine disturbs less than wall time (with one thread).
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from cdeq import Student, solve_model
from cdeq.equilibrium.trees import map_tensors
from cdeq.evaluation import median_times
from common import Measurement, Options, markdown_table
from subjects import inputs_for, named_inputs, session_of, student_named

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before onnxruntime is imported

TOL, MOST = 1e-3, 100
OVER_EAGER, OVER_TEACHER = 0.7, 8.0
"""At one sample: the compiled or exported student's CPU time over the eager one's, and the teacher's over its."""
TEACHER, EAGER = "teacher, Anderson to 1e-3", "student"

Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class DeployOptions(Options):
    steps: int = 2
    """Of the student."""
    models: tuple[str, ...] = ("images", "text", "mdeq-cifar10", "deq-transformer-wikitext2")
    batches: tuple[int, ...] = (1, 64)
    compile: bool = True
    """Time the compiled student, too; compiling takes minutes on a busy machine."""
    folder: Path = Path("runs/deploy")
    """Where teachers and students of the demos are kept."""


def teacher_answer(student: Student, x: Any) -> tuple[Tensor, int]:
    """What the teacher says at its equilibrium, and the evaluations that finding it takes."""
    context = student.teacher.inject(x)
    found = solve_model(student.teacher, context, tol=TOL, max_steps=MOST)
    return student.teacher.readout(found.state, context), found.evaluations


def ways(student: Student, x: Any, files: Path, options: DeployOptions) -> dict[str, Work]:
    """Each way of answering `x`; the files are written for the first batch and serve all."""
    steps = options.steps
    works: dict[str, Work] = {
        TEACHER: partial(teacher_answer, student, x),
        EAGER: partial(student, x, steps=steps),
    }
    half = map_tensors(lambda t: t.bfloat16() if t.is_floating_point() else t, x)
    works["student, bfloat16"] = partial(copy.deepcopy(student).bfloat16(), half, steps=steps)
    if isinstance(x, Tensor) and x.ndim == 4:
        last = {"memory_format": torch.channels_last}
        moved = copy.deepcopy(student).to(**last)
        works["student, channels_last"] = partial(moved, x.contiguous(**last), steps=steps)
    tensors = named_inputs(x)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    unrolled = {"": student.unrolled(steps, check=False), ", checked": student.unrolled(steps)}
    if options.compile:
        works["compiled"] = partial(torch.compile(unrolled[""], fullgraph=True, dynamic=False), x)
    for name, check in (("", False), (", checked", True)):
        works[f"unrolled{name}"] = partial(unrolled[name], x)
        path = files / f"student{name[2:]}.onnx"
        if not path.exists():
            student.export(path, x, steps, check=check)
        run = session_of(path, options.threads).run
        works[f"onnxruntime{name}"] = partial(run, None, arrays)
    path = files / "student.pt2"
    if not path.exists():
        student.export(path, x, steps, check=False)
    works["exported, .pt2"] = partial(torch.export.load(path).module(), *tensors.values())
    return works


@torch.no_grad()
def measure(model: str, options: DeployOptions) -> list[dict[str, Any]]:
    """A row for each batch size and way."""
    student = student_named(model, options.folder)
    rows = []
    with tempfile.TemporaryDirectory() as files:
        for batch in options.batches:
            torch.compiler.reset()  # it keeps eight versions of a function, and these are as many
            works = ways(student, inputs_for(model, student, batch), Path(files), options)
            answers = {
                name: work() for name, work in works.items()
            }  # and compiled, before the clock
            timed = {name: partial(lambda work: work, work) for name, work in works.items()}
            times = median_times(timed, options.repeats)
            cpu = {name: spent for name, (_, spent) in times.items()}
            expected = answers[EAGER]
            for name, answer in answers.items():
                output = answer if isinstance(answer, Tensor) else torch.as_tensor(answer[0])
                output = output.to(expected.dtype)
                rows.append(
                    {
                        "model": model,
                        "batch": batch,
                        "way": name,
                        "seconds": times[name][0],
                        "cpu_seconds": cpu[name],
                        "over_student": cpu[name] / cpu[EAGER],
                        "teacher_over": cpu[TEACHER] / cpu[name],
                        "difference": float((output - expected).abs().max()),
                        "evaluations": answer[1] if name == TEACHER else None,
                    }
                )
    return rows


def said(met: bool) -> str:
    return "PASS" if met else "FAIL"


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Whether the targets are met, at one sample."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        fast = [
            row
            for row in rows
            if (row["model"], row["batch"]) == (model, 1)
            and row["way"] in ("compiled", "onnxruntime", "exported, .pt2")
        ]
        if not fast:
            continue
        best = min(fast, key=lambda row: row["cpu_seconds"])
        share, times = best["over_student"], best["teacher_over"]
        lines += [
            f"- {said(share <= OVER_EAGER)} {model}: {best['way']} takes {share:.2f} of the eager student's time, "
            f"target at most {OVER_EAGER}",
            f"- {said(times >= OVER_TEACHER)} {model}: {best['way']} is {times:.1f} times faster than the eager "
            f"teacher, target at least {OVER_TEACHER:g}",
        ]
    return lines


def main() -> None:
    options = tyro.cli(DeployOptions, description=__doc__)
    measurement = Measurement(options)
    rows = [row for model in options.models for row in measure(model, options)]
    header = ["way", "model", "samples", "ms", "CPU ms", "of the eager student", "teacher over it"]
    table = markdown_table(
        f"A student at {options.steps} steps, put to use",
        header,
        [
            [
                row["way"],
                row["model"],
                str(row["batch"]),
                f"{1e3 * row['seconds']:.2f}",
                f"{1e3 * row['cpu_seconds']:.2f}",
                f"{row['over_student']:.2f}",
                f"{row['teacher_over']:.1f}",
            ]
            for row in rows
        ],
    )
    shown = "\n".join([table, *verdicts(rows)])
    print(shown)
    measurement.finish(rows, shown + "\n", steps=options.steps, tol=TOL)


if __name__ == "__main__":
    main()

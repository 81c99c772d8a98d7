"""The certificate of `student.solve`: does the bound cover, how wide is it, does the warning come, what does it cost?

Every student is distilled by `cdeq.distill(teacher, batches)`; nothing else is set. Its bounds are calibrated on
batches that it was not trained on, and judged on others. Distances are to equilibria in double precision.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import tyro
from torch import Tensor

import cdeq
from cdeq.consistency.certificate import FLOOR
from cdeq.consistency.scores import Exact, Scored, score, scores_on
from cdeq.consistency.student import Student
from cdeq.demo import tasks
from cdeq.demo.run import distil_student, train_teacher
from cdeq.demo.task import Task
from cdeq.equilibrium.trees import map_tensors
from cdeq.evaluation import compare_certified, median_seconds
from common import Measurement, Options, markdown_table
from stranger_maps import STRANGERS

CONFIDENCES = (0.9, 0.95, 0.99)
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4)
DEMOS = ("demo images", "demo text", "demo graph")
PARTS = ("coverage", "slow", "solving", "compaction", "training")
HELD_OUT = 4
"""Batches of a stranger's training data that its student does not see, to calibrate on."""


@dataclass(frozen=True, kw_only=True)
class CertificateOptions(Options):
    repeats: int = 5
    only: tuple[str, ...] = ()
    """Names of maps, or of demo tasks as "demo images", to run these alone."""
    parts: tuple[str, ...] = PARTS
    """What to measure."""


@dataclass(frozen=True)
class Case:
    """A distilled student, inputs to calibrate it on and inputs to judge it on."""

    student: Student
    held_out: list[Any]
    test: list[Any]


def stranger_case(name: str) -> Case:
    stranger = STRANGERS[name]()
    train, held_out = stranger.train[:-HELD_OUT], stranger.train[-HELD_OUT:]
    teacher = stranger.teacher.requires_grad_(False).eval()
    return Case(cdeq.distill(teacher, train, task_loss=None), held_out, stranger.test)


def demo_case(name: str) -> Case:
    task: Task = getattr(tasks, name.removeprefix("demo "))(0)
    teacher, _ = train_teacher(task, None, 0)
    student = distil_student(task, teacher, "corrected", None, 0, False)
    return Case(student, [x for x, _ in task.valid], [x for x, _ in task.test])


def shifted(x: Any, vocabulary: int | None) -> Any:
    """The input with noise of half its own spread; tokens drawn anew."""
    g = torch.Generator().manual_seed(0)

    def noisy(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return torch.randint(vocabulary or int(t.max()) + 1, t.shape, generator=g)
        return t + 0.5 * t.std() * torch.randn(t.shape, generator=g, dtype=t.dtype)

    return map_tensors(noisy, x)


def coverage(case: Case) -> list[dict[str, Any]]:
    """At each confidence: the share of samples within the bound, its width, and whether a shift is noticed."""
    scores = scores_on(case.student, case.held_out)
    exact = Exact(case.student)
    plain = [score(case.student, x, exact) for x in case.test]
    away = [score(case.student, shifted(x, None), exact) for x in case.test]
    rows = []
    for confidence in CONFIDENCES:
        certificate = scores.certificate(confidence)
        row: dict[str, Any] = {"confidence": confidence, "calibrated_on": len(scores.ratios)}
        if certificate is not None:
            row |= {"factor": certificate.factor} | covered(plain, certificate.factor)
            row["shifted"] = covered(away, certificate.factor)
            case.student.certificate = certificate
            row["unlike"] = unlike(case.student, case.test)
            row["unlike_shifted"] = unlike(case.student, [shifted(x, None) for x in case.test])
        rows.append(row)
    return rows


def covered(found: list[Scored], factor: float) -> dict[str, Any]:
    """Share within the bound and its width, where each sample stops by its estimate; the worst over tolerances."""
    shares, widths = [], []
    for tol in TOLERANCES:
        within = []
        for one in found:
            hit = one.error <= tol
            stop = torch.where(hit.any(dim=0), hit.double().argmax(dim=0), len(hit) - 1)
            error, distance = (t.gather(0, stop[None])[0] for t in (one.error, one.distance))
            bound = factor * error.clamp_min(FLOOR)
            within.append(distance <= bound)
            widths.append(bound / distance)
        shares.append(float(torch.cat(within).double().mean()))
    width, samples = torch.cat(widths), sum(one.error.shape[1] for one in found)
    return {
        "share": min(shares),
        "samples": samples,
        "width": [float(width.quantile(q)) for q in (0.5, 0.9)],
    }


def unlike(student: Student, inputs: list[Any]) -> dict[str, Any]:
    """The share of samples that are called unlike those of calibration, and whether there was a warning."""
    marked = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for x in inputs:
            found = student.solve(x, tol=1e-1).unlike_calibration
            assert found is not None
            marked.append(found)
    return {"share": float(torch.cat(marked).double().mean()), "warned": bool(seen)}


def slow(case: Case, tol: float = 1e-2) -> dict[str, Any]:
    """Solves by estimated error: the share of samples truly within, of those that say so."""
    exact, within, said, steps = Exact(case.student), 0, 0, 0.0
    for x in case.test:
        found = case.student.solve(x, tol=tol, max_steps=500)
        star, _ = exact.equilibrium(x, found.state)
        layout = cdeq.equilibrium.StateLayout.of(star, case.student.batched)
        z, target = layout.flatten(found.state).double(), layout.flatten(star)
        near = (z - target).norm(dim=1) <= tol * target.norm(dim=1)
        within += int((near & found.converged).sum())
        said += int(found.converged.sum())
        steps += float(found.steps.sum())
    total = sum(len(case.student.solve(x, tol=1.0).finished_by) for x in case.test)
    return {
        "tol": tol,
        "within": within / max(said, 1),
        "said": said / total,
        "evaluations": steps / total,
    }


def solving(case: Case, repeats: int) -> list[dict[str, Any]]:
    """To the same residual as Anderson's method alone: ratios of time and evaluations, and who finished."""
    rows = []
    for tol in TOLERANCES:
        found = compare_certified(
            case.student, case.test[0], tol=tol, max_steps=500, repeats=repeats
        )
        rows.append(
            {
                "tol": tol,
                "time_ratio": found.student_seconds / found.solver_seconds,
                "evaluations": [found.student_evaluations, found.solver_evaluations],
                "by_student": found.finished_by_student,
            }
        )
    return rows


def compaction(repeats: int, width: int = 256, batch: int = 128) -> dict[str, Any]:
    """A batch of which a tenth needs about five times the evaluations: time with rows left out over time without."""
    g = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(width, width, generator=g))
    rate = torch.full((batch, 1, 1), 0.3)
    rate[: batch // 10] = 0.85
    context = {"x": 0.1 * torch.randn(batch, 32, width, generator=g), "rate": rate}
    model = cdeq.from_functions(
        lambda z, c: c["rate"] * torch.tanh(z @ q) + c["x"],
        start=lambda c: torch.zeros_like(c["x"]),
    )
    given = {"tol": 1e-4, "max_steps": 400}
    works: dict[str, Callable[[], object]] = {
        "compact": lambda: cdeq.solve_model(model, context, **given),
        "whole": lambda: cdeq.solve_model(model, context, compact=False, **given),
    }
    seconds = median_seconds(works, repeats)
    steps = cdeq.solve_model(model, context, **given).steps.double()
    hard, easy = float(steps[: batch // 10].mean()), float(steps[batch // 10 :].mean())
    return {"time_ratio": seconds["compact"] / seconds["whole"], "evaluations": [easy, hard]}


def training(updates: int = 100) -> list[dict[str, Any]]:
    """The second half of a training, with Anderson's method and with a student of the first half inside."""
    task = tasks.images(0)
    halfway = replace(task.teach, fit=replace(task.teach.fit, updates=updates))
    teacher, _ = train_teacher(replace(task, teach=halfway), None, 0)
    student = distil_student(task, teacher, "corrected", None, 0, False)
    rows = []
    for name, solver in (("anderson", cdeq.Anderson()), ("student", student.as_solver())):
        model = task.build()
        model.load_state_dict(teacher.state_dict())
        spent: list[float] = []
        config = replace(halfway, solver=solver, pretrain_updates=0)
        began = time.perf_counter()
        cdeq.teach(
            model,
            lambda update: task.teaching(updates + update),
            config,
            progress=lambda done, total, metrics, spent=spent: spent.append(metrics["evaluations"]),
        )
        took = time.perf_counter() - began
        parts = []
        with torch.no_grad():
            for x, y in task.test:
                context = model.inject(x)
                found = cdeq.solve_model(model, context, tol=1e-4, max_steps=100)
                parts.append(task.metric.part(model.readout(found.state, context), y))
        rows.append(
            {
                "solver": name,
                "evaluations": sum(spent) / len(spent),
                "seconds": took,
                "score": task.metric.score(parts),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Coverage and width on all maps, then solving against Anderson's method."""
    lines = []
    for row in rows:
        for one in row.get("coverage", ()):
            if "share" not in one:
                continue
            n, c = one["samples"], one["confidence"]
            enough = one["share"] >= c - 2 * math.sqrt(c * (1 - c) / n)
            lines.append(
                [
                    f"{row['map']}, {c:.0%}",
                    f"{one['share']:.1%}{'' if enough else ' (too few)'}",
                    f"{one['width'][0]:.1f}, {one['width'][1]:.1f}",
                    f"{one['shifted']['share']:.1%}",
                    f"{one['unlike']['share']:.0%}, {one['unlike_shifted']['share']:.0%}",
                    "yes" if one["unlike_shifted"]["warned"] else "no",
                ]
            )
    parts = [
        markdown_table(
            "Coverage of the bound, the worst over tolerances; its width over the true distance (median, 90%).",
            [
                "map",
                "within",
                "width",
                "within, shifted",
                "unlike: test, shifted",
                "warned of the shift",
            ],
            lines,
        )
    ]
    lines = [
        [
            f"{row['map']}, {one['tol']:g}",
            f"{one['time_ratio']:.2f}",
            "{:.1f} / {:.1f}".format(*one["evaluations"]),
            f"{one['by_student']:.0%}",
        ]
        for row in rows
        for one in row.get("solving", ())
    ]
    header = ["map, residual", "time ratio", "evaluations", "finished by the student"]
    parts.append(markdown_table("`student.solve` against Anderson's method alone.", header, lines))
    lines = [
        [row["map"], *(f"{row['slow'][k]:.3g}" for k in ("within", "said", "evaluations"))]
        for row in rows
        if "slow" in row
    ]
    header = ["map", "truly within, of those that say so", "say so", "evaluations"]
    parts.append(markdown_table('`measure="error"`, `tol=1e-2`.', header, lines))
    return "\n".join(parts)


def main() -> None:
    options = tyro.cli(CertificateOptions, description=__doc__)
    known = (*STRANGERS, *DEMOS)
    if unknown := sorted(set(options.only) - set(known)):
        raise SystemExit(f"no map {unknown[0]!r}; there are {', '.join(known)}")
    measurement = Measurement(options)
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    if "compaction" in options.parts:
        about["compaction"] = compaction(options.repeats)
        print("compaction", about["compaction"], flush=True)
    if "training" in options.parts:
        about["training"] = training()
        print("training", about["training"], flush=True)
    for name in known if set(options.parts) & {"coverage", "slow", "solving"} else ():
        if options.only and name not in options.only:
            continue
        case = demo_case(name) if name in DEMOS else stranger_case(name)
        row: dict[str, Any] = {"map": name}
        if "coverage" in options.parts and case.student.batched:  # a graph is one sample
            row["coverage"] = coverage(case)
        if "slow" in options.parts:
            row["slow"] = slow(case)
        if "solving" in options.parts:
            row["solving"] = solving(case, options.repeats)
        rows.append(row)
        print(row, flush=True)
        measurement.finish(rows, table(rows), **about)
    if not rows:
        measurement.finish(rows, table(rows), **about)


if __name__ == "__main__":
    main()

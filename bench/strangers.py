"""Maps that cdeq never saw, with defaults: how near does each method come at equal evaluations?

Every student is distilled by `cdeq.distill(teacher, batches, recipe=...)` and nothing else is set. Distances are to
equilibria found in double precision. Methods: plain solvers from the teacher's start, `warm_start` (a learned start,
then Anderson's method), `anchored`, and `corrected`. Beside the latter, to check its safeguard: Anderson from its own
start, and at each count the share of samples whose residual is larger than that of Anderson there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import tyro
from torch import Tensor

import cdeq
from algorithm_maps import ALGORITHMS
from cdeq.equilibrium.states import State, map_state, relative_distance
from cdeq.equilibrium.trees import map_tensors
from cdeq.evaluation import SOLVERS, Method, solver_method, student_method
from cdeq.solvers.base import Callback
from cdeq.trajectories.capture import measure_residual
from common import Measurement, Options, markdown_table
from stranger_maps import STRANGERS, Stranger

MAPS = STRANGERS | ALGORITHMS
COUNTS = (1, 2, 3, 5, 8, 12, 20)
RECIPES = ("warm_start", "anchored", "corrected")


@dataclass(frozen=True, kw_only=True)
class StrangerOptions(Options):
    only: tuple[str, ...] = ()
    """Names of maps, to run these alone."""
    recipes: tuple[str, ...] = RECIPES


def _double(tree: Any) -> Any:
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, tree)


@torch.no_grad()
def equilibrium(teacher: Any, x: Any) -> tuple[State, float]:
    """The equilibrium in double precision, and its largest residual."""
    exact = copy.deepcopy(teacher).double()
    solver = cdeq.Anderson(window=10)
    found = cdeq.solve_model(exact, exact.inject(_double(x)), solver, tol=1e-13, max_steps=5000)
    return found.state, float(found.residual.max())


def anderson_from_start(student: cdeq.Student) -> Method:
    """Anderson's method from the student's own start."""

    def states(x: Any, steps: int) -> Iterator[State]:
        prepared, seen = student.prepare(x), list[State]()
        keep: Callback = lambda k, z: seen.append(z)  # noqa: E731
        given = {"z0": student.begin(prepared), "tol": 0.0, "max_steps": steps, "callback": keep}
        cdeq.solve_model(student.teacher, prepared.base, **given)
        yield from seen + seen[-1:] * (steps + 1 - len(seen))

    return replace(student_method(student), states=states)


@torch.no_grad()
def larger_residuals(student: cdeq.Student, inputs: list[Any]) -> dict[int, float]:
    """The share of samples whose residual after k steps is above that of Anderson from the same start.

    Residuals that are within rounding of each other, or of nothing, are the same.
    """
    found: dict[int, list[Tensor]] = {k: [] for k in COUNTS}
    for x in inputs:
        context = student.teacher.inject(x)
        ways = (student_method(student), anderson_from_start(student))
        pairs = zip(*(way.states(x, max(COUNTS)) for way in ways), strict=True)
        for k, both in enumerate(pairs):
            if k in found:
                ours, theirs = (measure_residual(student.teacher, z, context) for z in both)
                floor = 16 * torch.finfo(ours.dtype).eps
                found[k].append((ours > 1.001 * theirs + floor).double())
    return {k: float(torch.cat(parts).mean()) for k, parts in found.items()}


@torch.no_grad()
def distances(method: Any, stars: list[tuple[Any, State]]) -> dict[int, float]:
    """The mean relative distance at each count."""
    found: dict[int, list[Tensor]] = {k: [] for k in COUNTS}
    for x, star in stars:
        for k, z in enumerate(method.states(x, max(COUNTS))):
            if k in found:
                found[k].append(relative_distance(map_state(Tensor.double, z), star))
    return {k: float(torch.cat(parts).mean()) for k, parts in found.items()}


def measure(name: str, stranger: Stranger, recipes: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row for each method on a map."""
    teacher = stranger.teacher.requires_grad_(False).eval()
    stars = [(x, equilibrium(teacher, x)) for x in stranger.test]
    worst = max(residual for _, (_, residual) in stars)
    known = [(x, star) for x, (star, _) in stars]
    rows = []
    for method, solver in SOLVERS.items():
        found = distances(solver_method(teacher, solver), known)
        rows.append({"map": name, "method": method, "distance": found, "exact_to": worst})
    for recipe in recipes:
        if recipe == "anchored" and not any(True for _ in teacher.parameters()):
            continue  # it changes weights, and there are none
        began = time.perf_counter()
        student = cdeq.distill(teacher, stranger.train, recipe=recipe, task_loss=None)
        took = time.perf_counter() - began
        found = distances(student_method(student), known)
        row = {"map": name, "method": recipe, "distance": found, "train_seconds": took}
        if recipe == "corrected":
            row["larger_residual"] = larger_residuals(student, stranger.test)
            found = distances(anderson_from_start(student), known)
            rows.append({"map": name, "method": "its start, Anderson", "distance": found})
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Distances of all methods on all maps; the nearest at each count in bold."""
    lines = []
    for name in dict.fromkeys(row["map"] for row in rows):
        mine = [row for row in rows if row["map"] == name]
        best = {k: min(row["distance"][k] for row in mine) for k in COUNTS}
        for i, row in enumerate(mine):
            texts = [f"{row['distance'][k]:.2g}" for k in COUNTS]
            texts = [
                f"**{text}**" if row["distance"][k] == best[k] else text
                for text, k in zip(texts, COUNTS, strict=True)
            ]
            lines.append([name if i == 0 else "", row["method"], *texts])
    return markdown_table(
        "Relative distance to the equilibrium at equal evaluations, maps that cdeq never saw, defaults.",
        ["map", "method", *map(str, COUNTS)],
        lines,
    )


def main() -> None:
    options = tyro.cli(StrangerOptions, description=__doc__)
    if unknown := sorted(set(options.only) - set(MAPS)):
        raise SystemExit(f"no map {unknown[0]!r}; there are {', '.join(MAPS)}")
    measurement = Measurement(options)
    rows: list[dict[str, Any]] = []
    for name, make in MAPS.items():
        if options.only and name not in options.only:
            continue
        rows += measure(name, make(), options.recipes)
        for row in (row for row in rows if row["map"] == name):
            shown = " ".join(f"{row['distance'][k]:.2g}" for k in COUNTS)
            print(f"{name:22} {row['method']:19} {shown}", flush=True)
            if worse := row.get("larger_residual"):
                shares = " ".join(f"{worse[k]:.0%}" for k in COUNTS)
                print(f"{name:22} {'  larger residual':19} {shares}", flush=True)
        measurement.finish(rows, table(rows), counts=COUNTS)


if __name__ == "__main__":
    main()

"""Table 3 of the paper: node classification, implicit and explicit, at 1, 2, 5 and 10 evaluations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from cdeq.consistency.distill import distill
from cdeq.consistency.recipes import RECIPES, recipe_named
from cdeq.data.graphs import NodeTask
from cdeq.equilibrium.contract import check_contract
from cdeq.experiments.cells import Cells
from cdeq.experiments.compare import (
    Explicit,
    Method,
    Reference,
    compare,
    learned_solver_method,
    parameter_count,
    reference,
    solver_method,
    student_method,
)
from cdeq.experiments.graph_rivals import (
    EXPLICIT,
    RIVAL_TEACHERS,
    closed_form,
    explicit_fit,
    explicit_method,
    few_step_methods,
    rival_method,
    train_explicit,
    train_ignn_solver,
)
from cdeq.experiments.graph_tasks import SCALES, GraphPlan, ignn_task
from cdeq.experiments.paper_table import gap_closed, nearest_methods, write_table
from cdeq.experiments.provenance import Training
from cdeq.experiments.results import (
    Results,
    Row,
    TeacherResult,
    current_command,
    current_commit,
    current_hardware,
)
from cdeq.experiments.table import curves, style
from cdeq.experiments.task import Task
from cdeq.experiments.train import train_teacher
from cdeq.solvers import Anderson, Broyden, Picard, Solver
from cdeq.training.log import ProgressBar
from cdeq.trajectories import TrajectoryStore, record

COUNTS = tuple(range(1, 11))
"""Evaluations at which equilibrium models are measured."""
SHOWN = (1, 2, 5, 10)
"""Those that the table shows, as in the paper, and that few-step models are trained for."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class GraphCell:
    """One graph with one seed: everything trained, then everything measured in one run."""

    cells: Cells
    plan: GraphPlan
    seed: int
    data: Path | None
    progress: bool
    say: Say

    def place(self, name: str, config: dict[str, Any] | None = None) -> Path:
        """The folder of one training on this graph with this seed."""
        described = {"plan": self.plan, "seed": self.seed, **(config or {})}
        return self.cells.place(f"{self.plan.name}-{name}", described)

    def bar(self, title: str) -> AbstractContextManager[ProgressBar | None]:
        shown = f"{self.plan.title}, seed {self.seed}: {title}"
        return ProgressBar(shown) if self.progress else nullcontext()

    def measured(self) -> dict[str, Any]:
        """Rows and teachers as plain JSON, from the cell if they were measured before."""
        config = {"plan": self.plan, "seed": self.seed, "counts": COUNTS}
        return self.cells.result(f"{self.plan.name}-table3", config, self.measure)

    def measure(self) -> dict[str, Any]:
        nodes = self.plan.load(self.data, self.seed)
        task = ignn_task(self.plan, nodes, self.seed)
        folder = self.place("ignn")
        with self.bar("IGNN") as bar:
            teacher, training = train_teacher(task, folder, self.seed, bar)
        model = check_contract(teacher)
        known = reference(model, task.test, task.metric)
        teachers = [teacher_result(task, teacher, known, training)]
        self.say(_line(self, "IGNN", known.metric, training))

        solvers: dict[str, Solver] = {
            "picard": Picard(),
            "anderson": Anderson(),
            "broyden": Broyden(),
        }
        methods = {name: solver_method(model, solver) for name, solver in solvers.items()}
        explicit: dict[str, Explicit] = {}
        for name, (build, solver) in RIVAL_TEACHERS.items():
            rival, found, result = self.rival(build(task, self.plan, nodes), name)
            methods[name] = rival_method(rival, solver, found)
            teachers.append(result)
            if name == "eignn":
                explicit["eignn_closed"] = closed_form(rival)
        methods |= self.students(task, teacher, folder)
        methods |= few_step_methods(task, SHOWN, self.place, self.seed, self.bar)
        explicit |= self.explicit(nodes)
        rows = compare(
            methods,
            model,
            task.test,
            known.states,
            task.metric,
            dataset=self.plan.title,
            seed=self.seed,
            counts=COUNTS,
            repeats=5,
            explicit=explicit,
        )
        self.say(f"{self.plan.title}, seed {self.seed}: measured")
        return {
            "rows": [asdict(row) for row in rows],
            "teachers": [asdict(result) for result in teachers],
            "commit": current_commit(),
            "command": current_command(),
            "hardware": current_hardware(),
        }

    def rival(self, task: Task, name: str) -> tuple[Any, Reference, TeacherResult]:
        """Another equilibrium model, trained to convergence as the teacher is."""
        with self.bar(name.upper()) as bar:
            model, training = train_teacher(task, self.place(name), self.seed, bar)
        known = reference(check_contract(model), task.test, task.metric)
        self.say(_line(self, type(model).__name__, known.metric, training))
        return model, known, teacher_result(task, model, known, training)

    def students(self, task: Task, teacher: nn.Module, folder: Path) -> dict[str, Method]:
        """The learned solver and a student by each recipe; what was recorded of the teacher is shared."""
        model = check_contract(teacher)
        stores: dict[str, TrajectoryStore] = {}
        for mode in ("endpoint", "full"):
            with self.bar(f"record ({mode})") as bar:
                stores[mode] = record(
                    model,
                    task.distilling,
                    folder / f"trajectories-{mode}",
                    max_steps=task.distill_steps,
                    tol=task.distill_tol if mode == "endpoint" else 0.0,
                    mode=mode,
                    progress=bar,
                )
        with self.bar("IGNN-Solver") as bar:
            place = self.place("ignn_solver")
            solver, training = train_ignn_solver(
                teacher, stores["endpoint"], self.plan, place, self.seed, bar
            )
        self.say(_line(self, "IGNN-Solver", None, training))
        methods = {"ignn_solver": learned_solver_method(model, solver)}
        for name in RECIPES:
            plan = task.plans[name]
            recipe = recipe_named(name, **plan.changes)
            student = distill(
                teacher,
                stores[recipe.store_mode],
                recipe=recipe,
                fit_config=plan.fit,
                folder=self.place(name, {"recipe": recipe, "fit": plan.fit}),
                seed=self.seed,
                progress=self.progress,
            )
            methods[name] = student_method(student)
            self.say(f"{self.plan.title}, seed {self.seed}: {name} distilled")
        return methods

    def explicit(self, nodes: NodeTask) -> dict[str, Explicit]:
        found = {}
        for name in EXPLICIT:
            with self.bar(name.upper()) as bar:
                place = self.place(name, {"fit": explicit_fit(name, self.plan)})
                model, training = train_explicit(name, self.plan, nodes, place, self.seed, bar)
            found[name] = explicit_method(model)
            self.say(_line(self, name.upper(), None, training))
        return found


def teacher_result(
    task: Task, model: nn.Module, known: Reference, training: Training
) -> TeacherResult:
    return TeacherResult(
        dataset=task.dataset,
        name=type(model).__name__,
        parameters=parameter_count(model),
        metric_name=task.metric.name,
        metric=known.metric,
        higher_is_better=task.metric.higher_is_better,
        steps=known.steps,
        residual=known.residual,
        train_seconds=training.seconds,
    )


def _line(cell: GraphCell, what: str, metric: float | None, training: Training) -> str:
    score = "" if metric is None else f" {100 * metric:.1f}% converged,"
    took = "?" if training.seconds is None else f"{training.seconds:.0f}"
    return f"{cell.plan.title}, seed {cell.seed}: {what}{score} trained in {took} s"


def plans_at(scale: str, data: Path | None, only: tuple[str, ...] = ()) -> list[GraphPlan]:
    """The graphs of a scale: those named, or all; ogbn-arxiv at the small scale only if its files are there."""
    plans = [plan for plan in SCALES[scale] if not only or plan.name in only]
    unknown = set(only) - {plan.name for plan in SCALES[scale]}
    if unknown:
        there = ", ".join(plan.name for plan in SCALES[scale])
        raise ValueError(f"no graph {', '.join(sorted(unknown))} at this scale; there are {there}")
    optional = scale == "small" and not only
    return [
        plan
        for plan in plans
        if not (optional and plan.name == "ogbn-arxiv" and not plan.is_available(data))
    ]


def run_table3(
    scale: str,
    *,
    runs: Path,
    data: Path | None,
    seeds: int = 3,
    only: tuple[str, ...] = (),
    progress: bool = False,
    say: Say = lambda line: None,
    kept: Callable[[Results], None] = lambda results: None,
) -> Results:
    """All graphs and seeds of a scale; `kept` is given the results so far after each graph and seed."""
    plans = plans_at(scale, data, only)
    for plan in plans:
        plan.load(data, 0)  # a missing file is found before hours of training
    parts: list[dict[str, Any]] = []
    for seed in range(
        seeds
    ):  # all graphs with one seed first: a run cut short has something of each
        for plan in plans:
            cell = GraphCell(
                cells=Cells(runs), plan=plan, seed=seed, data=data, progress=progress, say=say
            )
            parts.append(cell.measured())
            kept(_results(scale, parts))
    return _results(scale, parts)


def _results(scale: str, parts: list[dict[str, Any]]) -> Results:
    return Results(
        experiment="table3",
        scale=scale,
        commit=" and ".join(dict.fromkeys(part["commit"] for part in parts)),
        command=" and ".join(dict.fromkeys(part["command"] for part in parts)),
        hardware=parts[-1]["hardware"],
        teachers=tuple(TeacherResult(**t) for part in parts for t in part["teachers"]),
        rows=tuple(Row(**row) for part in parts for row in part["rows"]),
    )


NOTES = (
    "Picard, Anderson and Broyden solve the IGNN that IGNN-Solver, Paper and Anchored accelerate: distance is to "
    "that IGNN's equilibrium, relative.",
    "EIGNN (its fixed-point iteration), MIGNN (Peaceman-Rachford steps of one sweep, one evaluation each, under "
    "Anderson mixing) and Few-step are models of their own, each measured against its own equilibrium. EIGNN's "
    "closed form has no step count: the table has it among the explicit models; it is solved by conjugate gradients "
    "after the weights are diagonalised.",
    "Few-step is a separate IGNN for each number of evaluations, trained for that number with the phantom gradient.",
    "Gap closed: share of the way from the IGNN after one step to the converged IGNN, in accuracy.",
    "Seconds: median for the whole graph, all methods in turns; cost in steps: all included, in units of one "
    "evaluation of the IGNN's map.",
    "PubMed has its public split; the others 20 nodes a class to train, 30 to validate, the rest to test, drawn "
    "with the seed. Parameters of students count the frozen teacher's too.",
)


def claims(results: Results) -> list[str]:
    """What is asked of the default recipe, and of the published one, line by line."""
    lines = []
    rivals = ("picard", "anderson", "broyden", "eignn", "mignn", "ignn_solver")
    for dataset in results.datasets:
        found = {m: {p.steps: p for p in ps} for m, ps in curves(results, dataset).items()}
        for name in RECIPES:
            if name not in found:
                continue
            closed = [gap_closed(results, dataset, name, k) for k in (1, 2)]
            shares = ", ".join("–" if c is None else f"{100 * c:.0f}%" for c in closed)
            lost = [
                f"{style(rival).name} at {k}"
                for k in (1, 2, 5)
                for rival in rivals
                if _beats(found, rival, name, k)
            ]
            nearest = nearest_methods(results, dataset, (*rivals, name))
            not_nearest = [k for k, method in sorted(nearest.items()) if method != name]
            accuracy = (
                f"less accurate than {', '.join(lost)}"
                if lost
                else "no other implicit model is more accurate at 1, 2 or 5"
            )
            distance = (
                f"not the nearest to the equilibrium at {', '.join(map(str, not_nearest))}"
                if not_nearest
                else f"nearest to the equilibrium at every count up to {max(nearest)}"
            )
            lines.append(
                f"- {dataset}, {style(name).name}: closes {shares} of the gap at 1 and 2 evaluations; "
                f"{accuracy}; {distance}."
            )
    return lines


def _beats(found: dict[str, dict[int | None, Any]], rival: str, name: str, k: int) -> bool:
    ours, theirs = found[name].get(k), found.get(rival, {}).get(k)
    if ours is None or theirs is None or ours.metric is None or theirs.metric is None:
        return False
    return theirs.metric > ours.metric


def write_table3(results: Results, folder: Path) -> list[Path]:
    """table3.json, table3.md and table3.png."""
    return write_table(
        results,
        folder,
        title="Table 3: node classification",
        shown=SHOWN,
        notes=NOTES,
        claims=claims(results),
    )

"""Table 3 of the paper: node classification, implicit and explicit, at 1, 2, 5 and 10 evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from cdeq.consistency.distillation import distill
from cdeq.consistency.recipes import RECIPES, Recipe
from cdeq.demo.task import Task
from cdeq.equilibrium.contract import check_contract
from cdeq.evaluation import (
    SOLVERS,
    Equilibria,
    Explicit,
    Method,
    compare,
    find_equilibria,
    learned_solver_method,
    solver_method,
    student_method,
)
from cdeq.evaluation import Results, TeacherResult
from cdeq.evaluation import curves, style
from cdeq.trajectories import TrajectoryStore, record
from cdeq_experiments.graph_cells import (
    GraphCell,
    Measured,
    plans_of,
    run_graphs,
)
from cdeq_experiments.graph_rivals import (
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
from cdeq_experiments.graph_tasks import ignn_task
from cdeq_experiments.options import Options
from cdeq_experiments.paper_table import gap_closed, nearest_methods, write_table
from cdeq_experiments.train import teacher_result, train_teacher

COUNTS = tuple(range(1, 11))
"""Evaluations at which equilibrium models are measured."""
SHOWN = (1, 2, 5, 10)
"""Those that the table shows, as in the paper, and that few-step models are trained for."""

CALIBRATED = max(COUNTS)
"""Steps whose clock is chosen after distillation, on the graph that was distilled on."""


def measure(cell: GraphCell) -> Measured:
    """Everything on one graph with one seed: trained, then measured in one run."""
    plan, seed = cell.plan, cell.seed
    nodes = plan.load(cell.options.data, seed)
    task = ignn_task(plan, nodes, seed)
    with cell.bar("IGNN") as bar:
        teacher, training = train_teacher(task, cell.place("ignn"), seed, bar)
    model = check_contract(teacher)
    known = find_equilibria(model, task.test, task.metric)
    teachers = [teacher_result(task, teacher, known, training)]
    cell.say("IGNN", known.metric, training)

    methods = {name: solver_method(model, solver) for name, solver in SOLVERS.items()}
    explicit: dict[str, Explicit] = {}
    for name, (build, solver) in RIVAL_TEACHERS.items():
        rival, found, result = _rival(cell, build(task, plan, nodes), name)
        methods[name] = rival_method(rival, solver, found)
        teachers.append(result)
        if name == "eignn":
            explicit["eignn_closed"] = closed_form(rival)
    methods |= _students(cell, task, teacher)
    methods |= few_step_methods(task, SHOWN, cell.place, seed, cell.bar)
    for name in EXPLICIT:
        with cell.bar(name.upper()) as bar:
            place = cell.place(name, {"fit": explicit_fit(name, plan)})
            made, training = train_explicit(name, plan, nodes, place, seed, bar)
        explicit[name] = explicit_method(made)
        cell.say(name.upper(), training=training)
    rows = compare(
        methods,
        model,
        task.test,
        known.states,
        task.metric,
        dataset=plan.title,
        seed=seed,
        counts=COUNTS,
        timed=SHOWN,
        repeats=5,
        explicit=explicit,
    )
    cell.say("measured")
    return rows, teachers


def _rival(cell: GraphCell, task: Task, name: str) -> tuple[Any, Equilibria, TeacherResult]:
    """Another equilibrium model, trained to convergence as the teacher is."""
    with cell.bar(name.upper()) as bar:
        model, training = train_teacher(task, cell.place(name), cell.seed, bar)
    known = find_equilibria(check_contract(model), task.test, task.metric)
    cell.say(type(model).__name__, known.metric, training)
    return model, known, teacher_result(task, model, known, training)


def _students(cell: GraphCell, task: Task, teacher: nn.Module) -> dict[str, Method]:
    """The learned solver and a student by each recipe; what was recorded of the teacher is shared."""
    model, seed = check_contract(teacher), cell.seed
    stores: dict[str, TrajectoryStore] = {}
    for mode in ("endpoint", "full"):
        with cell.bar(f"record ({mode})") as bar:
            stores[mode] = record(
                model,
                task.distilling,
                cell.place("ignn") / f"trajectories-{mode}",
                max_steps=task.distill_steps,
                tol=task.distill_tol if mode == "endpoint" else 0.0,
                mode=mode,
                progress=bar,
            )
    with cell.bar("IGNN-Solver") as bar:
        place = cell.place("ignn_solver")
        solver, training = train_ignn_solver(
            teacher, stores["endpoint"], cell.plan, place, seed, bar
        )
    cell.say("IGNN-Solver", training=training)
    methods = {"ignn_solver": learned_solver_method(model, solver)}
    for name in RECIPES:
        plan = task.plans[name]
        recipe = Recipe.from_name(name, **plan.changes)
        student = distill(
            teacher,
            stores[recipe.store_mode],
            recipe=recipe,
            fit=plan.fit,
            folder=cell.place(name, {"recipe": recipe, "fit": plan.fit}),
            seed=seed,
            progress=cell.options.progress,
        )
        if name == "anchored":
            # Its late steps, past the depth it was trained at, have a clock to choose.
            student.calibrate(task.distilling, steps=CALIBRATED)
        methods[name] = student_method(student)
        cell.say(f"{name} distilled")
    return methods


def table3(options: Options) -> Results:
    """Node classification; table3.json, table3.md and table3.png."""
    return run_graphs(
        "table3",
        plans_of(options),
        options,
        measure,
        {"counts": COUNTS, "calibrated": CALIBRATED},
        lambda results: write_table3(results, options.out),
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
    "Seconds: median for the whole graph, all methods in turns. Cost in steps: the evaluations and what a method does "
    "once an input (start network, second injection), in units of one evaluation of the IGNN's map; the mixing between "
    "steps is in the seconds alone. Bold distances: the nearest among those to the same equilibrium.",
    "PubMed has its public split; the others 20 nodes a class to train, 30 to validate, the rest to test, drawn "
    "with the seed. Parameters of students count the frozen teacher's too.",
)


SAME_EQUILIBRIUM = ("picard", "anderson", "broyden", "ignn_solver", "paper", "anchored")
"""Methods whose distances can be compared: they seek the equilibrium of one and the same IGNN."""
RIVALS = ("picard", "anderson", "broyden", "eignn", "mignn", "ignn_solver", "few_step")


def claims(results: Results) -> list[str]:
    """What is asked of the default recipe, and of the published one, line by line."""
    lines = []
    for dataset in results.datasets:
        found = {m: {p.steps: p for p in ps} for m, ps in curves(results, dataset).items()}
        for name in RECIPES:
            if name not in found:
                continue
            closed = [gap_closed(results, dataset, name, k) for k in (1, 2)]
            shares = " and ".join("–" if c is None else f"{100 * c:.1f}%" for c in closed)
            lost = [
                f"{style(rival).name} at {k}"
                for k in (1, 2, 5)
                for rival in RIVALS
                if _beats(found, rival, name, k)
            ]
            accuracy = (
                f"less accurate than {', '.join(lost)}"
                if lost
                else "none of the other implicit models is more accurate at 1, 2 or 5"
            )
            lines.append(
                f"- {dataset}, {style(name).name}: closes {shares} of the gap at 1 and 2 evaluations; "
                f"{accuracy}; {_nearness(results, dataset, name)}."
            )
    return lines


def _nearness(results: Results, dataset: str, name: str) -> str:
    """At which counts a method is not the nearest to the equilibrium of the IGNN."""
    nearest = nearest_methods(results, dataset, SAME_EQUILIBRIUM)
    if not nearest:
        return "no distance is known"
    elsewhere = [k for k, method in sorted(nearest.items()) if method != name]
    if elsewhere:
        return f"not the nearest to the equilibrium at {', '.join(map(str, elsewhere))}"
    return f"nearest to the equilibrium at every count up to {max(nearest)}"


def _beats(found: dict[str, dict[int | None, Any]], rival: str, name: str, k: int) -> bool:
    """Whether a rival is the more accurate; one that has no figure beats nobody, and beats whoever has none."""
    ours, theirs = found[name].get(k), found.get(rival, {}).get(k)
    if ours is None or theirs is None or theirs.metric is None:
        return False
    return ours.metric is None or theirs.metric > ours.metric


def write_table3(results: Results, folder: Path) -> list[Path]:
    """table3.json, table3.md and table3.png."""
    return write_table(
        results,
        folder,
        title="Table 3: node classification",
        shown=SHOWN,
        notes=NOTES,
        claims=claims(results),
        same_equilibrium=SAME_EQUILIBRIUM,
    )

"""Other settings of the IGNN than those of Table 3: what they change about the teacher, and what is left to win."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cdeq.equilibrium.contract import check_contract
from cdeq.evaluation import find_equilibria, measure_quality, solver_method
from cdeq.evaluation import Results, Row
from cdeq.evaluation import curves, markdown_rows, metric_of
from cdeq.solvers import Picard
from cdeq_experiments.figure_pages import written
from cdeq_experiments.graph_cells import GraphCell, Measured, plans_of, run_graphs
from cdeq_experiments.graph_tasks import SCALES, GraphPlan, ignn_task
from cdeq_experiments.options import Options
from cdeq_experiments.plots import captioned, saved_figure
from cdeq_experiments.table3 import SHOWN
from cdeq_experiments.train import teacher_result, train_teacher

VALIDATION = "validation accuracy"
USUAL = "as in Table 3"
NOTES = (
    "Test accuracy of the IGNN after so many Picard steps, and converged; settings are chosen by the validation "
    "accuracy of the converged model. A line changes one setting of Table 3's.",
)


def settings(plan: GraphPlan) -> dict[str, GraphPlan]:
    """The plan of Table 3 and what else was tried, by what is changed."""
    return {
        USUAL: plan,
        f"{3 * plan.updates} updates": replace(plan, updates=3 * plan.updates),
        "no weight decay": replace(plan, weight_decay=0.0),
        "dropout 0.2": replace(plan, dropout=0.2),
        f"width {2 * plan.width}": replace(plan, width=2 * plan.width),
        "kappa 0.8": replace(plan, kappa=0.8),
    }


def setting_of(plan: GraphPlan, scale: str) -> str:
    """What is changed in a plan of `settings`."""
    return next(
        name for base in SCALES[scale] for name, known in settings(base).items() if known == plan
    )


def measure(cell: GraphCell) -> Measured:
    """One teacher: converged, on validation nodes, and after a few steps."""
    task = ignn_task(cell.plan, cell.plan.load(cell.options.data, cell.seed), cell.seed)
    name = setting_of(cell.plan, cell.options.scale)
    with cell.bar(f"IGNN, {name}") as bar:
        teacher, training = train_teacher(task, cell.place("ignn"), cell.seed, bar)
    model = check_contract(teacher)
    known = find_equilibria(model, task.test, task.metric)
    result = replace(teacher_result(task, teacher, known, training), name=name)
    valid = find_equilibria(model, task.valid, task.metric).metric
    found = measure_quality(
        solver_method(model, Picard()), model, task.test, known.states, task.metric, SHOWN
    )
    rows = [
        Row(
            dataset=cell.plan.title,
            seed=cell.seed,
            method=name,
            steps=steps,
            metric=score.metric,
            distance=score.distance,
            residual=score.residual,
            seconds=None,
            f_equivalents=float(steps),
            parameters=result.parameters,
            train_seconds=training.seconds,
            figures={VALIDATION: valid},
        )
        for steps, score in found.items()
    ]
    cell.say(name, known.metric, training)
    return rows, [result]


def teachers(options: Options) -> Results:
    """Teachers of graphs; teachers.json, teachers.md and teachers.png."""
    plans = [plan for base in plans_of(options) for plan in settings(base).values()]
    return run_graphs(
        "teachers",
        plans,
        options,
        measure,
        {"counts": SHOWN},
        lambda results: write_teachers(results, options.out),
    )


def write_teachers(results: Results, folder: Path) -> None:
    tables, claims = {}, []
    for dataset in results.datasets:
        metric, found = metric_of(results, dataset), curves(results, dataset)
        valid = {name: _validation(results, dataset, name) for name in found}
        converged = {name: results.teacher(dataset, name) for name in found}
        tables[dataset] = markdown_rows(
            ["setting", "validation", "converged", "steps", *map(str, SHOWN)],
            [
                [
                    *(name, metric.text(valid[name]), metric.text(converged[name].metric)),
                    f"{converged[name].steps:.0f}",
                    *(metric.text(p.metric, p.spread) for p in points),
                ]
                for name, points in found.items()
            ],
        )
        best = max(valid, key=lambda name: valid[name])
        claims.append(
            f"- {dataset}: best on validation nodes is {best} ({metric.text(valid[best])}; test "
            f"{metric.text(converged[best].metric)}, of which one step gives {metric.text(found[best][0].metric)})."
        )
    stem = written(
        results,
        folder,
        title="Teachers of graphs: other settings",
        tables=tables,
        notes=NOTES,
        claims=claims,
    )
    with saved_figure(stem.with_suffix(".png"), columns=len(results.datasets)) as panels:
        for panel, dataset in zip(panels, results.datasets, strict=True):
            for name, points in curves(results, dataset).items():
                panel.plot(
                    [p.steps or 0 for p in points],
                    [100 * (p.metric or 0.0) for p in points],
                    marker="o",
                    label=name,
                )
            captioned(panel, dataset, "Picard steps", "accuracy (%)")


def _validation(results: Results, dataset: str, name: str) -> float:
    """The mean over the seeds."""
    found = {
        row.seed: row.figures[VALIDATION] for row in results.rows_of(dataset) if row.method == name
    }
    return sum(found.values()) / len(found)

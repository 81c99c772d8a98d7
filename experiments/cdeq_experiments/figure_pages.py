"""Pages and plots of the figures that are no grid."""

from __future__ import annotations

from pathlib import Path

from cdeq.evaluation import Results, Row
from cdeq.evaluation import curves, markdown_rows, seconds_text, small_text, style
from cdeq.files import atomic_write_text
from cdeq_experiments.paper_table import page_of
from cdeq_experiments.plots import captioned, saved_figure

RESIDUAL_NOTES = (
    "Relative residual |f(z) - z| / |z| under the teacher's map, mean over samples of some test batches; a text's "
    "segments have the memory that the converged teacher leaves. The paper's Figure 2.",
    "A student's state is measured under the teacher's map, not its own. An equilibrium has residual 0; a small "
    "residual short of it does not prove nearness, which is why the distance stands beside it in the JSON.",
)
COST_NOTES = (
    "Seconds of training on this machine, the student's with the recording of what it learns from. The paper's Table 7 "
    "gives 2.6 h against 36.2 h on WikiText-103 (7.2%) and 4.5 h against 57.4 h on ImageNet (7.8%).",
)
OVERHEAD_NOTES = (
    "A recorded batch: its size on disk (inputs included), the seconds its solve and writing took, and how many states "
    "it holds; an update of the student, from the log of its training; what four updates add to the memory of a fresh "
    "process, at their peak, and all that it holds then. The paper's Table 8, on GPUs: "
    "WikiText-103 337.2 MB, 1.44 s, 40 points, 3.27 s, 17.0 GB; ImageNet 757.1 MB, 2.61 s, 50, 4.93 s, 20.9 GB; "
    "ogbn-arxiv 173.1 MB, 0.97 s, 30, 1.21 s, 12.9 GB.",
    "Paper stores whole trajectories; Anchored learns from equilibria alone.",
)
CERTIFIED_NOTES = (
    "One test batch, from input to output, taking turns: Anderson from the teacher's own start, and the certified "
    "student, whose last evaluations check the residual. Evaluations are means over samples, the student's check "
    "included. Where the student's steps do not reach the tolerance the solver goes on from there.",
)


def written(
    results: Results,
    folder: Path,
    *,
    title: str,
    tables: dict[str, str],
    notes: tuple[str, ...],
    claims: list[str],
) -> Path:
    """JSON and Markdown; the path without its suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / results.experiment
    results.to_json(stem.with_suffix(".json"))
    page = page_of(results, title=title, tables=tables, notes=notes, claims=claims)
    atomic_write_text(stem.with_suffix(".md"), page)
    return stem


def write_residuals(results: Results, folder: Path) -> None:
    tables, claims = {}, []
    for dataset in results.datasets:
        found = curves(results, dataset)
        counts = sorted({p.steps for points in found.values() for p in points if p.steps})
        best = {
            k: min(
                (p.residual, name)
                for name, points in found.items()
                for p in points
                if p.steps == k and p.residual is not None
            )[1]
            for k in counts
        }
        tables[dataset] = markdown_rows(
            ["residual after", *map(str, counts)],
            [
                [style(name).name, *(small_text(p.residual) for p in points)]
                for name, points in found.items()
            ],
        )
        where = [k for k in counts if best[k] == "anchored"]
        claims.append(
            f"- {dataset}: Anchored has the smallest residual at "
            + (f"{', '.join(map(str, where))} of {len(counts)} counts" if where else "no count")
            + "; elsewhere "
            + (
                ", ".join(f"{style(best[k]).name} at {k}" for k in counts if k not in where)
                or "nobody else"
            )
            + "."
        )
    stem = written(
        results,
        folder,
        title="Residual against steps",
        tables=tables,
        notes=RESIDUAL_NOTES,
        claims=claims,
    )
    with saved_figure(stem.with_suffix(".png"), columns=len(results.datasets)) as panels:
        for panel, dataset in zip(panels, results.datasets, strict=True):
            for name, points in curves(results, dataset).items():
                look = style(name)
                panel.plot(
                    [p.steps or 0 for p in points],
                    [p.residual or float("nan") for p in points],
                    color=look.colour,
                    marker=look.marker,
                    label=look.name,
                )
            panel.set_yscale("log")
            captioned(panel, dataset, "evaluations of f", "relative residual")


def write_cost(results: Results, folder: Path) -> None:
    tables, claims = {}, []
    bars: dict[str, list[tuple[str, float]]] = {}
    for dataset in results.datasets:
        teacher = results.teacher(dataset).train_seconds
        rows = [["teacher", seconds_text(teacher), "100%"]]
        bars[dataset] = [("teacher", teacher or 0.0)]
        for row in results.rows_of(dataset):
            known = row.train_seconds is not None and teacher
            share = f"{100 * row.train_seconds / teacher:.1f}%" if known else "–"  # type: ignore[operator]
            rows.append([style(row.method).name, seconds_text(row.train_seconds), share])
            bars[dataset].append((style(row.method).name, row.train_seconds or 0.0))
            claims.append(
                f"- {dataset}: {style(row.method).name} takes {seconds_text(row.train_seconds)}, {share} of its "
                f"teacher's {seconds_text(teacher)}."
            )
        tables[dataset] = markdown_rows(["model", "training", "of the teacher's"], rows)
    stem = written(
        results,
        folder,
        title="Training: teacher and students",
        tables=tables,
        notes=COST_NOTES,
        claims=claims,
    )
    with saved_figure(stem.with_suffix(".png"), columns=len(bars)) as panels:
        for panel, (dataset, found) in zip(panels, bars.items(), strict=True):
            panel.barh(
                [name for name, _ in found][::-1], [s for _, s in found][::-1], color="#0068a3"
            )
            panel.set_title(dataset)
            panel.set_xlabel("seconds of training")


def write_overhead(results: Results, folder: Path) -> None:
    tables, claims = {}, []
    for dataset in results.datasets:
        rows = results.rows_of(dataset)
        names = list(rows[0].figures)
        tables[dataset] = markdown_rows(
            ["recipe", *names],
            [
                [style(row.method).name, *(f"{row.figures[name]:.3g}" for name in names)]
                for row in rows
            ],
        )
        sizes = {row.method: row.figures["storage, MB a batch"] for row in rows}
        if {"paper", "anchored"} <= set(sizes):
            claims.append(
                f"- {dataset}: a batch that Paper learns from takes {sizes['paper']:.3g} MB, one that Anchored learns "
                f"from {sizes['anchored']:.3g} MB, {sizes['paper'] / sizes['anchored']:.0f} times less."
            )
    stem = written(
        results,
        folder,
        title="Overhead of trajectories and updates",
        tables=tables,
        notes=OVERHEAD_NOTES,
        claims=claims,
    )
    with saved_figure(stem.with_suffix(".png"), columns=len(results.datasets)) as panels:
        for panel, dataset in zip(panels, results.datasets, strict=True):
            rows = results.rows_of(dataset)
            panel.barh(
                [style(row.method).name for row in rows],
                [row.figures["storage, MB a batch"] for row in rows],
                color=[style(row.method).colour for row in rows],
            )
            panel.set_title(dataset)
            panel.set_xlabel("MB a recorded batch")


def write_certified(results: Results, folder: Path) -> None:
    tables, claims = {}, []
    pairs: dict[str, list[tuple[str, Row, Row]]] = {}
    for dataset in results.datasets:
        rows = {row.method: row for row in results.rows_of(dataset)}
        tolerances = [name.removeprefix("solver to ") for name in rows if name.startswith("solver")]
        pairs[dataset] = [
            (t, rows[f"solver to {t}"], rows[f"certified to {t}"]) for t in tolerances
        ]
        tables[dataset] = markdown_rows(
            [
                *("tolerance", "Anderson: evaluations", "seconds", "certified: evaluations"),
                *("seconds", "finished by the student", "time ratio"),
            ],
            [
                [
                    t,
                    f"{solver.f_equivalents:.1f}",
                    seconds_text(solver.seconds),
                    f"{student.f_equivalents:.1f}",
                    seconds_text(student.seconds),
                    f"{100 * student.figures['by the student']:.0f}%",
                    f"{(student.seconds or 0) / (solver.seconds or 1):.2f}",
                ]
                for t, solver, student in pairs[dataset]
            ],
        )
        claims += [
            f"- {dataset}, to {t}: {solver.f_equivalents:.1f} evaluations and {seconds_text(solver.seconds)} for the "
            f"solver alone, {student.f_equivalents:.1f} and {seconds_text(student.seconds)} for the certified student."
            for t, solver, student in pairs[dataset]
        ]
    stem = written(
        results,
        folder,
        title="Certified solving",
        tables=tables,
        notes=CERTIFIED_NOTES,
        claims=claims,
    )
    with saved_figure(stem.with_suffix(".png"), columns=len(pairs)) as panels:
        for panel, (dataset, found) in zip(panels, pairs.items(), strict=True):
            places = range(len(found))
            for shift, rows_of, name, colour in (
                (-0.2, [a for _, a, _ in found], "Anderson alone", style("anderson").colour),
                (0.2, [b for *_, b in found], "certified student", style("anchored").colour),
            ):
                panel.bar(
                    [p + shift for p in places],
                    [1000 * (row.seconds or 0) for row in rows_of],
                    width=0.4,
                    label=name,
                    color=colour,
                )
            panel.set_xticks(list(places), [t for t, *_ in found])
            captioned(panel, dataset, "tolerance", "ms a batch")

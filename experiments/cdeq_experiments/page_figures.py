"""Figures of results/ as the README and docs/ show them: tables, sentences, and numbers within a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cdeq.evaluation import Results
from cdeq.evaluation import (
    Point,
    curves,
    markdown_rows,
    markdown_table,
    metric_of,
    seconds_text,
    small_text,
    style,
)
from cdeq_experiments.grids import GRIDS
from cdeq_experiments.image_cells import SHOWN as IMAGE_COUNTS
from cdeq_experiments.published import TABLES, PublishedTable, bracketed, published_beside
from cdeq_experiments.reproduce import EXPERIMENTS
from cdeq_experiments.text_cells import SHOWN as TEXT_COUNTS

TASKS = ("images", "text", "graph")
SHOWN = ("metric", "distance", "f_equivalents")
GRAPH_METHODS = ("anderson", "ignn_solver", "paper", "anchored")
GRAPH_COUNTS = (1, 2)
COMPARED = ("anderson", "hyperdeq", "ignn_solver", "few_step", "paper", "anchored")
COUNTED = (
    ("table1", "WikiText-2"),
    ("table2", "CIFAR-10"),
    ("table2", "Tiny-ImageNet (40 classes)"),
)
METHODS = ("picard", "anderson", "broyden", "hyperdeq", "few_step", "paper", "anchored")


def _small(results: Path, experiment: str) -> Results:
    return Results.from_json(results / "small" / f"{experiment}.json")


def _point(found: Results, dataset: str, method: str, steps: int | None) -> Point:
    return _at(curves(found, dataset)[method], steps)


def _at(points: Sequence[Point], steps: int | None) -> Point:
    return next(p for p in points if p.steps == steps)


def demo_figures(results: Path) -> str:
    """The tables of the three demos, with a heading each."""
    parts = []
    for task in TASKS:
        found = Results.from_json(results / "tiny" / f"demo-{task}.json")
        for dataset in found.datasets:
            parts.append(f"**{dataset}.** {markdown_table(found, dataset, SHOWN)}")
    return "\n".join(parts)


def graph_figures(results: Path) -> str:
    """Accuracy on the real graphs: a line a graph, a column a method and number of evaluations."""
    found = _small(results, "table3")
    heads = [f"{style(method).name}, {k}" for k in GRAPH_COUNTS for method in GRAPH_METHODS]
    rows = []
    for dataset in found.datasets:
        metric, teacher = metric_of(found, dataset), found.teacher(dataset)
        by = curves(found, dataset)
        cells = []
        for k in GRAPH_COUNTS:
            points = [_at(by[method], k) for method in GRAPH_METHODS]
            best = max(p.metric or 0.0 for p in points)
            texts = [metric.text(p.metric, p.spread) for p in points]
            cells += [
                f"**{text}**" if p.metric == best else text
                for text, p in zip(texts, points, strict=True)
            ]
        converged = f"{metric.text(teacher.metric)} ({teacher.steps:.0f} steps)"
        rows.append([dataset, converged, *cells])
    return markdown_rows(["graph", "IGNN, converged", *heads], rows)


def counted_figures(
    results: Path, table: str, counts: Sequence[int], methods: Sequence[str]
) -> str:
    """A table's metric on each of its data sets: a line a method, a column a number of evaluations."""
    found = _small(results, table)
    parts = []
    for dataset in found.datasets:
        metric, teacher = metric_of(found, dataset), found.teacher(dataset)
        by = curves(found, dataset)
        rows = []
        for method in methods:
            at = {p.steps: p for p in by[method]}
            cells = [metric.text(at[k].metric, at[k].spread) for k in counts]
            rows.append([style(method).name, *cells, seconds_text(at[1].seconds)])
        converged = f"{metric.text(teacher.metric)} in {teacher.steps:.0f} steps"
        table = markdown_rows(["method", *map(str, counts), "seconds a batch at 1"], rows)
        parts.append(f"{dataset}; the converged teacher: {converged}.\n\n{table}")
    return "\n".join(parts)


def beside_paper(results: Path, table: str, quantity: str = "metric") -> str:
    """A table's students and their rivals at the paper's numbers of evaluations, its own figures in brackets.

    `quantity` is metric or seconds.
    """
    found = _small(results, table)
    parts = []
    for dataset in found.datasets:
        metric, teacher = metric_of(found, dataset), found.teacher(dataset)
        by, beside = curves(found, dataset), published_beside(found, dataset)
        counts = _counts_of_the_paper(by["paper"], beside)
        what = metric.name if quantity == "metric" else "time of a batch"
        head = f"{dataset}, {what} at" + (f" ({beside.data} in brackets)" if beside else "")
        rows = []
        for method in (method for method in COMPARED if method in by):
            at = {p.steps: p for p in by[method]}
            texts = [
                metric.text(at[k].metric, at[k].spread)
                if quantity == "metric"
                else seconds_text(at[k].seconds)
                for k in counts
            ]
            figures = [
                getattr(beside.figure(method, k), quantity) if beside else None for k in counts
            ]
            cells = [text + bracketed(f) for text, f in zip(texts, figures, strict=True)]
            rows.append([style(method).name, *cells])
        part = markdown_rows([head, *map(str, counts)], rows)
        if quantity == "metric":
            converged = f"{metric.text(teacher.metric)} in {teacher.steps:.0f} steps"
            part += f"\nThe converged teacher: {converged}.\n"
        parts.append(part)
    return "\n" + "\n".join(parts) + "\n"


def _counts_of_the_paper(points: Sequence[Point], beside: PublishedTable | None) -> list[int]:
    """Numbers of evaluations at which the paper has figures; for data it has none of, those of its other graphs."""
    known = {p.steps for p in points}
    if beside is None:
        return [k for k in (1, 2, 5, 10) if k in known]
    return [k for k in sorted({k for _, k in beside.rows if k}) if k in known]


def gains(results: Path) -> str:
    """How many times better than the teacher's solver with the same one or two evaluations; the paper's in brackets."""
    shown = [(method, k) for method in ("paper", "anchored") for k in (1, 2)]
    rows = []
    for table in TABLES:
        found = _small(results, table)
        for dataset in found.datasets:
            beside = published_beside(found, dataset)
            name = f"{dataset} ({beside.data})" if beside else dataset
            rows.append([name, *(_gain(found, dataset, method, k) for method, k in shown)])
    heads = [f"{style(method).name}, {k}" for method, k in shown]
    return "\n" + markdown_rows(["times better than Anderson", *heads], rows) + "\n"


def _gain(found: Results, dataset: str, method: str, steps: int) -> str:
    """A student's metric over that of Anderson, ours and the paper's."""
    higher, beside = metric_of(found, dataset).higher_is_better, published_beside(found, dataset)
    pair = (method, "anderson")
    ours = _times([_point(found, dataset, m, steps).metric for m in pair], higher)
    theirs = _times([beside.figure(m, steps).metric for m in pair], higher) if beside else None
    return f"{ours:.2f}" + ("" if theirs is None else f" ({theirs:.1f})")


def _times(pair: Sequence[float | None], higher_is_better: bool) -> float | None:
    """The first over the second, or the second over the first where less is better."""
    first, second = pair
    if first is None or second is None:
        return None
    return first / second if higher_is_better else second / first


def ladder(results: Path) -> str:
    """From the published recipe to ours: the metric at one evaluation, and the distance where the paper reports."""
    found, grid = _small(results, "recipe"), GRIDS["recipe"]
    ends = {
        title: grid.reported[kind] for kind, title in zip(grid.kinds, found.datasets, strict=True)
    }
    heads = [
        head
        for title, end in ends.items()
        for head in (f"{title}: {metric_of(found, title).name} at 1", f"distance at {end}")
    ]
    rows = []
    for name in dict.fromkeys(row.method for row in found.rows):
        cells = []
        for title, end in ends.items():
            first = _point(found, title, name, 1)
            cells.append(metric_of(found, title).text(first.metric, first.spread))
            cells.append(small_text(_point(found, title, name, end).distance))
        rows.append([style(name).name, *cells])
    return markdown_rows(["", *heads], rows)


def tables_of(results: Path, experiment: str) -> str:
    """The tables of an experiment's own page, under the names of their data sets."""
    page = (results / "small" / f"{experiment}.md").read_text("utf-8")
    parts = []
    for section in page.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        lines = [line for line in body.splitlines() if line.startswith("|")]
        if lines:
            parts.append(f"{title}:\n\n" + "\n".join(lines) + "\n")
    return "\n" + "\n".join(parts) + "\n"


# Single figures within a sentence.


def _ratio(above: float | None, below: float | None, digits: int = 1) -> str:
    assert above is not None
    assert below is not None
    return f"{above / below:.{digits}f}"


def _teacher_memory(results: Path) -> str:
    """By how much the student distilled on the teacher's memory is better, beside its perplexity."""
    own, teachers = (
        next(
            row.metric
            for row in _small(results, "table1").rows
            if (row.method, row.seed, row.steps) == (method, 0, 1) and row.metric
        )
        for method in ("anchored", "anchored_teacher_memory")
    )
    return f"{own - teachers:.1f} of {own:.0f}"


def _short_of_converged(
    results: Path, table: str, dataset: str, method: str, steps: int, digits: int = 1
) -> str:
    """By how many points of accuracy, or per cent of perplexity, a student is worse than the converged teacher."""
    found = _small(results, table)
    reached, converged = (
        _point(found, dataset, method, steps).metric,
        found.teacher(dataset).metric,
    )
    assert reached is not None
    assert converged is not None
    if metric_of(found, dataset).percent:
        return f"{100 * (converged - reached):.{digits}f}"
    return f"{100 * (reached / converged - 1):.{digits}f}%"


def _times_as_far(results: Path, method: str, steps: int) -> str:
    """How much further from the equilibrium a student made from pieces of PubMed is than one of all seen nodes."""
    far, near = (
        _point(_small(results, "inductive"), "PubMed", m, steps).distance
        for m in (method, "anchored")
    )
    return _ratio(far, near)


def _times_faster(results: Path, table: str, dataset: str) -> str:
    """Seconds of Anderson run to its tolerance over those of the student at two evaluations."""
    found = _small(results, table)
    solved, student = (
        _point(found, dataset, m, k).seconds for m, k in (("solved", None), ("anchored", 2))
    )
    return _ratio(solved, student)


def _nearer_by_weights(results: Path, dataset: str) -> str:
    """How many times nearer to the equilibrium at eight evaluations anchored weights bring a student."""
    found = _small(results, "recipe")
    before, after = (
        _point(found, dataset, m, 8).distance for m in ("+ own rollouts", "+ anchored weights")
    )
    return _ratio(before, after, 0)


PLACES: dict[str, Callable[[Path], str]] = {
    "figures": demo_figures,
    "words": partial(counted_figures, table="table1", counts=TEXT_COUNTS, methods=METHODS),
    "pictures": partial(
        counted_figures, table="table2", counts=IMAGE_COUNTS, methods=("deq", *METHODS)
    ),
    "graphs": graph_figures,
    **{f"{t} beside the paper": partial(beside_paper, table=t) for t in TABLES},
    **{
        f"seconds of {t} beside the paper": partial(beside_paper, table=t, quantity="seconds")
        for t in TABLES
    },
    "gains": gains,
    "ladder": ladder,
    **{f"tables of {name}": partial(tables_of, experiment=name) for name in EXPERIMENTS},
    "gain of the teacher's memory": _teacher_memory,
    "points below on CIFAR-10": partial(
        _short_of_converged,
        table="table2",
        dataset="CIFAR-10",
        method="anchored",
        steps=1,
        digits=2,
    ),
    "times as far from samples": partial(_times_as_far, method="anchored_samples", steps=1),
    "times as far from parts": partial(_times_as_far, method="anchored_parts", steps=1),
    **{
        f"Paper short of {dataset}": partial(
            _short_of_converged, table=table, dataset=dataset, method="paper", steps=8
        )
        for table, dataset in COUNTED
    },
    **{
        f"times faster on {dataset}": partial(_times_faster, table=table, dataset=dataset)
        for table, dataset in COUNTED
    },
    **{
        f"times nearer on {dataset}": partial(_nearer_by_weights, dataset=dataset)
        for dataset in ("WikiText-2", "CIFAR-10")
    },
}
"""What stands between <!-- name --> and <!-- end of name -->."""

"""Put the figures of results/ into a Markdown page: `python -m cdeq.experiments.readme README.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cdeq.experiments.image_cells import SHOWN as IMAGE_COUNTS
from cdeq.experiments.results import Results
from cdeq.experiments.table import curves, markdown_table, metric_of, seconds_text, style
from cdeq.experiments.text_cells import SHOWN as TEXT_COUNTS

TASKS = ("images", "text", "graph")
SHOWN = ("metric", "distance", "f_equivalents")
GRAPH_METHODS = ("anderson", "ignn_solver", "paper", "anchored")
GRAPH_COUNTS = (1, 2)
METHODS = ("picard", "anderson", "broyden", "hyperdeq", "few_step", "paper", "anchored")


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
    found = Results.from_json(results / "small" / "table3.json")
    heads = [f"{style(method).name}, {k}" for k in GRAPH_COUNTS for method in GRAPH_METHODS]
    lines = [
        "| graph | IGNN, converged | " + " | ".join(heads) + " |",
        "|---|---:|" + "---:|" * len(heads),
    ]
    for dataset in found.datasets:
        metric, teacher = metric_of(found, dataset), found.teacher(dataset)
        by = curves(found, dataset)
        cells = []
        for k in GRAPH_COUNTS:
            points = [next(p for p in by[method] if p.steps == k) for method in GRAPH_METHODS]
            best = max(p.metric or 0.0 for p in points)
            texts = [metric.text(p.metric, p.spread) for p in points]
            cells += [
                f"**{text}**" if p.metric == best else text
                for text, p in zip(texts, points, strict=True)
            ]
        converged = f"{metric.text(teacher.metric)} ({teacher.steps:.0f} steps)"
        lines.append(f"| {dataset} | {converged} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def counted_figures(
    results: Path, table: str, counts: Sequence[int], methods: Sequence[str]
) -> str:
    """A table's metric on each of its data sets: a line a method, a column a number of evaluations."""
    found = Results.from_json(results / "small" / f"{table}.json")
    parts = []
    for dataset in found.datasets:
        metric, teacher = metric_of(found, dataset), found.teacher(dataset)
        by = curves(found, dataset)
        lines = [
            f"{dataset}; the converged teacher: {metric.text(teacher.metric)} in {teacher.steps:.0f} steps.",
            "",
            "| method | " + " | ".join(map(str, counts)) + " | seconds a batch at 1 |",
            "|---|" + "---:|" * (len(counts) + 1),
        ]
        for method in methods:
            at = {p.steps: p for p in by[method]}
            cells = [metric.text(at[k].metric, at[k].spread) for k in counts]
            cells.append(seconds_text(at[1].seconds))
            lines.append(f"| {style(method).name} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


PLACES: dict[str, Callable[[Path], str]] = {
    "figures": demo_figures,
    "words": partial(counted_figures, table="table1", counts=TEXT_COUNTS, methods=METHODS),
    "pictures": partial(
        counted_figures, table="table2", counts=IMAGE_COUNTS, methods=("deq", *METHODS)
    ),
    "graphs": graph_figures,
}
"""What stands between <!-- name --> and <!-- end of name -->."""


def filled(page: str, results: Path) -> str:
    """The page with its marked places filled anew."""
    for name, figures in PLACES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise ValueError(f"the page has no place between {begin} and {end}")
        page = f"{before}{begin}\n{figures(results)}{end}{after}"
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(filled(path.read_text(), path.parent / "results"))

"""Put numbers of results/ into Markdown pages: `python -m cdeq_experiments.pages.fill README.md docs/*.md`.

What stands between `<!-- fill: EXPRESSION -->` and `<!-- end -->` is the value of that Jinja expression, which can call
the public methods of `Known`. Of a folder of results, such as results/small, the pages are rendered again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from cdeq.evaluation import Results, metric_of, style
from cdeq_experiments.pages import frame as frames
from cdeq_experiments.pages.plots import draw_picture
from cdeq_experiments.pages.render import ENVIRONMENT, write_pages
from cdeq_experiments.pages.sentences import plain
from cdeq_experiments.pages.tables import Table, cell, tables

PLACE = re.compile(r"<!-- fill: (?P<what>.+?) -->.*?<!-- end -->", re.DOTALL)
MARK = re.compile(r"<!-- (fill: .*?|end) -->")
TABLES = ("table1", "table2", "table3")
LEARNED = {"hyperdeq": "learned solver", "ignn_solver": "learned solver"}


class Known:
    """What an expression can ask for, from a folder of results: experiments are those of results/small."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.read = cache(self._read)

    def _read(self, experiment: str) -> tuple[Results, pd.DataFrame]:
        results = Results.from_json(self.folder / "small" / f"{experiment}.json")
        return results, frames.frame(results)

    def at(self, experiment: str, dataset: str, method: str, steps: int | None = None) -> Any:
        """A row of the frame: `at("table2", "CIFAR-10", "anchored", 1).metric`."""
        return frames.at(self.read(experiment)[1], dataset, method, steps)

    def teacher(self, experiment: str, dataset: str) -> Any:
        """The converged teacher: `teacher("table2", "CIFAR-10").metric`."""
        return self.read(experiment)[0].teacher(dataset)

    def findings(self, experiment: str) -> str:
        """The sentences of an experiment, as a list."""
        return "\n" + "\n".join(f"- {line}" for line in self.read(experiment)[0].findings) + "\n"

    def tables(self, experiment: str) -> str:
        """The tables of an experiment."""
        return ENVIRONMENT.get_template("tables.md.j2").render(
            tables=tables(self.read(experiment)[0])
        )

    def bench(self, name: str) -> str:
        """The tables that a benchmark wrote beside its JSON."""
        return f"\n{(self.folder / 'bench' / f'{name}.md').read_text(encoding='utf-8')}"

    def summary(
        self,
        *methods: str,
        field: str = "metric",
        paper: bool = False,
        of: Sequence[str] = TABLES,
        counts: Sequence[int | None] = (1, 2),
    ) -> str:
        """All data sets of the three tables: a quantity of some methods after one and two evaluations.

        `learned solver` is the one that a data set has; with `paper` its numbers stand in brackets. `of` other
        experiments or at other `counts` if so asked, None for what has no number of evaluations.
        """
        rows, columns = [], [(name, k) for k in counts for name in methods]
        for results, found in map(self.read, of):
            for dataset in results.datasets:
                metric, teacher = metric_of(results, dataset), results.teacher(dataset)
                own = found[found["dataset"] == dataset].replace({"method": LEARNED})
                own, higher = own[own["method"].isin(methods)], metric.higher_is_better
                own["best"] = frames.best_of(own, own["metric"], metric.text, higher)
                picked = [frames.at(own, dataset, name, k) for name, k in columns]
                told = f" ({frames.beside(dataset)})" if paper and frames.beside(dataset) else ""
                end = f"{metric.phrase(teacher.metric)} after {teacher.steps:.0f}"
                cells = [cell(metric, row, field, paper=paper) for row in picked]
                rows.append([f"{plain(dataset)}{told}", end, *cells])
        heads = [style(name).name + f", {k}" * (k is not None) for name, k in columns]
        heads = [head[:1].upper() + head[1:] for head in heads]
        return f"\n{Table('', ['', 'converged', *heads], rows).markdown()}\n"


def filled(page: str, results: Path) -> str:
    """The page with all its places filled again."""
    known = Known(results)
    names = {name: getattr(known, name) for name in dir(Known) if not name.startswith("_")}

    def fill(place: re.Match[str]) -> str:
        value = ENVIRONMENT.from_string("{{ " + place["what"] + " }}").render(names)
        return f"<!-- fill: {place['what']} -->{value}<!-- end -->"

    if len(MARK.findall(page)) != 2 * len(PLACE.findall(page)):
        raise ValueError(f"a place has no beginning or no end: {MARK.findall(page)}")
    return PLACE.sub(fill, page)


def main(arguments: list[str]) -> None:
    """Fill pages, with the README draw its picture, and render the results of folders again."""
    for path in (Path(name).resolve() for name in arguments):
        if path.is_dir():
            for found in map(Results.from_json, sorted(path.glob("*.json"))):
                if found.page:
                    write_pages(found, path)
            continue
        root = next(folder for folder in path.parents if (folder / "results").is_dir())
        path.write_text(
            filled(path.read_text(encoding="utf-8"), root / "results"), encoding="utf-8"
        )
        if path.name == "README.md":
            pictured = Known(root / "results").read("table2")[0]
            draw_picture(pictured, "Tiny-ImageNet (40 classes)", root / "docs" / "picture.png")


if __name__ == "__main__":
    main(sys.argv[1:])

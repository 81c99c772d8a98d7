"""Put numbers of results/ into Markdown pages: `python -m cdeq_experiments.pages.fill README.md docs/*.md`.

A folder among the arguments is one of results: their pages are rendered again from their JSON.

What stands between `<!-- fill: EXPRESSION -->` and `<!-- end -->` is the value of that Jinja expression; the public
methods of `Known` are what it can call. With `--check` nothing is written, and a page that is out of date is an error.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from cdeq.evaluation import Results, metric_of, style
from cdeq_experiments.pages import frame as frames
from cdeq_experiments.pages.plots import draw_picture
from cdeq_experiments.pages.render import ENVIRONMENT, write_pages
from cdeq_experiments.pages.sentences import plain
from cdeq_experiments.pages.tables import Table, quantities, tables

PLACE = re.compile(r"<!-- fill: (?P<what>.+?) -->(?P<old>.*?)<!-- end -->", re.DOTALL)
MARK = re.compile(r"<!-- (fill: .*?|end) -->")
TABLES = ("table1", "table2", "table3")
LEARNED = {"hyperdeq": "learned solver", "ignn_solver": "learned solver"}
PICTURE = ("table2", "CIFAR-10", "docs/picture.png")
"""The experiment and data set of the README's picture, and where it is."""


class Known:
    """What an expression can ask for, from a folder of results."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.read = cache(self._read)

    def _read(self, experiment: str, scale: str = "small") -> tuple[Results, pd.DataFrame]:
        results = Results.from_json(self.folder / scale / f"{experiment}.json")
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

    def tables(self, experiment: str, first: int | None = None) -> str:
        """The tables of an experiment, or the first of each data set."""
        return _shown(self.read(experiment)[0], first)

    def demo(self, task: str) -> str:
        """Metric and distance of a demo, at every number of evaluations."""
        results, found = self.read(f"demo-{task}", "tiny")
        counts = sorted(found["steps"].dropna().unique())
        page = {"layout": "table", "counts": dict.fromkeys(results.datasets, counts)}
        return _shown(replace(results, page=page), 2)

    def summary(self, *methods: str, field: str = "metric", paper: bool = False) -> str:
        """All data sets of the three tables: a quantity of some methods after one and two evaluations.

        `learned solver` is the one that a data set has; with `paper` its numbers stand in brackets.
        """
        rows = []
        for experiment in TABLES:
            results, found = self.read(experiment)
            for dataset in results.datasets:
                metric, teacher = metric_of(results, dataset), results.teacher(dataset)
                own = found[found["dataset"] == dataset].replace({"method": LEARNED})
                own = own[own["method"].isin(methods)]
                own["best"] = frames.best_of(
                    own, own["metric"], metric.text, metric.higher_is_better
                )
                _, cell = quantities(results, dataset, paper)[field]
                cells = [cell(frames.at(own, dataset, name, k)) for k in (1, 2) for name in methods]
                told = f" ({frames.beside(dataset)})" if paper and frames.beside(dataset) else ""
                end = f"{metric.phrase(teacher.metric)} after {teacher.steps:.0f}"
                rows.append([f"{plain(dataset)}{told}", end, *cells])
        heads = [f"{style(name).name}, {k}".capitalize() for k in (1, 2) for name in methods]
        return f"\n{Table('', ['', 'converged', *heads], rows).markdown()}\n"


def _shown(results: Results, first: int | None) -> str:
    parts = []
    for dataset, found in tables(results).items():
        for table in found[:first]:
            title = ": ".join(filter(None, (plain(dataset), table.caption.lower())))
            parts.append(f"{title}\n\n{table.markdown()}\n")
    return "\n" + "\n".join(parts)


def filled(page: str, results: Path) -> str:
    """The page with all its places filled anew."""
    known = Known(results)
    names = {name: getattr(known, name) for name in dir(Known) if not name.startswith("_")}

    def fill(place: re.Match[str]) -> str:
        value = ENVIRONMENT.from_string("{{ " + place["what"] + " }}").render(names)
        return f"<!-- fill: {place['what']} -->{value}<!-- end -->"

    marks = [mark for place in PLACE.finditer(page) for mark in MARK.findall(place[0])]
    alone = MARK.findall(page)
    if len(marks) != len(alone) or len(marks) != 2 * len(PLACE.findall(page)):
        raise ValueError(f"a place has no begin or no end: {alone}")
    return PLACE.sub(fill, page)


def main(arguments: list[str]) -> int:
    """Fill the pages named, and draw the README's picture; or check that they are up to date. Returns 1 if not."""
    check, stale = "--check" in arguments, []
    paths = [Path(name).resolve() for name in arguments if name != "--check"]
    for folder in filter(Path.is_dir, paths):
        for file in sorted(folder.glob("*.json")):
            if not check and (results := Results.from_json(file)).page:
                write_pages(results, folder)
    for path in filter(Path.is_file, paths):
        root = next(folder for folder in path.parents if (folder / "results").is_dir())
        text = path.read_text(encoding="utf-8")
        new = filled(text, root / "results")
        if new != text:
            stale.append(path.name)
        if not check:
            path.write_text(new, encoding="utf-8")
            experiment, dataset, picture = PICTURE
            if path.name == "README.md":
                draw_picture(Known(root / "results").read(experiment)[0], dataset, root / picture)
    if check and stale:
        print(f"out of date, run without --check: {', '.join(stale)}", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

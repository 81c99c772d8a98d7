"""Put the figures of results/tiny into a Markdown page: `python -m cdeq.experiments.readme README.md`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cdeq.experiments.results import Results
from cdeq.experiments.table import markdown_table

TASKS = ("images", "text", "graph")
SHOWN = ("metric", "distance", "f_equivalents")
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def figures(folder: Path) -> str:
    """The tables of the three demos, with a heading each."""
    parts = []
    for task in TASKS:
        results = Results.from_json(folder / f"demo-{task}.json")
        for dataset in results.datasets:
            parts.append(f"**{dataset}.** {markdown_table(results, dataset, SHOWN)}")
    return "\n".join(parts)


def filled(page: str, folder: Path) -> str:
    """The page with its marked place filled anew."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no place between {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{figures(folder)}{END}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(filled(path.read_text(), path.parent / "results" / "tiny"))

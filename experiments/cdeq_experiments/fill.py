"""Put the figures of results/ into Markdown pages: `python -m cdeq_experiments.fill README.md docs/*.md`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cdeq_experiments.page_figures import PLACES

PLACE = re.compile(r"<!-- (?P<name>[^>]+?) -->(?P<old>.*?)<!-- end of (?P=name) -->", re.DOTALL)
MARK = re.compile(r"<!-- (.*?) -->")


def filled(page: str, results: Path) -> str:
    """The page with its marked places filled anew: on lines of their own, or within a sentence."""

    def fill(place: re.Match[str]) -> str:
        name, line = place["name"], "\n" if place["old"].startswith("\n") else ""
        if name not in PLACES:
            raise ValueError(f"no figures are called {name!r}")
        return f"<!-- {name} -->{line}{PLACES[name](results)}<!-- end of {name} -->"

    marks = {mark for place in PLACE.finditer(page) for mark in MARK.findall(place[0])}
    if alone := set(MARK.findall(page)) - marks:
        raise ValueError(f"the page has no place of which {sorted(alone)[0]!r} is begin and end")
    return PLACE.sub(fill, page)


def root_of(path: Path) -> Path:
    """The folder above a page that has results/."""
    for folder in path.resolve().parents:
        if (folder / "results").is_dir():
            return folder
    raise FileNotFoundError(f"no folder above {path} has results/")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(filled(path.read_text(), root_of(path) / "results"))

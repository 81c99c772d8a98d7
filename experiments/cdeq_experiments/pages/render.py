"""Results as files and on the terminal: JSON once, and from it Markdown, PNG, and one HTML page of everything."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup
from rich.console import Console
from rich.markdown import Markdown

from cdeq.evaluation import Results, ResultsError, metric_of, results_table, teacher_text
from cdeq.files import atomic_write_text
from cdeq_experiments.pages.frame import beside, with_published
from cdeq_experiments.pages.plots import draw
from cdeq_experiments.pages.sentences import findings, plain
from cdeq_experiments.pages.tables import tables


def _hardware(hardware: dict[str, Any] | str) -> str:
    if isinstance(hardware, str):
        return hardware
    values = {k: " / ".join(map(str, v)) if isinstance(v, list) else v for k, v in hardware.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


ENVIRONMENT = Environment(
    loader=PackageLoader("cdeq_experiments.pages"),
    autoescape=lambda name: name is not None and ".html" in name,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
# Raw HTML in Markdown stays text; a link can lead to the web only.
READER = MarkdownIt("commonmark", {"html": False}).enable("table")
ENVIRONMENT.filters |= {
    "markdown": lambda text: Markup(READER.render(text)),
    "inline": lambda text: Markup(READER.renderInline(text)),
    "plain": plain,
    "hardware": _hardware,
}


def write_pages(results: Results, folder: str | Path) -> list[Path]:
    """Write `folder`/<experiment>.json, with the paper's values and the findings, .md and .png."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    results = with_published(results)
    results = replace(results, findings=findings(results))
    stem = folder / results.experiment
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".json", ".md", ".png")]
    results.to_json(paths[0])
    atomic_write_text(paths[1], ENVIRONMENT.get_template("page.md.j2").render(content(results)))
    draw(results, paths[2])
    return paths


def content(results: Results) -> dict[str, Any]:
    """All that a page of one result shows, as text, for the templates."""
    sections = []
    for dataset, found in tables(results).items():
        metric = metric_of(results, dataset)
        names = dict.fromkeys(t.name for t in results.teachers if t.dataset == dataset)
        teachers = [teacher_text(results.teacher(dataset, name), metric) for name in names]
        sections.append({"title": dataset, "teachers": teachers, "tables": found})
    told = dict.fromkeys(row.dataset for row in results.rows if row.published)
    return {
        "results": results,
        "page": {"notes": [], "carried_over": False, **results.page},
        "sections": sections,
        "seeds": len({row.seed for row in results.rows}),
        "brackets": [f"{beside(name)} for {name}" for name in told],
    }


def show(console: Console, results: Results) -> None:
    """Of a table its metric and distance at the counts of its page; else what was found, or the tables."""
    if results.page["layout"] == "table":
        for dataset in results.datasets:
            counts = results.page["counts"][dataset]
            console.print(results_table(results, dataset, ("metric", "distance"), counts))
    else:
        lines = [f"- {line}" for line in findings(with_published(results))]
        lines = lines or [t.markdown() + "\n" for found in tables(results).values() for t in found]
        console.print(Markdown("\n".join(lines)))


def write_report(folder: str | Path, path: str | Path, order: Sequence[str] = ()) -> Path:
    """Write one self-contained HTML page of all results in `folder`.

    Those named in `order` come first, the others after them by name; the page says which of `order` are missing.
    Raises ResultsError, naming the file, where one is damaged, or where there are none.
    """
    folder, path = Path(folder), Path(path)
    found = {}
    for file in sorted(folder.glob("*.json")):
        results = Results.from_json(file)
        if results.page:
            plot = file.with_suffix(".png")
            image = base64.b64encode(plot.read_bytes()).decode() if plot.exists() else None
            found[file.stem] = content(replace(results, experiment=file.stem)) | {"image": image}
    if not found:
        raise ResultsError(
            f"{folder}: no results here. Give the folder that `cdeq reproduce` wrote to."
        )
    wanted = list(dict.fromkeys(order))
    names = [name for name in wanted if name in found] + sorted(set(found) - set(wanted))
    page = ENVIRONMENT.get_template("report.html.j2").render(
        scales=list(dict.fromkeys(found[name]["results"].scale for name in names)),
        experiments=[found[name] for name in names],
        missing=[name for name in wanted if name not in found],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, page)
    return path

"""All results of a folder bound into one page: what was found first, then a section an experiment."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from cdeq.evaluation import Results
from cdeq.evaluation import curves, metric_of, style
from cdeq.files import atomic_write_text
from cdeq_experiments.findings import listed
from cdeq_experiments.markdown import (
    Block,
    Bullets,
    Grid,
    Heading,
    Paragraph,
    inline,
    read_markdown,
)

NOTES = "how to read it"
"""The heading whose section is folded."""


def write_binder(folder: Path, path: Path, *, order: Sequence[str] = ()) -> Path:
    """Write one self-contained HTML page of all experiments in `folder`.

    An experiment is a <name>.json with a <name>.md beside it, and a <name>.png if it could be drawn. Those named in
    `order` come first, the others after them by name; the page says which of `order` have no results. Raises
    ValueError, naming the file, where one is damaged or there are none.
    """
    folder, path = Path(folder), Path(path)
    found = {p.stem for p in folder.glob("*.json") if p.with_suffix(".md").exists()}
    if not found:
        raise ValueError(
            f"{folder}: no results here (an experiment leaves a .json and a .md of the same name). "
            "Give the folder that `cdeq reproduce` wrote to."
        )
    wanted = list(dict.fromkeys(order))
    names = [name for name in wanted if name in found] + sorted(found - set(wanted))
    bound = [_read(folder / f"{name}.json") for name in names]
    scales = listed(list(dict.fromkeys(one.results.scale for one in bound)))
    count = f"{len(bound)} experiment{'s' * (len(bound) != 1)}"
    missing = [name for name in wanted if name not in found]
    html = Template(_template("binder.html")).substitute(
        look=_look(),
        title=escape(f"Results at scale {scales}"),
        subtitle=f"{count}: what was found, then how, with every table.",
        missing=_paragraph(f"Without results here: {', '.join(missing)}." if missing else ""),
        contents="\n".join(f"<li>{_link(one)}</li>" for one in bound),
        findings="\n".join(map(_findings, bound)),
        sections="\n".join(map(_section, bound)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, html)
    return path


def _template(name: str) -> str:
    return resources.files("cdeq_experiments").joinpath(f"templates/{name}").read_text("utf-8")


def _look() -> str:
    """The style sheet of the single report, so that both pages look alike; no curve here needs its colours."""
    sheet = _template("report.html").partition("<style>")[2].partition("</style>")[0]
    return Template(sheet.strip()).substitute(light="", dark="")


def _plain(text: str) -> str:
    """The same without its markup, for attributes and inside links."""
    return re.sub(r"<[^>]*>", "", inline(text))


# One experiment as it lies on the disk.


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The three files of one experiment, its Markdown taken apart."""

    name: str
    results: Results
    title: str
    claims: tuple[str, ...]
    body: tuple[Block, ...]
    notes: tuple[Block, ...]
    plot: bytes | None
    stale: bool
    """The Markdown names another command or commit than the JSON: they come from different runs."""


def _read(path: Path) -> Experiment:
    try:
        results = Results.from_json(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error
    page, picture = path.with_suffix(".md"), path.with_suffix(".png")
    try:
        blocks = read_markdown(page.read_text(encoding="utf-8"))
    except ValueError as error:  # a UnicodeDecodeError too
        raise ValueError(f"{page}: {error}") from error
    if blocks and isinstance(blocks[-1], Paragraph) and blocks[-1].text.startswith("Hardware: "):
        blocks.pop()  # the JSON has it
    title, stale, opening, folded = results.experiment, False, True, False
    claims: list[str] = []
    body: list[Block] = []
    notes: list[Block] = []
    for i, block in enumerate(blocks):
        if isinstance(block, Heading):
            if i == 0:
                title = block.text
                continue
            opening, folded = False, block.text.lower() == NOTES
            if folded:
                continue
        if isinstance(block, Paragraph) and opening and block.text.startswith("Made by "):
            stale = not (results.command in block.text and results.commit in block.text)
        elif isinstance(block, Bullets) and opening:
            claims += block.items
        else:
            (notes if folded else body).append(block)
    return Experiment(
        name=path.stem,
        results=results,
        title=title,
        claims=tuple(claims),
        body=tuple(body),
        notes=tuple(notes),
        plot=_png(picture) if picture.exists() else None,
        stale=stale,
    )


def _png(path: Path) -> bytes:
    content = path.read_bytes()
    if not (content.startswith(b"\x89PNG\r\n\x1a\n") and content[-8:-4] == b"IEND"):
        raise ValueError(
            f"{path}: not a whole PNG image; make it again, or delete it to go without"
        )
    return content


# Its HTML.


def _anchor(one: Experiment) -> str:
    return escape(quote(one.name))


def _link(one: Experiment) -> str:
    return f'<a href="#experiment-{_anchor(one)}">{_plain(one.title)}</a>'


def _paragraph(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def _findings(one: Experiment) -> str:
    shown = _bullets(map(_claim, one.claims), "findings")
    if not one.claims:
        shown = _paragraph("No findings in words: see its plot and tables.")
    return f'<h3 id="findings-{_anchor(one)}">{_link(one)}</h3>\n{shown}'


def _claim(text: str) -> str:
    """A finding, with what it is about in bold where it opens with that and a colon."""
    about, colon, rest = text.partition(": ")
    if not colon or len(about) > 60 or re.search(r"[`*\[]", about):
        return inline(text)
    return f"<b>{escape(about)}:</b> {inline(rest)}"


def _bullets(items: Iterable[str], kind: str) -> str:
    return f'<ul class="{kind}">\n' + "\n".join(f"<li>{item}</li>" for item in items) + "\n</ul>"


def _section(one: Experiment) -> str:
    parts = [f'<section id="experiment-{_anchor(one)}">', f"<h2>{inline(one.title)}</h2>"]
    if one.stale:
        parts.append(
            '<p class="warning">The tables below and the JSON beside them name different commands or commits: '
            "they may come from different runs.</p>"
        )
    parts += [_figure(one), *_blocks(one.body, one.title)]
    if one.notes:
        notes = "\n".join(_blocks(one.notes, one.title))
        parts.append(f"<details><summary>How to read it</summary>\n{notes}\n</details>")
    parts += ["<h3>How it was made</h3>", "<dl>", *_provenance(one.results), "</dl>"]
    back = f'<a href="#findings-{_anchor(one)}">Its findings</a> · <a href="#contents">Contents</a>'
    return "\n".join([*parts, f'<p class="back">{back}</p>', "</section>"])


def _figure(one: Experiment) -> str:
    if one.plot is None:
        return _paragraph(f"No plot: {one.name}.png is missing.")
    width, height = struct.unpack(">II", one.plot[16:24])
    methods = dict.fromkeys(
        style(row.method, explicit=row.steps is None).name for row in one.results.rows
    )
    shows = f"Data: {', '.join(one.results.datasets)}. Methods: {', '.join(methods)}."
    alt = f"Plot for {_plain(one.title)}. {escape(shows)} The tables below give values."
    data = base64.b64encode(one.plot).decode()
    image = (
        f'<img alt="{alt}" width="{width}" height="{height}" src="data:image/png;base64,{data}">'
    )
    return f"<figure>{image}</figure>"


def _blocks(blocks: Sequence[Block], title: str) -> Iterator[str]:
    """The blocks of a section whose own heading is an h2; a table is called by the heading above it."""
    level, above, tables = 2, "", 0
    for block in blocks:
        match block:
            case Heading():
                # No level is skipped on the way down, however the text was written.
                level = min(max(block.level + 1, 3), level + 1)
                above, tables = block.text, 0
                yield f"<h{level}>{inline(block.text)}</h{level}>"
            case Paragraph():
                yield f"<p>{inline(block.text)}</p>"
            case Bullets():
                yield _bullets([inline(item) for item in block.items], "plain")
            case Grid():
                tables += 1
                name = ": ".join(filter(None, (title, above)))
                yield _table(block, f"{name}, table {tables}" if tables > 1 else name)


def _table(grid: Grid, caption: str) -> str:
    heads = "".join(
        f'<th scope="col" class="{side}">{inline(cell)}</th>' if cell else "<td></td>"
        for cell, side in zip(grid.head, grid.sides, strict=True)
    )
    out = [
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_plain(caption)}">',
        f"<table><caption><span>{_plain(caption)}</span></caption>",
        f"<thead><tr>{heads}</tr></thead>",
        "<tbody>",
    ]
    # Our tables stand in blocks, one for each number of evaluations.
    block = grid.head.index("evaluations") if "evaluations" in grid.head else None
    last = None
    for first, *rest in grid.rows:
        here = None if block is None else (first, *rest)[block]
        if last is not None and here != last:
            out.append("</tbody><tbody>")
        last = here
        cells = "".join(
            f'<td class="{side}">{inline(cell)}</td>'
            for cell, side in zip(rest, grid.sides[1:], strict=True)
        )
        out.append(f'<tr><th scope="row" class="{grid.sides[0]}">{inline(first)}</th>{cells}</tr>')
    return "\n".join([*out, "</tbody></table></div>"])


def _provenance(results: Results) -> list[str]:
    """Command, commit, seeds, spread and machine as HTML definitions; several runs are joined by "and"."""
    commands = re.split(r" and (?=cdeq |python )", results.command)
    facts = [("Command", commands, "code"), ("Commit", results.commit.split(" and "), "code")]
    facts += [
        ("Seeds", _by_dataset(results, _seeds), "span"),
        ("Spread", _by_dataset(results, _spread), "span"),
        ("Hardware", [_hardware(results.hardware)], "span"),
    ]
    return [
        f"<div><dt>{name}{'s' * (tag == 'code' and len(texts) > 1)}</dt>"
        + "".join(f"<dd><{tag}>{escape(text)}</{tag}></dd>" for text in texts)
        + "</div>"
        for name, texts, tag in facts
    ]


def _by_dataset(results: Results, describe: Callable[[Results, str], str]) -> list[str]:
    """A line a data set, or one line for all where they agree."""
    texts = {dataset: describe(results, dataset) for dataset in results.datasets}
    if len(set(texts.values())) == 1:
        return list(texts.values())[:1]
    return [f"{dataset}: {text}" for dataset, text in texts.items()]


def _seeds(results: Results, dataset: str) -> str:
    rows = results.rows_of(dataset)
    every = sorted({row.seed for row in rows})
    if not every:
        return "–"
    fewer: dict[tuple[int, ...], list[str]] = {}
    for method in curves(results, dataset):
        own = tuple(sorted({row.seed for row in rows if row.method == method}))
        if len(own) < len(every):
            fewer.setdefault(own, []).append(style(method).name)
    # Names may hold a comma themselves.
    only = [f"Only {listed(own)} for {'; '.join(names)}" for own, names in fewer.items()]
    return ". ".join([listed(every), *only])


def _spread(results: Results, dataset: str) -> str:
    metric = metric_of(results, dataset)
    points = [point for points in curves(results, dataset).values() for point in points]
    spreads = [(point.spread, point) for point in points if point.spread is not None]
    if not spreads:
        return "none measured: no method has more than one seed"
    widest, point = max(spreads, key=lambda pair: pair[0])
    amount = f"{metric.factor * widest:.1f} points" if metric.percent else f"{widest:.2g}"
    where = "" if point.steps is None else f" at {point.steps}"
    return (
        f"± is the standard deviation of the {metric.name} over the seeds; "
        f"widest {amount}, {style(point.method).name}{where}"
    )


def _hardware(hardware: dict[str, Any] | str) -> str:
    if isinstance(hardware, str):
        return hardware
    known = {"cpu": "CPU {}", "gpu": "GPU {}", "gpus": "GPUs {}", "memory_gb": "memory {} GB"}
    return ", ".join(
        known.get(name, name.replace("_", " ") + " {}").format(
            " / ".join(map(str, value)) if isinstance(value, list) else value
        )
        for name, value in hardware.items()
    )

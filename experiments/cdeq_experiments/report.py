"""A report to read: findings in plain words, figures, the full table, and how it was made."""

import base64
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from cdeq.evaluation import Results, Row
from cdeq.evaluation import (
    PALETTE,
    grid,
    metric_of,
    seconds_text,
    small_text,
    style,
    teacher_text,
)
from cdeq_experiments.findings import findings, listed
from cdeq_experiments.plots import inline_svg, page_colour, plot_results

_HARDWARE = {"cpu": "CPU", "gpu": "GPU", "gpus": "GPUs", "memory_gb": "Memory, GB"}


def write_report(
    results: Results,
    path: str | Path,
    *,
    figures: Mapping[str, Sequence[Path]] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write one self-contained HTML page.

    `figures` are the files of `plot_results` for each dataset; left out, they are drawn here, or
    the page goes without if matplotlib is not installed. `notes` are paragraphs for the top.
    """
    notes = list(notes)
    if figures is None:
        try:
            drawn = {dataset: _drawn(results, dataset) for dataset in results.datasets}
        except ImportError as error:
            drawn = {}
            notes.append(f"No figures: {error}.")
    else:
        drawn = {dataset: _embedded(paths) for dataset, paths in figures.items()}
    page = resources.files("cdeq_experiments").joinpath("templates/report.html").read_text("utf-8")
    sections = [_section(results, name, drawn.get(name, "")) for name in results.datasets]
    html = Template(page).substitute(
        title=escape(results.experiment),
        subtitle=escape(f"Scale {results.scale} · {', '.join(results.datasets)}"),
        light="\n".join(f"  --m-{light[1:]}: {light};" for light in PALETTE),
        dark="\n".join(f"    --m-{light[1:]}: {dark};" for light, dark in PALETTE.items()),
        notes="\n".join(f'<p class="note">{escape(note)}</p>' for note in notes),
        sections="\n".join(sections),
        provenance="\n".join(_provenance(results)),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    return path


def _drawn(results: Results, dataset: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return _embedded(plot_results(results, dataset, folder, formats=("svg",)))


def _embedded(paths: Sequence[Path]) -> str:
    """The SVG files inline, those against steps first; a PNG only where there is no SVG at all."""
    vectors = sorted((p for p in paths if p.suffix == ".svg"), key=lambda p: "seconds" in p.stem)
    shown = [inline_svg(path) for path in vectors]
    for path in [] if vectors else paths:
        data = base64.b64encode(path.read_bytes()).decode()
        shown.append(f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">')
    return "\n".join(f"<figure>{picture}</figure>" for picture in shown)


def _section(results: Results, dataset: str, figures: str) -> str:
    teacher = teacher_text(results.teacher(dataset), metric_of(results, dataset))
    items = [f"<li>{escape(line)}</li>" for line in findings(results, dataset)]
    if items:
        items[0] = items[0].replace("<li>", '<li class="first">', 1)
    return f"""<section>
<h2>{escape(dataset)}</h2>
<p class="teacher">{escape(teacher)}</p>
<ul class="findings">
{chr(10).join(items)}
</ul>
<h3>Figures</h3>
<div class="figures">
{figures}
</div>
<h3>Table</h3>
<div class="scroll" tabindex="0">{_grid_table(results, dataset)}</div>
<p class="caption">Bold: best at that number of steps.</p>
<details><summary>Every measurement</summary>
<div class="scroll" tabindex="0">{_full_table(results, dataset)}</div>
</details>
</section>"""


def _grid_table(results: Results, dataset: str) -> str:
    steps, lines = grid(results, dataset)
    heads = "".join(f"<th>{'explicit' if k is None else k}</th>" for k in steps)
    out = [f'<table><thead><tr><th class="word">method</th><th>steps</th>{heads}</tr></thead>']
    last = None
    for method, label, cells in lines:
        head = "<th></th>"
        if method != last:
            out.append("<tbody>" if last is None else "</tbody><tbody>")
            look = style(method)
            dot = f'<span class="swatch" style="background: {page_colour(look.colour)}"></span>'
            head = f'<th scope="row">{dot}{escape(look.name)}</th>'
        values = [f"<b>{escape(text)}</b>" if top else escape(text) for text, top in cells]
        numbers = "".join(f"<td>{value}</td>" for value in values)
        out.append(f'<tr>{head}<td class="soft">{escape(label)}</td>{numbers}</tr>')
        last = method
    return "\n".join([*out, "</tbody></table>"])


def _full_table(results: Results, dataset: str) -> str:
    metric = metric_of(results, dataset)

    def cells(row: Row) -> list[str]:
        cost = "–" if row.f_equivalents is None else f"{row.f_equivalents:.3g}"
        return [
            "–" if row.steps is None else str(row.steps),
            str(row.seed),
            metric.text(row.metric),
            small_text(row.distance),
            small_text(row.residual),
            seconds_text(row.seconds),
            cost,
            f"{row.parameters:,}",
        ]

    names = ["steps", "seed", metric.name, "distance", "residual", "seconds", "f-equivalents"]
    heads = "".join(f"<th>{escape(name)}</th>" for name in [*names, "parameters"])
    out = [f'<table><thead><tr><th class="word">method</th>{heads}</tr></thead><tbody>']
    for row in results.rows_of(dataset):
        numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
        out.append(f'<tr><td class="word">{escape(style(row.method).name)}</td>{numbers}</tr>')
    return "\n".join([*out, "</tbody></table>"])


def _provenance(results: Results) -> list[str]:
    """Command, commit, seeds, step counts, teachers and machine as HTML definitions."""
    seeds = sorted({row.seed for row in results.rows})
    steps = sorted({row.steps for row in results.rows if row.steps is not None})
    facts = [
        ("Command", f"<code>{escape(results.command)}</code>"),
        ("Commit", f"<code>{escape(results.commit)}</code>"),
        ("Scale", escape(results.scale)),
        ("Seeds" if len(seeds) > 1 else "Seed", listed(seeds) if seeds else "–"),
        ("Step counts", listed(steps) if steps else "–"),
    ]
    for teacher in results.teachers:
        text = teacher_text(teacher, metric_of(results, teacher.dataset))
        if teacher.train_seconds is not None:
            text += f", trained in {seconds_text(teacher.train_seconds)}"
        facts.append((f"Teacher, {teacher.dataset}", escape(text)))
    hardware = results.hardware
    if isinstance(hardware, str):
        hardware = {"hardware": hardware}
    for name, value in hardware.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        facts.append((_HARDWARE.get(name, name.replace("_", " ").capitalize()), escape(shown)))
    return [f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in facts]

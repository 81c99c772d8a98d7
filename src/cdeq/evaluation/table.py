"""Results as tables, for the terminal and for Markdown; and the names and numbers both share."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import stdev

from rich.table import Table
from rich.text import Text

from cdeq.evaluation.results import Results, Row, TeacherResult, mean


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a method is shown everywhere. `kind` is solver, student or explicit."""

    name: str
    kind: str
    colour: str
    dark: str
    """The colour on a dark page."""
    marker: str = "o"


# Okabe and Ito's palette, which colour-blind readers can tell apart, darkened so that it can also
# be read as text; markers differ too.
STYLES = {
    "picard": Style(name="Picard", kind="solver", colour="#6b7280", dark="#a3abb8", marker="s"),
    "anderson": Style(name="Anderson", kind="solver", colour="#c25500", dark="#f5935a", marker="^"),
    "broyden": Style(name="Broyden", kind="solver", colour="#a8477f", dark="#e3a3c6", marker="v"),
    "paper": Style(name="Paper", kind="student", colour="#00805d", dark="#3cc9a0", marker="D"),
    "anchored": Style(name="Anchored", kind="student", colour="#0068a3", dark="#63bbf0"),
    "anchored_parts": Style(
        name="Anchored, parts", kind="student", colour="#2f6b8a", dark="#8cc7e6", marker=">"
    ),
    "anchored_samples": Style(
        name="Anchored, samples", kind="student", colour="#5b3f9e", dark="#b9a3f0", marker="X"
    ),
    "anchored_whole": Style(
        name="Anchored, whole graph", kind="student", colour="#8a6d00", dark="#e6b93c", marker="P"
    ),
    "hyperdeq": Style(
        name="HyperDEQ", kind="student", colour="#8a6d00", dark="#e6b93c", marker="P"
    ),
    "ignn_solver": Style(
        name="IGNN-Solver", kind="student", colour="#5b3f9e", dark="#b9a3f0", marker="X"
    ),
    "eignn": Style(name="EIGNN", kind="solver", colour="#7a5a00", dark="#dcb64a", marker="<"),
    "mignn": Style(name="MIGNN", kind="solver", colour="#2f6b8a", dark="#8cc7e6", marker=">"),
    "few_step": Style(
        name="Few-step", kind="student", colour="#b0304f", dark="#f08aa4", marker="p"
    ),
    "eignn_closed": Style(
        name="EIGNN, closed form", kind="explicit", colour="#7a5a00", dark="#dcb64a", marker="*"
    ),
    "solved": Style(
        name="Anderson, to its tolerance",
        kind="solver",
        colour="#7a5a00",
        dark="#dcb64a",
        marker="<",
    ),
    "anchored_teacher_memory": Style(
        name="Anchored, teacher's memory",
        kind="student",
        colour="#2f6b8a",
        dark="#8cc7e6",
        marker=">",
    ),
    "deq": Style(
        name="DEQ (single-stream)", kind="solver", colour="#2f6b8a", dark="#8cc7e6", marker=">"
    ),
    "alexnet": Style(name="AlexNet", kind="explicit", colour="#3f6f1d", dark="#a0cf75", marker="*"),
    "inception_v2": Style(
        name="Inception-V2", kind="explicit", colour="#8c2f39", dark="#ee8f99", marker="*"
    ),
    "hrnet": Style(name="HRNet", kind="explicit", colour="#4a4a9c", dark="#a9a9ee", marker="*"),
    "tcn": Style(name="TCN", kind="explicit", colour="#3f6f1d", dark="#a0cf75", marker="*"),
    "gcnn": Style(
        name="Gated ConvNet", kind="explicit", colour="#8c2f39", dark="#ee8f99", marker="*"
    ),
    "awd_qrnn": Style(
        name="AWD-QRNN", kind="explicit", colour="#4a4a9c", dark="#a9a9ee", marker="*"
    ),
    "transformer_xl": Style(
        name="Transformer-XL", kind="explicit", colour="#96601a", dark="#e2ab6b", marker="*"
    ),
    "gcn": Style(name="GCN", kind="explicit", colour="#3f6f1d", dark="#a0cf75", marker="*"),
    "gat": Style(name="GAT", kind="explicit", colour="#8c2f39", dark="#ee8f99", marker="*"),
    "gcnii": Style(name="GCNII", kind="explicit", colour="#4a4a9c", dark="#a9a9ee", marker="*"),
    "gpm": Style(name="GPM", kind="explicit", colour="#96601a", dark="#e2ab6b", marker="*"),
}
_SPARE = (
    ("#8a6d00", "#e6b93c"),
    ("#5b3f9e", "#b9a3f0"),
    ("#3f6f1d", "#a0cf75"),
    ("#8c2f39", "#ee8f99"),
)
# Each colour and what it becomes on a dark page.
PALETTE = {look.colour: look.dark for look in STYLES.values()} | dict(_SPARE)


def style(method: str, *, explicit: bool = False) -> Style:
    """The style of a method; one not in the table gets its own name and a spare colour."""
    if method in STYLES:
        return STYLES[method]
    colour, dark = _SPARE[zlib.crc32(method.encode()) % len(_SPARE)]
    kind = "explicit" if explicit else "student"
    return Style(name=method, kind=kind, colour=colour, dark=dark, marker="h")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One method at one step count, the mean over its seeds."""

    method: str
    steps: int | None
    metric: float | None
    distance: float | None
    residual: float | None
    seconds: float | None
    f_equivalents: float | None
    parameters: int
    seeds: int
    spread: float | None
    """Standard deviation of the metric over the seeds; None for a single seed."""
    top5: float | None = None


def curves(results: Results, dataset: str) -> dict[str, list[Point]]:
    """For each method, in the order of `STYLES`, its points by rising step count."""
    rows = results.rows_of(dataset)
    methods = list(dict.fromkeys(row.method for row in rows))
    order = [method for method in STYLES if method in methods]
    order += [method for method in methods if method not in STYLES]
    found: dict[str, list[Point]] = {}
    for method in order:
        groups: dict[int | None, list[Row]] = {}
        for row in rows:
            if row.method == method:
                groups.setdefault(row.steps, []).append(row)
        steps = sorted(groups, key=lambda k: -1 if k is None else k)
        found[method] = [_point(groups[k]) for k in steps]
    return found


def _point(rows: list[Row]) -> Point:
    metrics = [row.metric for row in rows if row.metric is not None]
    return Point(
        method=rows[0].method,
        steps=rows[0].steps,
        metric=mean([row.metric for row in rows]),
        distance=mean([row.distance for row in rows]),
        residual=mean([row.residual for row in rows]),
        seconds=mean([row.seconds for row in rows]),
        f_equivalents=mean([row.f_equivalents for row in rows]),
        parameters=rows[0].parameters,
        seeds=len(rows),
        spread=stdev(metrics) if len(metrics) == len(rows) > 1 else None,
        top5=mean([row.top5 for row in rows]),
    )


def kind_of(points: list[Point]) -> str:
    """Solver, student or explicit."""
    explicit = all(point.steps is None for point in points)
    return style(points[0].method, explicit=explicit).kind


@dataclass(frozen=True, kw_only=True)
class MetricStyle:
    """How a dataset's metric is written, and which of two values is the better one."""

    name: str
    higher_is_better: bool
    percent: bool
    factor: float

    def text(self, value: float | None, spread: float | None = None) -> str:
        """`96.1%`, or four significant digits for a metric that is no fraction."""
        if value is None:
            return "–"
        if not self.percent:
            text = f"{value:#.4g}".rstrip(".")
            return text if spread is None else f"{text} ±{spread:.2g}"
        plus = f" ±{self.factor * spread:.1f}" if spread is not None else ""
        return f"{self.factor * value:.1f}{plus}%"

    def phrase(self, value: float | None) -> str:
        """`96.1% accuracy`, `perplexity 12.34`."""
        text = self.text(value)
        return f"{text} {self.name}" if self.percent else f"{self.name} {text}"

    def better(self, a: float, b: float) -> bool:
        """Whether `a` beats `b`, as far as the written digits tell."""
        if self.text(a) == self.text(b):
            return False
        return a > b if self.higher_is_better else a < b

    def near(self, value: float | None, target: float, *, within: float = 0.01) -> bool:
        """Whether `value` is no worse than `target` by more than the share `within` of it."""
        if value is None:
            return False
        slack = within * abs(target)
        return value >= target - slack if self.higher_is_better else value <= target + slack


def metric_of(results: Results, dataset: str) -> MetricStyle:
    """The metric of a dataset. A fraction such as accuracy is shown in percent."""
    teacher = results.teacher(dataset)
    name = teacher.metric_name.lower()
    percent = any(word in name for word in ("accuracy", "f1", "error rate", "recall", "precision"))
    values = [teacher.metric, *(row.metric for row in results.rows_of(dataset))]
    fraction = all(value is None or abs(value) <= 1 for value in values)
    return MetricStyle(
        name=teacher.metric_name,
        higher_is_better=teacher.higher_is_better,
        percent=percent,
        factor=100.0 if fraction else 1.0,
    )


def small_text(value: float | None) -> str:
    """A distance or residual to three digits: `0.294`, `0.00850`, `3.1e-05`."""
    if value is None:
        return "–"
    if value == 0 or not 1e-3 <= abs(value) < 1e3:
        return f"{value:.1e}" if value else "0"
    return f"{value:#.3g}".rstrip(".")


def seconds_text(value: float | None) -> str:
    """`850 µs`, `12.3 ms`, `1.25 s`, `14 min`."""
    if value is None:
        return "–"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if value < limit:
            scaled = value * factor
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{value / 60:.0f} min"


def cost_text(value: float | None) -> str:
    """A cost in teacher steps to one decimal: `2.3`."""
    return "–" if value is None else f"{value:.1f}"


def teacher_text(teacher: TeacherResult, metric: MetricStyle) -> str:
    """One line about the converged teacher."""
    parts = [f"{teacher.name}, converged: {metric.phrase(teacher.metric)}"]
    if teacher.steps is not None:
        parts.append(f"{teacher.steps:.3g} steps")
    if teacher.residual is not None:
        parts.append(f"residual {small_text(teacher.residual)}")
    parts.append(f"{teacher.parameters:,} parameters")
    return ", ".join(parts)


QUANTITIES = ("metric", "distance", "residual", "seconds")
"""What a table shows unless told otherwise; `f_equivalents`, the cost in teacher steps, can be asked for."""


def grid(
    results: Results, dataset: str, shown: Sequence[str] = QUANTITIES
) -> tuple[list[int | None], Iterator[tuple[str, str, list[tuple[str, bool]]]]]:
    """The step counts, and for each method and quantity its cells `(text, is best)`.

    The best of a column is the best of its quantity at that step count over all methods; the cost in
    steps has none, since a plain solver's is the step count itself.
    """
    found = curves(results, dataset)
    metric = metric_of(results, dataset)
    steps = sorted({p.steps for points in found.values() for p in points}, key=lambda k: k or 1e9)
    quantities: list[tuple[str, str, Callable[[Point], str], bool | None]] = [
        (metric.name, "metric", lambda p: metric.text(p.metric, p.spread), metric.higher_is_better),
        ("distance", "distance", lambda p: small_text(p.distance), False),
        ("residual", "residual", lambda p: small_text(p.residual), False),
        ("seconds", "seconds", lambda p: seconds_text(p.seconds), False),
        ("cost in steps", "f_equivalents", lambda p: cost_text(p.f_equivalents), None),
    ]

    def best(field: str, higher: bool | None, k: int | None) -> float | None:
        column = [getattr(p, field) for points in found.values() for p in points if p.steps == k]
        present = [value for value in column if value is not None]
        if higher is None or len(present) < 2:
            return None
        return max(present) if higher else min(present)

    def lines() -> Iterator[tuple[str, str, list[tuple[str, bool]]]]:
        for method, points in found.items():
            at = {point.steps: point for point in points}
            for label, field, text, higher in (q for q in quantities if q[1] in shown):
                cells = []
                for k in steps:
                    value = getattr(at[k], field) if k in at else None
                    is_best = value is not None and value == best(field, higher, k)
                    cells.append((text(at[k]) if k in at else "", is_best))
                if any(text not in ("", "–") for text, _ in cells):
                    yield method, label, cells

    return steps, lines()


def results_table(
    results: Results,
    dataset: str,
    shown: Sequence[str] = QUANTITIES,
    counts: Sequence[int] | None = None,
) -> Table:
    """Methods by steps; the best of each step count in bold, the converged teacher above.

    `shown` quantities, at `counts` alone, default all.
    """
    if counts is not None:
        kept = [row for row in results.rows if row.steps is None or row.steps in counts]
        results = replace(results, rows=tuple(kept))
    steps, lines = grid(results, dataset, shown)
    teacher = teacher_text(results.teacher(dataset), metric_of(results, dataset))
    table = Table(
        title=Text.assemble((results.experiment, "bold"), f" · {dataset}\n", (teacher, "dim")),
        caption="Bold: best at that number of steps. Seconds: median for a batch.",
        title_justify="left",
        caption_justify="left",
        title_style="",
    )
    table.add_column("method", no_wrap=True)
    table.add_column("steps", style="dim", no_wrap=True, justify="right")
    for k in steps:
        table.add_column("explicit" if k is None else str(k), justify="right", no_wrap=True)
    last = None
    for method, label, cells in lines:
        if method != last and last is not None:
            table.add_section()
        look = style(method)
        name = Text(look.name if method != last else "", style=f"bold {look.dark}")
        table.add_row(
            name, Text(label), *(Text(text, "bold" if top else "") for text, top in cells)
        )
        last = method
    return table


def markdown_rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is words and whose others are figures."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def markdown_table(results: Results, dataset: str, shown: Sequence[str] = QUANTITIES) -> str:
    """The same as a Markdown table, of the quantities `shown`."""
    steps, lines = grid(results, dataset, shown)
    teacher = teacher_text(results.teacher(dataset), metric_of(results, dataset))
    heads = ["explicit" if k is None else str(k) for k in steps]
    out = [
        f"{_cell(teacher)}. Bold: best at that number of steps.",
        "",
        "| method | steps | " + " | ".join(heads) + " |",
        "|---|---|" + "---:|" * len(heads),
    ]
    last = None
    for method, label, cells in lines:
        name = _cell(style(method).name) if method != last else ""
        texts = [f"**{text}**" if top else text for text, top in cells]
        out.append(f"| {name} | {_cell(label)} | " + " | ".join(texts) + " |")
        last = method
    return "\n".join(out) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

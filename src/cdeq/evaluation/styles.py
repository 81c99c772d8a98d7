"""How methods and numbers are shown everywhere: names, colours, markers; values as short texts."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

from cdeq.evaluation.results import Results, TeacherResult


class Style(NamedTuple):
    """How a method is shown. `kind` is solver, student or explicit; `dark`, its colour on a dark page."""

    name: str
    kind: str
    colour: str
    dark: str
    marker: str = "o"


# Okabe and Ito's palette, which colour-blind readers can tell apart, darkened so that it can also
# be read as text; markers differ too.
STYLES = {
    "picard": Style("Picard", "solver", "#6b7280", "#a3abb8", "s"),
    "anderson": Style("Anderson", "solver", "#c25500", "#f5935a", "^"),
    "broyden": Style("Broyden", "solver", "#a8477f", "#e3a3c6", "v"),
    "paper": Style("Paper", "student", "#00805d", "#3cc9a0", "D"),
    "anchored": Style("Anchored", "student", "#0068a3", "#63bbf0"),
    "warm_start": Style("Warm start", "student", "#8a6d00", "#e6b93c", "P"),
    "corrected": Style("Corrected", "student", "#b0304f", "#f08aa4", "*"),
    "anchored_parts": Style("Anchored, parts", "student", "#2f6b8a", "#8cc7e6", ">"),
    "anchored_samples": Style("Anchored, samples", "student", "#5b3f9e", "#b9a3f0", "X"),
    "anchored_whole": Style("Anchored, whole graph", "student", "#8a6d00", "#e6b93c", "P"),
    "warm_start_far": Style("Warm start, far", "student", "#2f6b8a", "#8cc7e6", "d"),
    "corrected_far": Style("Corrected, far", "student", "#0068a3", "#63bbf0", "o"),
    "hyperdeq": Style("HyperDEQ", "student", "#5b3f9e", "#b9a3f0", "X"),
    "ignn_solver": Style("IGNN-Solver", "student", "#5b3f9e", "#b9a3f0", "X"),
    "eignn": Style("EIGNN", "solver", "#7a5a00", "#dcb64a", "<"),
    "ignn": Style("IGNN", "solver", "#0068a3", "#63bbf0", "o"),
    "ignn_published": Style("IGNN, kappa 0.9", "solver", "#6b7280", "#a3abb8", "s"),
    "eignn_published": Style("EIGNN, gamma 0.8", "solver", "#a8477f", "#e3a3c6", "v"),
    "mignn": Style("MIGNN", "solver", "#2f6b8a", "#8cc7e6", ">"),
    "few_step": Style("Few-step", "student", "#3f6f1d", "#a0cf75", "p"),
    "eignn_closed": Style("EIGNN, closed form", "explicit", "#7a5a00", "#dcb64a", "*"),
    "solved": Style("Anderson, to its tolerance", "solver", "#7a5a00", "#dcb64a", "<"),
    "anchored_teacher_memory": Style(
        "Anchored, teacher's memory", "student", "#2f6b8a", "#8cc7e6", ">"
    ),
    "deq": Style("DEQ (single-stream)", "solver", "#2f6b8a", "#8cc7e6", ">"),
    "alexnet": Style("AlexNet", "explicit", "#3f6f1d", "#a0cf75", "*"),
    "inception_v2": Style("Inception-V2", "explicit", "#8c2f39", "#ee8f99", "*"),
    "hrnet": Style("HRNet", "explicit", "#4a4a9c", "#a9a9ee", "*"),
    "tcn": Style("TCN", "explicit", "#3f6f1d", "#a0cf75", "*"),
    "gcnn": Style("Gated ConvNet", "explicit", "#8c2f39", "#ee8f99", "*"),
    "awd_qrnn": Style("AWD-QRNN", "explicit", "#4a4a9c", "#a9a9ee", "*"),
    "transformer_xl": Style("Transformer-XL", "explicit", "#96601a", "#e2ab6b", "*"),
    "gcn": Style("GCN", "explicit", "#3f6f1d", "#a0cf75", "*"),
    "gat": Style("GAT", "explicit", "#8c2f39", "#ee8f99", "*"),
    "gcnii": Style("GCNII", "explicit", "#4a4a9c", "#a9a9ee", "*"),
    "gpm": Style("GPM", "explicit", "#96601a", "#e2ab6b", "*"),
}
_SPARE = (
    ("#8a6d00", "#e6b93c"),
    ("#5b3f9e", "#b9a3f0"),
    ("#3f6f1d", "#a0cf75"),
    ("#8c2f39", "#ee8f99"),
)
PALETTE = {look.colour: look.dark for look in STYLES.values()} | dict(_SPARE)
"""Each colour and what it becomes on a dark page."""


def style(method: str, *, explicit: bool = False) -> Style:
    """The style of a method; one not in the table gets its own name and a spare colour."""
    if method in STYLES:
        return STYLES[method]
    colour, dark = _SPARE[zlib.crc32(method.encode()) % len(_SPARE)]
    return Style(method, "explicit" if explicit else "student", colour, dark, "h")


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


def listed(items: list[object] | list[int] | list[str]) -> str:
    """`1, 2 and 3`."""
    *head, last = [str(item) for item in items]
    return f"{', '.join(head)} and {last}" if head else last


def teacher_text(teacher: TeacherResult, metric: MetricStyle) -> str:
    """One line about the converged teacher."""
    parts = [f"{teacher.name}, converged"]
    if teacher.metric is not None:
        parts[0] += f": {metric.phrase(teacher.metric)}"
    if teacher.steps is not None:
        parts.append(f"{teacher.steps:.3g} steps")
    if teacher.residual is not None:
        parts.append(f"residual {small_text(teacher.residual)}")
    parts.append(f"{teacher.parameters:,} parameters")
    return ", ".join(parts)

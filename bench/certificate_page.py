"""The measurements of certificates as tables, each with what was asked and whether it was found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from common import markdown_table

RATIOS = {1e-1: 0.45, 1e-2: 0.5, 1e-3: 0.55, 1e-4: 0.6}
"""The largest time of a certified solve over Anderson's, at each residual."""
BY_STUDENT = {1e-1: 0.8, 1e-2: 0.8}
"""The smallest share of samples that the student itself brings there."""
COMPACTION, WITHIN = 0.5, 0.95

Rows = list[dict[str, Any]]


def page(rows: Rows, about: dict[str, Any]) -> str:
    """All tables of what was measured."""
    parts = [coverage(rows), shifts(rows), proven(rows), slow(rows), solving(rows)]
    parts += [compaction(about), training(about)]
    return "\n".join(part for part in parts if part)


def verdict(met: bool) -> str:
    return "yes" if met else "**no**"


def least(level: dict[str, Any]) -> float:
    """The share that is asked for: the nominal one less two standard errors of a share of so many samples."""
    confidence, samples = level["confidence"], level["samples"]
    return confidence - 2 * math.sqrt(confidence * (1 - confidence) / samples)


def of_part(rows: Rows, part: str) -> Iterator[tuple[str, Any]]:
    return ((row["map"], row[part]) for row in rows if part in row)


def table(title: str, header: list[str], lines: list[list[str]]) -> str:
    """Nothing where nothing was measured."""
    return markdown_table(title, header, lines) if lines else ""


def coverage(rows: Rows) -> str:
    """The share within the bound at each confidence."""
    lines = [
        [
            name,
            f"{one['confidence']:.0%}",
            f"{one['share']:.1%}",
            f"{least(one):.1%}",
            verdict(one["share"] >= least(one)),
            "{:.1f}, {:.1f}".format(*one["width"]),
            f"{one['samples']} ({found['calibrated_on']})",
        ]
        for name, found in of_part(rows, "coverage")
        for one in found["levels"]
    ]
    header = ["map", "confidence", "within", "asked", "met", "width", "samples (calibrated on)"]
    title = (
        "**The calibrated bound on test data.** *Within*: the share of test samples whose true distance is within the "
        "bound where the solve stops, the worst of the tolerances 1e-1, 1e-2, 1e-3 and 1e-4. *Asked*: the confidence "
        "less two standard errors. *Width*: the bound over the true distance, median and 90%. How the error is "
        "estimated was once decided by looking at samples of the images demo, the denoiser and the linear map of "
        "radius 0.99: of these the widths may flatter; the coverage is the calibration's, whatever the estimate."
    )
    return table(title, header, lines)


def shifts(rows: Rows) -> str:
    """Other data than those of calibration: what becomes of the bound, and whether the warning comes."""
    lines = []
    for name, found in of_part(rows, "coverage"):
        if "unlike" in found:
            lines.append([name, "none", "", *_within(found["levels"]), *_warned(found["unlike"])])
        for one in found.get("shifts", ()):
            tuned = "yes" if one["tuned"] else "no"
            missed = ""
            if _fails(one["levels"]) and not one["warned"]:
                missed = ": **missed**"
            lines.append([name, one["name"], tuned, *_within(one["levels"]), *_warned(one, missed)])
    header = ["map", "shift", "tuned on", "within 90%", "95%", "99%", "unlike", "batches warned of"]
    title = (
        "**With a shift.** Nothing is promised for other data than those of calibration; a warning should say so. "
        "*Unlike*: the share of samples that are called unlike those of calibration. *Tuned on*: the warning was made "
        "by looking at this kind of shift, so that only the others judge it. *Missed*: the bound holds less often "
        "than it says at some confidence, and no batch was warned of. Without a shift every warning is a false one."
    )
    return table(title, header, lines)


def _within(levels: list[dict[str, Any]]) -> list[str]:
    shares = {one["confidence"]: f"{one['share']:.1%}" for one in levels}
    return [shares.get(confidence, "–") for confidence in (0.9, 0.95, 0.99)]


def _fails(levels: list[dict[str, Any]]) -> bool:
    return any(one["share"] < least(one) for one in levels)


def _warned(one: dict[str, Any], missed: str = "") -> list[str]:
    return [f"{one['share_unlike']:.0%}", f"{one['warned']} of {one['batches']}{missed}"]


def proven(rows: Rows) -> str:
    """Bounds by a declared contraction."""
    lines = [
        [
            f"{name}, {one['tol']:g}",
            f"{one['contraction']:.4f}",
            f"{one['distance']:.1e}",
            f"{one['bound']:.1e}",
            f"{one['width'][0]:.1f}",
            verdict(one["share"] == 1),
        ]
        for name, found in of_part(rows, "proven")
        for one in found
    ]
    header = ["map, tolerance", "contraction", "distance", "bound", "width", "within"]
    title = (
        "**Proven bounds.** A graph is one sample, so that there is nothing to calibrate on; its model declares by "
        "what factor it contracts, and in which norm. Distance and bound are in that norm, where a solve to an "
        "estimated error of the tolerance ends. *Width*: bound over distance."
    )
    return table(title, header, lines)


def slow(rows: Rows) -> str:
    """Slow maps, solved by their estimated error."""
    lines = [
        [
            name,
            f"{found['within']:.1%}",
            verdict(found["within"] >= WITHIN),
            f"{found['said']:.1%}",
            f"{found['evaluations']:.1f}",
        ]
        for name, found in of_part(rows, "slow")
    ]
    header = ["map", "truly within", "at least 95%", "say so", "evaluations"]
    title = (
        '**Slow maps.** `solve(measure="error", tol=1e-2)`: of the samples that say that they are within, the share '
        "whose true distance is; the share that says so; and evaluations, the mean."
    )
    return table(title, header, lines)


def fast_enough(one: dict[str, Any]) -> bool:
    """Whether a certified solve took no longer than is asked, and the student itself finished as many samples."""
    enough = one["by_student"] >= BY_STUDENT.get(one["tol"], 0)
    return enough and one["time_ratio"] <= RATIOS[one["tol"]]


def solving(rows: Rows) -> str:
    """Certified solving against Anderson's method; what was asked is of the models of the zoo."""
    lines = [
        [
            f"{name}, {one['tol']:g}",
            f"{one['time_ratio']:.2f}",
            f"{one['cpu_ratio']:.2f}",
            f"{RATIOS[one['tol']]:.2f}" if name.startswith("zoo") else "",
            "{:.1f} / {:.1f}".format(*one["evaluations"]),
            f"{one['by_student']:.0%}",
            verdict(fast_enough(one)) if name.startswith("zoo") else "",
        ]
        for name, found in of_part(rows, "solving")
        for one in found
    ]
    header = ["map, residual", "time", "CPU time", "asked", "evaluations", "by the student", "met"]
    title = (
        "**Against Anderson's method alone.** `student.solve(measure=\"residual\")` over Anderson's method from the "
        "teacher's start, from input to output, in turns, medians. Evaluations: the student's and Anderson's, means "
        "over samples. At 0.1 and 0.01 the student itself is asked to finish 80% of the samples."
    )
    return table(title, header, lines)


def compaction(about: dict[str, Any]) -> str:
    """Rows that are done left out."""
    if (found := about.get("compaction")) is None:
        return ""
    easy, hard = found["evaluations"]
    title = (
        f"**Samples that are done cost nothing.** A tenth of a batch needs {hard:.0f} evaluations, the rest "
        f"{easy:.0f}: time with rows left out over time without."
    )
    line = [f"{found['time_ratio']:.2f}", f"{COMPACTION:.2f}"]
    line.append(verdict(found["time_ratio"] <= COMPACTION))
    return markdown_table(title, ["time", "asked", "met"], [line])


def training(about: dict[str, Any]) -> str:
    """A student inside a training."""
    if not (rows := about.get("training")):
        return ""
    title = (
        "**A training with a student inside.** A model is trained on, its equilibria found by Anderson's method or by "
        "a student of the model as it was before: the same weights at the beginning, the same batches. *Forward*: "
        "milliseconds of a solve by the student and by Anderson's method, in turns on the same batches with the "
        "weights of every tenth update, medians. What it took to distil the student is not counted."
    )
    lines = [
        [
            f"{one['task']}, {one['updates']} updates",
            one["solver"],
            f"{one['evaluations']:.1f}",
            f"{one['last_evaluations']:.1f}",
            f"{one['residual']:.1e}",
            "{:.1f} / {:.1f}".format(*(1e3 * one["forward"][n] for n in ("student", "anderson"))),
            f"{one['score']:.4g}",
        ]
        for one in rows
    ]
    header = ["task", "solver", "evaluations", "of the last ten", "residual", "forward", "score"]
    return markdown_table(title, header, lines)

"""The certificate of `student.solve`: does the bound cover, how wide is it, does the warning come, what does it cost?

    python bench/certificate.py --parts coverage proven slow          # beside other work: no seconds are measured
    python bench/certificate.py --parts solving compaction training   # on a quiet machine

Strangers and demo tasks are distilled by `cdeq.distill(teacher, batches)`, nothing else set; the models of the zoo are
taken as they are, on the data that CDEQ_DATA names. Bounds are calibrated on inputs that the student was not trained
on, and judged on others. Distances are to equilibria in double precision.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from cdeq.data import MissingDataError
from cdeq.equilibrium.contract import declared_contraction
from cdeq.evaluation import plot_certificate, true_distances
from cdeq.evaluation.environment import current_commit
from certificate_cases import Case, cases
from certificate_coverage import coverage, proven, slow
from certificate_page import page
from certificate_times import compaction, solving, training
from common import Measurement, Options

ALONE = {"compaction": compaction, "training": training}
"""Parts that are of no case."""
PARTS = ("coverage", "proven", "slow", "solving", *ALONE)
PICTURED = "zoo CIFAR-10"
SLOW = ("linear, radius 0.99", "linear, radius 0.999", "denoiser")


@dataclass(frozen=True, kw_only=True)
class CertificateOptions(Options):
    repeats: int = 5
    only: tuple[str, ...] = ()
    """Cases, by name or by how their names begin ("zoo", "demo", "linear"), to run these alone."""
    parts: tuple[str, ...] = PARTS
    """What to measure."""
    picture: Path | None = None
    """Draw a solve of the first test images of CIFAR-10 here."""
    add: bool = False
    """Keep what the JSON file already has of other cases. Each row names the commit that it was measured at."""
    students: Path | None = None
    """Keep what is distilled and read here, and use what is here: to be removed when the recipe has changed."""


def parts_of(name: str, parts: tuple[str, ...]) -> list[str]:
    """What a case is asked for: solving is timed on our own models, the slow maps are named."""
    ours = name.startswith(("zoo", "demo"))
    asked = {"coverage": True, "proven": True, "slow": name in SLOW, "solving": ours}
    return [part for part in parts if asked.get(part)]


def measured(name: str, case: Case, parts: list[str], repeats: int) -> dict[str, Any]:
    """A row: what was measured of a case."""
    row: dict[str, Any] = {"map": name}
    if "coverage" in parts and case.student.batched:
        row["coverage"] = coverage(case)
    context = case.student.teacher.inject(case.test[0])
    if "proven" in parts and declared_contraction(case.student.teacher, context) is not None:
        row["proven"] = proven(case)
    if "slow" in parts:
        row["slow"] = slow(case)
    if "solving" in parts:
        row["solving"] = solving(case, repeats)
    return row


def rows_so_far(options: CertificateOptions) -> dict[str, dict[str, Any]]:
    """The rows of an earlier run, by case, if they are to be kept."""
    if not options.add or options.json is None or not options.json.is_file():
        return {}
    earlier = json.loads(options.json.read_text())
    return {row["map"]: {"commit": earlier["commit"], **row} for row in earlier["rows"]}


def draw(case: Case, path: Path) -> None:
    """A solve, what is known of it, and the truth."""
    x = case.test[0]
    case.student.calibrate(case.held_out, confidence=0.95)
    plot_certificate(case.student.solve(x), path, distances=true_distances(case.student, x))


def main() -> None:
    options, known = tyro.cli(CertificateOptions, description=__doc__), cases()
    if unknown := [one for one in options.only if not any(k.startswith(one) for k in known)]:
        raise SystemExit(f"no case {unknown[0]!r}; there are {', '.join(known)}")
    if unknown := sorted(set(options.parts) - set(PARTS)):
        raise SystemExit(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    measurement = Measurement(options)
    found, commit = rows_so_far(options), current_commit()
    rows = list(found.values())
    about: dict[str, Any] = {}
    for part in (part for part in options.parts if part in ALONE):
        about[part] = ALONE[part](options.repeats)
        print(part, about[part], flush=True)
        measurement.finish(rows, page(rows, about), **about)
    for name, make in known.items():
        parts = parts_of(name, options.parts)
        if not parts or (options.only and not name.startswith(options.only)):
            continue
        try:
            case = make(options.students)
        except MissingDataError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        row = {"commit": commit, **measured(name, case, parts, options.repeats)}
        found[name] = row
        rows = sorted(found.values(), key=lambda row: list(known).index(row["map"]))
        print(row, flush=True)
        measurement.finish(rows, page(rows, about), **about)
        if options.picture is not None and name == PICTURED:
            draw(case, options.picture)


if __name__ == "__main__":
    main()

"""One page from several runs of an experiment: further seeds, methods or data sets beside those that are there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cdeq.evaluation import Results, ResultsError, Row
from cdeq.evaluation.environment import joined


def read_page(folder: Path, experiment: str, scale: str) -> Results | None:
    """The results that a page in `folder` was made from, of the same experiment and scale; None without a page."""
    path = folder / f"{experiment}.json"
    if not path.exists():
        return None
    found = Results.from_json(path)
    if (found.experiment, found.scale) != (experiment, scale):
        raise ResultsError(
            f"{path} has {found.experiment} at the scale {found.scale}, not {experiment} at {scale}: "
            "give another folder with --out, or leave --add out"
        )
    return found


def join(old: Results, new: Results) -> Results:
    """`new`, and what `old` has beside it.

    Seconds can be compared within one run only. So a method that `old` has timed keeps those seconds for all its
    seeds, and one that is new to a data set has none, unless nothing of the data set is kept.
    """
    places = {_place(row) for row in new.rows}
    kept = [row for row in old.rows if _place(row) not in places]
    timed = {(r.dataset, r.method, r.steps): r for r in reversed(old.rows)}  # the first seed's
    mixed = {row.dataset for row in kept}
    rows = [_timed_as(timed, row) if row.dataset in mixed else row for row in new.rows]
    theirs = {(t.dataset, t.name, t.seed): t for t in old.teachers if t.dataset in mixed}
    found = theirs | {(t.dataset, t.name, t.seed): t for t in new.teachers} | theirs
    order = list(dict.fromkeys([*new.page.get("counts", ()), *old.datasets, *new.datasets]))
    teachers = sorted(found.values(), key=lambda t: order.index(t.dataset))
    return replace(
        new,
        commit=joined([old.commit, new.commit]),
        command=joined([old.command, new.command]),
        hardware=old.hardware if mixed else new.hardware,
        teachers=tuple(teachers),
        rows=(*kept, *rows),
    )


def _place(row: Row) -> tuple[str, int, str, int | None]:
    return row.dataset, row.seed, row.method, row.steps


def _timed_as(timed: dict[tuple[str, str, int | None], Row], row: Row) -> Row:
    before = timed.get((row.dataset, row.method, row.steps))
    if before is None:
        return replace(row, seconds=None)
    return replace(row, seconds=before.seconds, f_equivalents=before.f_equivalents)

"""What each method reaches in a given time: evaluations alone can be won by work that is not counted in them."""

from __future__ import annotations

from cdeq.evaluation.results import Results
from cdeq.evaluation.table import Point, curves


def within_time(
    results: Results, dataset: str, *, clock: str = "picard"
) -> dict[str, dict[int, Point]]:
    """For each method its nearest point to the equilibrium within the time that `clock` takes for k evaluations.

    Keys of the inner dict are the counts k at which `clock` was timed. A method that reaches nothing in that time has
    no point there.
    """
    found = curves(results, dataset)
    if clock not in found:
        raise ValueError(f"{clock!r} was not timed on {dataset}; there are {', '.join(found)}")
    limits = {p.steps: p.seconds for p in found[clock] if p.steps and p.seconds is not None}
    nearest: dict[str, dict[int, Point]] = {}
    for method, points in found.items():
        known = [p for p in points if p.seconds is not None and p.distance is not None]
        nearest[method] = {}
        for count, limit in limits.items():
            if in_time := [p for p in known if p.seconds <= limit]:  # type: ignore[operator]
                nearest[method][count] = min(in_time, key=lambda p: p.distance or 0.0)
    return nearest

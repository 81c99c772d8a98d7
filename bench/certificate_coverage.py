"""What a certificate is worth: coverage and width of the bound, warnings, proven bounds, slow maps. No seconds."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from cdeq.consistency.certificate import FLOOR
from cdeq.consistency.scores import Exact, Scored, Scores, score, scores_on
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import declared_contraction
from cdeq.equilibrium.states import map_state, relative_distance
from certificate_cases import TUNED, Case

CONFIDENCES = (0.9, 0.95, 0.99)
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4)


def coverage(case: Case) -> dict[str, Any]:
    """At each confidence the share of samples within the bound, and its width; the same and the warning with shifts."""
    scores, exact = scores_on(case.student, case.held_out), Exact(case.student)
    found: dict[str, Any] = {
        "calibrated_on": len(scores.ratios),
        "levels": levels(case, scores, exact, case.test),
    }
    case.student.certificate = scores.certificate(CONFIDENCES[0])
    if case.student.certificate is not None:
        found["unlike"] = unlike(case.student, case.test)
        found["shifts"] = [
            {
                "name": name,
                "tuned": name in TUNED,
                "levels": levels(case, scores, exact, inputs),
                **unlike(case.student, inputs),
            }
            for name, inputs in case.shifts.items()
        ]
        case.student.certificate = None  # so that it costs nothing in what is timed after this
    return found


def levels(case: Case, scores: Scores, exact: Exact, inputs: list[Any]) -> list[dict[str, Any]]:
    """Coverage and width on these inputs at each confidence that the calibration has samples for."""
    judged = [score(case.student, x, exact) for x in inputs]
    known = {confidence: scores.certificate(confidence) for confidence in CONFIDENCES}
    return [
        {"confidence": confidence, "factor": one.factor, **covered(judged, one.factor)}
        for confidence, one in known.items()
        if one is not None
    ]


def covered(found: list[Scored], factor: float) -> dict[str, Any]:
    """Share within the bound and its width, where each sample stops by its estimate; the worst over tolerances."""
    shares, widths = [], []
    for tol in TOLERANCES:
        within = []
        for one in found:
            hit = one.error <= tol
            stop = torch.where(hit.any(dim=0), hit.double().argmax(dim=0), len(hit) - 1)
            error, distance = (t.gather(0, stop[None])[0] for t in (one.error, one.distance))
            bound = factor * error.clamp_min(FLOOR)
            within.append(distance <= bound)
            widths.append(bound / distance)
        shares.append(float(torch.cat(within).double().mean()))
    width, samples = torch.cat(widths), sum(one.error.shape[1] for one in found)
    return {
        "share": min(shares),
        "samples": samples,
        "width": [float(width.quantile(q)) for q in (0.5, 0.9)],
    }


def unlike(student: Student, inputs: list[Any]) -> dict[str, Any]:
    """The share of samples that are called unlike those of calibration, and the batches with a warning."""
    marked, warned = [], 0
    for x in inputs:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = student.solve(x, tol=1e-1).unlike_calibration
        assert found is not None
        marked.append(found)
        warned += any("unlike" in str(one.message) for one in seen)
    share = float(torch.cat(marked).double().mean())
    return {"share_unlike": share, "warned": warned, "batches": len(inputs)}


# Proven bounds, and slow maps.


@torch.no_grad()
def proven(case: Case) -> list[dict[str, Any]]:
    """Of a teacher that declares its contraction: bound, and distance in the norm of that, where solves stop."""
    exact, rows = Exact(case.student), []
    for tol in TOLERANCES:
        found = [case.student.solve(x, tol=tol, max_steps=500) for x in case.test]
        distances = []
        for x, one in zip(case.test, found, strict=True):
            context = case.student.teacher.inject(x)
            declared = declared_contraction(case.student.teacher, context)
            assert declared is not None
            star, _ = exact.equilibrium(x, one.state)
            state = map_state(lambda z, like: z.to(like.dtype), one.state, star)
            away = relative_distance(state, star, case.student.batched)
            if declared.norm is not None:
                away = declared.norm(map_state(torch.sub, state, star)) / declared.norm(star)
            distances.append(away)
        distance = torch.cat(distances)
        bound = torch.cat([one.bound for one in found if one.bound is not None])
        width = bound / distance
        rows.append(
            {
                "tol": tol,
                "samples": len(distance),
                "contraction": declared.factor,
                "share": float((distance <= bound).double().mean()),
                "distance": float(distance.median()),
                "bound": float(bound.median()),
                "width": [float(width.quantile(q)) for q in (0.5, 0.9)],
            }
        )
    return rows


@torch.no_grad()
def slow(case: Case, tol: float = 1e-2) -> dict[str, Any]:
    """Solves by estimated error: the share of samples truly within, of those that say so."""
    exact, near, said, steps = Exact(case.student), [], [], []
    for x in case.test:
        found = case.student.solve(x, tol=tol, max_steps=500)
        star, _ = exact.equilibrium(x, found.state)
        state = map_state(lambda z, like: z.to(like.dtype), found.state, star)
        near.append(relative_distance(state, star, case.student.batched) <= tol)
        said.append(found.converged)
        steps.append(found.steps.double())
    claimed = torch.cat(said)
    return {
        "tol": tol,
        "samples": len(claimed),
        "within": float((torch.cat(near) & claimed).sum() / claimed.sum().clamp_min(1)),
        "said": float(claimed.double().mean()),
        "evaluations": float(torch.cat(steps).mean()),
    }

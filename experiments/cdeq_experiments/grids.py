"""The paper's ablations, and ours, as data: which fields of a recipe change, on which kinds of data.

A variant is a student that differs from the published one in a few fields. What the paper reports of it stands beside
it, to be shown in brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cdeq_experiments.subjects import StudentPlan, Subject

KINDS = ("text", "images", "graph")
REPORTED = {"text": 8, "images": 8, "graph": 5}
"""Evaluations at which the paper reports its ablations."""
COUNTS = {"text": (1, 2, 8), "images": (1, 2, 8), "graph": (1, 2, 5, 10)}
"""Those at which ours are scored."""
CURVE = {
    "text": (1, 2, 3, 4, 6, 8, 12),
    "images": (1, 2, 3, 4, 6, 8, 12),
    "graph": (1, 2, 3, 5, 7, 10),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One student of a grid.

    `cell`: its row and column, where the grid is a table of two fields. `decay`: the clock it is used with, where that
    is not the recipe's own. `published`: what the paper gives for it, by the kind of data, and `published_seconds`: the
    seconds a batch that it took there.
    """

    name: str
    student: StudentPlan
    cell: tuple[str, str] | None = None
    decay: float | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    published_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """An ablation: `variants(subject)` are what is compared; `default` names the one that a recipe has.

    Scored at `counts` evaluations, `reported` among them, at which the paper reports it and ours are timed.
    """

    experiment: str
    title: str
    kinds: tuple[str, ...]
    variants: Callable[[Subject], list[Variant]]
    default: str
    counts: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: COUNTS)
    reported: Mapping[str, int] = field(default_factory=lambda: REPORTED)
    axes: tuple[str, str] | None = None
    """What the rows and columns of a table of two fields are."""
    notes: tuple[str, ...] = ()


def _by_kind(figures: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(KINDS, figures, strict=True)) if figures else {}


def published(
    name: str, figures: tuple[float, ...] = (), seconds: tuple[float, ...] = (), **changes: Any
) -> Variant:
    """The published recipe with changed fields, and what the paper gives for it on each kind of data."""
    return Variant(
        name=name,
        student=StudentPlan(recipe="paper", changes=changes),
        published=_by_kind(figures),
        published_seconds=_by_kind(seconds),
    )


DEFAULT = (26.43, 74.04, 71.40)
DEFAULT_SECONDS = (0.37, 0.87, 0.16)
"""What the paper gives for its own recipe, on each kind of data."""


def _solvers(subject: Subject) -> list[Variant]:
    figures: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
        "anderson": (DEFAULT, DEFAULT_SECONDS),
        "broyden": ((26.97, 71.82, 67.83), (0.43, 1.05, 0.17)),
        "picard": ((28.68, 69.46, 61.13), (0.33, 0.85, 0.14)),
    }
    return [
        Variant(
            name=f"{solver} trajectory",
            student=StudentPlan(recipe="paper", solver=solver),
            published=_by_kind(found),
            published_seconds=_by_kind(seconds),
        )
        for solver, (found, seconds) in figures.items()
    ]


def _history(subject: Subject) -> list[Variant]:
    return [published("with Anderson"), published("without Anderson", history="none")]


def _lambdas(subject: Subject) -> list[Variant]:
    figures = {
        0.0: (25.7, 25.6, 25.5, 25.4, 25.5, 25.8),
        0.05: (25.5, 25.4, 25.2, 25.1, 25.0, 25.3),
    }
    return [
        Variant(
            name=f"lambda_1 = {first:g}, lambda_2 = {second:g}",
            student=StudentPlan(recipe="paper", changes={"lambda_1": first, "lambda_2": second}),
            cell=(f"{second:g}", f"{first:g}"),
            published={"text": figure},
        )
        for second, row in figures.items()
        for first, figure in zip((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), row, strict=True)
    ]


def _modules(subject: Subject) -> list[Variant]:
    return [
        published("Anderson", DEFAULT, DEFAULT_SECONDS),
        published("MLP", (38.93, 63.49, 66.81), (0.69, 1.17, 0.28), history="mlp"),
        published("GRU", (47.08, 59.86, 64.53), (0.74, 1.26, 0.27), history="gru"),
    ]


def _window(subject: Subject) -> list[Variant]:
    return [
        published("m = 1", DEFAULT, DEFAULT_SECONDS, window=1),
        published("m = 3", (26.23, 74.81, 71.66), (0.89, 1.28, 0.29), window=3),
        published("m = 5", (26.04, 75.03, 71.71), (1.72, 1.95, 0.43), window=5),
        published("m = 7", (25.93, 75.09, 71.73), (2.96, 3.02, 0.85), window=7),
    ]


def _gamma_rho(subject: Subject) -> list[Variant]:
    figures = {
        0.05: (93.57, 35.29, 27.69, 51.52),
        0.1: (89.08, 34.24, 26.43, 50.18),
        0.2: (97.23, 36.03, 30.45, 53.29),
    }
    return [
        Variant(
            name=f"gamma = {gamma:g}, rho = {rho:g}",
            student=StudentPlan(recipe="paper", changes={"gamma": gamma, "rho": rho}),
            cell=(f"{rho:g}", f"{gamma:g}"),
            published={"text": figure},
        )
        for rho, row in figures.items()
        for gamma, figure in zip((0.5, 1.0, 2.0, 5.0), row, strict=True)
    ]


def _beta(subject: Subject) -> list[Variant]:
    """The clock of use alone: all are one and the same student."""
    figures = {0.5: 29.28, 0.7: 28.19, 0.9: 26.43, 0.95: 26.72}
    return [
        Variant(
            name=f"beta = {beta:g}",
            student=StudentPlan(recipe="paper"),
            decay=beta,
            published={"text": figure},
        )
        for beta, figure in figures.items()
    ]


def _time_map(subject: Subject) -> list[Variant]:
    return [
        published("linear", (31.91, 69.16, 67.62), time_map="linear"),
        published("cosine", (29.77, 71.50, 68.04), time_map="cosine"),
        published("exponential", DEFAULT),
    ]


def _recipe(subject: Subject) -> list[Variant]:
    """From the published recipe to ours, one part after another; the last is the subject's own anchored student."""
    anchored = subject.students["anchored"]
    last = anchored.whole
    own: dict[str, Any] = {
        "states": "own",
        "depth": last.depth,
        "backprop": "truncated",
        "augment_probability": 0.0,
    }
    weights = {"boundary": "weights", "gamma": 1.0, "decay": 0.5, "injection": "teacher"}
    weights |= {"history": last.history, "window": last.window}
    through = {**own, **weights, "backprop": "full"}
    steps: list[tuple[str, dict[str, Any]]] = [
        ("paper", {}),
        ("+ own rollouts", own),
        ("+ anchored weights", {**own, **weights}),
        ("+ gradient through the rollout", through),
        ("+ log loss", {**through, "loss": "log"}),
        ("+ learned start", {**through, "loss": "log", "start": "learned"}),
    ]
    found = [Variant(name=n, student=StudentPlan(recipe="paper", changes=c)) for n, c in steps]
    return [*found, Variant(name="anchored", student=anchored)]


def _updates(subject: Subject) -> list[Variant]:
    """Whether the published recipe only needs more training."""
    longer = [
        Variant(name=f"{n} times the updates", student=StudentPlan(recipe="paper", longer=n))
        for n in (2, 4)
    ]
    return [
        published("paper"),
        *longer,
        Variant(name="anchored", student=subject.students["anchored"]),
    ]


GRIDS: dict[str, Grid] = {
    grid.experiment: grid
    for grid in (
        Grid(
            experiment="solvers",
            title="Trajectory solver",
            kinds=KINDS,
            variants=_solvers,
            default="anderson trajectory",
            notes=(
                "The solver that made the states the student learns from; the paper's Table 4. The student itself "
                "is the same.",
            ),
        ),
        Grid(
            experiment="history",
            title="With and without Anderson in the student, against steps",
            kinds=KINDS,
            variants=_history,
            default="with Anderson",
            counts=CURVE,
            notes=("The paper's Figure 3, which shows language modelling.",),
        ),
        Grid(
            experiment="lambdas",
            title="Weights of the losses",
            kinds=("text",),
            variants=_lambdas,
            default="lambda_1 = 0.8, lambda_2 = 0.05",
            counts={"text": (20,)},
            reported={"text": 20},
            axes=("lambda_2", "lambda_1"),
            notes=("lambda_1 weighs global against local consistency, lambda_2 the task loss.",),
        ),
        Grid(
            experiment="modules",
            title="What is made of the history",
            kinds=KINDS,
            variants=_modules,
            default="Anderson",
        ),
        Grid(
            experiment="window",
            title="Window of the student's history",
            kinds=KINDS,
            variants=_window,
            default="m = 1",
        ),
        Grid(
            experiment="gamma-rho",
            title="Boundary exponent and rate of solver time",
            kinds=("text",),
            variants=_gamma_rho,
            default="gamma = 2, rho = 0.1",
            counts={"text": (8,)},
            axes=("rho", "gamma"),
        ),
        Grid(
            experiment="beta",
            title="Clock of use",
            kinds=("text",),
            variants=_beta,
            default="beta = 0.9",
            counts={"text": (8,)},
            notes=("One student, used with four clocks: beta takes no part in training.",),
        ),
        Grid(
            experiment="time-map",
            title="Solver time of the teacher's states",
            kinds=KINDS,
            variants=_time_map,
            default="exponential",
        ),
        Grid(
            experiment="recipe",
            title="From the published recipe to ours, part by part",
            kinds=KINDS,
            variants=_recipe,
            default="anchored",
            notes=(
                "Each row has all parts above it. Own rollouts: trained on the states the student itself reaches, "
                "cut at every step. Anchored weights: the boundary holds for the weights, history and context as in "
                "the last row. The last row is the subject's own anchored student, which also drops the local loss, "
                "has its own learning rate and updates, and what the tables say of it.",
            ),
        ),
        Grid(
            experiment="updates",
            title="The published recipe, trained for longer",
            kinds=KINDS,
            variants=_updates,
            default="paper",
            notes=(
                "The same recipe, recording and learning rate, which falls over the whole of a training; warm-up as in "
                "the shorter one. Anchored has its own number of updates, each of several evaluations.",
            ),
        ),
    )
}

"""The paper's ablations, and ours, as data: which fields of a recipe change, on which kinds of data.

A variant is a student that differs from the published one in a few fields. What the paper reports of it stands beside
it, to be shown in brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cdeq.experiments.subjects import StudentPlan, Subject

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
    is not the recipe's own. `published`: what the paper gives for it, by the kind of data.
    """

    name: str
    student: StudentPlan
    cell: tuple[str, str] | None = None
    decay: float | None = None
    published: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """An ablation: `variants(subject)` are what is compared; `default` names the one that a recipe has."""

    experiment: str
    title: str
    kinds: tuple[str, ...]
    variants: Callable[[Subject], list[Variant]]
    default: str
    counts: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: COUNTS)
    axes: tuple[str, str] | None = None
    """What the rows and columns of a table of two fields are."""
    notes: tuple[str, ...] = ()


def published(name: str, figures: Mapping[str, float] | None = None, **changes: Any) -> Variant:
    """The published recipe with changed fields."""
    return Variant(
        name=name,
        student=StudentPlan(recipe="paper", changes=changes),
        published=figures or {},
    )


def _solvers(subject: Subject) -> list[Variant]:
    figures = {
        "anderson": {"text": 26.43, "images": 74.04, "graph": 71.40},
        "broyden": {"text": 26.97, "images": 71.82, "graph": 67.83},
        "picard": {"text": 28.68, "images": 69.46, "graph": 61.13},
    }
    return [
        Variant(
            name=f"{solver} trajectory",
            student=StudentPlan(recipe="paper", solver=solver),
            published=found,
        )
        for solver, found in figures.items()
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
        published("Anderson", {"text": 26.43, "images": 74.04, "graph": 71.40}),
        published("MLP", {"text": 38.93, "images": 63.49, "graph": 66.81}, history="mlp"),
        published("GRU", {"text": 47.08, "images": 59.86, "graph": 64.53}, history="gru"),
    ]


def _window(subject: Subject) -> list[Variant]:
    figures = {
        1: (26.43, 74.04, 71.40),
        3: (26.23, 74.81, 71.66),
        5: (26.04, 75.03, 71.71),
        7: (25.93, 75.09, 71.73),
    }
    return [
        published(f"m = {m}", dict(zip(KINDS, found, strict=True)), window=m)
        for m, found in figures.items()
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
        published("linear", {"text": 31.91, "images": 69.16, "graph": 67.62}, time_map="linear"),
        published("cosine", {"text": 29.77, "images": 71.50, "graph": 68.04}, time_map="cosine"),
        published("exponential", {"text": 26.43, "images": 74.04, "graph": 71.40}),
    ]


def _recipe(subject: Subject) -> list[Variant]:
    """From the published recipe to ours, one part after another; the last is the subject's own anchored student."""
    anchored = subject.students["anchored"]
    depth = anchored.whole.depth
    own: dict[str, Any] = {
        "states": "own",
        "depth": depth,
        "backprop": "truncated",
        "augment_probability": 0.0,
    }
    weights = {"boundary": "weights", "gamma": 1.0, "decay": 0.5, "injection": "teacher"}
    weights |= {"history": "none"}
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
            axes=("lambda_2", "lambda_1"),
            notes=(
                "lambda_1 weighs global against local consistency, lambda_2 the task loss. The paper gives its figures "
                "at 20 evaluations.",
            ),
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
            axes=("rho", "gamma"),
        ),
        Grid(
            experiment="beta",
            title="Clock of use",
            kinds=("text",),
            variants=_beta,
            default="beta = 0.9",
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
                "cut at every step. Anchored weights: the boundary holds for the weights, without history, context "
                "of the teacher. The last row is the subject's own anchored student, which also drops the local loss, "
                "has its own learning rate and updates, and what the tables say of it.",
            ),
        ),
    )
}

"""The paper's ablations, and ours, as data: which fields of a recipe change, on which kinds of data.

A variant is a student that differs from one of the tables, mostly the published one, in a few fields. An ablation is a
table whose students are its variants; students that several ablations have in common are trained once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cdeq_experiments.configs import figure_configs
from cdeq_experiments.configs.base import CORRECTED, Counts, Kind, StudentConfig, SuiteConfig
from cdeq_experiments.tables import Experiment, Page, measure_tables

Variants = dict[str, StudentConfig]
"""Students by the name of the variant."""
Evaluations = Mapping[Kind, tuple[int, ...]]

SHORT: Evaluations = {"text": (1, 2, 8), "images": (1, 2, 8), "graph": (1, 2, 5, 10)}
CURVE = (1, 2, 3, 4, 6, 8, 12)
LONG: Evaluations = {"text": CURVE, "images": CURVE, "graph": (1, 2, 3, 5, 7, 10)}
REPORTED: Mapping[Kind, int] = {"text": 8, "images": 8, "graph": 5}
"""Evaluations at which the paper reports most of its ablations."""


@dataclass(frozen=True)
class Ablation:
    """`variants(config)` are the students that are compared; `default` names the one that a recipe has.

    `counts` are the evaluations at which they are scored, for each kind of data. `axes`: for a table of two fields,
    those of its rows and columns; a variant's name gives the values of both.
    """

    name: str
    default: str
    variants: Callable[[SuiteConfig], Variants]
    counts: Evaluations
    axes: tuple[str, str] | None = None

    def configs(self, scale: str) -> list[SuiteConfig]:
        """The first data set of each kind, with the variants as its students."""
        found = []
        for config in figure_configs(scale, tuple(self.counts)):
            at, timed = self.counts[config.kind], (self.reported(config.kind),)
            counts = Counts(shown=at, methods=at, solvers=at, timed=timed, time_first_seed=True)
            found.append(config.with_students(self.variants(config), counts))
        return found

    def reported(self, kind: Kind) -> int:
        """Evaluations at which the paper reports it, and ours is timed."""
        counts = self.counts[kind]
        return REPORTED[kind] if REPORTED[kind] in counts else counts[0]

    def more(self, configs: list[SuiteConfig]) -> Page:
        """What its page needs to know."""
        variants = []
        for name in configs[0].students:
            values = dict(part.split(" = ") for part in name.split(", ")) if self.axes else {}
            place = [values[axis] for axis in self.axes or ()]
            variants.append({"name": name, **dict(zip(("row", "column"), place, strict=False))})
        reported = {config.title: self.reported(config.kind) for config in configs}
        axes = {"axes": None if self.axes is None else list(self.axes)}
        return {"default": self.default, "reported": reported, "variants": variants, **axes}

    def experiment(self) -> Experiment:
        given: dict[str, Any] = {"configs": self.configs, "more": self.more}
        return Experiment(name=self.name, layout="ablation", measure=measure_tables, **given)


def students(**variants: Mapping[str, Any]) -> Callable[[SuiteConfig], Variants]:
    """Variants by name, each the published student with other settings."""
    return lambda config: {
        name: replace(config.students["paper"], **fields) for name, fields in variants.items()
    }


def changes(**variants: Mapping[str, Any]) -> Callable[[SuiteConfig], Variants]:
    """Variants by name, each the published student with changed fields of its recipe."""
    return students(**{name: {"changes": fields} for name, fields in variants.items()})


def pairs(
    first: str, values: Iterable[float], second: str, others: Iterable[float]
) -> Callable[[SuiteConfig], Variants]:
    """All pairs of the values of two fields."""
    both = [{first: a, second: b} for b, a in product(others, values)]
    return changes(**{", ".join(f"{k} = {v:g}" for k, v in pair.items()): pair for pair in both})


def recipe_parts(config: SuiteConfig) -> Variants:
    """From the published recipe to `anchored`, one part after another, and on to the default: students of tables."""
    last = config.students["anchored"].resolve()
    own: dict[str, Any] = {"states": "own", "depth": last.depth, "backprop": "truncated"}
    own["augment_probability"] = 0.0
    weights = {"boundary": "weights", "gamma": 1.0, "decay": 0.5, "injection": "teacher"}
    weights |= {"history": last.history, "window": last.window}
    through = {**own, **weights, "backprop": "full"}
    steps = {
        "paper": {},
        "+ own rollouts": own,
        "+ anchored weights": {**own, **weights},
        "+ gradient through the rollout": through,
        "+ log loss": {**through, "loss": "log"},
        "+ learned start": {**through, "loss": "log", "start": "learned"},
    }
    ours = {name: config.students[name] for name in ("anchored", *CORRECTED)}
    return changes(**steps)(config) | ours


def corrected_parts(config: SuiteConfig) -> Variants:
    """The default recipe without one of its parts, or with a leap before its corrected steps."""
    student, fixed = config.students["corrected"], config.students["corrected"].changes
    untrained = {"correction_updates": 0}
    without: dict[str, dict[str, Any]] = {
        "corrected": {},
        "the teacher's start": {"start": "teacher", "start_updates": 0},
        "no correction (warm_start)": {"correction": "none", **untrained, "safeguard": False},
        "correction not trained alone": untrained,
        "no mixing": {"history": "none", "window": 1, "safeguard": False},
        "no safeguard": {"safeguard": False},
        "a leap of one step": {"leap": 1},
        "a leap of two steps": {"leap": 2},
    }
    return {name: replace(student, changes={**fixed, **new}) for name, new in without.items()}


def longer_trainings(config: SuiteConfig) -> Variants:
    """Whether the published recipe only needs more training."""
    student, fit = config.students["paper"], config.students["paper"].fit
    longer = {
        f"{n} times the updates": replace(student, fit=replace(fit, updates=n * fit.updates))
        for n in (2, 4)
    }
    return {"paper": student, **longer, "anchored": config.students["anchored"]}


SOLVERS = students(**{f"{s} trajectory": {"solver": s} for s in ("anderson", "broyden", "picard")})
CLOCKS = students(**{f"beta = {b:g}": {"clock": b} for b in (0.5, 0.7, 0.9, 0.95)})
HISTORIES = changes(**{"with Anderson": {}, "without Anderson": {"history": "none"}})
LAMBDAS = pairs("lambda_1", (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "lambda_2", (0.0, 0.05))
MODULES = changes(Anderson={}, MLP={"history": "mlp"}, GRU={"history": "gru"})
WINDOWS = changes(**{f"m = {m}": {"window": m} for m in (1, 3, 5, 7)})
GAMMA_RHO = pairs("gamma", (0.5, 1.0, 2.0, 5.0), "rho", (0.05, 0.1, 0.2))
TIME_MAPS = changes(**{name: {"time_map": name} for name in ("linear", "cosine", "exponential")})

ABLATIONS = (
    Ablation("solvers", "anderson trajectory", SOLVERS, SHORT),
    Ablation("history", "with Anderson", HISTORIES, LONG),
    Ablation(
        "lambdas",
        "lambda_1 = 0.8, lambda_2 = 0.05",
        LAMBDAS,
        {"text": (20,)},
        ("lambda_2", "lambda_1"),
    ),
    Ablation("modules", "Anderson", MODULES, SHORT),
    Ablation("window", "m = 1", WINDOWS, SHORT),
    Ablation("gamma-rho", "gamma = 2, rho = 0.1", GAMMA_RHO, {"text": (8,)}, ("rho", "gamma")),
    Ablation("beta", "beta = 0.9", CLOCKS, {"text": (8,)}),
    Ablation("time-map", "exponential", TIME_MAPS, SHORT),
    Ablation("recipe", "corrected", recipe_parts, SHORT),
    Ablation("corrected", "corrected", corrected_parts, LONG),
    Ablation("updates", "paper", longer_trainings, SHORT),
)

"""Recipes: a named set of choices. Most ablations of the paper change one or two fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from cdeq.consistency.clock import TIME_MAPS


class RecipeError(ValueError):
    """A recipe whose fields contradict each other."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a student is parameterized, and what it is trained on.

    The defaults of the fields are those of `anchored`; the default of `distill` is `Recipe.from_name("corrected")`.

    Parameterization:

    `boundary`: where the boundary condition acts. `state`: g = c_skip z + c_out P, the paper's; `weights`: a step runs
        with theta + c_out(t) delta, so that late steps are the teacher's own.
    `gamma`, `eps`, `end`: exponent and interval of the boundary coefficients.
    `time_map`, `rho`: solver time of the teacher's states z_k.
    `decay`: the paper's beta of inference; step j runs at fraction 1 - decay^j of solver time.
    `schedule`: that clock, `fixed`, `learned`, or `leap`: the first `leap` steps run with all of the change, the later
        ones with the teacher's own weights. The last two are for the boundary `weights` only.
    `correction`: whether a step adds a `learned` correction of the teacher's residual, or `none` (see correction.py).
    `safeguard`: in use, a sample whose corrected residual grows goes back to its best state, without correction.
    `history`, `window`, `mixing`: what is made of the last window + 1 evaluations.
    `start`: the initial state, the `teacher`'s own, or with a `learned` change of it.
    `delta`, `rank`: the change of the weights, `full` or `low_rank`.
    `injection`: whose weights compute the context: the `student`'s, mixed as the weights of steps are, or the
        `teacher`'s alone, which saves one injection for each input.
    `feature_axis`: axis of the features in a state tensor. None: 1 for (B, C, H, W), else the last.

    Training:

    `start_updates`: updates of the start alone, before the rest; they cost no evaluation of f.
    `correction_updates`: updates of the correction alone, one step at a time, after the start and before the rest.
    `selection`: a stage of training, or a correction, that leaves the student farther from the equilibrium is undone.
    `states`: the `teacher`'s trajectory, or the student's `own` rollout of `depth` steps.
    `memory`: for a model with memory, what the `teacher` remembers of the text before, or what the student itself
        remembers after one to `depth` steps on it (`own`), which is what it meets in use.
    `early`: the loss of step j of a rollout has the weight j^-early; 0 counts all steps the same.
    `backprop`: through the rollout, `full`, `checkpointed` (same gradient, less memory) or `truncated` at every step.
    `loss`: `mse` (the paper's d), or `log`: log(|z - z*|^2 / |z*|^2 + floor), the floor being `log_floor`;
        None lets it follow the precision of the recorded equilibria.
    `lambda_1`: weight of the global loss; the local loss has 1 - lambda_1.
    `lambda_2`: weight of the task loss, up to fraction `task_until` of solver time.
    `agreement`: weight of the divergence of the student's answer at each step from that of the converged teacher, for
        readouts that are logits. It needs no labels.
    `direction`: of the local loss. The `later` point learns from the earlier one (the paper's), or the reverse.
    `first_index`: the smallest k drawn from the teacher's trajectory, 0, or 1 as the paper writes.
    `ema`: rate of the running average that the local loss learns from.
    `augment_probability`, `augment_first`, `augment_last`: endpoint augmentation, and how many first and last states
        are exempt.
    """

    name: str
    boundary: Literal["state", "weights"] = "weights"
    gamma: float = 1.0
    eps: float = 0.0
    end: float = 1.0
    time_map: Literal["exponential", "linear", "cosine"] = "exponential"
    rho: float = 0.1
    decay: float = 0.5
    schedule: Literal["fixed", "learned", "leap"] = "fixed"
    leap: int = 1
    correction: Literal["none", "learned"] = "none"
    safeguard: bool = False
    history: Literal["anderson", "mlp", "gru", "none"] = "none"
    window: int = 1
    mixing: float = 1.0
    start: Literal["teacher", "learned"] = "learned"
    delta: Literal["full", "low_rank"] = "full"
    rank: int = 8
    injection: Literal["student", "teacher"] = "teacher"
    feature_axis: int | None = None

    states: Literal["teacher", "own"] = "own"
    start_updates: int = 0
    correction_updates: int = 0
    selection: bool = False
    depth: int = 6
    memory: Literal["teacher", "own"] = "teacher"
    early: float = 0.0
    backprop: Literal["full", "checkpointed", "truncated"] = "full"
    loss: Literal["mse", "log"] = "log"
    log_floor: float | None = 1e-3
    lambda_1: float = 1.0
    lambda_2: float = 0.0
    agreement: float = 0.0
    task_until: float = 0.5
    direction: Literal["later", "earlier"] = "later"
    first_index: Literal[0, 1] = 0
    ema: float = 0.95
    augment_probability: float = 0.0
    augment_first: int = 3
    augment_last: int = 2

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise RecipeError(f"recipe {self.name!r}: {problem}")

    @property
    def changes_weights(self) -> bool:
        """Whether any step runs with changed weights."""
        return self.schedule != "leap" or self.leap > 0

    def without_correction(self) -> Recipe:
        """The same with plain steps of the teacher."""
        return replace(self, correction="none", correction_updates=0, safeguard=False)

    @property
    def store_mode(self) -> Literal["full", "endpoint"]:
        """What must be recorded of the teacher: all its states, or only the equilibria."""
        return "full" if self.states == "teacher" else "endpoint"

    @classmethod
    def from_name(cls, name: str, **changes: Any) -> Recipe:
        """A recipe by its name, with changed fields."""
        if name not in RECIPES:
            raise RecipeError(f"unknown recipe {name!r}; there are {', '.join(RECIPES)}")
        return RECIPES[name]().changed(**changes)

    def changed(self, **changes: Any) -> Recipe:
        """The recipe with changed fields.

        A change that makes no difference, given the other fields, is refused, so that no ablation is a copy of what it
        is compared with. Fields that are not changed may lose their meaning through those that are.
        """
        if unknown := set(changes) - {f.name for f in fields(Recipe)}:
            raise RecipeError(f"unknown recipe fields: {', '.join(sorted(unknown))}")
        recipe = replace(self, **changes)
        for name, conditions in EFFECTS.items():
            if getattr(recipe, name) != getattr(self, name):
                for holds, needed in conditions:
                    if not holds(recipe):
                        raise RecipeError(
                            f"recipe {recipe.name!r}: {name} makes no difference without {needed}"
                        )
        return recipe

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise RecipeError(f"unknown recipe fields: {', '.join(sorted(unknown))}")
        return cls(**values)


NUMBERS: dict[str, tuple[tuple[type, ...], tuple[str, ...]]] = {
    "a whole number": (
        (int,),
        (
            *("window", "rank", "leap", "start_updates", "correction_updates", "depth"),
            *("augment_first", "augment_last"),
        ),
    ),
    "a whole number or None": ((int, type(None)), ("feature_axis",)),
    "a number or None": ((int, float, type(None)), ("log_floor",)),
    "a number": (
        (int, float),
        (
            *("gamma", "eps", "end", "rho", "decay", "mixing", "lambda_1", "lambda_2"),
            *("agreement", "task_until", "ema", "augment_probability", "early"),
        ),
    ),
}


def _problems(r: Recipe) -> list[str]:
    """What is wrong with a recipe, in words."""
    choices = {
        "boundary": ("state", "weights"),
        "time_map": tuple(TIME_MAPS),
        "schedule": ("fixed", "learned", "leap"),
        "correction": ("none", "learned"),
        "safeguard": (False, True),
        "selection": (False, True),
        "history": ("anderson", "mlp", "gru", "none"),
        "start": ("teacher", "learned"),
        "delta": ("full", "low_rank"),
        "injection": ("student", "teacher"),
        "states": ("teacher", "own"),
        "memory": ("teacher", "own"),
        "backprop": ("full", "checkpointed", "truncated"),
        "loss": ("mse", "log"),
        "direction": ("later", "earlier"),
        "first_index": (0, 1),
    }
    found = [
        f"{name} must be {kind}, not {getattr(r, name)!r}"
        for kind, (types, names) in NUMBERS.items()
        for name in names
        if not isinstance(getattr(r, name), types) or isinstance(getattr(r, name), bool)
    ]
    if found:
        return found  # the rules below compare numbers
    found = [
        f"{name}={getattr(r, name)!r} is not one of {', '.join(map(repr, allowed))}"
        for name, allowed in choices.items()
        if getattr(r, name) not in allowed
    ]
    rules = [
        (0 < r.gamma < math.inf, "gamma must be positive and finite"),
        (math.inf > r.end > r.eps >= 0, "the clock needs 0 <= eps < end, both finite"),
        (0 < r.rho < math.inf, "rho must be positive and finite"),
        (0 < r.decay < 1, "decay must lie between 0 and 1"),
        (r.window >= 1, "window must be at least 1"),
        (0 < r.mixing <= 1, "mixing must lie in (0, 1]"),
        (r.rank >= 1, "rank must be at least 1"),
        (r.depth >= 1, "depth must be at least 1"),
        (
            r.log_floor is None or 0 < r.log_floor < math.inf,
            "log_floor must be positive and finite",
        ),
        (0 <= r.lambda_1 <= 1, "lambda_1 must lie in [0, 1]"),
        (0 <= r.lambda_2 < math.inf, "lambda_2 must be finite and not negative"),
        (0 <= r.agreement < math.inf, "agreement must be finite and not negative"),
        (0 <= r.early < math.inf, "early must be finite and not negative"),
        (0 <= r.task_until <= 1, "task_until must lie in [0, 1]"),
        (0 <= r.ema < 1, "ema must lie in [0, 1)"),
        (0 <= r.augment_probability <= 1, "augment_probability must lie in [0, 1]"),
        (
            min(r.augment_first, r.augment_last) >= 0,
            "augment_first and augment_last must not be negative",
        ),
        (
            min(r.leap, r.start_updates, r.correction_updates) >= 0,
            "leap, start_updates and correction_updates must not be negative",
        ),
        (
            not (r.schedule != "fixed" and r.boundary == "state"),
            f"schedule={r.schedule!r} sets the strength of the weights' change and needs boundary='weights'",
        ),
        (
            not (r.correction == "learned" and not (r.schedule == "leap" and r.states == "own")),
            "correction='learned' is of the teacher's own steps and needs schedule='leap' and states='own'",
        ),
        (
            not (r.safeguard and not (r.correction == "learned" and r.history == "anderson")),
            "safeguard watches over corrected and mixed steps: it needs correction='learned', history='anderson'",
        ),
        (
            not (r.start_updates and r.start == "teacher"),
            "start_updates train a learned start: it needs start='learned'",
        ),
        (
            not (r.correction_updates and r.correction == "none"),
            "correction_updates train a correction: it needs correction='learned'",
        ),
        (
            not (r.schedule == "learned" and r.states == "teacher"),
            "schedule='learned' is learned on rollouts and needs states='own'",
        ),
        (
            not (r.start == "learned" and r.states == "teacher"),
            "start='learned' is trained by rollouts from it and needs states='own'",
        ),
        (
            not (r.agreement > 0 and r.states == "teacher"),
            "agreement holds at each step of a rollout and needs states='own'",
        ),
        (
            not (r.augment_probability > 0 and r.states == "own"),
            "augment_probability replaces teacher states and needs states='teacher'",
        ),
        (
            not (r.backprop != "full" and r.states == "teacher"),
            f"backprop={r.backprop!r} is a way through a rollout and needs states='own'",
        ),
        (
            not (r.history == "none" and (r.window != 1 or r.mixing != 1.0)),
            "window and mixing have no meaning with history='none'",
        ),
        (
            not (r.history in ("mlp", "gru") and (r.window != 1 or r.mixing != 1.0)),
            f"history={r.history!r} sees two evaluations: window must be 1 and mixing 1.0",
        ),
    ]
    return found + [problem for holds, problem in rules if not holds]


def paper() -> Recipe:
    """The published recipe, section 3 of the paper and its appendix; open choices as in docs/method.md."""
    return Recipe(
        name="paper",
        boundary="state",
        gamma=2.0,
        decay=0.9,
        history="anderson",
        window=1,
        injection="student",
        start="teacher",
        states="teacher",
        loss="mse",
        lambda_1=0.8,
        lambda_2=0.05,
        augment_probability=0.1,
    )


def anchored() -> Recipe:
    """Own rollouts, anchored weights, gradient through the rollout, log loss, learned start."""
    return Recipe(name="anchored")


def corrected() -> Recipe:
    """The default: learned start, then the teacher's own steps with a learned correction, under Anderson's method."""
    return Recipe(
        name="corrected",
        schedule="leap",
        leap=0,
        correction="learned",
        safeguard=True,
        history="anderson",
        window=5,
        start_updates=300,
        correction_updates=300,
        selection=True,
        log_floor=None,
        early=1.0,
    )


def warm_start() -> Recipe:
    """The control: a learned start, trained for it, then nothing but Anderson's method."""
    return Recipe(
        name="warm_start",
        schedule="leap",
        leap=0,
        history="anderson",
        window=5,
        start_updates=300,
        selection=True,
        log_floor=None,
        early=1.0,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "paper": paper,
    "anchored": anchored,
    "corrected": corrected,
    "warm_start": warm_start,
}
"""Functions that make a recipe, by its name."""


Condition = tuple[Callable[[Recipe], bool], str]
TEACHER_STATES: Condition = (lambda r: r.states == "teacher", "states='teacher'")
OWN_STATES: Condition = (lambda r: r.states == "own", "states='own'")
STATE_BOUNDARY: Condition = (lambda r: r.boundary == "state", "boundary='state'")
LOCAL_LOSS: Condition = (lambda r: r.lambda_1 < 1, "lambda_1 below 1")
CHANGED_WEIGHTS: Condition = (lambda r: r.changes_weights, "a leap")
AUGMENTATION: Condition = (lambda r: r.augment_probability > 0, "augment_probability above 0")
EFFECTS: dict[str, tuple[Condition, ...]] = {
    "eps": (STATE_BOUNDARY,),
    "end": (STATE_BOUNDARY,),
    "time_map": (TEACHER_STATES,),
    "rho": (TEACHER_STATES, (lambda r: r.time_map == "exponential", "time_map='exponential'")),
    "rank": ((lambda r: r.delta == "low_rank", "delta='low_rank'"),),
    "depth": ((lambda r: r.states == "own" or r.memory == "own", "states='own' or memory='own'"),),
    "leap": ((lambda r: r.schedule == "leap", "schedule='leap'"),),
    "decay": ((lambda r: r.schedule != "leap", "schedule other than 'leap'"),),
    "gamma": ((lambda r: r.schedule != "leap", "schedule other than 'leap'"),),
    "delta": (CHANGED_WEIGHTS,),
    "injection": (CHANGED_WEIGHTS,),
    # Steps under the teacher's own weights are at the end of solver time.
    "lambda_2": ((lambda r: r.changes_weights or r.task_until == 1, "a leap or task_until=1"),),
    "early": (OWN_STATES,),
    "log_floor": ((lambda r: r.loss == "log", "loss='log'"),),
    "task_until": ((lambda r: r.lambda_2 > 0, "lambda_2 above 0"),),
    "direction": (LOCAL_LOSS,),
    "ema": (LOCAL_LOSS,),
    "first_index": (TEACHER_STATES,),
    "augment_first": (TEACHER_STATES, AUGMENTATION),
    "augment_last": (TEACHER_STATES, AUGMENTATION),
}
"""What a field needs of the others to make any difference."""

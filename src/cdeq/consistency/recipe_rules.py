"""What a recipe may say: the values of each field, what contradicts what, and what makes no difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from cdeq.consistency.clock import TIME_MAPS

if TYPE_CHECKING:
    from cdeq.consistency.recipes import Recipe

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


def problems_of(r: Recipe) -> list[str]:
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


Condition = tuple["Callable[[Recipe], bool]", str]
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

"""Recipes: a named set of choices. Most ablations of the paper change one or two fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from cdeq.consistency.recipe_rules import EFFECTS, problems_of


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
        for problem in problems_of(self):
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
    """The control, the default without its correction: a learned start, then nothing but Anderson's method."""
    return replace(corrected().without_correction(), name="warm_start")


RECIPES: dict[str, Callable[[], Recipe]] = {
    "paper": paper,
    "anchored": anchored,
    "corrected": corrected,
    "warm_start": warm_start,
}
"""Functions that make a recipe, by its name."""

"""Recipes: the paper's numbers, and the refusal of what makes no sense."""

import dataclasses
import json
import math

import pytest

from cdeq import RECIPES, Recipe, RecipeError

PAPER = {
    **{"boundary": "state", "gamma": 2, "rho": 0.1, "decay": 0.9, "time_map": "exponential"},
    **{"history": "anderson", "window": 1, "start": "teacher", "states": "teacher", "loss": "mse"},
    **{"lambda_1": 0.8, "lambda_2": 0.05, "ema": 0.95, "eps": 0, "end": 1},
    **{"augment_probability": 0.1, "augment_first": 3, "augment_last": 2},
    **{"direction": "later", "first_index": 0, "store_mode": "full"},
}
ANCHORED = {
    **{"boundary": "weights", "gamma": 1, "history": "none", "start": "learned"},
    **{"states": "own", "backprop": "full", "loss": "log", "lambda_1": 1, "lambda_2": 0},
    "store_mode": "endpoint",
}


@pytest.mark.parametrize(("name", "fields"), [("paper", PAPER), ("anchored", ANCHORED)])
def test_the_numbers_of_the_paper_and_of_the_design(name, fields):
    recipe = Recipe.from_name(name)
    assert {field: getattr(recipe, field) for field in fields} == fields
    assert name == "paper" or 0.4 <= recipe.decay <= 0.65


@pytest.mark.parametrize("name", RECIPES)
def test_round_trip_through_json(name):
    changes = {"gamma": 1.5} if RECIPES[name]().changes_weights else {"early": 1.5}
    recipe = Recipe.from_name(name, feature_axis=1, **changes)
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert again == recipe
    assert again.feature_axis == 1


def test_recipes_are_frozen_and_changes_make_new_ones():
    recipe = Recipe.from_name("paper")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.gamma = 3.0
    assert recipe.changed(gamma=3.0).gamma == 3.0
    assert recipe.gamma == 2.0


def test_unknown_names_are_refused():
    with pytest.raises(
        RecipeError, match="unknown recipe 'papper'; there are paper, anchored, cor"
    ):
        Recipe.from_name("papper")
    with pytest.raises(RecipeError, match="unknown recipe fields: gama"):
        Recipe.from_name("paper", gama=2)
    with pytest.raises(RecipeError, match="unknown recipe fields: colour, gama"):
        Recipe.from_dict({"name": "mine", "gama": 2, "colour": "red"})


def each(name, **values):
    """One case for each value of each field."""
    return [(name, {field: v}, field) for field, wrong in values.items() for v in wrong]


CHOICES = (
    *("boundary", "time_map", "schedule", "history", "start", "delta", "states"),
    *("backprop", "loss", "direction", "first_index"),
)
WRONG = [
    *each("anchored", **dict.fromkeys(CHOICES, ("nonsense",))),
    *each("anchored", first_index=[2], eps=[1.0, -0.1], end=[0.0, math.inf]),
    *each("anchored", gamma=[0.0, math.nan, math.inf], rho=[0.0, math.inf], decay=[0.0, 1.0]),
    *each("paper", window=[0], mixing=[0.0, 1.1]),
    *each("anchored", rank=[0], depth=[0], log_floor=[0.0], task_until=[1.1], ema=[1.0, -0.1]),
    *each("anchored", lambda_1=[1.1, -0.1], lambda_2=[-0.1, math.inf]),
    *each("paper", augment_probability=[1.1], augment_first=[-1], augment_last=[-1]),
    # Not together with the rest of the recipe.
    *each("paper", schedule=["learned"], start=["learned"]),
    *each("paper", backprop=["truncated", "checkpointed"]),
    *each("anchored", augment_probability=[0.1], window=[3], mixing=[0.5]),
    ("paper", {"schedule": "learned", "boundary": "weights"}, "schedule"),
    ("anchored", {"schedule": "learned", "boundary": "state"}, "schedule"),
    ("paper", {"states": "own"}, "augment_probability"),
    ("anchored", {"history": "mlp", "window": 3}, "window"),
    ("anchored", {"history": "gru", "mixing": 0.5}, "mixing"),
    # Not of the right kind.
    *each("paper", window=[2.0, "3"], augment_first=[1.5]),
    *each("anchored", depth=[3.5, True], feature_axis=[1.0], gamma=["2"]),
    ("anchored", {"delta": "low_rank", "rank": 4.0}, "rank"),
    # Without effect.
    *each("anchored", time_map=["linear"], rho=[0.3], first_index=[1], direction=["earlier"]),
    *each("anchored", augment_first=[1], augment_last=[1], ema=[0.5], rank=[2], task_until=[0.9]),
    *each("anchored", eps=[0.1], end=[2.0]),
    *each("paper", depth=[3], log_floor=[0.1]),
    ("paper", {"rho": 0.3, "time_map": "linear"}, "rho"),
    ("paper", {"augment_probability": 0.0, "augment_last": 1}, "augment_last"),
    ("anchored", {"loss": "mse", "log_floor": 0.1}, "log_floor"),
    ("paper", {"lambda_1": 1.0, "ema": 0.5}, "ema"),
    ("paper", {"lambda_2": 0.0, "task_until": 0.9}, "task_until"),
]


@pytest.mark.parametrize(("name", "changes", "field"), WRONG)
def test_contradictions_are_refused_by_name(name, changes, field):
    with pytest.raises(RecipeError, match=rf"recipe '{name}': .*\b{field}\b"):
        Recipe.from_name(name, **changes)


RIGHT = [
    ("paper", {"boundary": "weights"}),
    ("paper", {"window": 7, "mixing": 0.5}),
    ("paper", {"history": "gru"}),
    ("paper", {"history": "none"}),
    ("paper", {"states": "own", "augment_probability": 0.0, "depth": 4}),
    ("paper", {"time_map": "cosine", "direction": "earlier", "first_index": 1}),
    ("anchored", {"schedule": "learned", "gamma": 2.0}),
    ("anchored", {"boundary": "state", "history": "mlp"}),
    ("anchored", {"lambda_1": 0.0, "ema": 0.0, "lambda_2": 3.0}),
    # Other fields may lose their meaning, and a value that is no change needs none.
    ("paper", {"lambda_1": 1.0}),
    ("paper", {"lambda_2": 0.0}),
    ("paper", {"time_map": "linear"}),
    ("paper", {"augment_probability": 0.0}),
    ("paper", {"states": "own", "augment_probability": 0.0}),
    ("anchored", {"loss": "mse"}),
    ("anchored", {"states": "teacher", "start": "teacher"}),
    ("anchored", {"rho": 0.1, "ema": 0.95, "rank": 8}),
    ("anchored", {"lambda_2": 1.0, "task_until": 0.9}),
]


@pytest.mark.parametrize(("name", "changes"), RIGHT)
def test_ablations_are_one_changed_field(name, changes):
    recipe = Recipe.from_name(name, **changes)
    assert {k: getattr(recipe, k) for k in changes} == changes


def test_what_has_an_effect_is_asked_of_the_changes_alone():
    recipe = Recipe.from_name("paper", rho=0.3).changed(time_map="linear")
    assert recipe.rho == 0.3
    with pytest.raises(RecipeError, match="rho makes no difference without time_map='exponential'"):
        recipe.changed(rho=0.2)
    assert Recipe.from_name("paper", states="own", augment_probability=0.0).depth == 6

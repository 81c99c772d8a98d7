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


CORRECTED = {
    **{"schedule": "leap", "leap": 0, "correction": "learned", "safeguard": True, "early": 1},
    **{"history": "anderson", "window": 5, "mixing": 1, "start": "learned", "start_updates": 300},
    **{"states": "own", "loss": "log", "log_floor": None, "lambda_1": 1, "lambda_2": 0},
    **{"changes_weights": False, "store_mode": "endpoint"},
}
WARM_START = CORRECTED | {"correction": "none", "safeguard": False}
DESIGNS = {"paper": PAPER, "anchored": ANCHORED, "corrected": CORRECTED, "warm_start": WARM_START}


@pytest.mark.parametrize(("name", "fields"), DESIGNS.items())
def test_the_numbers_of_the_paper_and_of_the_design(name, fields):
    recipe = Recipe.from_name(name)
    assert {field: getattr(recipe, field) for field in fields} == fields
    assert name == "paper" or 0.4 <= recipe.decay <= 0.65
    assert list(RECIPES) == list(DESIGNS)


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
    *("backprop", "loss", "direction", "first_index", "correction", "safeguard"),
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
    *each("anchored", leap=[-1], start_updates=[-1], early=[-1.0, math.inf], agreement=[-1.0]),
    *each("anchored", correction=["learned"], safeguard=[True]),
    *each("paper", correction=["learned"]),
    *each("warm_start", safeguard=[True]),
    ("anchored", {"schedule": "leap", "boundary": "state"}, "schedule"),
    ("corrected", {"history": "none", "window": 1}, "safeguard"),
    ("corrected", {"correction": "none"}, "safeguard"),
    ("corrected", {"start": "teacher"}, "start_updates"),
    ("corrected", {"schedule": "fixed"}, "correction"),
    # Not of the right kind.
    *each("paper", window=[2.0, "3"], augment_first=[1.5]),
    *each("anchored", depth=[3.5, True], feature_axis=[1.0], gamma=["2"]),
    ("anchored", {"delta": "low_rank", "rank": 4.0}, "rank"),
    *each("corrected", leap=[1.0, "1"], start_updates=[2.5], early=["1"], log_floor=["1", True]),
    # Without effect.
    *each("anchored", time_map=["linear"], rho=[0.3], first_index=[1], direction=["earlier"]),
    *each("anchored", augment_first=[1], augment_last=[1], ema=[0.5], rank=[2], task_until=[0.9]),
    *each("anchored", eps=[0.1], end=[2.0]),
    *each("paper", depth=[3], log_floor=[0.1]),
    *each("paper", early=[1.0]),
    *each("anchored", leap=[2]),
    *each("corrected", decay=[0.3], gamma=[2.0], delta=["low_rank"], injection=["student"]),
    *each("corrected", lambda_2=[0.1]),
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
    ("anchored", {"log_floor": None, "early": 1.0, "start_updates": 10}),
    ("anchored", {"schedule": "leap", "leap": 2}),
    ("corrected", {"leap": 1, "delta": "low_rank", "rank": 2, "injection": "student"}),
    ("corrected", {"leap": 1, "lambda_2": 0.1}),
    ("corrected", {"lambda_2": 0.1, "task_until": 1.0}),
    ("corrected", {"history": "none", "window": 1, "safeguard": False}),
    ("corrected", {"start": "teacher", "start_updates": 0}),
    ("warm_start", {"correction": "learned", "safeguard": True}),
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

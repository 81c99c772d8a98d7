"""Recipes: the paper's figures, and the refusal of what makes no sense."""

import dataclasses
import json
import math

import pytest

from cdeq import RECIPES, Recipe, RecipeError


def test_paper_has_the_papers_figures():
    r = Recipe.from_name("paper")
    assert (r.boundary, r.gamma, r.rho, r.decay, r.time_map) == (
        "state",
        2,
        0.1,
        0.9,
        "exponential",
    )
    assert (r.history, r.window, r.start, r.states, r.loss) == (
        "anderson",
        1,
        "zero",
        "teacher",
        "mse",
    )
    assert (r.lambda_1, r.lambda_2, r.ema) == (0.8, 0.05, 0.95)
    assert (r.augment_probability, r.augment_first, r.augment_last) == (0.1, 3, 2)
    assert (r.eps, r.end, r.direction, r.first_index) == (0, 1, "later", 0)
    assert r.store_mode == "full"


def test_anchored_is_what_the_design_says():
    r = Recipe.from_name("anchored")
    assert (r.boundary, r.states, r.loss, r.start) == ("weights", "own", "log", "learned")
    assert (r.gamma, r.history, r.backprop) == (1, "none", "full")
    assert 0.4 <= r.decay <= 0.65
    assert (r.lambda_1, r.lambda_2) == (1, 0)
    assert r.store_mode == "endpoint"


@pytest.mark.parametrize("name", RECIPES)
def test_round_trip_through_json(name):
    recipe = Recipe.from_name(name, feature_axis=1, gamma=1.5)
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
    with pytest.raises(RecipeError, match="unknown recipe 'papper'; there are paper, anchored"):
        Recipe.from_name("papper")
    with pytest.raises(RecipeError, match="unknown recipe fields: gama"):
        Recipe.from_name("paper", gama=2)
    with pytest.raises(RecipeError, match="unknown recipe fields: colour, gama"):
        Recipe.from_dict({"name": "mine", "gama": 2, "colour": "red"})


CHOICES = [
    "boundary",
    "time_map",
    "schedule",
    "history",
    "start",
    "delta",
    "states",
    "backprop",
    "loss",
    "direction",
    "first_index",
]
WRONG = [
    *(("anchored", {field: "nonsense"}, field) for field in CHOICES),
    ("anchored", {"first_index": 2}, "first_index"),
    ("anchored", {"gamma": 0.0}, "gamma"),
    ("anchored", {"gamma": math.nan}, "gamma"),
    ("anchored", {"gamma": math.inf}, "gamma"),
    ("anchored", {"eps": 1.0}, "eps"),
    ("anchored", {"eps": -0.1}, "eps"),
    ("anchored", {"end": 0.0}, "end"),
    ("anchored", {"end": math.inf}, "end"),
    ("anchored", {"rho": 0.0}, "rho"),
    ("anchored", {"rho": math.inf}, "rho"),
    ("anchored", {"decay": 0.0}, "decay"),
    ("anchored", {"decay": 1.0}, "decay"),
    ("paper", {"window": 0}, "window"),
    ("paper", {"mixing": 0.0}, "mixing"),
    ("paper", {"mixing": 1.1}, "mixing"),
    ("anchored", {"rank": 0}, "rank"),
    ("anchored", {"depth": 0}, "depth"),
    ("anchored", {"log_floor": 0.0}, "log_floor"),
    ("anchored", {"lambda_1": 1.1}, "lambda_1"),
    ("anchored", {"lambda_1": -0.1}, "lambda_1"),
    ("anchored", {"lambda_2": -0.1}, "lambda_2"),
    ("anchored", {"task_until": 1.1}, "task_until"),
    ("anchored", {"ema": 1.0}, "ema"),
    ("anchored", {"ema": -0.1}, "ema"),
    ("paper", {"augment_probability": 1.1}, "augment_probability"),
    ("paper", {"augment_first": -1}, "augment_first"),
    ("paper", {"augment_last": -1}, "augment_last"),
    ("paper", {"schedule": "learned"}, "schedule"),
    ("paper", {"schedule": "learned", "boundary": "weights"}, "schedule"),
    ("anchored", {"schedule": "learned", "boundary": "state"}, "schedule"),
    ("paper", {"start": "learned"}, "start"),
    ("paper", {"states": "own"}, "augment_probability"),
    ("anchored", {"augment_probability": 0.1}, "augment_probability"),
    ("paper", {"backprop": "truncated"}, "backprop"),
    ("paper", {"backprop": "checkpointed"}, "backprop"),
    ("anchored", {"window": 3}, "window"),
    ("anchored", {"mixing": 0.5}, "mixing"),
    ("anchored", {"history": "mlp", "window": 3}, "window"),
    ("anchored", {"history": "gru", "mixing": 0.5}, "mixing"),
    # Not of the right kind.
    ("paper", {"window": 2.0}, "window"),
    ("paper", {"window": "3"}, "window"),
    ("anchored", {"depth": 3.5}, "depth"),
    ("anchored", {"depth": True}, "depth"),
    ("anchored", {"delta": "low_rank", "rank": 4.0}, "rank"),
    ("paper", {"augment_first": 1.5}, "augment_first"),
    ("anchored", {"feature_axis": 1.0}, "feature_axis"),
    ("anchored", {"gamma": "2"}, "gamma"),
    ("anchored", {"lambda_2": math.inf}, "lambda_2"),
    # Without effect.
    ("anchored", {"time_map": "linear"}, "time_map"),
    ("anchored", {"rho": 0.3}, "rho"),
    ("paper", {"rho": 0.3, "time_map": "linear"}, "rho"),
    ("anchored", {"first_index": 1}, "first_index"),
    ("anchored", {"augment_first": 1}, "augment_first"),
    ("anchored", {"augment_last": 1}, "augment_last"),
    ("paper", {"augment_probability": 0.0, "augment_last": 1}, "augment_last"),
    ("paper", {"depth": 3}, "depth"),
    ("paper", {"log_floor": 0.1}, "log_floor"),
    ("anchored", {"loss": "mse", "log_floor": 0.1}, "log_floor"),
    ("anchored", {"direction": "earlier"}, "direction"),
    ("anchored", {"ema": 0.5}, "ema"),
    ("paper", {"lambda_1": 1.0, "ema": 0.5}, "ema"),
    ("anchored", {"rank": 2}, "rank"),
    ("anchored", {"task_until": 0.9}, "task_until"),
    ("paper", {"lambda_2": 0.0, "task_until": 0.9}, "task_until"),
    ("anchored", {"eps": 0.1}, "eps"),
    ("anchored", {"end": 2.0}, "end"),
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
    ("anchored", {"states": "teacher", "start": "zero"}),
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

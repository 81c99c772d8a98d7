"""Rows of methods that seek an equilibrium of their own, or are made for certain counts; cost in steps."""

import dataclasses

import pytest
import torch

from cdeq.equilibrium.contract import from_functions
from cdeq.evaluation import Explicit, Target, accuracy, compare, comparison, solver_method
from cdeq.solvers import Picard


def affine(factor, sign=1.0):
    """z -> factor z + x, whose equilibrium is x / (1 - factor)."""
    return from_functions(lambda z, x: factor * z + x, readout=lambda z: sign * z)


def points():
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    return [(part, part.argmax(1)) for part in x.split(5)]


def compared(methods, explicit=None, counts=(1, 2), **fields):
    about = {"dataset": "toy", "seed": 0, "repeats": 1, "counts": counts, "explicit": explicit}
    states = [2 * x for x, _ in points()]
    return compare(methods, affine(0.5), points(), states, accuracy(), **about, **fields)


def test_a_method_is_measured_at_its_own_equilibrium():
    model = affine(0.8, sign=-1.0)
    own = Target(model=model, equilibria=[5 * x for x, _ in points()])
    methods = {"picard": solver_method(affine(0.5), Picard())}
    methods["other"] = solver_method(model, Picard(), own=own)
    by = {(row.method, row.steps): row for row in compared(methods)}
    for k in (1, 2):
        assert by["picard", k].distance == pytest.approx(0.5**k, rel=1e-4)
        assert by["other", k].distance == pytest.approx(0.8**k, rel=1e-4)
        # Its own readout names the smallest entry.
        assert (by["picard", k].metric, by["other", k].metric) == (1.0, 0.0)
    # z_1 = x, f(z_1) = 1.8 x under its own map.
    assert by["other", 1].residual == pytest.approx(0.8, rel=1e-4)


def test_counts_and_label_of_a_method_are_its_own():
    plain = solver_method(affine(0.5), Picard())
    methods = {"picard": plain}
    methods |= {f"few {k}": dataclasses.replace(plain, counts=(k,), label="few") for k in (3, 7)}
    rows = compared(methods)
    assert [(row.method, row.steps) for row in rows] == [
        *(("picard", 1), ("picard", 2)),
        *(("few", 3), ("few", 7)),
    ]
    assert rows[-1].distance == pytest.approx(0.5**7, rel=1e-3)


def test_seconds_are_measured_where_they_are_asked_for():
    method, mlp = solver_method(affine(0.5), Picard()), Explicit(output=lambda x: x, parameters=7)
    few = dataclasses.replace(method, counts=(4,))
    rows = compared({"picard": method, "few": few}, {"mlp": mlp}, counts=(1, 2, 3), timed=(2,))
    timed = {(row.method, row.steps) for row in rows if row.seconds is not None}
    assert timed == {("picard", 2), ("mlp", None)}
    costs = [row.f_equivalents for row in rows if row.method == "picard"]
    assert costs == pytest.approx([1, 2, 3])


def test_an_explicit_model_has_neither_steps_nor_distance():
    for sign, score in ((-1, 0.0), (1, 1.0)):
        model = Explicit(output=lambda x, sign=sign: sign * x, parameters=7)
        (row,) = compared({}, {"mlp": model})
        assert (row.method, row.steps, row.distance, row.residual) == ("mlp", None, None, None)
        assert (row.metric, row.parameters) == (score, 7)


def test_cost_is_in_steps_of_the_compared_teacher(monkeypatch):
    seconds = {
        **{("own", 1): 0.3, ("own", 2): 0.5, ("own", "step"): 0.2, ("mlp", None): 0.35},
        **{("student", 1): 0.4, ("student", 2): 0.6, ("student", "extra"): 0.25},
        ("student", "rolled"): 0.25 + comparison.ROLLED * 0.15,
        **{"step": 0.1, "inject": 0.05},
    }
    monkeypatch.setattr(comparison, "measure_seconds", lambda *given, **fields: seconds)
    model = affine(0.8)
    own = Target(model=model, equilibria=[5 * x for x, _ in points()])
    plain = solver_method(affine(0.5), Picard())
    rows = compared(
        {
            "own": solver_method(model, Picard(), own=own),
            "student": dataclasses.replace(plain, extra=lambda x: None),
        },
        {"mlp": Explicit(output=lambda x: x, parameters=7)},
    )
    by = {(row.method, row.steps): row for row in rows}
    assert by["own", 2].f_equivalents == pytest.approx(4.0)  # two of its own steps
    assert by["student", 2].f_equivalents == pytest.approx(2 * 1.5 + (0.25 - 0.05) / 0.1)
    assert by["mlp", None].f_equivalents == pytest.approx(3.5)
    assert {key: row.seconds for key, row in by.items()} == {key: seconds[key] for key in by}

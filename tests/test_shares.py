"""What of a recording is trained on, and what is judged on."""

from __future__ import annotations

import pytest
import torch

from cdeq import FitConfig, Recipe, distill, record
from cdeq.consistency.shares import MOST_HELD_OUT, can_be_cut, held_out_count, held_out_samples
from cdeq.equilibrium.states import relative_distance
from checks import equilibrium
from teachers import Tanh, inputs, untrained


@pytest.mark.parametrize(
    ("batches", "kept"), [(1, 0), (7, 0), (8, 1), (31, 3), (500, MOST_HELD_OUT)]
)
def test_few_batches_are_all_trained_on(batches, kept):
    assert held_out_count(batches) == kept


def test_few_batches_are_judged_on_samples_that_nobody_trained_on(no_plan):
    """As many samples as hidden features can be learned by heart; only others show what that is worth."""
    teacher = Tanh(norm=0.9)
    recipe = Recipe.from_name("corrected", start_updates=100, correction_updates=100)
    student = distill(
        teacher, [inputs(24)], recipe=recipe, fit=FitConfig(updates=30), max_steps=300
    )
    x = inputs(256, seed=9)
    star = equilibrium(teacher, x)
    with torch.no_grad():
        ours = student.trajectory(x, 8)
        control = untrained(teacher, recipe="warm_start").eval().trajectory(x, 8)
    for k in (1, 2, 5, 8):
        far, plain = (float(relative_distance(z[k], star).mean()) for z in (ours, control))
        assert far < plain


@pytest.mark.parametrize(
    ("size", "world", "kept"), [(64, 1, 8), (7, 1, 0), (1, 1, 0), (20, 1, 2), (64, 3, 10)]
)
def test_samples_kept_leave_a_number_that_processes_share(size, world, kept):
    assert held_out_samples(size, world) == kept
    assert (size - kept) % world == 0 or kept == 0


def test_inputs_that_cannot_be_cut_are_not(tmp_path):
    """Patterns that all samples share may by chance be as many as the samples: cut, they give another map."""

    class Shared(Tanh):
        def inject(self, x):
            return x["own"] @ self.injection.T + x["shared"].mean(dim=0)

    x = {"own": inputs(16), "shared": torch.randn(16, 8)}
    alone = record(Tanh(), [inputs(16)], tmp_path / "alone", mode="endpoint")
    store = record(Shared(), [x], tmp_path / "shared", mode="endpoint")
    assert can_be_cut(untrained(Tanh(), recipe="corrected"), alone[0])
    assert not can_be_cut(untrained(Shared(), x, recipe="corrected"), store[0])

"""Stages of training that must help, and what is fitted in closed form before them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import mdeqs
from cdeq import FitConfig, Recipe, Student, distill
from cdeq.consistency.least_squares import fit_start
from cdeq.consistency.losses import log_distance
from cdeq.consistency.selection import Selection
from cdeq.equilibrium.states import (
    map_state,
    relative_distance,
    sizes_to_measure_by,
    tensors_of,
)
from cdeq.models import IGNN
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.models.vision.conv import ConvDEQ
from graphs import FEATURES, random_graph
from teachers import Tanh, batches, inputs, randomized, untrained

QUICK = {"start_updates": 20, "correction_updates": 20, "depth": 3}


def recorded(teacher, x):
    """A batch as a store gives it."""
    z = teacher.start(teacher.inject(x))
    for _ in range(200):
        z = teacher.step(z, teacher.inject(x))
    return SimpleNamespace(x=x, endpoint=z.detach())


@pytest.fixture
def judged():
    teacher = Tanh(norm=0.9)
    student = untrained(teacher, recipe="corrected")
    return student, Selection(student, lambda: [recorded(teacher, inputs(16))], 1e-6)


def test_the_score_is_the_log_of_the_mean_distance_weighed_as_the_loss(judged):
    student, selection = judged
    [batch] = selection.batches()
    student.eval()
    with torch.no_grad():
        states = student.trajectory(batch.x, 12)[1:]
        far = [float(relative_distance(z, batch.endpoint).mean()) for z in states]
    logs = [math.log(max(distance, 1e-6)) for distance in far]
    expected = sum(log / j for j, log in enumerate(logs, 1)) / sum(1 / j for j in range(1, 13))
    assert selection.score() == pytest.approx(expected, rel=1e-5)
    assert not student.training
    assert selection.best == selection.score()


def test_distances_below_the_precision_of_the_targets_are_alike(judged):
    student, selection = judged
    coarse = Selection(student, selection.batches, 10.0)
    assert coarse.best == pytest.approx(math.log(10.0))


def shift(student, size):
    """Move the start by a constant, which nothing else makes up for at once."""
    with torch.no_grad():
        student.start_network.networks[0].outer.linear.bias.add_(size)


def test_what_helps_is_kept_and_what_harms_is_undone(judged):
    student, selection = judged
    batch = next(iter(selection.batches()))
    best, bias = selection.best, student.start_network.networks[0].outer.linear.bias
    selection.attempt("worse", lambda: shift(student, 50.0))
    assert not bias.any()
    assert (selection.undone, selection.best) == (["worse"], best)
    selection.attempt("better", lambda: fit_start(student, [batch]))
    assert bias.any()
    assert selection.undone == ["worse"]
    assert selection.best < best


def test_a_second_way_is_tried_from_where_the_first_began(judged):
    student, selection = judged
    batch = next(iter(selection.batches()))
    ways = [lambda: shift(student, 50.0), lambda: fit_start(student, [batch])]
    selection.attempt("start", *ways)
    alone = untrained(Tanh(norm=0.9), recipe="corrected")
    alone.load_state_dict({**student.state_dict()})
    torch.nn.init.zeros_(alone.start_network.networks[0].outer.linear.weight)
    torch.nn.init.zeros_(alone.start_network.networks[0].outer.linear.bias)
    fit_start(alone, [batch])
    assert selection.undone == []
    ours, theirs = (s.start_network.networks[0].outer.linear.bias for s in (student, alone))
    torch.testing.assert_close(ours, theirs)


def test_gradients_that_are_not_finite_are_an_error_only_where_nothing_else_is_left(judged):
    student, selection = judged
    batch = next(iter(selection.batches()))

    def fails():
        shift(student, 50.0)
        raise FloatingPointError("the gradient is not finite")

    selection.attempt("start", fails, lambda: fit_start(student, [batch]))
    assert selection.undone == []
    assert student.start_network.networks[0].outer.linear.bias.detach().abs().max() < 10
    with pytest.raises(FloatingPointError, match="not finite"):
        selection.attempt("whole", fails, fails)


def test_a_training_that_is_thrown_off_is_ended_at_once_and_the_next_way_tried(judged):
    student, selection = judged
    batch = next(iter(selection.batches()))
    done = []

    def thrown(size):
        shift(student, size)
        selection.require_its_hold()
        done.append(size)

    selection.require_its_hold()
    ways = [lambda: thrown(50.0), lambda: thrown(1e-4), lambda: fit_start(student, [batch])]
    selection.attempt("whole", *ways)
    assert done == [1e-4]  # which is let go on
    assert selection.undone == []
    selection.attempt("whole", lambda: thrown(50.0))
    assert selection.undone == ["whole"]
    assert student.start_network.networks[0].outer.linear.bias.detach().abs().max() < 10


def test_the_last_stage_is_looked_at_early(no_plan, caplog):
    """A rate that is too high throws it off within the first eighth; a lower one is taken."""
    caplog.set_level("DEBUG", logger="cdeq")
    recipe = Recipe.from_name("warm_start", start_updates=20, lambda_2=0.5, task_until=1.0)
    given = {"recipe": recipe, "max_steps": 200}
    distill(Tanh(), batches(8), fit=FitConfig(updates=100, learning_rate=0.3), **given)
    scores = [m for m in caplog.messages if m.startswith("stage whole")]
    assert scores[0].startswith("stage whole: log distance inf")
    assert len(scores) > 1


def test_states_that_are_not_finite_are_undone(judged):
    student, selection = judged
    selection.attempt("start", lambda: shift(student, math.nan))
    assert selection.undone == ["start"]
    assert math.isfinite(selection.best)


def test_a_correction_that_harms_is_left_out_for_good(judged, tmp_path):
    student, selection = judged
    with torch.no_grad():
        student.correction.blocks[0].linear.linear.weight.copy_(-1.5 * torch.eye(8))
    selection.best = selection.score()
    selection.drop_useless_correction()
    assert student.correction is None
    assert selection.undone == ["correction"]
    assert (student.recipe.correction, student.recipe.name) == ("none", "corrected")
    assert student.is_solver
    x = inputs(4)
    student.save(tmp_path)
    again = Student.load(tmp_path, teacher=Tanh)
    torch.testing.assert_close(again(x, steps=3), student.eval()(x, steps=3))


def test_a_correction_that_hardly_helps_is_left_out(judged):
    student, selection = judged
    without = selection.best
    inverse = torch.linalg.inv(torch.eye(8) - student.teacher.weight) - torch.eye(8)
    with torch.no_grad():
        student.correction.blocks[0].linear.linear.weight.copy_(1e-3 * inverse)
    selection.best = selection.score()
    assert without - 0.02 < selection.best < without
    selection.drop_useless_correction()
    assert student.correction is None


def test_a_correction_that_helps_stays(judged):
    student, selection = judged
    inverse = torch.linalg.inv(torch.eye(8) - student.teacher.weight) - torch.eye(8)
    with torch.no_grad():
        student.correction.blocks[0].linear.linear.weight.copy_(0.5 * inverse)
    selection.best = selection.score()
    selection.drop_useless_correction()
    assert student.correction is not None
    assert selection.undone == []


def test_what_learns_from_labels_is_taken_unless_it_is_thrown_off(judged):
    student, selection = judged
    best = selection.best

    def thrown():
        shift(student, 50.0)
        selection.require_its_hold()

    selection.attempt("whole", thrown, lambda: shift(student, 0.5), judged=False)
    assert selection.undone == []
    assert student.start_network.networks[0].outer.linear.bias.detach().abs().max() == 0.5
    assert selection.best == selection.score() > best


@pytest.mark.parametrize("recipe", ["corrected", "warm_start"])
def test_a_rate_that_is_far_too_high_harms_no_student(recipe, no_plan):
    """With it, gradients can only destroy what was fitted in closed form."""
    changes = {k: v for k, v in QUICK.items() if recipe == "corrected" or "correction" not in k}
    given = {"recipe": Recipe.from_name(recipe, **changes), "max_steps": 200, "task_loss": None}
    sane = distill(Tanh(), batches(8), fit=FitConfig(updates=20), **given)
    wild = distill(Tanh(), batches(8), fit=FitConfig(updates=20, learning_rate=10.0), **given)
    assert "whole" in wild.report.undone
    assert "taken back" in str(wild.report)
    batch = recorded(Tanh(), inputs(32, seed=9))
    far = {
        name: float(
            relative_distance(student.trajectory(batch.x, 2)[-1].detach(), batch.endpoint).mean()
        )
        for name, student in (("sane", sane), ("wild", wild), ("plain", untrained(Tanh())))
    }
    assert far["wild"] < far["plain"]
    assert far["sane"] <= far["wild"]


def with_zeros(x):
    """The same inputs, the first of them 0: for Tanh so is its equilibrium."""
    return torch.cat([torch.zeros_like(x[:1]), x[1:]])


def test_an_equilibrium_that_is_zero_is_no_reason_to_refuse_a_stage():
    """Any other state is infinitely far from it, measured by its own size."""
    teacher = Tanh(norm=0.9)
    batch = recorded(teacher, with_zeros(inputs(64)))
    student = untrained(teacher, recipe="corrected")
    shift(student, 0.5)
    selection = Selection(student, lambda: [batch], 1e-6)
    before = selection.best
    assert math.isfinite(before)
    selection.attempt("start, in closed form", lambda: fit_start(student, [batch]))
    assert selection.undone == []
    assert selection.best < before - 0.3


def test_an_equilibrium_that_is_zero_leaves_gradients_finite():
    """The square of a distance over nothing is no number in single precision."""
    z = torch.full((4, 8), 9.0, requires_grad=True)
    star = with_zeros(torch.ones(4, 8))
    loss = log_distance(z, star, batched=True, floor=1e-9)
    loss.backward()
    assert loss < 20
    assert z.grad.isfinite().all()
    assert z.grad[0].abs().max() > 0


def test_samples_of_their_own_size_are_measured_by_it():
    norms = torch.tensor([0.0, 1e-9, 0.5, 1.0, 3.0])
    expected = torch.tensor([0.01 * 0.5, 0.01 * 0.5, 0.5, 1.0, 3.0])
    torch.testing.assert_close(sizes_to_measure_by(norms), expected)
    assert torch.equal(sizes_to_measure_by(torch.zeros(3)), torch.ones(3))


KINDS = {
    "vector": lambda: (Tanh(), inputs(64)),
    "text": lambda: (
        TransformerDEQ(vocabulary=9, width=8, heads=2, inner=8, length=12),
        torch.randint(9, (8, 12)),
    ),
    "image": lambda: (ConvDEQ(in_channels=1, channels=8, image_size=8), torch.randn(4, 1, 8, 8)),
    "pyramid": lambda: (mdeqs.make(3), torch.randn(6, 3, 16, 16)),
    "graph": lambda: (
        IGNN(features=FEATURES, classes=3, width=4),
        random_graph(200, dtype=torch.float32),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_that_is_in_reach_is_found_in_closed_form(kind):
    """The equilibrium is what the start network gives with other last layers: they are found again."""
    torch.manual_seed(0)
    teacher, x = KINDS[kind]()
    student = untrained(teacher, x, recipe="warm_start")
    network = student.start_network
    layers = [layer for part in network.output_layers() for layer in part]
    for layer in layers:
        randomized(layer)
    if hasattr(network, "nonnegative"):
        network.nonnegative = False  # cut off at zero it is no linear map
    with torch.no_grad():
        star = student.begin(student.prepare(x))
        for layer in layers:
            for weight in layer.parameters():
                weight.zero_()
        batch = SimpleNamespace(x=x, endpoint=star)
        before = relative_distance(student.begin(student.prepare(x)), star, student.batched)
        fit_start(student, [batch])
        found = student.begin(student.prepare(x))
    assert float(before.min()) > 0.5
    assert all(t.isfinite().all() for t in tensors_of(found))
    assert float(relative_distance(found, star, student.batched).max()) < 1e-2


def test_a_network_that_names_no_layers_is_left_alone():
    student = untrained(Tanh(), recipe="warm_start")
    student.start_network = torch.nn.Linear(8, 8)
    before = student.start_network.weight.clone()
    fit_start(student, [recorded(Tanh(), inputs(4))])
    assert torch.equal(student.start_network.weight, before)


def test_samples_count_alike_whatever_their_size():
    """A start is fitted on relative distances: a sample a thousand times as large does not hide the others."""
    student = untrained(Tanh(), recipe="warm_start")
    x = inputs(256)
    scale = torch.where(torch.arange(256) % 2 == 0, 1000.0, 1.0)[:, None]
    star = student.teacher.inject(x) * scale
    with torch.no_grad():
        fit_start(student, [SimpleNamespace(x=x, endpoint=star)])
        found = student.begin(student.prepare(x))
    error = relative_distance(map_state(torch.Tensor.double, found), star)
    # What depends on x alone cannot be right for both: the weighted fit serves the small ones far better.
    unweighted = torch.linalg.lstsq(student.teacher.inject(x), star).solution
    other = relative_distance(student.teacher.inject(x) @ unweighted, star)
    assert float(error[1::2].mean()) < 0.1 * float(other[1::2].mean())

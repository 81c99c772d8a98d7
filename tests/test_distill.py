"""Distillation as a user calls it: it learns, with every option, from loaders and stores."""

import math

import pytest
import torch
from torch import nn

import cdeq
from cdeq import (
    FitConfig,
    Recipe,
    Student,
    TrajectoryStore,
    distill,
    from_functions,
    record,
    solve_model,
)
from cdeq.consistency.objective import DistillationObjective
from cdeq.equilibrium.states import relative_distance
from cdeq.solvers import Anderson, Broyden, Picard
from cdeq.training.task_loss import cross_entropy
from cdeq.trajectories import FingerprintMismatch
from checks import distances, equilibrium, picard_states, read_log, same_tensors
from teachers import Offering, Pair, Ring, Tanh, Weightless, batches, inputs, untrained

SHORT = FitConfig(updates=6, checkpoint_every=2, log_every=1)
LEARNING = FitConfig(updates=60, learning_rate=5e-3)
pytestmark = pytest.mark.usefixtures("brief_stages")
both_recipes = pytest.mark.parametrize("recipe", ["paper", "anchored"])


def same_weights(one, other):
    return same_tensors(one.own_parts().state_dict(), other.own_parts().state_dict())


@torch.no_grad()
def mean_loss(student, store):
    """The loss of what the recipe is trained on, over the same draws for each student."""
    objective = DistillationObjective(student, cross_entropy, seed=3)
    losses = [objective(store[i % len(store)], i)[0].item() for i in range(16)]
    return sum(losses) / len(losses)


def require_learned(student, teacher, data):
    """Training has lowered the loss by at least 3 percent, or a logarithm by 0.03; `data`: a store or its folder."""
    if not isinstance(data, TrajectoryStore):
        data = TrajectoryStore.open(data / f"trajectories-{student.recipe.store_mode}")
    before = mean_loss(untrained(teacher, data[0].x, student.recipe), data)
    assert mean_loss(student, data) < before - 0.03 * (
        1 if student.recipe.loss == "log" else before
    )


def slow_teacher(width=8):
    """Weakly driven and hardly a contraction."""
    teacher = Tanh(width=width, norm=1.2)
    teacher.injection.data.mul_(0.2)
    return teacher


# It works


@pytest.mark.parametrize("recipe", [pytest.param("paper", marks=pytest.mark.slow), "anchored"])
def test_the_loss_falls_and_the_student_beats_the_teacher(tmp_path, recipe):
    teacher = slow_teacher(width=12)
    config = FitConfig(updates=120, learning_rate=1e-2, log_every=1)
    student = distill(
        teacher, batches(8, 16), recipe=recipe, fit=config, folder=tmp_path, max_steps=20
    )
    losses = [entry["loss"] for entry in read_log(tmp_path)]
    assert len(losses) == 120
    first, last = sum(losses[:15]) / 15, sum(losses[-15:]) / 15
    assert last < (first - 1 if recipe == "anchored" else 0.5 * first)

    x = inputs(32, seed=77)  # held out
    star = equilibrium(teacher, x)
    ours = distances(student.trajectory(x, 3), star)
    picard = distances(picard_states(teacher, x, 3), star)
    assert ours[1] < 0.9 * picard[1]
    assert ours[2] < 0.9 * picard[2]
    assert ours[1] < 1
    if recipe == "anchored":
        assert ours[0] < 0.8  # the learned start; zero is at distance 1
        assert ours[3] < ours[2] < ours[1] < ours[0]
    assert not student.training
    assert not any(p.requires_grad for p in student.parameters())
    assert set(student.plan) == {1e-1, 1e-2, 1e-3, 1e-4}


@pytest.mark.slow
def test_a_loader_and_a_store_give_the_same_weights(tmp_path, no_plan):
    teacher, data = Tanh(), batches()
    for recipe, mode, tol in (("paper", "full", 0.0), ("anchored", "endpoint", 1e-4)):
        store = record(teacher, data, tmp_path / mode, max_steps=12, tol=tol, mode=mode)
        one = distill(teacher, data, recipe=recipe, fit=SHORT, max_steps=12)
        other = distill(teacher, store, recipe=recipe, fit=SHORT)
        assert same_weights(one, other)
        again = distill(teacher, store, recipe=recipe, fit=SHORT, seed=1)
        assert not same_weights(one, again)


@pytest.mark.slow
def test_the_global_generator_neither_matters_nor_moves(no_plan):
    teacher, data = Tanh(), batches()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = distill(teacher, data, fit=SHORT)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same_weights(one, distill(teacher, data, fit=SHORT))


@pytest.mark.slow
@both_recipes
@pytest.mark.parametrize("bare", [False, True])
def test_labels_may_be_absent(tmp_path, no_plan, recipe, bare):
    data = [x for x, _ in batches()] if bare else batches(labels=False)
    options = {"recipe": recipe, "fit": LEARNING, "max_steps": 8, "folder": tmp_path}
    student = distill(slow_teacher(), data, **options)
    require_learned(student, slow_teacher(), tmp_path)


def test_a_store_of_the_wrong_kind_or_teacher_is_refused(tmp_path):
    teacher = Tanh()
    store = record(teacher, batches(), tmp_path / "s", mode="endpoint")
    with pytest.raises(ValueError, match=r"recipe 'paper' .* record with mode='full'"):
        distill(teacher, store, recipe="paper", fit=SHORT)
    with pytest.raises(FingerprintMismatch, match="teacher"):
        distill(Tanh(seed=9), store, fit=SHORT)


@pytest.mark.slow
def test_a_full_store_serves_own_rollouts(tmp_path, no_plan):
    store = record(slow_teacher(), batches(), tmp_path / "s", max_steps=30)
    student = distill(slow_teacher(), store, recipe="anchored", fit=LEARNING)
    require_learned(student, slow_teacher(), store)


def test_a_teacher_without_weights_is_refused_before_anything_is_recorded(tmp_path):
    with pytest.raises(TypeError, match=r"must be an nn\.Module, and Weightless is none"):
        distill(Weightless(), batches(), folder=tmp_path)
    without = cdeq.from_functions(lambda z, c: 0.5 * z + c)
    for recipe in ("paper", "anchored", Recipe.from_name("corrected", leap=1)):
        with pytest.raises(TypeError, match=r"changes the teacher's weights, .*'corrected'"):
            distill(without, batches(), recipe=recipe, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_unknown_recipes_are_refused():
    with pytest.raises(cdeq.RecipeError, match="unknown recipe"):
        distill(Tanh(), batches(), recipe="best")


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_stops_the_run(no_plan):
    def broken(output, labels):
        return output.sum() * math.nan

    recipe = Recipe.from_name("anchored", lambda_2=1.0)
    with pytest.raises(FloatingPointError, match="not finite at update 0"):
        distill(Tanh(), batches(), recipe=recipe, fit=SHORT, task_loss=broken)


# Every ablation learns

QUICK = {"start_updates": 20, "correction_updates": 10}
OWN = {"states": "own", "augment_probability": 0.0, "depth": 3}
ABLATIONS = [
    ("paper", {}),
    ("anchored", {}),
    ("paper", {"boundary": "weights"}),
    ("anchored", {"boundary": "state"}),
    *(("paper", {"time_map": t}) for t in ("linear", "cosine")),
    ("paper", {"history": "anderson", "window": 5}),
    *(("anchored", {"history": "anderson", "window": w, "mixing": 0.8}) for w in (1, 5)),
    *((name, {"history": h}) for name in ("paper", "anchored") for h in ("mlp", "gru")),
    ("paper", {"history": "none"}),
    ("paper", {"direction": "earlier"}),
    *(("anchored", {"direction": d, "lambda_1": 0.5}) for d in ("later", "earlier")),
    ("paper", OWN),
    ("anchored", {"states": "teacher", "start": "teacher"}),
    *(("anchored", {"backprop": b}) for b in ("checkpointed", "truncated")),
    ("paper", {"loss": "log"}),
    ("anchored", {"loss": "mse"}),
    ("anchored", {"start": "teacher"}),
    *((name, {"delta": "low_rank", "rank": 2}) for name in ("paper", "anchored")),
    *(("anchored", {"schedule": "learned", "gamma": g}) for g in (1.0, 2.0)),
    ("paper", {"first_index": 1}),
    ("paper", {"lambda_1": 0.0}),
    ("paper", {"lambda_1": 1.0, "lambda_2": 0.0}),
    ("anchored", {"lambda_2": 0.1}),
    *(("corrected", QUICK | changes) for changes in ({}, {"safeguard": False}, {"early": 0.0})),
    ("corrected", QUICK | {"leap": 1}),
    ("corrected", QUICK | {"lambda_1": 0.5, "agreement": 0.1}),
    ("corrected", QUICK | {"lambda_2": 0.1, "task_until": 1.0}),
    ("corrected", QUICK | {"history": "none", "window": 1, "safeguard": False}),
    *(("corrected", QUICK | {"backprop": b}) for b in ("checkpointed", "truncated")),
    ("corrected", QUICK | {"start": "teacher", "start_updates": 0}),
    ("warm_start", {"start_updates": 20}),
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return {
        mode: record(slow_teacher(), batches(4, 16), folder / mode, max_steps=5, mode=mode)
        for mode in ("full", "endpoint")
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), ABLATIONS, ids=str)
def test_every_ablation_learns(stores, no_plan, name, changes):
    recipe = Recipe.from_name(name, **changes)
    student = distill(slow_teacher(), stores[recipe.store_mode], recipe=recipe, fit=LEARNING)
    require_learned(student, slow_teacher(), stores[recipe.store_mode])
    fresh = untrained(slow_teacher(), recipe=recipe).state_dict()
    moved = {name for name, p in student.state_dict().items() if not torch.equal(p, fresh[name])}
    assert any(n.startswith("deltas") for n in moved) == recipe.changes_weights
    if recipe.correction == "learned":
        assert "gains" in moved
        assert {n.split(".")[3] for n in moved if n.startswith("correction")} == {
            *("linear", "enter", "leave", "gates")
        }
    if recipe.start == "learned":
        assert any(n.startswith("start_network") for n in moved)
    if recipe.schedule == "learned":
        assert "rates" in moved
    if recipe.boundary == "state":
        assert any(n.startswith("time_heads") for n in moved)
    if recipe.history in ("mlp", "gru"):
        assert any(n.startswith("history") for n in moved)
    assert torch.isfinite(student(inputs(), steps=4)).all()


@pytest.mark.slow
@pytest.mark.parametrize("solver", [Anderson(window=2), Broyden(), Picard()])
def test_any_solver_records(tmp_path, no_plan, solver):
    options = {"recipe": "paper", "fit": LEARNING, "max_steps": 5, "folder": tmp_path}
    student = distill(slow_teacher(), batches(2), solver=solver, **options)
    require_learned(student, slow_teacher(), tmp_path)


@pytest.mark.slow
@both_recipes
@pytest.mark.parametrize("kind", [Pair, Ring, Offering])
def test_other_teachers(tmp_path, no_plan, recipe, kind):
    options = {"recipe": recipe, "fit": LEARNING, "max_steps": 8, "folder": tmp_path}
    require_learned(distill(kind(), batches(2), **options), kind(), tmp_path)


@both_recipes
def test_teachers_in_double_precision(no_plan, recipe):
    data = [(x.double(), y) for x, y in batches(2)]
    student = distill(Tanh().double(), data, recipe=recipe, fit=SHORT, max_steps=8)
    assert student(data[0][0]).dtype == torch.float64
    assert {p.dtype for p in student.parameters()} == {torch.float64}


@both_recipes
def test_what_does_not_fit_the_teacher_is_refused_before_anything_is_solved(tmp_path, recipe):
    def refused(teacher, x, match):
        data = ((x, torch.zeros(len(x)).long()) for _ in range(2))  # has no length
        with pytest.raises(ValueError, match=match):
            distill(teacher, data, recipe=recipe, fit=SHORT, folder=tmp_path / str(x.dtype))
        assert not list(tmp_path.rglob("*.safetensors"))

    refused(Tanh().bfloat16(), inputs(dtype=torch.bfloat16), r"bfloat16: .*teacher\.float\(\)")
    refused(Tanh(), inputs()[:, :4], r"cannot take this input .*float32 \(6, 4\) was given")
    refused(Tanh(), inputs().long(), r"cannot take this input .*int64 \(6, 5\) was given")


@pytest.mark.slow
def test_progress_is_shown(capsys, monkeypatch, no_plan):
    monkeypatch.setenv("FORCE_COLOR", "1")
    distill(Tanh(), batches(2), fit=SHORT, progress=True)
    shown = capsys.readouterr().err
    assert "record" in shown
    assert "distil the start" in shown
    assert "distil corrected" in shown


@pytest.mark.slow
def test_a_teacher_that_does_not_converge_is_warned_of(no_plan):
    class Turning(Tanh):
        """A rotation about c / (1 - R): it never comes nearer."""

        def step(self, z, context):
            turned = torch.cat([-z[:, 1:2], z[:, :1], z[:, 2:]], dim=1)
            return turned + 0.1 * torch.tanh(context + z @ self.weight.T)

    with pytest.warns(UserWarning, match="does not converge within the budget"):
        distill(Turning(), batches(2), fit=SHORT, solver=cdeq.Picard(), max_steps=5, tol=1e-6)


@pytest.mark.slow
def test_a_start_network_of_the_user_is_copied(no_plan):
    network = nn.Linear(8, 8)
    before = network.weight.clone()
    first = distill(Tanh(), batches(2), fit=SHORT, start_network=network)
    assert torch.equal(network.weight, before)
    assert network.weight.requires_grad
    assert not torch.equal(first.start_network.weight, before)


def test_a_map_without_weights_is_distilled_in_the_precision_of_its_inputs(no_plan, tmp_path):
    """Kepler's equation, as astronomers have it: no tensor of the teacher says that its states are double."""

    def kepler(z, context):
        return context["mean"] + context["e"] * torch.sin(z)

    def drawn(size, seed):
        g = torch.Generator().manual_seed(seed)
        numbers = torch.rand(2, size, 1, generator=g, dtype=torch.float64)
        return {"mean": 3 * numbers[0], "e": 0.8 * numbers[1]}

    teacher = from_functions(kepler, start=lambda context: context["mean"])
    recipe = Recipe.from_name("corrected", start_updates=100, correction_updates=50)
    data = [drawn(32, seed) for seed in range(8)]
    student = distill(teacher, data, recipe=recipe, fit=FitConfig(updates=20))
    x = drawn(64, 99)
    z = student.trajectory(x, 8)
    star = solve_model(teacher, x, tol=1e-14, max_steps=200).state
    assert z[0].dtype == torch.float64
    first = relative_distance(z[1], star).mean()
    assert first < 0.5 * relative_distance(kepler(x["mean"], x), star).mean()
    assert relative_distance(z[8], star).max() < 1e-9
    student.save(tmp_path)
    again = Student.load(tmp_path, teacher=teacher)
    assert torch.equal(again(x, steps=2), student(x, steps=2))

"""Distillation as a user calls it: it works, every ablation runs, and an interrupted run goes on."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cdeq
from cdeq import FitConfig, TrajectoryStore, distill, record
from cdeq.consistency import distill as distill_function
from cdeq.consistency.objective import DistillationObjective
from cdeq.equilibrium.states import relative_distance
from cdeq.solvers import Anderson, Broyden, Picard, solve_model
from cdeq.training import CheckpointError
from cdeq.trajectories import FingerprintMismatch
from teachers import OfferedStart, Offering, Pair, Ring, Tanh, Weightless, batches, inputs

assert callable(distill_function)
SHORT = FitConfig(updates=6, checkpoint_every=2, log_every=1)


@pytest.fixture
def unplanned(monkeypatch):
    """Leave out the choice of a plan for certified solving, which these tests do not look at."""
    module = __import__("sys").modules["cdeq.consistency.distillation"]
    monkeypatch.setattr(module, "plan_handover", lambda student, inputs: {})


def weights_of(student):
    return {n: p.detach() for n, p in student.named_parameters() if not n.startswith("methods.")}


def same_weights(one, other):
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(p, theirs[n]) for n, p in ours.items())


def lines(folder):
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in entries]


def distances(student, x, steps):
    teacher = student.teacher
    with torch.no_grad():
        star = solve_model(teacher, teacher.inject(x), Anderson(), tol=1e-6, max_steps=200).state
        states = student.trajectory(x, steps)
        return [float(relative_distance(z, star, student.batched).mean()) for z in states]


# It works


@pytest.mark.parametrize("recipe", ["paper", "anchored"])
def test_the_loss_falls_and_the_student_beats_the_teacher(tmp_path, recipe):
    teacher = Tanh(width=12, norm=1.2)  # slow, since weakly driven and hardly a contraction
    teacher.injection.data.mul_(0.2)
    config = FitConfig(updates=120, learning_rate=1e-2, log_every=1)
    student = distill(
        teacher, batches(8, 16), recipe=recipe, fit=config, folder=tmp_path, max_steps=20
    )
    losses = [entry["loss"] for entry in lines(tmp_path)]
    assert len(losses) == 120
    first, last = sum(losses[:15]) / 15, sum(losses[-15:]) / 15
    assert last < (first - 1 if recipe == "anchored" else 0.5 * first)

    x = inputs(32, seed=77)  # held out
    ours = distances(student, x, 3)
    untrained = cdeq.Student.for_example(teacher, student.recipe, x)
    picard = distances(untrained, x, 3)
    assert ours[1] < 0.9 * picard[1]
    assert ours[2] < 0.9 * picard[2]
    assert ours[1] < 1
    if recipe == "anchored":
        assert ours[0] < 0.8  # the learned start; zero is at distance 1
        assert ours[3] < ours[2] < ours[1] < ours[0]
    assert not student.training
    assert not any(p.requires_grad for p in student.parameters())
    assert set(student.plan) == {1e-1, 1e-2, 1e-3, 1e-4}


def test_a_loader_and_a_store_give_the_same_weights(tmp_path, unplanned):
    teacher, data = Tanh(), batches()
    for recipe, mode, tol in (("paper", "full", 0.0), ("anchored", "endpoint", 1e-4)):
        store = record(teacher, data, tmp_path / mode, max_steps=12, tol=tol, mode=mode)
        one = distill(teacher, data, recipe=recipe, fit=SHORT, max_steps=12)
        other = distill(teacher, store, recipe=recipe, fit=SHORT)
        assert same_weights(one, other)
        again = distill(teacher, store, recipe=recipe, fit=SHORT, seed=1)
        assert not same_weights(one, again)


def test_the_global_generator_neither_matters_nor_moves(unplanned):
    teacher, data = Tanh(), batches()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = distill(teacher, data, fit=SHORT)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same_weights(one, distill(teacher, data, fit=SHORT))


def require_trained(student, x):
    """The student's changes have moved from zero, and its outputs are numbers."""
    assert all(bool(delta.abs().sum() > 0) for delta in student.deltas())
    assert bool(torch.isfinite(student(x, steps=3)).all())


def test_labels_may_be_absent(unplanned):
    for data in (batches(labels=False), [x for x, _ in batches()]):
        for recipe in ("paper", "anchored"):
            student = distill(Tanh(), data, recipe=recipe, fit=SHORT, max_steps=8)
            require_trained(student, inputs())


def test_updates_and_learning_rate_are_short_forms(unplanned):
    teacher, data = Tanh(), batches()
    one = distill(teacher, data, fit=FitConfig(updates=4, learning_rate=0.01))
    config = FitConfig(updates=4, learning_rate=0.01)
    assert same_weights(one, distill(teacher, data, fit=config))


def test_a_store_of_the_wrong_kind_or_teacher_is_refused(tmp_path):
    teacher = Tanh()
    store = record(teacher, batches(), tmp_path / "s", mode="endpoint")
    with pytest.raises(ValueError, match=r"recipe 'paper' .* record with mode='full'"):
        distill(teacher, store, recipe="paper", fit=SHORT)
    with pytest.raises(FingerprintMismatch, match="teacher"):
        distill(Tanh(seed=9), store, fit=SHORT)


def test_a_full_store_serves_own_rollouts(tmp_path, unplanned):
    store = record(Tanh(), batches(), tmp_path / "s", max_steps=30)
    require_trained(distill(Tanh(), store, recipe="anchored", fit=SHORT), inputs())


def test_a_teacher_without_weights_is_refused_before_anything_is_recorded(tmp_path):
    with pytest.raises(TypeError, match=r"nn\.Module with parameters"):
        distill(Weightless(), batches(), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_unknown_recipes_are_refused():
    with pytest.raises(cdeq.RecipeError, match="unknown recipe"):
        distill(Tanh(), batches(), recipe="best")


def test_a_gradient_that_is_not_finite_stops_the_run(unplanned):
    def broken(output, labels):
        return output.sum() * math.nan

    recipe = cdeq.Recipe.from_name("anchored", lambda_2=1.0)
    with pytest.raises(FloatingPointError, match="not finite at update 0"):
        distill(Tanh(), batches(), recipe=recipe, fit=SHORT, task_loss=broken)


# Every ablation runs

OWN = {"states": "own", "augment_probability": 0.0, "depth": 3}
ABLATIONS = [
    *(("paper", {"boundary": b}) for b in ("state", "weights")),
    *(("anchored", {"boundary": b}) for b in ("state", "weights")),
    *(("paper", {"time_map": t}) for t in ("exponential", "linear", "cosine")),
    *(("paper", {"history": "anderson", "window": w}) for w in (1, 3, 5, 7)),
    *(("anchored", {"history": "anderson", "window": w, "mixing": 0.8}) for w in (1, 5)),
    *((name, {"history": h}) for name in ("paper", "anchored") for h in ("mlp", "gru", "none")),
    *(("paper", {"direction": d}) for d in ("later", "earlier")),
    *(("anchored", {"direction": d, "lambda_1": 0.5}) for d in ("later", "earlier")),
    ("paper", OWN),
    ("anchored", {"states": "teacher", "start": "zero"}),
    *(("anchored", {"backprop": b}) for b in ("full", "checkpointed", "truncated")),
    *((name, {"loss": loss}) for name in ("paper", "anchored") for loss in ("mse", "log")),
    *(("anchored", {"start": s}) for s in ("zero", "learned")),
    *((name, {"delta": "low_rank", "rank": 2}) for name in ("paper", "anchored")),
    *(("anchored", {"schedule": "learned", "gamma": g}) for g in (0.5, 1.0, 2.0)),
    *(("paper", {"first_index": i}) for i in (0, 1)),
    ("paper", {"lambda_1": 0.0}),
    ("paper", {"lambda_1": 1.0, "lambda_2": 0.0}),
    ("anchored", {"lambda_2": 0.1}),
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return {
        mode: record(Tanh(), batches(), folder / mode, max_steps=10, mode=mode)
        for mode in ("full", "endpoint")
    }


@pytest.mark.parametrize(("name", "changes"), ABLATIONS)
def test_every_ablation_runs(stores, unplanned, name, changes):
    recipe = cdeq.Recipe.from_name(name, **changes)
    config = FitConfig(updates=3, learning_rate=1e-2)
    student = distill(Tanh(), stores[recipe.store_mode], recipe=recipe, fit=config)
    fresh = cdeq.Student.for_example(Tanh(), recipe, inputs())
    moved = {n for n, p in weights_of(student).items() if not torch.equal(p, weights_of(fresh)[n])}
    assert any(n.startswith("deltas") for n in moved)
    if recipe.start == "learned":
        assert any(n.startswith("start_network") for n in moved)
    if recipe.schedule == "learned":
        assert "rates" in moved
    if recipe.boundary == "state":
        assert any(n.startswith("time_heads") for n in moved)
    if recipe.history in ("mlp", "gru"):
        assert any(n.startswith("history") for n in moved)
    assert torch.isfinite(student(inputs(), steps=4)).all()


@pytest.mark.parametrize("solver", [Anderson(window=2), Broyden(), Picard()])
def test_any_solver_records(unplanned, solver):
    options = {"recipe": "paper", "fit": SHORT, "max_steps": 8}
    student = distill(Tanh(), batches(2), solver=solver, **options)
    require_trained(student, inputs())


@pytest.mark.parametrize("recipe", ["paper", "anchored"])
@pytest.mark.parametrize("kind", [Pair, Ring, Offering])
def test_other_teachers(unplanned, recipe, kind):
    student = distill(kind(), batches(2), recipe=recipe, fit=SHORT, max_steps=8)
    require_trained(student, batches(2)[0][0])


@pytest.mark.parametrize("recipe", ["paper", "anchored"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_teachers_of_other_dtypes(unplanned, recipe, dtype):
    data = [(x.to(dtype), y) for x, y in batches(2)]
    teacher = Tanh().to(dtype)
    student = distill(teacher, data, recipe=recipe, fit=SHORT, max_steps=8)
    assert student(data[0][0]).dtype == dtype
    assert {p.dtype for p in student.parameters()} == {dtype}


# Interrupted and resumed


class Stop(Exception):
    pass


def interrupted(monkeypatch, at, **arguments):
    """Run distill until the update `at`, which raises."""
    update_average, calls = DistillationObjective.update_average, [0]

    def fatal(self):
        calls[0] += 1
        if calls[0] > at:
            raise Stop
        update_average(self)

    with monkeypatch.context() as patch:
        patch.setattr(DistillationObjective, "update_average", fatal)
        with pytest.raises(Stop):
            distill(**arguments)


@pytest.mark.parametrize("recipe", ["paper", "anchored"])
@pytest.mark.parametrize("at", [0, 3, 4, 9])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    tmp_path, monkeypatch, unplanned, recipe, at
):
    config = FitConfig(updates=10, checkpoint_every=2, log_every=1, learning_rate=1e-2)
    call = {"teacher": Tanh(), "data": batches(), "recipe": recipe, "fit": config}
    call["max_steps"] = 8
    whole = distill(**call, folder=tmp_path / "whole")
    call["folder"] = folder = tmp_path / "cut"
    interrupted(monkeypatch, at, **call)
    resumed = distill(**call)
    assert same_weights(whole, resumed)
    # Weights, running averages and the optimizer's moments.
    ours, theirs = (load_file(f / "checkpoint.safetensors") for f in (folder, tmp_path / "whole"))
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in ours)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert lines(folder) == lines(tmp_path / "whole")
    assert [entry["update"] for entry in lines(folder)] == list(range(10))


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path, monkeypatch, unplanned):
    config = FitConfig(updates=10, checkpoint_every=4, log_every=1)
    call = {"teacher": Tanh(), "data": batches(), "fit": config, "folder": tmp_path}
    interrupted(monkeypatch, 6, **call)
    assert [entry["update"] for entry in lines(tmp_path)] == [0, 1, 2, 3, 4, 5]
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"update": 6, "lo')  # killed in the middle of a line
    interrupted(monkeypatch, 1, **call)
    assert [entry["update"] for entry in lines(tmp_path)] == [0, 1, 2, 3, 4]
    distill(**call)
    assert [entry["update"] for entry in lines(tmp_path)] == list(range(10))


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch, unplanned):
    call = {"teacher": Tanh(), "data": batches(), "fit": SHORT, "folder": tmp_path}
    first = distill(**call)
    monkeypatch.setattr(DistillationObjective, "forward", None)
    assert same_weights(first, distill(**call))


DIFFERENT = [
    ({"recipe": cdeq.Recipe.from_name("anchored", decay=0.123)}, r"recipe\.decay"),
    ({"fit": FitConfig(updates=7, checkpoint_every=2, log_every=1)}, r"training\.updates"),
    ({"seed": 1}, "seed"),
    ({"start_network": OfferedStart(8)}, "start_network"),
]


@pytest.mark.parametrize(("change", "named"), DIFFERENT)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(tmp_path, unplanned, change, named):
    call = {"teacher": Tanh(), "data": batches(), "fit": SHORT, "folder": tmp_path}
    distill(**call)
    with pytest.raises(CheckpointError, match=rf"another run: it differs in {named}\."):
        distill(**call | change)


def test_a_checkpoint_of_other_data_is_refused(tmp_path, unplanned):
    for name, data in (("one", batches()), ("other", batches(3))):
        record(Tanh(), data, tmp_path / name, mode="endpoint")
    call = {"teacher": Tanh(), "fit": SHORT, "folder": tmp_path / "run"}
    distill(data=TrajectoryStore.open(tmp_path / "one"), **call)
    with pytest.raises(CheckpointError, match=r"differs in data\.data"):
        distill(data=TrajectoryStore.open(tmp_path / "other"), **call)


@pytest.mark.parametrize("damage", ["truncated", "empty", "not one"])
def test_a_damaged_checkpoint_is_refused(tmp_path, unplanned, damage):
    call = {"teacher": Tanh(), "data": batches(), "fit": SHORT, "folder": tmp_path}
    distill(**call)
    path = tmp_path / "checkpoint.safetensors"
    content = path.read_bytes()
    spoiled = {"truncated": content[: len(content) // 2], "empty": b"", "not one": b"x" * 200}
    path.write_bytes(spoiled[damage])
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors is damaged"):
        distill(**call)


def test_progress_is_shown(capsys, monkeypatch, unplanned):
    monkeypatch.setenv("FORCE_COLOR", "1")
    distill(Tanh(), batches(2), fit=SHORT, progress=True)
    shown = capsys.readouterr().err
    assert "record" in shown
    assert "distil anchored" in shown


def test_a_teacher_that_does_not_converge_is_warned_of(unplanned):
    class Turning(Tanh):
        """A rotation about c / (1 - R): it never comes nearer."""

        def step(self, z, context):
            turned = torch.cat([-z[:, 1:2], z[:, :1], z[:, 2:]], dim=1)
            return turned + 0.1 * torch.tanh(context + z @ self.weight.T)

    with pytest.warns(UserWarning, match="does not converge within the budget"):
        distill(
            Turning(), batches(2), fit=SHORT, solver=cdeq.Picard(), max_steps=5, tol=1e-6
        )


def test_a_start_network_of_the_user_is_copied(unplanned):
    network = nn.Linear(8, 8)
    before = network.weight.clone()
    first = distill(Tanh(), batches(2), fit=SHORT, start_network=network)
    assert torch.equal(network.weight, before)
    assert network.weight.requires_grad
    assert not torch.equal(first.start_network.weight, before)

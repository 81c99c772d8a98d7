"""Devices and precision: what is refused, what stays in single precision, and training in bfloat16 for real."""

import json
import types

import pytest
import torch
from torch import nn

import cdeq
from cdeq import FitConfig, PlacementError, TeachConfig, cli, distill, record, teach
from cdeq.consistency.recipes import Recipe
from cdeq.data.graphs import Graph
from cdeq.equilibrium.memory import Segment
from cdeq.models import IGNN, DEQTransformer
from cdeq.models.graph.sparse import sparse_product
from cdeq.placement import Placement, beside, find_device, in_single, not_cast
from cdeq.training.batches import moved_batches
from checks import numbers
from graphs import FEATURES, random_graph
from mdeqs import contracted
from recorded import Affine, batches

META = torch.device("meta")


def without_cuda():
    return pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA")


# What is refused.


@pytest.mark.parametrize(
    ("device", "message"),
    [
        pytest.param("cuda", "device cuda: this torch has no CUDA", marks=without_cuda()),
        pytest.param("cuda:3", "device cuda:3: this torch has no CUDA", marks=without_cuda()),
        ("abacus", "device abacus: torch knows no such device"),
        ("meta", "device meta: it knows shapes only"),
        ("hip", "device hip is not available here: Could not run"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_one_line(device, message):
    with pytest.raises(PlacementError, match=f"^{message}") as found:
        find_device(device)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda **place: teach(Affine(), batches(), teaching(), **place),
        lambda **place: distill(Affine(), batches(), **place),
    ],
)
def test_training_refuses_what_it_cannot_compute_in(call):
    with pytest.raises(PlacementError, match="precision fp16: nothing is trained in it on a CPU"):
        call(precision="fp16")
    with pytest.raises(PlacementError, match="precision is one of fp32, bf16, fp16, not fp8"):
        call(precision="fp8")
    with pytest.raises(PlacementError, match="device meta"):
        call(device="meta")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["demo", "--device", "cuda"],
            "device cuda: this torch has no CUDA",
            marks=without_cuda(),
        ),
        (["demo", "--precision", "fp16"], "precision fp16: nothing is trained in it on a CPU"),
        (["generate", "nowhere", "--device", "abacus"], "device abacus: torch knows no such"),
        (["reproduce", "table3", "--scale", "tiny", "--device", "meta"], "device meta: it knows"),
    ],
)
def test_commands_say_so_before_anything_is_computed(
    arguments, message, capsys, tmp_path, monkeypatch
):
    if arguments[0] == "reproduce":
        pytest.importorskip("cdeq_experiments.cli")
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(f"cdeq: {message}")
    assert shown.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_under_torchrun_cuda_is_that_of_the_process(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, device: device)
    assert find_device("cuda") == torch.device("cuda:2")
    assert find_device("cuda:1") == torch.device("cuda:1")
    assert find_device("cpu") == torch.device("cpu")


# Where things are.


def test_batches_follow_the_model_and_one_that_comes_again_is_moved_once():
    batch = {"x": torch.ones(2, 3), "more": (torch.zeros(1), "text")}
    there = beside(nn.Linear(3, 3, device=META), batch)
    assert [there["x"].device, there["more"][0].device] == [META, META]
    assert there["more"][1] == "text"
    assert beside(nn.Linear(3, 3), batch) is batch
    assert beside(object(), batch) is batch
    at = moved_batches(lambda update: batch if update < 2 else {"x": torch.ones(1)}, META)
    assert at(0) is at(1)
    assert at(2)["x"].shape == (1,)


def test_on_a_device_the_last_states_read_are_kept_and_on_the_cpu_all(tmp_path):
    store = record(Affine(), batches(1), tmp_path, max_steps=8)
    here, there = store[0], store[0].to(META, torch.float32)
    for batch in (here, there):
        first = batch.state(0)
        assert batch.state(0) is first
        assert [batch.state(k).shape for k in range(1, 8)] == [first.shape] * 7
        assert (batch.state(0) is first) == (batch is here)
    assert there.state(3).device == META


# What is computed in which precision.


@pytest.mark.parametrize("solver", [cdeq.Anderson(), cdeq.Broyden(), cdeq.Anderson(window=2)])
def test_the_mixing_of_solvers_is_the_same_under_autocast(solver):
    shrink, b = numbers(4, 6).abs().float() / 4, numbers(4, 6, seed=1).float()
    arguments = (lambda z: b - shrink * z, torch.zeros(4, 6), solver)  # nothing here is cast
    usual = cdeq.solve(*arguments, tol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert (b @ b.T).dtype == torch.bfloat16
        cast = cdeq.solve(*arguments, tol=1e-6)
    assert bool(usual.converged.all())
    assert torch.equal(cast.state, usual.state)
    assert torch.equal(cast.history, usual.history)


def test_products_with_a_graph_are_the_same_under_autocast():
    adjacency, x = random_graph(dtype=torch.float32).adjacency, numbers(24, 8).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = sparse_product(adjacency, x)
    assert found.dtype == torch.float32
    assert torch.equal(found, sparse_product(adjacency, x))


def test_states_are_put_back_to_single_precision_under_autocast_alone():
    half, double = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    assert in_single(half) is half
    with torch.autocast("cpu", torch.bfloat16):
        assert in_single(half).dtype == torch.float32
        assert [t.dtype for t in in_single((half, double))] == [torch.float32, torch.float64]
        with not_cast(half):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_gradients_are_scaled_in_half_precision_only():
    scaled = {
        p: Placement(device=META, precision=p).scaler().is_enabled()
        for p in ("fp32", "bf16", "fp16")
    }
    assert scaled == {"fp32": False, "bf16": False, "fp16": True}


# A text, an image and a graph model in bfloat16.


def teaching(updates=4, **more):
    return TeachConfig(fit=FitConfig(updates=updates, learning_rate=1e-3, log_every=1), **more)


def text():
    model = DEQTransformer(
        vocabulary=50,
        width=16,
        heads=2,
        inner=24,
        memory=6,
        cutoffs=(10, 25),
        divisor=2,
        direct=True,
        keep=0.5,
    )
    draw = torch.Generator().manual_seed(1)
    tokens = [torch.randint(50, (4, 13), generator=draw) for _ in range(3)]
    return model, [(Segment(t[:, :-1], model.no_memory(4)), t[:, 1:]) for t in tokens], model.loss


def images():
    model = contracted(2)
    data = [(numbers(4, 3, 8, 8, seed=i).float(), torch.arange(4) % 3) for i in range(3)]
    return model, data, cdeq.training.task_loss.cross_entropy


def graph():
    model = IGNN(features=FEATURES, width=16, classes=3)
    x: Graph = random_graph(dtype=torch.float32)
    return model, [(x, torch.arange(24) % 3)], cdeq.training.task_loss.cross_entropy


def watch(model):
    """The dtypes of all states that the model's map is given, and of what its layers answer."""
    states, answers, usual = set(), set(), model.step

    def step(self, z, context):
        states.update(t.dtype for t in (z if isinstance(z, tuple) else (z,)))
        return usual(z, context)

    model.step = types.MethodType(step, model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_hook(lambda layer, given, out: answers.add(out.dtype))
    return states, answers


def logged(folder, name="loss"):
    return [json.loads(line)[name] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("make", [text, images, graph])
@pytest.mark.parametrize("pretrained", [0, 4])
def test_a_teacher_is_trained_in_bfloat16_as_in_single_precision(make, pretrained, tmp_path):
    found = {}
    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        model, data, loss = make()
        states, answers = watch(model)
        config = teaching(depths=(6, 8), pretrain_updates=pretrained, penalty=0.1)
        folder = tmp_path / precision
        teach(model, data, config, task_loss=loss, folder=folder, precision=precision)
        assert states == {torch.float32}
        assert answers == {torch.bfloat16 if precision == "bf16" else torch.float32}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        found[precision] = logged(folder)
    assert len(found["bf16"]) == 4
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.03)
    assert found["bf16"] != found["fp32"]
    torch.manual_seed(0)
    model, data, loss = make()
    with pytest.raises(cdeq.CheckpointError, match="precision"):
        teach(model, data, config, task_loss=loss, folder=tmp_path / "fp32", precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("make", [text, images, graph])
def test_a_recording_in_bfloat16_keeps_states_and_residuals_in_single_precision(make, tmp_path):
    stores = {}
    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        model, data, _ = make()
        states, answers = watch(model)
        stores[precision] = record(
            model, data, tmp_path / precision, max_steps=12, precision=precision
        )
        assert states == {torch.float32}
        assert answers == {torch.bfloat16 if precision == "bf16" else torch.float32}
    for ours, exact in zip(stores["bf16"], stores["fp32"], strict=True):
        assert ours.residual.dtype == torch.float32
        distance = cdeq.equilibrium.states.relative_distance(
            ours.endpoint, exact.endpoint, stores["fp32"].manifest.batched
        )
        assert 0 < float(distance.max()) < 0.05
    with pytest.raises(cdeq.StoreError, match="precision"):
        record(model, data, tmp_path / "fp32", max_steps=12, precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("make", [text, images, graph])
@pytest.mark.parametrize("name", ["corrected", "paper"])
def test_a_student_is_distilled_in_bfloat16_as_in_single_precision(make, name, tmp_path):
    found, changes = {}, {}
    if name == "corrected":
        # A correction fitted on so few images is large, and so is what half precision makes of it.
        name, parts = (
            ("warm_start", ["start"]) if make is images else (name, ["start", "correction"])
        )
        # Rounding may decide which of two stages is kept.
        changes = {f"{part}_updates": 60 for part in parts} | {"selection": False}
    recipe = Recipe.from_name(name, **changes)
    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        model, data, loss = make()
        folder = tmp_path / precision
        fit = FitConfig(updates=4, learning_rate=1e-3, log_every=1)
        given: dict = {"recipe": recipe, "fit": fit, "folder": folder, "max_steps": 20}
        student = distill(model, data, task_loss=loss, precision=precision, **given)
        found[precision] = logged(folder, "distance")
        x = data[0][0]
        with Placement.of(student, precision=precision).computing(), torch.no_grad():
            last = student.trajectory(x, 3)[-1]
            solved = student.solve(x, tol=1e-1, max_steps=8)
        kept = (*(last if isinstance(last, tuple) else (last,)), solved.residual)
        assert {t.dtype for t in kept} == {torch.float32}
    # What is recorded is the same in both: in single precision.
    name = f"trajectories-{student.recipe.store_mode}"
    manifests = [(tmp_path / p / name / "manifest.json").read_text() for p in ("fp32", "bf16")]
    assert manifests[0] == manifests[1]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.02, abs=0.06)
    assert found["bf16"] != found["fp32"]

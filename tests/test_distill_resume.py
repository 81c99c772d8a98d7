"""Distillation that was interrupted goes on as if nothing had happened, and refuses what it cannot go on with."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from builders import Cut
from cdeq import FitConfig, Recipe, TrajectoryStore, distill, record
from cdeq.consistency.first_stages import CorrectionObjective, StartObjective
from cdeq.consistency.least_squares import fit_correction
from cdeq.consistency.objective import DistillationObjective
from cdeq.training import CheckpointError
from checks import read_log, same_tensors
from teachers import OfferedStart, Tanh, batches

SHORT = FitConfig(updates=6, checkpoint_every=2, log_every=1)
pytestmark = pytest.mark.usefixtures("no_plan", "brief_stages")


def same_weights(one, other):
    return same_tensors(one.own_parts().state_dict(), other.own_parts().state_dict())


def interrupted(monkeypatch, at, **arguments):
    """Run distill until the update `at`, which raises."""
    update_average, calls = DistillationObjective.update_average, [0]

    def fatal(self):
        calls[0] += 1
        if calls[0] > at:
            raise Cut
        update_average(self)

    with monkeypatch.context() as patch:
        patch.setattr(DistillationObjective, "update_average", fatal)
        with pytest.raises(Cut):
            distill(**arguments)


def corrected(**changes):
    return Recipe.from_name("corrected", start_updates=6, correction_updates=6, depth=3, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["paper", "anchored", corrected(), corrected(lambda_1=0.5)])
@pytest.mark.parametrize("at", [0, 3, 4, 9])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(tmp_path, monkeypatch, recipe, at):
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
    assert same_tensors(ours, theirs)
    assert read_log(folder) == read_log(tmp_path / "whole")
    assert [entry["update"] for entry in read_log(folder)] == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, 3, 4, 5])
@pytest.mark.parametrize(
    ("recipe", "stage", "objective"),
    [
        (Recipe.from_name("warm_start", start_updates=6, depth=3), "start", StartObjective),
        (corrected(), "start", StartObjective),
        (corrected(), "correction", CorrectionObjective),
    ],
)
def test_a_run_interrupted_in_a_first_stage_goes_on(
    tmp_path, monkeypatch, recipe, stage, objective, at
):
    call = {"teacher": Tanh(), "data": batches(), "recipe": recipe, "fit": SHORT}
    whole = distill(**call, folder=tmp_path / "whole")
    call["folder"] = folder = tmp_path / "cut"
    forward = objective.forward

    def fatal(self, batch, update):
        if update == at:
            raise Cut
        return forward(self, batch, update)

    with monkeypatch.context() as patch:
        patch.setattr(objective, "forward", fatal)
        with pytest.raises(Cut):
            distill(**call)
    assert not (folder / "checkpoint.safetensors").exists()
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(objective, "forward", lambda *a: seen.append(a[2]) or forward(*a))
        resumed = distill(**call)
        assert seen == list(range(at - at % 2, 6))  # from the last checkpoint of the stage
        assert same_weights(whole, resumed)
        # A finished stage is not trained again.
        assert same_weights(whole, distill(**call))
        assert len(seen) == 6 - (at - at % 2)
    for part in ("", stage):
        ours, theirs = (
            load_file(f / part / "checkpoint.safetensors") for f in (folder, tmp_path / "whole")
        )
        assert same_tensors(ours, theirs)
        assert read_log(folder / part) == read_log(tmp_path / "whole" / part)


def test_the_running_average_begins_after_the_start_and_the_fit(tmp_path, monkeypatch):
    def fitted(student, data, **options):
        assert student.start_network.networks[0].outer.linear.weight.any()  # zero at first
        assert not student.correction.blocks[0].linear.linear.weight.any()
        fit_correction(student, data, **options)

    monkeypatch.setattr("cdeq.consistency.stages.fit_correction", fitted)
    monkeypatch.setattr(DistillationObjective, "update_average", lambda self: None)
    still = FitConfig(updates=1, learning_rate=1e-30)
    fast = FitConfig(updates=6)  # of the start
    monkeypatch.setattr(
        "cdeq.consistency.stages.replace",
        lambda config, **changes: fast if "updates" in changes else config,
    )
    student = distill(Tanh(), batches(), recipe=corrected(lambda_1=0.5), fit=still, folder=tmp_path)
    assert student.correction.blocks[0].linear.linear.weight.any()
    own = list(student.own_parts().parameters())
    kept = load_file(tmp_path / "checkpoint.safetensors")
    averages = [kept[f"buffer.average_{i}"] for i in range(len(own))]
    torch.testing.assert_close(averages, own, rtol=0, atol=1e-20)


@pytest.mark.slow
def test_the_log_is_cut_back_to_the_checkpoint(tmp_path, monkeypatch):
    config = FitConfig(updates=10, checkpoint_every=4, log_every=1)
    call = {"teacher": Tanh(), "data": batches(), "fit": config, "folder": tmp_path}
    interrupted(monkeypatch, 6, **call)
    assert [entry["update"] for entry in read_log(tmp_path)] == [0, 1, 2, 3, 4, 5]
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"update": 6, "lo')  # killed in the middle of a line
    interrupted(monkeypatch, 1, **call)
    assert [entry["update"] for entry in read_log(tmp_path)] == [0, 1, 2, 3, 4]
    distill(**call)
    assert [entry["update"] for entry in read_log(tmp_path)] == list(range(10))


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    call = {"teacher": Tanh(), "data": batches(), "fit": SHORT, "folder": tmp_path}
    first = distill(**call)
    monkeypatch.setattr(DistillationObjective, "forward", None)
    assert same_weights(first, distill(**call))


class Scaled(nn.Module):
    """A correction of the user's own, which is fitted by gradients alone."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def gate(self, context, start):
        return None

    def forward(self, r, gates):
        return self.scale * r


DIFFERENT = [
    ({"recipe": Recipe.from_name("anchored", decay=0.123)}, r"recipe\.decay"),
    ({"fit": FitConfig(updates=7, checkpoint_every=2, log_every=1)}, r"training\.updates"),
    ({"seed": 1}, "seed"),
    ({"start_network": OfferedStart(8)}, "start_network"),
    ({"recipe": corrected(), "correction": Scaled()}, "correction"),
]


@pytest.mark.parametrize(("change", "named"), DIFFERENT)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(tmp_path, change, named):
    call = {"teacher": Tanh(), "data": batches(), "fit": SHORT, "folder": tmp_path}
    call["recipe"] = corrected() if named == "correction" else "anchored"
    distill(**call)
    with pytest.raises(CheckpointError, match=rf"another run: it differs in {named}\."):
        distill(**call | change)


@pytest.mark.slow
def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    for name, data in (("one", batches()), ("other", batches(3))):
        record(Tanh(), data, tmp_path / name, mode="endpoint")
    call = {"teacher": Tanh(), "fit": SHORT, "folder": tmp_path / "run"}
    distill(data=TrajectoryStore.open(tmp_path / "one"), **call)
    with pytest.raises(CheckpointError, match=r"differs in data\.data"):
        distill(data=TrajectoryStore.open(tmp_path / "other"), **call)


@pytest.mark.parametrize("damage", ["truncated", "empty", "not one"])
@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    call = {"teacher": Tanh(), "data": batches(), "fit": SHORT, "folder": tmp_path}
    distill(**call)
    path = tmp_path / "checkpoint.safetensors"
    content = path.read_bytes()
    spoiled = {"truncated": content[: len(content) // 2], "empty": b"", "not one": b"x" * 200}
    path.write_bytes(spoiled[damage])
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors is damaged"):
        distill(**call)

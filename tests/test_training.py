"""The one training loop, its checkpoints and its log; and teaching."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from builders import Cut, cut_at
from cdeq import FitConfig, TeachConfig, teach
from cdeq.gradients import Implicit
from cdeq.training import CheckpointError, fit
from cdeq.training.batches import batches_by_number
from cdeq.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from cdeq.training.draws import numbered_draws
from cdeq.training.log import JsonLines
from cdeq.training.parallel import mean_over_processes, process_group, process_rank
from checks import read_log, same_tensors
from teachers import Tanh, batches


class Quadratic(nn.Module):
    """|w - batch|^2, a running mean as a buffer, and a weight that only every other update uses."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.sometimes = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, batch, update):
        self.mean.lerp_(batch, 0.1)
        loss = (self.w - batch).square().sum()
        if update % 2:
            loss = loss + (self.sometimes - 1).square().sum()
        return loss, {"first": self.w[0].detach()}


def batch_at(update):
    return torch.arange(3.0) + 0.1 * (update % 4)


def test_it_minimises():
    objective = Quadratic()
    fit(objective, batch_at, FitConfig(updates=300, learning_rate=0.05, clip=None))
    torch.testing.assert_close(objective.w.detach(), torch.arange(3.0) + 0.15, rtol=0, atol=0.1)
    assert objective.frozen == 1


@pytest.mark.parametrize("warmup_updates", [0, 5])
def test_the_rate_is_a_warm_up_and_a_cosine(warmup_updates):
    config = FitConfig(
        updates=25, learning_rate=2.0, warmup_updates=warmup_updates, final_fraction=0.1
    )
    rates = [config.rate(update) for update in range(25)]
    for update in range(warmup_updates):
        assert rates[update] == pytest.approx(2.0 * (update + 1) / warmup_updates)
    for update in range(warmup_updates, 25):
        done = (update - warmup_updates) / (25 - warmup_updates)
        expected = 2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
        assert rates[update] == pytest.approx(expected)
    assert config.rate(25) == pytest.approx(0.2)


def test_the_optimizer_gets_that_rate():
    objective = Quadratic()
    config = FitConfig(updates=4, learning_rate=0.1, warmup_updates=4)
    moves = []

    def remember(update):
        moves.append(objective.w.detach().clone())

    fit(objective, lambda update: torch.full((3,), 1e3), config, after_update=remember)
    # Adam moves by its rate where the gradient is constant.
    steps = torch.stack([torch.zeros(3), *moves]).diff(dim=0)[:, 0]
    torch.testing.assert_close(steps, 0.1 * torch.tensor([1, 2, 3, 4]) / 4, rtol=1e-2, atol=0)


def test_gradients_are_clipped():
    found = []

    class Recording(Quadratic):
        def forward(self, batch, update):
            if update:
                found.append(
                    torch.cat([p.grad for p in (self.w, self.sometimes) if p.grad is not None])
                )
            return super().forward(batch, update)

    fit(Recording(), lambda u: torch.full((3,), 50.0), FitConfig(updates=5, clip=0.5))
    assert all(g.norm() == pytest.approx(0.5, rel=1e-3) for g in found)


WRONG = [
    {"updates": 0},
    {"learning_rate": 0.0},
    {"checkpoint_every": 0},
    {"log_every": 0},
    {"warmup_updates": -1},
    {"clip": 0.0},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_settings_are_refused_by_name(wrong):
    [name] = wrong
    with pytest.raises(ValueError, match=name):
        FitConfig(**{"updates": 5} | wrong)


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_run_ends_in_the_same_numbers(tmp_path, stop):
    config = FitConfig(updates=10, checkpoint_every=3, log_every=2)
    whole, first, second = Quadratic(), Quadratic(), Quadratic()
    fit(whole, batch_at, config, folder=tmp_path / "whole")
    with pytest.raises(Cut):
        fit(first, batch_at, config, folder=tmp_path / "cut", after_update=cut_at(stop))
    fit(second, batch_at, config, folder=tmp_path / "cut")
    assert same_tensors(whole.state_dict(), second.state_dict())
    ours, theirs = (read_checkpoint(tmp_path / f, {}) for f in ("whole", "cut"))
    assert ours.update == theirs.update == 10
    assert same_tensors(ours.tensors, theirs.tensors)


def test_what_kills_left_behind_is_removed(tmp_path):
    left = [tmp_path / f"{n}.1234abcd.tmp" for n in ("checkpoint.safetensors", "log.jsonl")]
    for path in left:
        path.write_bytes(b"half")
    (tmp_path / "mine.tmp").write_bytes(b"")
    fit(Quadratic(), batch_at, FitConfig(updates=2), folder=tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"checkpoint.safetensors", "log.jsonl", "mine.tmp"}


def test_the_log_has_the_first_the_last_and_every_nth(tmp_path):
    shown = []
    fit(
        Quadratic(),
        batch_at,
        FitConfig(updates=11, log_every=4),
        folder=tmp_path,
        progress=lambda done, total, metrics: shown.append((done, total, metrics["loss"])),
    )
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["update"] for entry in entries] == [0, 3, 7, 10]
    assert set(entries[0]) == {"update", "loss", "first", "seconds"}
    assert [(done, total) for done, total, _ in shown] == [(1, 11), (4, 11), (8, 11), (11, 11)]
    assert [loss for _, _, loss in shown] == [entry["loss"] for entry in entries]


def test_json_lines_keeps_only_what_is_asked_and_whole(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    log = JsonLines(path, keep_below=0)
    for update in range(5):
        log.write({"update": update})
    path.write_text(path.read_text() + '{"update": 0, "x"')
    JsonLines(path, keep_below=3).write({"update": 3})
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]


def checkpoint_of(objective, update=3):
    weights = {n: p for n, p in objective.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(weights.values())
    return weights, optimizer, Checkpoint.of(objective, weights, optimizer, update)


def test_a_finished_run_is_loaded_without_a_write(tmp_path):
    first = Quadratic()
    fit(first, batch_at, FitConfig(updates=5), folder=tmp_path)
    (tmp_path / "log.jsonl.0123456789abcdef.tmp").write_text("another process is writing this")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    again = Quadratic()

    def refuse(update):
        raise AssertionError("trained on")

    fit(again, refuse, FitConfig(updates=5), folder=tmp_path)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()} == before
    assert same_tensors(first.state_dict(), again.state_dict())


def test_a_checkpoint_for_other_weights_is_refused(tmp_path):
    _, _, checkpoint = checkpoint_of(Quadratic())
    write_checkpoint(tmp_path, checkpoint, {"a": 1})
    found = read_checkpoint(tmp_path, {"a": 1})
    assert found.update == 3
    other = Quadratic()
    other.w = nn.Parameter(torch.zeros(4))
    other.extra = nn.Parameter(torch.zeros(1))
    weights, optimizer, _ = checkpoint_of(other)
    with pytest.raises(CheckpointError, match=r"weight\.extra, weight\.w do not match"):
        found.restore(other, weights, optimizer)


def test_identities_are_compared_to_the_field(tmp_path):
    _, _, checkpoint = checkpoint_of(Quadratic())
    identity = {"seed": 0, "recipe": {"a": 1, "b": [1, 2]}, "old": None}
    write_checkpoint(tmp_path, checkpoint, identity)
    assert read_checkpoint(tmp_path, {"seed": 0, "recipe": {"b": (1, 2), "a": 1}, "old": None})
    with pytest.raises(CheckpointError, match=r"differs in recipe\.b, seed\."):
        read_checkpoint(tmp_path, identity | {"seed": 1, "recipe": {"a": 1, "b": [1]}})
    assert read_checkpoint(tmp_path / "nowhere", identity) is None


def test_buffers_that_share_memory_are_saved(tmp_path):
    class Views(Quadratic):
        def __init__(self):
            super().__init__()
            table = torch.arange(6.0)
            self.register_buffer("low", table[:3])
            self.register_buffer("high", table[3:])

    fit(Views(), batch_at, FitConfig(updates=2), folder=tmp_path)
    assert read_checkpoint(tmp_path, {}).tensors["buffer.high"].tolist() == [3, 4, 5]


def test_alone_there_is_nothing_parallel():
    assert process_rank() == (0, 1)
    with process_group():
        assert process_rank() == (0, 1)
    assert mean_over_processes({"a": torch.tensor(2.0), "b": 3.0}) == {"a": 2.0, "b": 3.0}


# Batches by the number of the update


class Passes:
    """A loader without a length that counts how often it is passed over."""

    def __init__(self, batches):
        self.batches, self.count = batches, 0

    def __iter__(self):
        self.count += 1
        return iter(self.batches)


@pytest.mark.parametrize(
    "data", ["abc", Passes("abc"), DataLoader(list("abc"), batch_size=None), lambda i: "abc"[i % 3]]
)
def test_batches_by_number_of_any_loader(data):
    batch_at = batches_by_number(data)
    numbers = [0, 1, 2, 3, 4, 7, 2, 2, 0]  # on, ahead, back, again
    assert [batch_at(i) for i in numbers] == ["abc"[i % 3] for i in numbers]


def test_a_loader_is_passed_over_once_for_each_epoch():
    loader = Passes("abc")
    batch_at = batches_by_number(loader)
    for update in range(9):
        batch_at(update)
    assert loader.count == 3


@pytest.mark.parametrize("nothing", [[], Passes([])])
def test_no_batches_are_refused(nothing):
    with pytest.raises(ValueError, match="no batches to train on"):
        batches_by_number(nothing)(0)


def test_batches_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="a loader or a function, not from int"):
        batches_by_number(3)


# Teaching


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [None, Implicit()])
def test_a_teacher_learns(tmp_path, gradient):
    data = batches(4, 24)

    def task(update):
        x, _ = data[update % 4]
        return x, (x[:, 0] > 0).long()

    options = {} if gradient is None else {"gradient": gradient}
    config = TeachConfig(
        fit=FitConfig(updates=40, learning_rate=2e-2, log_every=1),
        depths=(6, 12),
        penalty=0.05,
        pretrain_updates=5,
        **options,
    )
    model = Tanh(norm=0.5)
    teach(model, task, config, folder=tmp_path)
    assert not model.training
    entries = read_log(tmp_path)
    assert entries[-1]["task"] < 0.5 * entries[0]["task"]
    assert "penalty" not in entries[0]
    assert "penalty" in entries[5]


def test_a_model_is_projected_after_each_update():
    class Projected(Tanh):
        projections = 0

        def project(self):
            self.projections += 1

    model = Projected()
    config = TeachConfig(fit=FitConfig(updates=3), depths=(2, 4))
    teach(model, lambda update: batches(1)[0], config)
    assert model.projections == 3


def test_numbered_draws_depend_on_the_number_and_leave_the_rest_alone():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    found = []
    for number in (0, 0, 1):
        with numbered_draws(3, number):
            found.append(torch.rand(3))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(torch.rand(2), expected)


class Dropped(Tanh):
    """A teacher whose injection is dropped out in training."""

    def inject(self, x):
        return nn.functional.dropout(super().inject(x), 0.5, self.training)


def test_a_teacher_with_dropout_resumes_to_the_same_weights(tmp_path):
    loader = DataLoader(batches(4), batch_size=None)
    config = TeachConfig(fit=FitConfig(updates=6, checkpoint_every=2, log_every=1), depths=(5, 5))

    def run(folder, progress=None):
        model = Dropped()
        teach(model, loader, config, folder=folder, progress=progress)
        return model

    whole = run(tmp_path / "whole")
    with pytest.raises(Cut):
        run(tmp_path / "cut", cut_at(3))
    torch.rand(7)  # the global generator has moved on
    assert same_tensors(run(tmp_path / "cut").state_dict(), whole.state_dict())
    assert not torch.equal(whole.weight, Dropped().weight)


def test_weights_may_have_a_share_of_the_learning_rate():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.slow, self.usual = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, batch, update):
            return (self.slow + self.usual).sum(), {}

    objective, config = Two(), FitConfig(updates=4, learning_rate=1e-2, warmup_updates=2)
    fit(objective, lambda update: None, config, factors={"slow": 0.25})
    assert bool((objective.usual < -1e-2).all())
    torch.testing.assert_close(objective.slow, 0.25 * objective.usual)

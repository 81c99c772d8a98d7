"""Two and four gloo processes record and teach as one does, and take up what another number of them left.

This file is also the helper process: it imports torch once and forks the processes.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from builders import contents
from cdeq import FitConfig, TeachConfig, TrajectoryStore, own_part, process_rank, record, teach
from cdeq.equilibrium.memory import Segment
from cdeq.training.checkpoint import CHECKPOINT, read_checkpoint
from cdeq.training.segments import CarriedMemory, full_memory
from checks import read_log
from killing import run_helper
from processes import die, run_processes
from teachers import Normed, Ring, Tanh, batches, small_transformer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]
WORLDS = (1, 2, 4)


# Recording.


class Counted(Sequence):
    """A sequence of batches that notes which of them are read, and may be the end of a process."""

    def __init__(self, read, fatal=None):
        self.data, self.read, self.fatal = batches(count=11), read, fatal

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if index == self.fatal:
            die()
        self.read.append(index)
        return self.data[index]


def recording(folder, fatal=None):
    """Six shards of two batches each."""
    read, teacher = [], Tanh()
    record(teacher, Counted(read, fatal), folder, max_steps=4, batches_per_shard=2)
    rank = process_rank()[0]
    found = {"read": read, "calls": teacher.calls}
    (folder.parent / f"{folder.name}-{rank}.json").write_text(json.dumps(found))


def other_recordings(root):
    """What is no sequence; a text with memory; states without a batch axis; an input without an equilibrium."""
    given = {"max_steps": 3, "batches_per_shard": 1}
    record(Tanh(), iter(batches()), root / "iterated", **given)
    record(Ring(), batches(), root / "graphs", mode="endpoint", **given)
    tokens = [segment(update) for update in range(4)]
    record(small_transformer().eval(), tokens, root / "text", carried=True, **given)
    bad = batches(count=3)
    bad[1][0][2] = torch.nan  # in a shard of the second process, if there is one
    words = ""
    try:
        record(Tanh(), bad, root / "bad", **given)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    (root / f"bad-{process_rank()[0]}.txt").write_text(words)
    rank = process_rank()[0]
    for name, teacher, data in [
        ("uneven", Tanh(), batches(count=1 if rank else 4)),
        ("other", Tanh(seed=rank), batches()),
    ]:
        try:
            record(teacher, data, root / name, **given)
        except Exception as error:
            (root / f"{name}-{rank}.txt").write_text(str(error))


# Teaching.

FIT = FitConfig(updates=7, checkpoint_every=3, log_every=1, learning_rate=1e-2)
PERIOD = 5


def segment(update):
    """Four texts, segments of five words."""
    draw = torch.Generator().manual_seed(update % PERIOD)
    whole = torch.randint(50, (4, 6), generator=draw)
    return whole[:, :-1], whole[:, 1:].contiguous()


@torch.no_grad()
def memory_for(model):
    def left(memory):
        context = model.inject(Segment(own_part(segment(0)[0]), memory))
        return model.remember(model.start(context), context)

    return CarriedMemory(full_memory(left), PERIOD)


def teaching(folder, sharded, kind, fatal=None, commits=None):
    """A teacher in double precision; `fatal`: the last process ends before this update, as one that is killed.

    `commits`: the first process ends when it would write a checkpoint for this time, with all parts written.
    """
    rank, world = process_rank()
    text = kind == "text"
    torch.manual_seed(0)
    model = (small_transformer(dropout=0.0) if text else Normed()).double()
    data = batches(size=8)

    def batch_at(update):
        if update == fatal and rank == world - 1:
            die()
        if text:
            return own_part(segment(update))
        x, y = own_part(data[update % len(data)])
        return x.double(), y

    if commits is not None and rank == 0:
        replace, count = os.replace, iter(range(commits))

        def fatal_replace(source, target):
            if Path(target).name == CHECKPOINT and next(count, None) is None:
                die()
            replace(source, target)

        os.replace = fatal_replace
    more = {"task_loss": model.loss, "carried": memory_for(model)} if text else {}
    config = TeachConfig(fit=FIT, depths=(4, 6), tol=0.0)
    teach(model, batch_at, config, sharded=sharded, folder=folder, **more)
    if rank == 0:
        save_file(
            model.state_dict(), folder / "weights.safetensors"
        )  # which takes no divided tensor


SHARDED = [("plain", 1), ("plain", 2), ("text", 1), ("text", 2), ("text", 4)]
ELASTIC = {"2 to 1": (2, 1), "2 to 4": (2, 4), "1 to 2": (1, 2)}


def main(root):
    torch.set_num_threads(1)
    well = {}
    for world in WORLDS:
        well[f"record {world}"] = run_processes(world, recording, root / f"record{world}")
    # The second process dies at its second shard; two processes go on, or one.
    for world in (1, 2):
        folder = root / f"resumed{world}"
        well[f"killed {world}"] = run_processes(4, recording, folder, 10)
        (root / f"left{world}.json").write_text(json.dumps(sorted(contents(folder))))
        well[f"resumed {world}"] = run_processes(world, recording, folder)
    for world in (1, 2):
        (root / f"others{world}").mkdir()
        well[f"others {world}"] = run_processes(world, other_recordings, root / f"others{world}")
    for kind, world in SHARDED:
        folder = root / f"{kind}-sharded{world}"
        well[f"{kind} sharded {world}"] = run_processes(world, teaching, folder, True, kind)
    well["text replicated 2"] = run_processes(2, teaching, root / "text-replicated2", False, "text")
    for name, (before, after) in ELASTIC.items():
        folder = root / name
        well[f"killed {name}"] = run_processes(before, teaching, folder, True, "text", 5)
        well[f"resumed {name}"] = run_processes(after, teaching, folder, True, "text")
    folder = root / "uncommitted"
    well["killed uncommitted"] = run_processes(2, teaching, folder, True, "plain", None, 1)
    (root / "uncommitted.json").write_text(json.dumps([p.name for p in folder.iterdir()]))
    well["resumed uncommitted"] = run_processes(2, teaching, folder, True, "plain")
    print(json.dumps(well))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("processes")
    well = run_helper(__file__, root)
    assert well == {name: not name.startswith("killed") for name in well}
    return root


@pytest.mark.parametrize("world", [2, 4])
def test_processes_record_the_store_of_one(root, world):
    assert contents(root / f"record{world}") == contents(root / "record1")
    assert len(TrajectoryStore.open(root / "record1")) == 11
    reads = [json.loads((root / f"record{world}-{r}.json").read_text()) for r in range(world)]
    assert sorted(i for one in reads for i in one["read"]) == list(range(11))  # each batch once
    # Four steps and one to measure the endpoint, for each batch of its own.
    assert [one["calls"] for one in reads] == [5 * len(one["read"]) for one in reads]
    assert min(len(one["read"]) for one in reads) >= 2


@pytest.mark.parametrize("world", [1, 2])
def test_a_recording_of_four_that_was_killed_is_finished_by_fewer(root, world):
    left = json.loads((root / f"left{world}.json").read_text())
    assert "shard-00001.json" in left or "shard-00001.safetensors" not in left
    assert "shard-00005.safetensors" not in left
    assert contents(root / f"resumed{world}") == contents(root / "record1")
    calls = [
        json.loads((root / f"resumed{world}-{rank}.json").read_text())["calls"]
        for rank in range(world)
    ]
    done = sum(name.endswith(".json") and name.startswith("shard") for name in left)
    assert done >= 1
    assert sum(calls) == 5 * (11 - 2 * done)


def test_other_loaders_and_models_are_recorded_as_by_one(root):
    for name in ("iterated", "graphs", "text"):
        assert contents(root / "others2" / name) == contents(root / "others1" / name)


def test_what_fails_in_one_process_fails_in_all(root):
    alone = (root / "others1" / "bad-0.txt").read_text()
    assert alone.startswith("UnsolvedBatch: batch 1: the teacher's residual is not finite")
    assert (root / "others2" / "bad-1.txt").read_text() == alone
    assert (
        root / "others2" / "bad-0.txt"
    ).read_text() == f"RuntimeError: process 1 failed: {alone}"
    told = (root / "others2" / "uneven-0.txt").read_text()
    assert "loaders of different lengths" in told
    words = [(root / "others2" / f"other-{rank}.txt").read_text() for rank in range(2)]
    assert "was recorded with another teacher" in words[1]
    assert words[0] == f"process 1 failed: FingerprintMismatch: {words[1]}"


def assert_same_run(one, other):
    """Within far less than 1e-4: in double precision only the order of sums differs."""
    ours, theirs = read_log(one), read_log(other)
    assert [line["update"] for line in theirs] == list(range(FIT.updates))
    for mine, yours in zip(ours, theirs, strict=True):
        assert yours["loss"] == pytest.approx(mine["loss"], rel=1e-7)
    first, second = (load_file(place / "weights.safetensors") for place in (one, other))
    assert list(first) == list(second)
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "world"), [one for one in SHARDED if one[1] > 1])
def test_processes_that_divide_a_teacher_train_it_as_one_does(root, kind, world):
    assert_same_run(root / f"{kind}-sharded1", root / f"{kind}-sharded{world}")
    losses = [line["loss"] for line in read_log(root / f"{kind}-sharded1")]
    assert losses[-1] < losses[0]


def test_replicated_processes_carry_the_memory_of_one(root):
    assert_same_run(root / "text-sharded1", root / "text-replicated2")


@pytest.mark.parametrize("name", ELASTIC)
def test_a_killed_training_goes_on_with_another_number_of_processes(root, name):
    assert_same_run(root / "text-sharded1", root / name)


def test_a_checkpoint_counts_when_all_its_parts_are_there(root):
    left = json.loads((root / "uncommitted.json").read_text())
    assert len([name for name in left if name.startswith("checkpoint-")]) == 2
    assert_same_run(root / "plain-sharded1", root / "uncommitted")


def test_a_divided_checkpoint_is_safetensors_alone(root):
    folder = root / "text-sharded2"
    [parts] = folder.glob("checkpoint-*")
    assert sorted(p.suffix for p in parts.iterdir()) == [".safetensors"] * 2
    saved = read_checkpoint(folder, {})
    assert saved.divided == parts
    # What is not divided: how many steps, and how long the memory is.
    assert all("step" in key or key.endswith("lengths") for key in saved.tensors)


if __name__ == "__main__":
    # Before the forks: FSDP2 imports the compiler, which takes seconds.
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    main(Path(sys.argv[1]))

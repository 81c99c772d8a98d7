"""SIGKILL during recording: whatever the moment, the same call completes to the same bytes.

This file is also the helper process: it imports torch once and forks the children that are killed.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from cdeq.equilibrium import from_functions
from cdeq.files import sha256_of_file
from cdeq.solvers import Anderson
from cdeq.trajectories import TrajectoryStore, record
from killing import fork, killed_at, outcome, run_helper

KILLS = 24
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def recording(folder, count, size):
    generator = torch.Generator().manual_seed(0)
    loader = ((torch.randn(size, 64, generator=generator),) for _ in range(count))
    model = from_functions(lambda z, c: torch.tanh(0.6 * z.roll(1, -1) + c))
    record(model, loader, folder, solver=Anderson(), max_steps=15, batches_per_shard=2)


def contents(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


def look(folder):
    """What a kill left: finished shards, all readable; temporary files; shards not yet listed."""
    names = {p.name for p in folder.iterdir()} if folder.exists() else set()
    listed = (
        json.loads((folder / "manifest.json").read_text())["shards"]
        if "manifest.json" in names
        else []
    )
    for shard in listed:
        assert sha256_of_file(folder / shard["file"]) == shard["sha256"]
    whole = {name for name in names if name.endswith(".safetensors")}
    return {
        "shards": len(listed),
        "temporary": sum(name.endswith(".tmp") for name in names),
        "unlisted": len(whole - {shard["file"] for shard in listed}),
    }


def kill_at_random(root):
    """SIGKILL after random delays, resuming each time, over as many recordings as it takes."""
    chance = random.Random(0)
    work = (24, 96)
    began = time.monotonic()
    assert outcome(fork(recording, root / "whole", *work)) == 0
    duration = time.monotonic() - began
    expected = contents(root / "whole")
    kills, left = 0, []
    while kills < KILLS:
        folder, killed = root / f"killed{kills}", 0
        while True:
            child = fork(recording, folder, *work)
            time.sleep(chance.uniform(0.0, duration / 3))
            os.kill(child, signal.SIGKILL)
            if outcome(child) == 0:
                break
            killed += 1
            left.append(look(folder))
        kills += killed
        assert contents(folder) == expected, f"{folder} differs after {killed} kills"
        assert len(TrajectoryStore.open(folder)) == work[0]
    return {"kills": kills, "left": left}


def kill_at_every_call(root):
    """SIGKILL before each flush (with half the file written) and each rename of a recording."""
    work = (3, 2)
    assert outcome(fork(recording, root / "whole", *work)) == 0
    expected = contents(root / "whole")
    kills, left = 0, []
    while True:
        folder = root / f"call{kills}"
        if outcome(fork(killed_at, kills, recording, folder, *work)) == 0:
            break
        kills += 1
        left.append(look(folder))
        assert outcome(fork(recording, folder, *work)) == 0
        assert contents(folder) == expected, f"{folder} differs"
    return {"kills": kills, "left": left}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run_helper(__file__, tmp_path_factory.mktemp("killed"))


def test_killed_at_random_moments(reports):
    report = reports["random"]
    assert report["kills"] >= KILLS
    shards = [left["shards"] for left in report["left"]]
    assert len(set(shards)) >= 5, f"the kills all landed at the same places: {shards}"


def test_killed_at_every_flush_and_rename(reports):
    report = reports["every call"]
    # Four manifests and two shards, each with a file flushed, a rename, and a folder flushed.
    assert report["kills"] == 3 * (4 + 2)
    assert sum(left["temporary"] for left in report["left"]) == 2 * (4 + 2)
    assert sum(left["unlisted"] for left in report["left"]) >= 2
    assert {left["shards"] for left in report["left"]} == {0, 1, 2}


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    everything = {
        "random": kill_at_random(root / "random"),
        "every call": kill_at_every_call(root / "every"),
    }
    print(json.dumps(everything))

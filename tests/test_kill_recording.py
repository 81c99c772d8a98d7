"""SIGKILL during recording: at whatever instant, the same call completes to the same bytes.

This file is also the helper process: it imports torch once and forks the children that are killed.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from builders import contents
from cdeq.equilibrium import from_functions
from cdeq.files import sha256_of_file
from cdeq.trajectories import TrajectoryStore, record
from killing import kill_at_every_call, kill_at_random, run_helper

KILLS = 24
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]


def recording(folder, count, size):
    generator = torch.Generator().manual_seed(0)
    loader = ((torch.randn(size, 64, generator=generator),) for _ in range(count))
    model = from_functions(lambda z, c: torch.tanh(0.6 * z.roll(1, -1) + c))
    record(model, loader, folder, max_steps=15, batches_per_shard=2)


def require_same(folder, expected):
    assert contents(folder) == contents(expected), f"{folder} differs"
    assert len(TrajectoryStore.open(folder)) == len(TrajectoryStore.open(expected))


def look(folder):
    """What a kill left: finished shards, all readable; temporary files; shards not yet listed."""
    names = set(contents(folder)) if folder.exists() else set()
    listed = []
    if "manifest.json" in names:
        # Those of a finished manifest, whose notes may not all be deleted yet, or those with a note.
        notes = [n for n in names if n.startswith("shard-") and n.endswith(".json")]
        listed = json.loads((folder / "manifest.json").read_text())["shards"] or [
            json.loads((folder / name).read_text())["shard"] for name in notes
        ]
    for shard in listed:
        assert sha256_of_file(folder / shard["file"]) == shard["sha256"]
    whole = {name for name in names if name.endswith(".safetensors")}
    return {
        "shards": len(listed),
        "temporary": sum(name.endswith(".tmp") for name in names),
        "unlisted": len(whole - {shard["file"] for shard in listed}),
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run_helper(__file__, tmp_path_factory.mktemp("killed"))


def test_killed_at_random_instants(reports):
    assert len(reports["random"]) >= KILLS
    shards = [left["shards"] for left in reports["random"]]
    assert len(set(shards)) >= 5, f"the kills all landed at the same places: {shards}"


def test_killed_at_every_flush_and_rename(reports):
    found = reports["every call"]
    # Two manifests, two shards and their notes, each with a file flushed, a rename, and a folder flushed.
    assert len(found) == 3 * (2 + 2 + 2)
    assert sum(left["temporary"] for left in found) == 2 * (2 + 2 + 2)
    assert sum(left["unlisted"] for left in found) >= 2
    assert {left["shards"] for left in found} == {0, 1, 2}


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    long, short = (partial(recording, count=c, size=s) for c, s in ((24, 96), (3, 2)))
    everything = {
        "random": kill_at_random(root / "random", long, require_same, look, KILLS),
        "every call": kill_at_every_call(root / "every", short, require_same, look),
    }
    print(json.dumps(everything))

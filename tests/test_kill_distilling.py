"""SIGKILL during distillation: whatever the moment, the same call ends in the same weights.

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
from safetensors.torch import load_file

from cdeq import FitConfig, TrajectoryStore, distill, record
from killing import fork, killed_at, outcome, run_helper
from teachers import Tanh, batches

KILLS = 20
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def recording(root):
    for recipe, mode in (("paper", "full"), ("anchored", "endpoint")):
        record(Tanh(), batches(), root / recipe, mode=mode, max_steps=8)


def distilling(root, recipe, folder, updates, every):
    # The plan for certified solving comes after training, and writes nothing.
    sys.modules["cdeq.consistency.distillation"].plan_handover = lambda student, inputs: {}
    config = FitConfig(updates=updates, checkpoint_every=every, log_every=1, learning_rate=1e-2)
    store = TrajectoryStore.open(root / recipe)
    student = distill(Tanh(), store, recipe=recipe, fit=config, folder=folder)
    student.save(folder / "student")


def tensors(folder):
    """The student's weights, and all that its training kept, as bytes."""
    paths = ("checkpoint.safetensors", "student/student.safetensors")
    return {
        f"{path} {name}": tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
        for path in paths
        for name, tensor in load_file(folder / path).items()
    }


def log(folder):
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in entries]


def require_same(folder, expected):
    assert tensors(folder) == tensors(expected), f"{folder} differs"
    assert log(folder) == log(expected), f"{folder} has another log"
    names = {p.name for p in folder.iterdir()}
    assert names == {"checkpoint.safetensors", "log.jsonl", "student"}, names


def progress(folder):
    """How many updates the checkpoint knows of, and how many temporary files lie about."""
    path = folder / "checkpoint.safetensors"
    left = len(list(folder.glob("*.tmp"))) if folder.exists() else 0
    if not path.exists():
        return 0, left
    step = next(t for n, t in load_file(path).items() if n.startswith("optimizer.step."))
    return int(step), left


def kill_at_random(root, recipe):
    """SIGKILL after random delays, resuming each time, over as many runs as it takes."""
    chance = random.Random(0)
    work = (60, 3)
    began = time.monotonic()
    assert outcome(fork(distilling, root, recipe, root / f"{recipe}-whole", *work)) == 0
    duration = time.monotonic() - began
    kills, found = 0, []
    while kills < KILLS // 2:
        folder, killed = root / f"{recipe}-killed{kills}", 0
        while True:
            child = fork(distilling, root, recipe, folder, *work)
            time.sleep(chance.uniform(0.0, duration / 3))
            os.kill(child, signal.SIGKILL)
            if outcome(child) == 0:
                break
            killed += 1
            found.append(progress(folder)[0])
        kills += killed
        require_same(folder, root / f"{recipe}-whole")
    return {"kills": kills, "updates": found}


def kill_at_every_call(root, recipe):
    """SIGKILL before each flush (with half the file written) and each rename of a run."""
    work = (3, 1)
    whole = root / f"{recipe}-short"
    assert outcome(fork(distilling, root, recipe, whole, *work)) == 0
    kills, left = 0, 0
    while True:
        folder = root / f"{recipe}-call{kills}"
        if outcome(fork(killed_at, kills, distilling, root, recipe, folder, *work)) == 0:
            break
        kills += 1
        left += progress(folder)[1]
        assert outcome(fork(distilling, root, recipe, folder, *work)) == 0
        require_same(folder, whole)
    return {"kills": kills, "temporary": left}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run_helper(__file__, tmp_path_factory.mktemp("killed"))


@pytest.mark.parametrize("recipe", ["paper", "anchored"])
def test_killed_at_random_moments(reports, recipe):
    report = reports[recipe]["random"]
    assert report["kills"] >= KILLS // 2
    updates = report["updates"]
    assert len(set(updates)) >= 4, f"the kills all landed at the same places: {updates}"


@pytest.mark.parametrize("recipe", ["paper", "anchored"])
def test_killed_at_every_flush_and_rename(reports, recipe):
    report = reports[recipe]["every call"]
    # The log, three checkpoints and the student's three files: each flushed, renamed, folder flushed.
    assert report["kills"] == 3 * (1 + 3 + 3)
    assert report["temporary"] == 2 * (1 + 3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    recording(root)
    for recipe in ("paper", "anchored"):  # what torch imports when first used is imported here
        distilling(root, recipe, root / f"{recipe}-first", 2, 1)
    everything = {
        recipe: {
            "random": kill_at_random(root, recipe),
            "every call": kill_at_every_call(root, recipe),
        }
        for recipe in ("paper", "anchored")
    }
    print(json.dumps(everything))

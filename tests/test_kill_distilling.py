"""SIGKILL during distillation: at whatever instant, the same call ends in the same weights.

This file is also the helper process: it imports torch once and forks the children that are killed.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cdeq import FitConfig, Recipe, TrajectoryStore, distill, record
from cdeq.consistency import distillation
from checks import read_log, tensor_bytes
from killing import kill_at_every_call, kill_at_random, run_helper
from teachers import Tanh, batches

KILLS = 6
RECIPES = {"paper": "full", "corrected": "endpoint"}
STAGES = {"corrected": ("start", "correction", "")}
"""Folders of trainings, one after another; for the others it is the folder itself."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]


def distilling(folder, store, recipe, updates, every):
    config = FitConfig(updates=updates, checkpoint_every=every, log_every=1, learning_rate=1e-2)
    data = TrajectoryStore.open(store)
    if recipe == "corrected":
        # Without judging its stages it has always the same ones.
        given = {"start_updates": updates, "correction_updates": updates, "selection": False}
        recipe = Recipe.from_name(recipe, depth=2, **given)
    student = distill(Tanh(), data, recipe=recipe, fit=config, folder=folder)
    student.save(folder / "student")


def tensors(folder):
    """The student's weights, and all that its training kept, as bytes."""
    paths = sorted(folder.rglob("*.safetensors"))
    return {str(p.relative_to(folder)): tensor_bytes(load_file(p)) for p in paths}


def require_same(stages, folder, expected):
    assert tensors(folder) == tensors(expected), f"{folder} differs"
    assert len(tensors(folder)) == len(stages) + 2
    for stage in stages:
        assert read_log(folder / stage) == read_log(expected / stage), f"{folder} has another log"
        names = {p.name for p in (folder / stage).iterdir()}
        more = {"student", *stages[:-1]} if stage == "" else set()
        assert names == {"checkpoint.safetensors", "log.jsonl"} | more, names


def look(stages, folder):
    """How many updates the checkpoints know of, and how many temporary files lie about."""
    updates = 0
    for stage in stages:
        path = folder / stage / "checkpoint.safetensors"
        known = load_file(path) if path.exists() else {}
        steps = [int(t) for name, t in known.items() if name.startswith("optimizer.step.")]
        updates += steps[0] if steps else 0
    temporary = [p for stage in stages for p in (folder / stage).glob("*.tmp")]
    return {"updates": updates, "temporary": len(temporary)}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run_helper(__file__, tmp_path_factory.mktemp("killed"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_at_random_instants(reports, recipe):
    updates = [left["updates"] for left in reports[recipe]["random"]]
    assert len(updates) >= KILLS
    assert len(set(updates)) >= 3, f"the kills all landed at the same places: {updates}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_at_every_flush_and_rename(reports, recipe):
    found, stages = reports[recipe]["every call"], len(STAGES.get(recipe, ("",)))
    # A log and two checkpoints, and the student's three files: each flushed, renamed, folder flushed.
    assert len(found) == 3 * (stages * (1 + 2) + 3)
    assert sum(left["temporary"] for left in found) == stages * 2 * (1 + 2)


def everything(root, recipe, mode):
    store = root / mode
    record(Tanh(), batches(), store, mode=mode, max_steps=8)
    run = partial(distilling, store=store, recipe=recipe)
    run(root / "first", updates=2, every=1)  # what torch imports when first used is imported here
    long, short = (partial(run, updates=u, every=e) for u, e in ((40, 2), (2, 1)))
    stages = STAGES.get(recipe, ("",))
    checks = partial(require_same, stages), partial(look, stages)
    return {
        "random": kill_at_random(root / "random", long, *checks, KILLS),
        "every call": kill_at_every_call(root / "every", short, *checks),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The plan for certified solving comes after training, and writes nothing.
    distillation.plan_handover = lambda student, inputs: {}
    root = Path(sys.argv[1])
    print(json.dumps({name: everything(root / name, name, mode) for name, mode in RECIPES.items()}))

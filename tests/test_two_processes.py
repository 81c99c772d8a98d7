"""Two processes of one group train as one does; tests/test_docs.py starts them by torchrun itself.

This file is also the helper process: it imports torch once and forks the processes.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from cdeq import FitConfig, Recipe, Student, TrajectoryStore, distill, record
from cdeq.training.parallel import process_rank
from checks import read_log
from killing import run_helper
from processes import run_processes
from teachers import Ring, Tanh, batches, inputs, untrained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]
CONFIG = FitConfig(updates=12, learning_rate=1e-2, log_every=1, checkpoint_every=5)
RECIPES = {
    "paper": Recipe.from_name("paper"),
    "mixed": Recipe.from_name("anchored", history="gru", schedule="learned", lambda_1=0.7, depth=4),
    "corrected": Recipe.from_name("corrected", start_updates=8, correction_updates=8, depth=3),
    "warm_start": Recipe.from_name("warm_start", start_updates=8, depth=3, leap=1),
}


def teacher():
    """In double precision: Adam makes steps of full length out of rounding errors."""
    return Tanh().double()


def runs(root, where):
    """Every recipe from its store, into `where`; the student saved by the first process."""
    for name, recipe in RECIPES.items():
        store = TrajectoryStore.open(root / recipe.store_mode)
        student = distill(teacher(), store, recipe=recipe, fit=CONFIG, folder=where / name)
        if process_rank()[0] == 0:
            student.save(where / name / "student")


def refused(root, where):
    """What two processes cannot do, and how they say so."""
    words = {}
    for name, call in {
        "graph": lambda: distill(Ring(), TrajectoryStore.open(root / "graph"), fit=CONFIG),
        "odd": lambda: distill(Tanh(), TrajectoryStore.open(root / "odd"), fit=CONFIG),
        "no folder": lambda: distill(Tanh(), batches(), fit=CONFIG),
    }.items():
        try:
            call()
            words[name] = "accepted"
        except ValueError as error:
            words[name] = str(error)
    (where / f"refused{process_rank()[0]}.json").write_text(json.dumps(words))


def together(root):
    where = root / "two"
    where.mkdir(exist_ok=True)
    runs(root, where)
    # From a loader: the first process records, and both read.
    given = {"recipe": RECIPES["corrected"], "fit": CONFIG, "max_steps": 10}
    distill(Tanh(), batches(), folder=where / "loader", **given)
    refused(root, where)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("torchrun")
    data = [(x.double(), y) for x, y in batches()]
    for mode in ("full", "endpoint"):
        record(teacher(), data, root / mode, max_steps=10, mode=mode, dtype=torch.float64)
    record(Ring(), batches(), root / "graph", mode="endpoint")
    record(Tanh(), batches(size=7), root / "odd", mode="endpoint")
    assert run_helper(__file__, root) is True
    (root / "one").mkdir()
    runs(root, root / "one")
    return root


@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_have_the_loss_curve_of_one(root, name):
    one, two = read_log(root / "one" / name), read_log(root / "two" / name)
    assert len(one) == len(two) == 12
    for ours, theirs in zip(one, two, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_end_in_the_weights_of_one(root, name):
    one, two = (Student.load(root / where / name / "student") for where in ("one", "two"))
    start = untrained(teacher(), inputs().double(), RECIPES[name])
    moved = 0.0
    theirs, began = dict(two.named_parameters()), dict(start.named_parameters())
    for key, weight in one.named_parameters():
        torch.testing.assert_close(weight, theirs[key], rtol=1e-5, atol=1e-6)
        moved = max(moved, float((weight - began[key]).detach().abs().max()))
    assert moved > 0.03
    x = inputs(seed=50).double()
    torch.testing.assert_close(one(x, steps=3), two(x, steps=3), rtol=1e-5, atol=1e-6)


def test_a_loader_is_recorded_once(root):
    assert len(read_log(root / "two" / "loader")) == 12
    store = TrajectoryStore.open(root / "two" / "loader" / "trajectories-endpoint")
    assert len(store) == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_shared_is_refused(root, rank):
    words = json.loads((root / "two" / f"refused{rank}.json").read_text())
    assert "a state without a batch axis cannot be shared" in words["graph"]
    assert "batches of 7 samples cannot be shared evenly by 2 processes" in words["odd"]
    assert "give a folder that all processes see" in words["no folder"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run_processes(2, together, Path(sys.argv[1]))))

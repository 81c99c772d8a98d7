"""The processes of torchrun share out an experiment. This file is also the script that torchrun starts."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from cdeq import cli
from cdeq.evaluation import Results
from cdeq_experiments.cells import Cells
from cdeq_experiments.crew import Crew
from test_grids import small

ARGUMENTS = ("reproduce", "beta", "--scale", "tiny", "--only", "text", "--seeds", "2")


class Unsendable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def places(root):
    return ["--out", str(root / "out"), "--runs", str(root / "runs")]


def script(root, more):
    """The command of a user, on data and plans on which it takes a second."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        return cli.main([*ARGUMENTS, *places(root), *more])


def torchrun(root, *more):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(__file__, str(root), *more),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)


def test_a_grid_under_torchrun_is_that_of_one_process(tmp_path, monkeypatch):
    done = torchrun(tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("seconds in all") == 1  # the helpers are silent
    small(monkeypatch)
    assert cli.main([*ARGUMENTS, *places(tmp_path / "one")]) == 0
    two, one = (
        Results.from_json(tmp_path / name / "out" / "beta.json").rows for name in ("two", "one")
    )
    assert [(r.method, r.seed, r.steps) for r in two] == [(r.method, r.seed, r.steps) for r in one]
    for theirs, ours in zip(two, one, strict=True):
        assert theirs.metric == pytest.approx(ours.metric, rel=1e-4)
    # All four clocks are of one student a seed, which one of the processes trained.
    assert len(list((tmp_path / "two" / "runs").glob("steps-paper-*"))) == 2


def test_jobs_are_those_of_torchrun(tmp_path):
    done = torchrun(tmp_path, "--jobs", "2")
    assert done.returncode != 0
    assert "leave --jobs out" in done.stderr


# Without torchrun: two members of a crew around one store.


def piece(number):
    if number == 3:
        raise Unsendable(1, 2)
    time.sleep(0.05)
    return number, os.getpid()


def member(port):
    store = dist.TCPStore("localhost", port, is_master=False)
    store.set("ready", b"")
    Crew(store, 1, 2).serve()


@pytest.fixture
def first():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    helper = context.Process(target=member, args=(store.port,))
    helper.start()
    store.wait(["ready"])
    crew = Crew(store, 0, 2)
    yield crew
    crew.dismiss()
    helper.join(20)
    assert helper.exitcode == 0


def test_results_come_in_order_from_both(first):
    found = list(first.shared(piece, [5, 1, 7, 2, 8, 4, 6, 9, 0] * 4))
    assert [number for number, _ in found] == [5, 1, 7, 2, 8, 4, 6, 9, 0] * 4
    assert len({process for _, process in found}) == 2
    assert list(first.shared(piece, [])) == []


def test_an_error_is_told_by_the_first(first):
    """Even one that cannot be unpickled, which would otherwise hide what went wrong."""
    with pytest.raises(RuntimeError, match="Unsendable: 1 and 2"):
        list(first.shared(piece, [0, 3, 1]))


# Claims.


def claimed_work(folder, log):
    def work():
        with log.open("a") as file:
            file.write("begun\n")
        time.sleep(0.3)
        return {"found": 1}

    assert Cells(folder).result("cell", {"a": 1}, work) == {"found": 1}


def test_two_processes_do_the_work_of_a_cell_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    both = [
        context.Process(target=claimed_work, args=(tmp_path / "cells", tmp_path / "log"))
        for _ in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
        assert one.exitcode == 0
    assert (tmp_path / "log").read_text() == "begun\n"


if __name__ == "__main__":
    sys.exit(script(Path(sys.argv[1]), sys.argv[2:]))

"""`cdeq reproduce` by two processes that train every model of a table together.

This file is also the helper process: it imports torch once and forks the processes.
"""

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes that are started here

import pytest
import torch
from small import TEXT, use_small_data

from cdeq import cli, process_rank
from cdeq.data.image_folders import FolderBatches, FolderImages
from cdeq.evaluation import Results
from cdeq.training.batches import FirstBatches
from cdeq_experiments import configs
from cdeq_experiments.configs.text import TextData
from image_files import flat, write_folders
from killing import run_helper
from processes import run_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]


# Two texts of the same length, one for each process; no dropout and no Jacobian penalty, which are drawn for each part
# of a batch.
def without_dropout(config):
    return replace(config, arguments={**config.arguments, "dropout": 0.0})


TEACHING = replace(TEXT.teacher.teaching, penalty=0.0)
UNMIXED = {"history": "none", "window": 1, "safeguard": False}
EVEN = replace(
    TEXT,
    data=TextData(name="steps", batch=2, length=5),
    teacher=replace(without_dropout(TEXT.teacher), teaching=TEACHING),
    explicit={"transformer_xl": without_dropout(TEXT.explicit["transformer_xl"])},
    # Rounding would decide between stages that bring so little, and mix residuals of so few numbers.
    students={
        "corrected": replace(
            TEXT.students["corrected"],
            changes={**TEXT.students["corrected"].changes, "selection": False, **UNMIXED},
        )
    },
    solvers=("picard",),
    few_step=None,
)


def reproduce(root, *arguments):
    """The command of a user on a small table: its exit code, and what it printed and complained of."""
    places = ["--out", str(root / "out"), "--runs", str(root / "runs")]
    out, errors = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        use_small_data(patch)
        patch.setitem(configs.SUITES["tiny"], "text", (EVEN,))
        code = cli.main(["reproduce", *arguments, "--scale", "tiny", "--threads", "1", *places])
    return {"code": code, "out": out.getvalue(), "errors": errors.getvalue()}


def together(root):
    found = {
        "jobs": reproduce(root / "refused", "table1", "--jobs", "2"),
        "graphs": reproduce(root / "refused", "table3"),
        "table1": reproduce(root / "two", "table1"),
        "again": reproduce(root / "two", "table1"),
    }
    (root / f"found{process_rank()[0]}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("together")
    assert run_helper(__file__, root) == {"two": True, "one": True}
    return root


@pytest.fixture
def found(root):
    return [json.loads((root / f"found{rank}.json").read_text()) for rank in range(2)]


def test_the_first_process_alone_speaks(found):
    first, second = (one["table1"] for one in found)
    assert first["code"] == second["code"] == 0, first["errors"]
    assert "seconds in all" in first["out"]
    assert second["out"] == second["errors"] == ""


def test_what_processes_cannot_do_together_is_refused(found):
    for one in found:
        assert one["jobs"]["code"] == one["graphs"]["code"] == 1
        assert "leave --jobs out" in one["jobs"]["errors"]
        assert "a graph is one state" in one["graphs"]["errors"]


def test_two_processes_make_the_table_of_one(root, found):
    one, two = (Results.from_json(root / place / "out" / "table1.json") for place in ("one", "two"))
    assert len(one.rows) == len(two.rows) > 10
    for ours, theirs in zip(one.rows, two.rows, strict=True):
        assert (theirs.method, theirs.seed, theirs.steps) == (ours.method, ours.seed, ours.steps)
        assert theirs.metric == pytest.approx(ours.metric, rel=1e-4)
    # Every model was trained once, in a run of the same name.
    names = [sorted(p.name for p in (root / place / "runs").iterdir()) for place in ("one", "two")]
    assert names[0] == names[1]


def test_nothing_is_done_twice(root, found):
    runs = root / "two" / "runs"
    logs = sorted(runs.glob("*/log.jsonl"))
    assert len(logs) >= 5
    for log in logs:
        updates = [json.loads(line)["update"] for line in log.read_text().splitlines()]
        assert updates == sorted(set(updates))
    assert all("done" not in one["again"]["out"].split() for one in found)


def test_a_process_decodes_its_part_of_each_batch(tmp_path):
    colours = {name: [flat((40 * i, 90, n)) for i in range(4)] for n, name in enumerate("ab")}
    write_folders(tmp_path, colours)
    files = FolderImages(tmp_path, "train")
    given = {"files": files, "batch": 4, "size": 8, "workers": 0}
    whole, parts = FolderBatches(**given), [FolderBatches(**given, part=(r, 2)) for r in range(2)]
    for update in (0, 3):
        expected, found = whole.at(update), [part.at(update) for part in parts]
        for i in range(2):
            assert torch.equal(torch.cat([part[i] for part in found]), expected[i])
    with pytest.raises(ValueError, match="4 images cannot be shared evenly by 3 processes"):
        FolderBatches(**given, part=(0, 3))


def test_first_batches_are_made_when_asked_for():
    asked = []
    batches = FirstBatches(lambda number: asked.append(number) or number, 3)
    assert (len(batches), batches[2], asked) == (3, 2, [2])
    assert list(batches) == [0, 1, 2]
    with pytest.raises(IndexError, match="batch 3 of 3"):
        batches[3]


if __name__ == "__main__":
    # Before the forks: divided tensors import the compiler, which takes seconds.
    import torch._dynamo
    import torch.distributed.checkpoint

    import cdeq_experiments.registry  # noqa: F401

    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    with redirect_stdout(sys.stderr):
        well = {
            "two": run_processes(2, together, root),
            "one": run_processes(1, reproduce, root / "one", "table1"),
        }
    print(json.dumps(well))

"""Cells: one folder a configuration, its work done once, whole or not at all."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cdeq.evaluation import begin_peak, peak_megabytes
from cdeq.solvers import Anderson, Picard
from cdeq_experiments.cells import CLAIM, CONFIG, RESULT, Cells, digest
from cdeq_experiments.graph_tasks import GraphPlan
from cdeq_experiments.options import ExperimentError

PLAN = GraphPlan(name="blocks", title="Block model", layers={"gcn": 2})


def changed(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {**value, "gat": 3}
    return value + ("x" if isinstance(value, str) else 1)


@pytest.fixture
def cells(tmp_path):
    return Cells(tmp_path / "runs" / "cells")


def test_one_configuration_has_one_folder(cells):
    config = {"plan": PLAN, "seed": 0, "solver": Anderson()}
    again = {"solver": Anderson(), "seed": 0, "plan": dataclasses.replace(PLAN)}
    place = cells.place("blocks-ignn", config)
    assert place.is_dir()
    assert place.parent == cells.folder
    assert place.name.startswith("blocks-ignn-")
    assert cells.place("blocks-ignn", again) == place
    assert len(list(cells.folder.iterdir())) == 1


def test_every_field_of_a_plan_counts():
    plans = [PLAN] + [
        dataclasses.replace(PLAN, **{field.name: changed(getattr(PLAN, field.name))})
        for field in dataclasses.fields(GraphPlan)
    ]
    assert len({digest({"plan": plan}) for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1, "solver": Anderson(), "counts": (1, 2)},
        {"seed": 0, "solver": Picard(), "counts": (1, 2)},
        {"seed": 0, "solver": Anderson(window=7), "counts": (1, 2)},
        {"seed": 0, "solver": Anderson(), "counts": (2, 1)},
        {"seed": 0, "solver": Anderson()},
        {"seed": 0, "solver": Anderson(), "counts": (1, 2), "more": None},
    ],
)
def test_another_configuration_has_another_folder(cells, other):
    config = {"seed": 0, "solver": Anderson(), "counts": (1, 2)}
    assert cells.place("a", other) != cells.place("a", config)


def test_another_name_has_another_folder(cells):
    assert cells.place("a", {"seed": 0}) != cells.place("b", {"seed": 0})


def test_the_configuration_can_be_read(cells):
    place = cells.place("a", {"plan": PLAN, "solver": Anderson(window=7)})
    text = (place / CONFIG).read_text()
    assert len(text.splitlines()) > 10  # not all in one line
    found = json.loads(text)
    assert found["plan"]["type"] == "GraphPlan"
    assert found["plan"]["layers"] == {"gcn": 2}
    assert found["solver"]["window"] == 7


def test_work_is_done_once(cells):
    done = []

    def work():
        done.append(1)
        return {"rows": (1, 2), "metric": None}

    first = cells.result("a", {"seed": 0}, work)
    # Plain JSON at once, and not only when it is read again.
    assert first == {"rows": [1, 2], "metric": None}
    assert cells.result("a", {"seed": 0}, work) == first
    assert len(done) == 1
    cells.result("a", {"seed": 1}, work)
    assert len(done) == 2


def test_cells_of_a_folder_outlive_the_object(cells):
    cells.result("a", {"seed": 0}, lambda: 3)
    again = Cells(cells.folder).result("a", {"seed": 0}, lambda: pytest.fail("done again"))
    assert again == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_work_cut_short_leaves_no_result_and_is_done_again(cells, error):
    def cut():
        raise error

    with pytest.raises(error):
        cells.result("a", {"seed": 0}, cut)
    place = cells.place("a", {"seed": 0})
    assert {path.name for path in place.iterdir()} == {CONFIG, CLAIM}
    assert cells.result("a", {"seed": 0}, lambda: "done") == "done"
    assert json.loads((place / RESULT).read_text()) == "done"


def test_work_that_is_no_json_leaves_no_result(cells):
    with pytest.raises(TypeError):
        cells.result("a", {"seed": 0}, lambda: {"model": object()})
    assert {path.name for path in cells.place("a", {"seed": 0}).iterdir()} == {CONFIG, CLAIM}


@pytest.mark.parametrize("text", ["", '{"rows": [1, 2', "rows"])
def test_a_damaged_result_is_named(cells, text):
    path = cells.place("a", {"seed": 0}) / RESULT
    path.write_text(text)
    with pytest.raises(ExperimentError, match="damaged") as caught:
        cells.result("a", {"seed": 0}, lambda: pytest.fail("done over what is there"))
    assert str(path) in str(caught.value)
    assert "remove it" in str(caught.value)
    assert path.read_text() == text
    path.unlink()
    assert cells.result("a", {"seed": 0}, lambda: 1) == 1


def test_a_new_process_does_not_count_the_memory_of_its_parent():
    held = bytearray(b"x" * (400 * 2**20))
    code = (
        "from cdeq.evaluation import begin_peak, peak_megabytes; print(peak_megabytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 50 < float(done.stdout) < peak_megabytes() - 50
    assert len(held) == 400 * 2**20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone forgets a peak")
def test_a_peak_begins_anew():
    held = bytearray(b"x" * (300 * 2**20))
    del held
    before = begin_peak()
    assert peak_megabytes() == pytest.approx(before, abs=20)
    held = bytearray(b"x" * (200 * 2**20))
    assert 150 < peak_megabytes() - before < 450
    assert held

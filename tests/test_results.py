"""The results schema: round trip, validation, and what is recorded about a run."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from builders import DATASET, results, row, teacher_result
from cdeq.evaluation import (
    Results,
    ResultsError,
    current_command,
    current_commit,
    current_hardware,
    metric_of,
    within_time,
    write_measurements,
)

TINY = Path(__file__).parents[1] / "results" / "tiny"

TEACHER = teacher_result("digits", name="conv DEQ", metric=0.963, steps=24, train_seconds=12.5)
ROW = row("anchored", 2, 0.961, dataset="digits", distance=0.2, residual=0.1, f_equivalents=2.2)
EXPLICIT = row("gcn", None, dataset="digits")
RESULTS = results(ROW, EXPLICIT, teachers=[TEACHER])


def test_round_trip(tmp_path):
    path = RESULTS.to_json(tmp_path / "new" / "results.json")
    assert Results.from_json(path) == RESULTS
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]  # no temporary file is left


def test_older_files_lack_the_seconds_of_training(tmp_path):
    path = RESULTS.to_json(tmp_path / "r.json")
    data = json.loads(path.read_text())
    for kept in data["rows"]:
        del kept["train_seconds"]
    path.write_text(json.dumps(data))
    assert Results.from_json(path) == RESULTS
    del data["rows"][0]["parameters"]
    path.write_text(json.dumps(data))
    with pytest.raises(ResultsError, match="missing field 'parameters'"):
        Results.from_json(path)


def test_schema_is_frozen(tmp_path):
    data = json.loads(RESULTS.to_json(tmp_path / "r.json").read_text())
    assert list(data) == [
        "experiment", "scale", "commit", "command", "hardware", "teachers", "rows", "findings",
        "page",
    ]  # fmt: skip
    assert list(data["teachers"][0]) == [
        "dataset", "name", "parameters", "metric_name", "metric", "higher_is_better", "steps",
        "residual", "train_seconds", "converged", "seed",
    ]  # fmt: skip
    assert list(data["rows"][0]) == [
        "dataset", "seed", "method", "steps", "metric", "distance", "residual", "seconds",
        "f_equivalents", "parameters", "train_seconds", "top5", "figures", "published",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_becomes_null(tmp_path, value):
    results = dataclasses.replace(
        RESULTS,
        rows=[dataclasses.replace(ROW, distance=value)],
        hardware={"load_average": [value, 1.0]},
    )
    path = results.to_json(tmp_path / "r.json")
    data = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert data["rows"][0]["distance"] is None
    assert data["hardware"]["load_average"] == [None, 1.0]
    assert Results.from_json(path).rows == results.rows


def test_numpy_numbers_become_plain():
    row = dataclasses.replace(ROW, metric=np.float32(0.5), steps=np.int64(3), distance=1)
    assert (type(row.metric), type(row.steps), type(row.distance)) == (float, int, float)


def test_failed_write_keeps_the_old_file(tmp_path):
    path = RESULTS.to_json(tmp_path / "r.json")
    broken = dataclasses.replace(RESULTS, hardware={"cpu": object()})
    with pytest.raises(TypeError):
        broken.to_json(path)
    assert Results.from_json(path) == RESULTS


def test_results_are_written_by_the_one_atomic_writer(tmp_path, monkeypatch):
    path = RESULTS.to_json(tmp_path / "r.json")

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(RESULTS, commit="other").to_json(path)
    assert Results.from_json(path) == RESULTS
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_measurements_stand_beside_command_commit_and_hardware(tmp_path):
    path = write_measurements(tmp_path / "new" / "b.json", [{"ratio": 0.5}], tol=1e-4)
    data = json.loads(path.read_text())
    assert list(data) == ["commit", "command", "hardware", "tol", "rows"]
    assert data["hardware"]["threads"] >= 1
    assert data["rows"] == [{"ratio": 0.5}]


def change(where, name, value):
    def apply(data):
        target = data if where is None else data[where][0]
        target[name] = value

    return apply


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("rows", "steps", 2.5), r"rows\[0\]\.steps: expected int \| None, got 2\.5"),
        (change("rows", "steps", True), r"rows\[0\]\.steps"),
        (change("rows", "metric", "high"), r"rows\[0\]\.metric: expected float"),
        (change("rows", "method", None), r"rows\[0\]\.method: expected str, got None"),
        (change("rows", "colour", "red"), r"rows\[0\]: unknown field 'colour'"),
        (change("teachers", "higher_is_better", 1), r"teachers\[0\]\.higher_is_better: .*bool"),
        (change("rows", "dataset", "cora"), r"rows\[0\]\.dataset: no teacher has dataset 'cora'"),
        (change(None, "rows", {}), r"rows: expected a list"),
        (change(None, "findings", "one"), r"findings: expected a list"),
        (change(None, "rows", [3]), r"rows\[0\]: expected an object"),
        (change(None, "version", 2), r"top level: unknown field 'version'"),
        (change(None, "hardware", 3), r"hardware: expected"),
        (lambda data: data.pop("commit"), r"top level: missing field 'commit'"),
        (lambda data: data["rows"][0].pop("seed"), r"rows\[0\]: missing field 'seed'"),
        (lambda data: data["rows"].append(data["rows"][0]), r"rows\[2\]: a second row"),
    ],
)
def test_validation_names_the_field(tmp_path, edit, message):
    path = RESULTS.to_json(tmp_path / "r.json")
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ResultsError, match=message) as error:
        Results.from_json(path)
    assert str(path) in str(error.value)


def test_not_json(tmp_path):
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(ResultsError, match="not JSON"):
        Results.from_json(tmp_path / "r.json")


def test_wrong_items_in_the_constructor():
    with pytest.raises(ResultsError, match=r"rows\[0\]: expected Row"):
        dataclasses.replace(RESULTS, rows=[{}])


def test_teacher_is_the_mean_of_its_seeds():
    second = dataclasses.replace(TEACHER, metric=0.943, steps=26)
    other = dataclasses.replace(TEACHER, name="other", metric=0.1)
    results = dataclasses.replace(RESULTS, teachers=[TEACHER, second, other])
    assert results.teacher("digits").metric == pytest.approx(0.953)
    assert results.teacher("digits").steps == 25
    with pytest.raises(KeyError, match="cora"):
        results.teacher("cora")


def test_commit(tmp_path):
    assert current_commit(tmp_path) == "unknown"

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    git("init")
    assert current_commit(tmp_path) == "unknown"  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("-c", "commit.gpgsign=false", "commit", "-m", "first")
    commit = current_commit(tmp_path)
    assert len(commit) == 40
    (tmp_path / "a").write_text("2")
    assert current_commit(tmp_path) == f"{commit}-dirty"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/cdeq", "demo", "--task", "images"], "cdeq demo --task images"),
        (["/x/src/cdeq/__main__.py", "demo"], "cdeq demo"),
        (
            ["cdeq", "reproduce", "beta", "--out", "/my place", "--seeds", "1", "--runs=/x"],
            "cdeq reproduce beta --seeds 1",
        ),
        (["cdeq", "reproduce", "beta", "--data-dir", "--out", "x"], "cdeq reproduce beta"),
        (["/x/bench/speed.py", "--name", "two words"], "python speed.py --name 'two words'"),
    ],
)
def test_command(argv, command):
    assert current_command(argv) == command


def test_hardware_fits_the_schema(tmp_path):
    hardware = current_hardware()
    assert hardware["threads"] >= 1
    results = dataclasses.replace(RESULTS, hardware=hardware)
    assert Results.from_json(results.to_json(tmp_path / "r.json")) == results


@pytest.mark.parametrize("task", ["images", "text", "graph"])
def test_the_committed_demos_show_what_the_readme_says(task):
    results = Results.from_json(TINY / f"demo-{task}.json")
    (teacher,) = results.teachers
    at = {(row.method, row.steps): row for row in results.rows}
    for k in (1, 2, 3, 5, 8):
        for rival in ("picard", "anderson", "broyden", "paper"):
            assert at["anchored", k].distance < at[rival, k].distance, (rival, k)
    curve = [at["anchored", k].distance for k in (1, 2, 3, 5, 8, 12)]
    assert curve == sorted(curve, reverse=True)
    metric = metric_of(results, teacher.dataset)
    assert metric.near(at["anchored", 2].metric, teacher.metric, within=0.01)


def test_the_nearest_within_the_time_of_so_many_evaluations():
    timed = [
        *(row(method="picard", steps=k, distance=1.0 / k, seconds=0.1 * k) for k in (1, 2, 4)),
        # A start alone, no evaluation; a step of it takes as long as two of Picard's.
        *(row(method="ours", steps=k, distance=0.5 / (k + 1), seconds=0.2 * k) for k in (0, 1, 2)),
        row(method="slow", steps=1, distance=1e-3, seconds=9.0),
    ]
    found = within_time(results(*timed), DATASET)
    assert {k: p.distance for k, p in found["picard"].items()} == {1: 1.0, 2: 0.5, 4: 0.25}
    assert {k: p.steps for k, p in found["ours"].items()} == {1: 0, 2: 1, 4: 2}
    assert found["slow"] == {}
    with pytest.raises(ValueError, match="'broyden' was not timed"):
        within_time(results(*timed), DATASET, clock="broyden")

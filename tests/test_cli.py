"""The command line as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdeq.experiments.results import Results

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def cdeq(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "cdeq.cli", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def graph_demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, cdeq("demo", "--task", "graph", "--threads", "1", cwd=folder)


def test_demo_prints_one_table_and_writes_everything(graph_demo):
    folder, done = graph_demo
    assert done.returncode == 0, done.stderr
    for word in ("Picard", "Anderson", "Broyden", "paper", "anchored", "report.html"):
        assert word in done.stdout
    made = folder / "runs" / "demo-graph"
    results = Results.from_json(made / "results.json")
    assert {(r.method, r.steps) for r in results.rows} == {
        (m, k)
        for m in ("picard", "anderson", "broyden", "paper", "anchored")
        for k in (1, 2, 3, 5, 8, 12)
    }
    assert results.command == "cdeq demo --task graph --threads 1"
    assert (made / "report.html").read_text().startswith("<!doctype html>")
    assert list(made.glob("*.png"))
    raw = json.loads((made / "results.json").read_text())
    assert set(raw) == {"experiment", "scale", "commit", "command", "hardware", "teachers", "rows"}


def test_the_anchored_student_is_nearer_than_every_solver_and_never_drifts(graph_demo):
    folder, _ = graph_demo
    results = Results.from_json(folder / "runs" / "demo-graph" / "results.json")
    distance = {(r.method, r.steps): r.distance for r in results.rows}
    for k in (1, 2, 3, 5, 8):
        rivals = [distance[m, k] for m in ("picard", "anderson", "broyden", "paper")]
        assert distance["anchored", k] < min(rivals)
    curve = [distance["anchored", k] for k in (1, 2, 3, 5, 8, 12)]
    assert curve == sorted(curve, reverse=True)


def test_a_second_call_resumes_and_agrees(graph_demo):
    folder, _ = graph_demo
    before = Results.from_json(folder / "runs" / "demo-graph" / "results.json")
    again = cdeq("demo", "--task", "graph", "--threads", "1", cwd=folder)
    assert again.returncode == 0, again.stderr
    after = Results.from_json(folder / "runs" / "demo-graph" / "results.json")
    assert [(r.metric, r.distance) for r in before.rows] == [
        (r.metric, r.distance) for r in after.rows
    ]


def test_the_saved_student_can_be_used(graph_demo):
    import torch

    from cdeq import Student
    from cdeq.experiments.demo_tasks import graph

    student = Student.load(graph_demo[0] / "runs" / "demo-graph" / "student-anchored")
    x, _ = graph(0).test[0]
    solved = student.solve(x, tol=1e-3)
    assert bool(solved.converged.all())
    assert float(solved.residual) <= 1e-3
    assert student(x, steps=2).shape == torch.Size([1797, 10])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--task", "poetry"), "poetry"),
        (("dance",), "dance"),
        (("demo", "--seed", "x"), "seed"),
    ],
)
def test_bad_arguments_are_named(arguments, message, tmp_path):
    done = cdeq(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


def test_the_options_of_the_command_line(tmp_path):
    shown = cdeq("demo", "--help", cwd=tmp_path).stdout
    for option in ("--task", "--out", "--seed", "--threads"):
        assert option in shown

"""The benchmarks as `make bench` runs them, on maps that take no time."""

import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cdeq.consistency.student import Student
from test_evaluation import batches, contraction

ROOT = Path(__file__).parents[1]


def bench(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bench_steps_times_the_rollout_of_both_recipes(tmp_path, monkeypatch, capsys):
    steps = bench("steps")
    model, _ = contraction()
    named = {name: (model, batches()[0][0]) for name in steps.teachers()}
    monkeypatch.setattr(steps, "teachers", lambda: named)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    rolled = []
    usual = Student.rollout
    monkeypatch.setattr(
        Student,
        "rollout",
        lambda self, *a: (
            rolled.append((self.recipe.history, self.recipe.window)) or usual(self, *a)
        ),
    )
    path = tmp_path / "new" / "steps.json"
    arguments = ["steps.py", "--repeats", "1", "--steps", "1", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    steps.main()
    assert set(rolled) == {("none", 1), ("anderson", 3)}
    data = json.loads(path.read_text())
    assert len(data["rows"]) == 8
    assert {row["target"] for row in data["rows"]} == {1.10}
    assert len({row["recipe"] for row in data["rows"]}) == 2
    assert data["command"].startswith("python steps.py")
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    for name in named:
        assert shown.count(name) == 4


def test_bench_steps_table_fits_a_hundred_columns():
    steps = bench("steps")
    row = {
        "steps": 8,
        "plain_seconds": 1.23456,
        "student_seconds": 1.34567,
        "ratio": 1.09,
        "cpu_ratio": 1.08,
        "call_ratio": 1.12,
        "target": 1.10,
    }
    rows = [{"teacher": name, **row} for name in steps.teachers()]
    for title in steps.RECIPES:
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(steps.table_of(title, rows))
        text = console.export_text()
        assert title in text
        assert all(name in text for name in steps.teachers())
        assert "…" not in text


def test_bench_solvers_makes_its_folder_and_says_how(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchdeq")
    solvers = bench("solvers")
    monkeypatch.setattr(solvers, "MAPS", {})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    path = tmp_path / "new" / "solvers.json"
    monkeypatch.setattr(sys, "argv", ["solvers.py", "--json", str(path)])
    with torch.enable_grad():  # the bench switches gradients off; put them back
        solvers.main()
    data = json.loads(path.read_text())
    assert {"command", "commit", "hardware", "load_before", "load_after", "rows"} <= set(data)
    assert data["hardware"]["cpu"]

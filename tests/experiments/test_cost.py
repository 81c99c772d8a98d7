"""bench/cost.py: what is counted, what is computed from it, and a plan of each kind of data."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import BY_KIND
from torch import nn

from cdeq.models.graph import sparse
from checks import csr

BENCH = Path(__file__).parents[2] / "bench"
SIZES = {
    "steps": {"vocabulary": 30},
    "digits": {"classes": 8},
    "few-nodes": {"features": 8, "classes": 3},
}


def without_penalty(config):
    """As the plans of the paper: torch's counter does not go through the penalty's inner gradient."""
    teaching = replace(config.teacher.teaching, penalty=0.0)
    return replace(config, teacher=replace(config.teacher, teaching=teaching))


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return importlib.import_module("cost")


def test_operations_and_bytes_are_counted(cost):
    layer, x = nn.Linear(4, 5), torch.randn(3, 4, requires_grad=True)
    with cost.counted(layer) as found:
        layer(x).square().sum().backward()
    # The product and the two of its gradient; saved are the input and the output, not the weight.
    assert found.operations == 3 * 2 * 3 * 4 * 5
    assert found.saved_bytes == 4 * (x.numel() + 15)
    assert found.cpu_seconds > 0
    matrix = csr(torch.eye(6))
    with torch.no_grad(), cost.counted(layer) as found:
        torch.sparse.mm(matrix, torch.ones(6, 2), "sum")
    assert found.sparse_bytes == 4 * 2 * (6 + 6)
    assert found.saved_bytes == 0


def test_hours_follow_from_operations_and_peaks(cost):
    gpu = cost.GPUS[0]
    assert (gpu.name, gpu.operations) == ("A100 80 GB", 312e12)
    text = cost.plan_of("text", 3600, cost.Cost(operations=gpu.operations))
    assert text["A100 80 GB seconds"] == pytest.approx(1 / cost.UTILISATION["text"])
    assert text["A100 80 GB hours"] == pytest.approx(1 / cost.UTILISATION["text"])
    assert text["operations"] == 3600 * gpu.operations
    graph = cost.plan_of("graph", 1, cost.Cost(sparse_bytes=gpu.bandwidth))
    assert graph["A100 80 GB seconds"] == pytest.approx(1 / cost.UTILISATION["graph"])


def test_every_plan_of_the_paper_has_its_sizes(cost):
    assert all(config.teacher.teaching.penalty == 0.0 for config in cost.plans())
    assert {config.name for config in cost.plans()} == set(cost.SIZES)
    assert set(cost.GRAPHS) == {c.name for c in cost.plans() if c.kind == "graph"}


@pytest.mark.slow
def test_a_plan_of_each_kind(cost, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cost, "plans", lambda: [without_penalty(c) for c in BY_KIND.values()])
    monkeypatch.setattr(cost, "SIZES", SIZES)
    monkeypatch.setattr(cost, "GRAPHS", {"few-nodes": (80, 240)})
    monkeypatch.setattr(cost, "NODES", 40)
    monkeypatch.setattr(sparse, "NARROW", 0)  # the kernel that is counted, as for wider states
    path = tmp_path / "cost.json"
    monkeypatch.setattr(sys, "argv", ["cost.py", "--json", str(path)])
    cost.main()
    found = json.loads(path.read_text())
    rows = {(row["kind"], row["stage"]): row for row in found["rows"]}
    stages = ["teacher, shallow", "teacher", "recording", "student"]
    kinds = ("text", "images", "graph")
    assert set(rows) == {(k, s) for k in kinds for s in stages} - {("graph", stages[0])}
    for row in rows.values():
        assert min(row["sample_operations"], row["sample_cpu_seconds"], row["disk_bytes"]) > 0
        assert (row["sample_sparse_bytes"] > 0) == (row["kind"] == "graph")
        assert (row["sample_saved_bytes"] > 0) == (row["stage"] != "recording")
    # Twice the nodes, as the plan has, are twice the work.
    assert rows["graph", "teacher"]["samples"] == 2
    table = path.with_suffix(".md").read_text()
    assert "Computed, not measured" in table
    assert "A100 80 GB 312 * 10^12 operations" in table
    assert table in capsys.readouterr().out


def test_twice_the_depth_is_twice_the_evaluations(cost, monkeypatch):
    monkeypatch.setattr(cost, "SIZES", SIZES)
    config = without_penalty(BY_KIND["images"])
    teacher = config.teacher.build(classes=8).eval()
    sample = cost.image_sample(config, teacher)
    once, twice, thrice = (cost.one_solve(teacher, steps, sample).operations for steps in (1, 2, 3))
    evaluation = twice - once  # and what Anderson adds to it, which grows with its window
    assert thrice - twice == pytest.approx(evaluation, rel=0.05)
    teaching = replace(config.teacher.teaching, depths=(3, 3))
    deeper = replace(teaching, depths=(4, 4))
    loss = cost.cross_entropy
    more = cost.teacher_update(teacher, deeper, sample, loss).operations
    fewer = cost.teacher_update(teacher, teaching, sample, loss).operations
    assert more - fewer == pytest.approx(evaluation, rel=0.1)

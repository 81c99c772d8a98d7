"""What the README says is so: its commands exist, its code runs, its numbers are those of results/."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import cdeq
from cdeq import cli
from cdeq.evaluation import Results
from cdeq.training.loop import FitConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


class TanhDEQ(nn.Module):
    """z = tanh(W z + x), read out linearly."""

    def __init__(self, width: int = 6, classes: int = 3):
        super().__init__()
        self.config = {"width": width, "classes": classes}
        self.weight = nn.Parameter(0.5 * torch.eye(width))
        self.head = nn.Linear(width, classes)

    def inject(self, x):
        return x

    def start(self, context):
        return torch.zeros_like(context)

    def step(self, z, context):
        return torch.tanh(z @ self.weight + context)

    def readout(self, z, context):
        return self.head(z)


def blocks_with(words: str) -> list[str]:
    return [block for block in BLOCKS if words in block]


@pytest.fixture
def names(tmp_path, monkeypatch, brief_stages):
    """What the README takes for granted; a few updates in place of hundreds."""
    monkeypatch.chdir(tmp_path)
    usual = cdeq.distill
    monkeypatch.setattr(
        cdeq, "distill", lambda *a, **k: usual(*a, **({"fit": FitConfig(updates=20)} | k))
    )
    x = torch.randn(8, 6)
    pairs = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(2)]
    return {
        "cdeq": cdeq,
        "nn": nn,
        "torch": torch,
        "teacher": TanhDEQ(),
        "loader": pairs,
        "test_loader": pairs,
        "held_out": [torch.randn(100, 6)],
        "x": x,
    }


def test_it_is_short_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 130
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link.partition("#")[0]).exists(), link


def test_the_make_commands_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([\w-]+)", README))
    assert {"demo", "test"} <= named <= targets


def test_the_commands_exist():
    known, _ = cli.commands()
    assert set(re.findall(r"^    cdeq (\w+)", README, re.MULTILINE)) == set(known) - {"demo"}


@pytest.mark.slow
def test_the_five_lines_run_as_written(names, tmp_path):
    (block,) = blocks_with("cdeq.distill(teacher")[:1]
    exec(block, names)
    assert names["logits"].shape == (8, 3)
    assert bool(names["result"].converged.all())
    assert (tmp_path / "student" / "config.json").exists()


@pytest.mark.slow
def test_all_other_code_runs_after_them(names):
    """Fields of a result, loading, evaluating: each block after the five lines, with what they made."""
    first = blocks_with("cdeq.distill(teacher")[0]
    exec(first, names)
    for block in BLOCKS[BLOCKS.index(first) + 1 :]:
        exec(block, names)
    assert cdeq.Student.load("student/").calibrated == names["student"].calibrated


def test_the_four_methods_are_the_contract():
    for block in blocks_with("class Teacher"):
        exec(block, names := {"nn": nn})
        assert isinstance(names["Teacher"](), cdeq.EquilibriumModel)


@pytest.mark.parametrize("task", ["images", "text", "graph"])
def test_the_demos_are_those_of_a_commit(task):
    results = Results.from_json(ROOT / "results" / "tiny" / f"demo-{task}.json")
    assert results.command == f"cdeq demo --task {task}"
    assert not results.commit.endswith("-dirty")


@pytest.mark.slow
def test_the_numbers_are_those_of_the_results():
    fill = pytest.importorskip("cdeq_experiments.pages.fill")
    assert fill.filled(README, ROOT / "results") == README

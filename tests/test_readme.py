"""What the README says is so: its commands exist, its code runs, its figures are those of results/."""

import re
from pathlib import Path

import torch
from torch import nn

import cdeq
from cdeq.evaluation import Results
from cdeq_experiments.fill import filled
from cdeq_experiments.page_figures import TASKS

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


def test_the_make_commands_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make (\w+)", README))
    assert {"demo", "test"} <= named <= targets


def test_the_five_lines_run_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    names = {"teacher": TanhDEQ(), "loader": [x, torch.randn(8, 6)], "x": x}
    usual = cdeq.distill
    monkeypatch.setattr(cdeq, "distill", lambda *a, **k: usual(*a, fit=cdeq.FitConfig(updates=20), **k))
    exec(BLOCKS[0], names)
    assert names["logits"].shape == (8, 3)
    assert bool(names["result"].converged.all())
    assert (tmp_path / "student" / "config.json").exists()
    exec(BLOCKS[2], names)  # the fields of a result


def test_saving_and_loading_run_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x, teacher = torch.randn(8, 6), TanhDEQ()
    cdeq.distill(teacher, [x], fit=cdeq.FitConfig(updates=5)).save("student/")
    names = {"cdeq": cdeq, "teacher": TanhDEQ(), "held_out": [torch.randn(8, 6)]}
    exec(BLOCKS[3], names)
    assert len(names["student"].calibrated) > 0
    assert cdeq.Student.load("student/").calibrated == names["student"].calibrated


def test_the_caption_explains_what_is_shown_and_nothing_else():
    caption = README.split("<!-- end of figures -->")[1].split("##")[0]
    caption = re.sub(r"`[^`]*`", "", caption)
    explained = {word.lower() for word in re.findall(r"\*([^*]+)\*", caption.replace("\n", " "))}
    shown = README.split("<!-- figures -->")[1].split("<!-- end of figures -->")[0].splitlines()
    rows = [line.split("|")[2].strip() for line in shown if line.startswith(("|  |", "| Picard |"))]
    assert explained == set(rows)


def test_the_four_methods_are_the_contract():
    exec(BLOCKS[1], names := {"nn": nn})
    assert isinstance(names["Teacher"](), cdeq.EquilibriumModel)


def test_the_figures_are_those_of_the_results():
    assert filled(README, ROOT / "results") == README
    for name in ("figures", "words", "pictures", "graphs"):
        assert f"<!-- end of {name} -->" in README
    for table in ("table1", "table3"):
        assert "-dirty" not in Results.from_json(ROOT / "results/small" / f"{table}.json").commit
    for task in TASKS:
        results = Results.from_json(ROOT / "results" / "tiny" / f"demo-{task}.json")
        assert results.command == f"cdeq demo --task {task}"
        assert not results.commit.endswith("-dirty")

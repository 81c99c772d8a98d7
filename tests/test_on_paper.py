"""A GPU on paper: bytes are added up, a tensor left on the CPU is an error, and the paper's plans fit."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from cdeq import FitConfig, TeachConfig, teach
from cdeq.training.segments import CarriedMemory
from recorded import Affine, D

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "results" / "bench" / "paper_plans.json"
PLANS = ("wikitext-103", "imagenet", "ogbn-arxiv", "ogbn-products")
LONG = ("imagenet", "ogbn-products")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module


class LeftBehind(Affine):
    """A map that adds a tensor of its own, made on the CPU at every step, or where the state is."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def step(self, z, context):
        device = z.device if self.where == "beside" else "cpu"
        return super().step(z, context) + 0.1 * torch.ones(D, device=device)


class PlainAttribute(Affine):
    """A map with a tensor that no `.to` moves, since it is neither parameter nor buffer."""

    def __init__(self, kind):
        super().__init__()
        if kind == "buffer":
            self.register_buffer("shift", torch.ones(D))
        else:
            self.shift = torch.ones(D)

    def step(self, z, context):
        return super().step(z, context) + 0.1 * self.shift


@pytest.mark.parametrize(
    ("fine", "wrong"),
    [
        (LeftBehind("beside"), LeftBehind("on the cpu")),
        (PlainAttribute("buffer"), PlainAttribute("attribute")),
    ],
    ids=["made in a step", "not registered"],
)
def test_a_tensor_left_on_the_cpu_is_an_error(bench, fine, wrong):
    paper = bench("on_paper")
    batch = (torch.empty(4, D, device="meta"), torch.empty(4, dtype=torch.int64, device="meta"))
    config = TeachConfig(fit=FitConfig(updates=1), depths=(3, 3))
    with paper.OnPaper():
        teach(fine.to("meta"), [batch], config)
        with pytest.raises(
            paper.WrongDevice, match=r"on the device and on the CPU, of shape \(5,\)"
        ):
            teach(wrong.to("meta"), [batch], config)


def test_a_product_that_torch_would_let_pass_is_an_error_too(bench):
    paper = bench("on_paper")
    here, there = torch.ones(3, 3, device="meta"), torch.ones(3, 3)
    assert (here @ there).device.type == "meta"
    with paper.OnPaper(), pytest.raises(paper.WrongDevice, match=r"aten\.mm"):
        here @ there
    with paper.OnPaper():
        assert (here * torch.tensor(2.0)).device.type == "meta"  # as on a GPU: a single number


def test_bytes_are_counted_while_something_refers_to_them(bench):
    with bench("on_paper").OnPaper() as paper:
        x = torch.ones(100, 50, device="meta")
        assert (paper.live, paper.peak) == (20_000, 20_000)
        y = x.double()
        view = y[:10]
        assert paper.live == 60_000
        del y
        assert paper.live == 60_000  # the view holds it
        del view
        assert (paper.live, paper.peak) == (20_000, 60_000)
        paper.begin()
        assert paper.peak == 20_000
        kept = x.cpu()  # on the CPU, of which only the shape is known
        assert (paper.live, kept.shape) == (20_000, x.shape)
        with pytest.raises(bench("on_paper").WrongDevice):
            x + kept


def test_weights_gradients_moments_and_what_a_gradient_needs_are_counted(bench):
    layer = nn.Linear(100, 100, bias=False)
    with bench("on_paper").OnPaper() as paper:
        layer.to("meta")
        assert paper.live == 40_000
        x = torch.ones(10, 100, device="meta")
        optimizer = torch.optim.AdamW(layer.parameters())
        out = layer(x).relu().sum()
        assert paper.live == 40_000 + 4_000 + 4_000 + 4  # x, the relu's result, the sum
        out.backward()
        optimizer.step()
        del out
        assert paper.live == 40_000 + 4_000 + 40_000 + 80_000
        assert paper.peak >= paper.live


def test_numbers_that_are_asked_for_are_one_and_choices_are_all(bench):
    with bench("on_paper").OnPaper():
        x = torch.zeros(3, 2, device="meta")
        assert bool((x > 0).any())
        assert x.sum().item() == 1
        assert x.tolist() == [[1, 1]] * 3
        assert x.nonzero().shape == (6, 2)
    assert torch.zeros(3).sum().item() == 0


def test_a_carried_memory_is_where_the_training_is(bench):
    like = (torch.zeros(2, 3, 4), torch.zeros(2, 5))
    carried = CarriedMemory(like, period=4).to("meta")
    with bench("on_paper").OnPaper():
        carried.keep(tuple(torch.empty_like(part, device="meta") for part in like))
        assert {part.device.type for part in carried.at(1)} == {"meta"}


def test_the_plans_are_all_of_the_scale_paper():
    configs = pytest.importorskip("cdeq_experiments.configs")
    found = [c.name for kind in configs.SUITES["paper"].values() for c in kind]
    assert found == list(PLANS)
    rows = json.loads(MEASURED.read_text())["rows"]
    assert [row["plan"] for row in rows] == list(PLANS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    # Those of images and of the larger graph take longest.
    [pytest.param(p, marks=[pytest.mark.release] * (p in LONG)) for p in PLANS],
)
def test_a_plan_of_the_paper_runs_on_another_device_within_its_memory(bench, plan):
    configs = pytest.importorskip("cdeq_experiments.configs")
    plans = bench("paper_plans")
    known = {c.name: c for kind in configs.SUITES["paper"].values() for c in kind}
    said = []
    found = plans.run_plan(known[plan], said.append)
    stages = [s for s in plans.STAGES if s != "pretraining" or known[plan].teacher.pretraining]
    assert [s for s in plans.STAGES if s in found] == stages
    assert len(said) == len(stages)
    assert all(0 < found[stage] <= plans.LIMIT for stage in stages)
    listed = {row["plan"]: row for row in json.loads(MEASURED.read_text())["rows"]}[plan]
    assert found["weights"] == listed["weights"]
    for stage in stages:
        assert found[stage] == pytest.approx(listed[stage], rel=0.05)

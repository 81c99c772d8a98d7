"""For all tests: long ones first, one thread, the same random numbers whatever ran before, no deadlines."""

import importlib
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for processes of ours

import pytest
import torch
from hypothesis import settings

from brief import leave_out_plans, shorten_stages

torch.set_num_threads(1)
settings.register_profile("cdeq", deadline=None)
settings.load_profile("cdeq")


LONG = (
    *("docs", "tables", "cli", "jobs", "distill", "many_processes", "unrolled", "kill_distilling"),
    *("bench", "together", "ablations", "distill_resume", "placement", "on_paper", "suites"),
    *("two_processes", "fill", "export", "mdeq_student", "kill_recording", "bench_certificate"),
)
"""Files that take longest, without `test_`: they come first, so that all workers end at the same time."""


def pytest_collection_modifyitems(items):
    places = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before fixtures of any scope, which may build models."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Again: some fixtures were made for an earlier test, and others now."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def bench(monkeypatch):
    """bench(name): the module of a benchmark, which leaves the number of threads as it is."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return importlib.import_module


@pytest.fixture
def no_plan(monkeypatch):
    """Leave out the plan for certified solving, which takes longer than the trainings of most tests."""
    leave_out_plans(monkeypatch)


@pytest.fixture
def brief_stages(monkeypatch):
    """A few updates in the first stages of recipes, whose hundreds take longer than the rest of most tests."""
    shorten_stages(monkeypatch)

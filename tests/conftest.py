"""For all tests: one thread, the same random numbers whatever ran before, no deadlines."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for processes of ours

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("cdeq", deadline=None)
settings.load_profile("cdeq")


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
def no_plan(monkeypatch):
    """Leave out the plan for certified solving, which takes longer than the trainings of most tests."""
    for module in ("calibration", "distillation"):
        monkeypatch.setattr(f"cdeq.consistency.{module}.plan_handover", lambda student, inputs: {})

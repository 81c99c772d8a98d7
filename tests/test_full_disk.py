"""A disk that is full: one clear line, what was there before stays, and nothing is left half-written.

A limit on the size of files stands for the disk: a write goes through in part and then fails, as on a full one.
"""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cdeq import FitConfig, Student, cli, export, record
from cdeq.demo import tasks
from cdeq.demo.task import StudentConfig
from cdeq.training import sharding
from recorded import Affine, batches
from saved import make, require_same
from teachers import Tanh, inputs
from test_demo import toy_task

resource = pytest.importorskip("resource")


@contextmanager
def room_for(size):
    """Inside, no file grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused_in_one_line(capsys, words, size):
    capsys.readouterr()
    with room_for(size):
        assert cli.main([str(word) for word in words]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("cdeq: [Errno 27] File too large: ")
    assert shown.count("\n") == 1
    return Path(shown.split("'")[1])


def test_an_export(tmp_path, monkeypatch, capsys):
    student = make(Tanh(), inputs())
    student.save(tmp_path / "student")
    monkeypatch.setattr(export, "WRITERS", {".pt2": lambda program: b"new" * 10_000})
    out = tmp_path / "made" / "s.pt2"
    out.parent.mkdir()
    words = ["export", tmp_path / "student", "--out", out, "--certified"]
    assert refused_in_one_line(capsys, words, 1000) == out
    assert contents(out.parent) == {}
    out.write_bytes(b"old")
    refused_in_one_line(capsys, words, 1000)
    assert contents(out.parent) == {Path("s.pt2"): b"old"}


def test_saving_over_an_older_student(tmp_path):
    x, old = inputs(), make(Tanh(), inputs())
    old.save(tmp_path)
    before = contents(tmp_path)
    with room_for(300), pytest.raises(OSError, match=r"File too large: '.*teacher.*'"):
        make(Tanh(seed=1), x).save(tmp_path)
    assert contents(tmp_path) == before
    require_same(old, Student.load(tmp_path), x)


def test_a_recording_goes_on_when_there_is_room_again(tmp_path):
    arguments = {"tol": 1e-3, "max_steps": 20}
    record(Affine(), batches(), tmp_path / "straight", **arguments)
    with room_for(400), pytest.raises(OSError, match="File too large: "):
        record(Affine(), batches(), tmp_path / "cut", **arguments)
    assert not list((tmp_path / "cut").glob("*.tmp"))
    record(Affine(), batches(), tmp_path / "cut", **arguments)
    assert contents(tmp_path / "cut") == contents(tmp_path / "straight")


@pytest.mark.slow
def test_a_demo_goes_on_when_there_is_room_again(tmp_path, monkeypatch, capsys):
    few = {"start_updates": 3, "correction_updates": 3}
    student = StudentConfig(fit=FitConfig(updates=5), changes=few)
    task = replace(toy_task(), students={"corrected": student})
    monkeypatch.setitem(tasks.DEMO_TASKS, "text", lambda seed: task)
    words = ["demo", "--task", "text", "--out", tmp_path]
    failed = [refused_in_one_line(capsys, words, size).name for size in (50, 5000, 30_000)]
    assert failed == ["log.jsonl", "checkpoint.safetensors", "certificate.png"]
    for path in contents(tmp_path):
        assert path.suffix != ".tmp"
        if path.suffix == ".json":
            json.loads((tmp_path / path).read_text())
        if path.suffix == ".safetensors":
            load_file(tmp_path / path)
    assert cli.main([str(word) for word in words]) == 0
    assert (tmp_path / "report.html").stat().st_size > 30_000


def test_a_checkpoint_of_many_processes(tmp_path, monkeypatch):
    from torch.distributed import checkpoint

    def full(tensors, storage_writer):
        (tmp_path / "part.safetensors").write_bytes(b"half")
        reason = OSError(28, "No space left on device")
        raise checkpoint.CheckpointException("save", {1: (reason, None)})

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(OSError, match=r"cannot be written: \[Errno 28\] No space left") as caught:
        sharding.write_divided(tmp_path, {"a": torch.zeros(3)})
    assert "\n" not in str(caught.value)
    assert not tmp_path.exists()

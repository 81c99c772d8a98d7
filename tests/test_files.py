"""Atomic writes and checksums."""

import hashlib
import os
import stat

import pytest

from cdeq import files


def test_written_content_replaces_the_old(tmp_path):
    path = tmp_path / "a.bin"
    files.atomic_write_bytes(path, b"old")
    files.atomic_write_bytes(str(path), b"new\r\n")
    assert path.read_bytes() == b"new\r\n"
    files.atomic_write_text(path, "zähl\n")
    assert path.read_bytes() == "zähl\n".encode()
    assert os.listdir(tmp_path) == ["a.bin"]


def test_file_has_the_usual_permissions(tmp_path):
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    files.atomic_write_bytes(tmp_path / "ours", b"")
    modes = {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failure_keeps_the_old_content_and_leaves_nothing(tmp_path, monkeypatch, call):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="disk full"):
        files.atomic_write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_content_is_flushed_before_the_name_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(_kind(fd)), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    files.atomic_write_bytes(tmp_path / "a.bin", b"content")
    assert calls == ["file", "replace", "folder"]


def _kind(descriptor):
    return "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"


def test_leftovers_are_removed_by_pattern(tmp_path):
    names = ["a.bin", "a.bin.0123abcd.tmp", "a.bin.mine.tmp", "b.bin.0123abcd.tmp", "mine.tmp"]
    for name in names:
        (tmp_path / name).touch()
    files.remove_leftovers(tmp_path, "a.*")
    left = ["a.bin", "a.bin.mine.tmp", "b.bin.0123abcd.tmp", "mine.tmp"]
    assert sorted(os.listdir(tmp_path)) == left


def test_what_an_interrupted_write_leaves_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda a, b: None)
    files.atomic_write_bytes(tmp_path / "a.bin", b"content")
    assert len(os.listdir(tmp_path)) == 1
    files.remove_leftovers(tmp_path, "a.bin")
    assert os.listdir(tmp_path) == []


def test_differences_have_dotted_names():
    recorded = {"same": 1, "a": {"b": 1, "c": {"d": 2}}, "gone": 3, "kind": {"x": 1}}
    given = {"same": 1, "a": {"b": 1, "c": {"d": 4}}, "new": 5, "kind": 2}
    assert files.differences(recorded, given) == {
        "a.c.d": (2, 4),
        "gone": (3, None),
        "kind": ({"x": 1}, 2),
        "new": (None, 5),
    }
    assert files.differences(given, given) == {}


def test_checksum_of_a_file(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"x" * 300_000)
    assert files.sha256_of_file(path) == hashlib.sha256(b"x" * 300_000).hexdigest()

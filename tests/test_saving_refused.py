"""Folders of students that are damaged, altered or of another kind, and saves that were cut short."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cdeq import Student
from cdeq.consistency import saving
from cdeq.consistency.saving import StudentFolderError
from saved import FILES, make, require_same
from teachers import Normed, Tanh, inputs, randomized


class Silent(Tanh):
    """Keeps no record of its arguments."""

    def __init__(self):
        super().__init__()
        del self.config


@pytest.fixture
def saved(tmp_path):
    make(Tanh(), inputs()).save(tmp_path / "student")
    return tmp_path / "student"


@pytest.mark.parametrize("name", FILES)
def test_missing_files(saved, name):
    (saved / name).unlink()
    with pytest.raises(StudentFolderError, match=rf"{name} is missing"):
        Student.load(saved)
    with pytest.raises(StudentFolderError, match="is missing"):
        Student.load(saved / "nowhere")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_files(saved, name, share):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(StudentFolderError, match=name):
        Student.load(saved)


@pytest.mark.parametrize("name", FILES[1:])
def test_altered_weights(saved, name):
    content = bytearray((saved / name).read_bytes())
    content[-3] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(StudentFolderError, match=rf"{name} is damaged"):
        Student.load(saved)


def test_files_of_another_student(saved, tmp_path):
    make(Tanh(seed=9), inputs(), "paper").save(tmp_path / "other")
    for name in FILES[1:]:
        shutil.copy(saved / name, saved / "kept")
        shutil.copy(tmp_path / "other" / name, saved / name)
        with pytest.raises(StudentFolderError, match=name):
            Student.load(saved)
        shutil.copy(saved / "kept", saved / name)


ALTERED = [
    ({"format": 99}, "format 99"),
    ({"recipe": {"name": "x", "boundary": "sideways"}}, "boundary"),
    ({"recipe": {"name": "x", "colour": "red"}}, "colour"),
    ({"recipe": None}, r"config\.json"),
    ({"shapes": {"features": [8], "axes": [1], "weights": ["nothing"]}}, "nothing"),
    ({"shapes": {}}, "features"),
    ({"plan": [1, 2]}, r"config\.json"),
    ({"sha256": {}}, r"teacher\.safetensors"),
    ({"teacher": {"class": "teachers:Tanh", "config": {"breadth": 3}}}, "breadth"),
    ({"teacher": {"class": "teachers:Tanh", "config": {"width": 9}}}, "shape"),
    ({"teacher": {"class": "teachers:Nobody", "config": {}}}, "teachers:Nobody is not there"),
    ({"teacher": {"class": "teachers:inputs", "config": {}}}, "is not there"),
    ({"teacher": {"class": "cdeq.nowhere:Model", "config": {}}}, "nowhere"),
    ({"teacher": {"class": "antigravity:geohash", "config": {}}}, "import it first"),
]


def alter(folder, change):
    """Change the description of a student."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | change(config)))


@pytest.mark.parametrize(("change", "named"), ALTERED)
def test_altered_descriptions(saved, change, named):
    alter(saved, lambda config: change)
    with pytest.raises(StudentFolderError, match=named):
        Student.load(saved)


@pytest.mark.parametrize("content", [b"[]", b"3", b"{", b"\xff\xfe", b"null"])
def test_descriptions_that_are_none(saved, content):
    (saved / "config.json").write_bytes(content)
    with pytest.raises(StudentFolderError, match=r"config\.json"):
        Student.load(saved)


def test_foreign_classes_are_not_imported(saved):
    alter(saved, lambda c: {"teacher": c["teacher"] | {"class": "turtledemo.chaos:main"}})
    with pytest.raises(
        StudentFolderError, match="import it first; or pass its class or an instance as `teacher=`"
    ):
        Student.load(saved)
    assert "turtledemo.chaos" not in sys.modules
    Student.load(saved, teacher=Tanh)


@pytest.mark.slow
def test_a_class_of_a_script_is_passed_in(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import cdeq, teachers\n"
        "class Teacher(teachers.Tanh):\n    pass\n"
        "recipe = cdeq.Recipe.from_name('anchored')\n"
        "student = cdeq.Student.for_example(Teacher(), recipe, teachers.inputs())\n"
        f"student.save({str(tmp_path / 'student')!r})\n"
    )
    tests = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": tests, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script], check=True, env=environment)
    with pytest.raises(
        StudentFolderError,
        match="__main__:Teacher is not there: pass its class or an instance as `teacher=`",
    ):
        Student.load(tmp_path / "student")
    assert isinstance(Student.load(tmp_path / "student", teacher=Tanh), Student)


def test_a_start_network_that_is_not_there(saved):
    alter(saved, lambda c: {"start_network": c["start_network"] | {"class": "teachers:Nobody"}})
    with pytest.raises(
        StudentFolderError, match=r"start_network's class .* is not there: define it"
    ):
        Student.load(saved)


def test_a_teacher_without_a_config_is_passed_as_an_instance(tmp_path):
    x, student = inputs(), make(Silent(), inputs())
    student.save(tmp_path)
    for given in (None, Silent):
        with pytest.raises(StudentFolderError, match="pass an instance"):
            Student.load(tmp_path, teacher=given)
    require_same(student, Student.load(tmp_path, teacher=Silent()), x)


def test_an_instance_that_does_not_fit_is_refused(saved):
    with pytest.raises(StudentFolderError, match="shape"):
        Student.load(saved, teacher=Tanh(width=9))
    with pytest.raises(StudentFolderError, match="unmatched names"):
        Student.load(saved, teacher=Normed())


# Saving over an older student


def names(folder):
    return {p.name for p in folder.iterdir()}


class Killed(BaseException):
    pass


def killed_before(monkeypatch, number):
    """From here on the process ends at the `number`-th change to the disk; False if it never came to that."""
    changes = []

    def before(function):
        def wrapped(*arguments, **options):
            if len(changes) == number:
                raise Killed
            changes.append(function)
            return function(*arguments, **options)

        return wrapped

    # A killed process does not tidy up after itself either, so the last `unlink` of a write is one more change.
    monkeypatch.setattr(os, "replace", before(os.replace))
    monkeypatch.setattr(os, "fsync", before(os.fsync))
    monkeypatch.setattr(Path, "unlink", before(Path.unlink))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["both", "student", "nothing"])
def test_a_folder_holds_the_old_student_or_the_new_one_at_every_instant(
    tmp_path, monkeypatch, change
):
    x = inputs()
    old = make(Tanh(), x)
    new = make(Tanh(seed=1 if change == "both" else 0), x)
    if change == "nothing":
        new.plan = {1e-2: 3}
    else:
        randomized(new.requires_grad_(True), seed=8)
        new.requires_grad_(False)
        if change == "student":
            new.methods.load_state_dict(old.methods.state_dict())
    found, number, ended = [], 0, False
    while not ended:
        folder = tmp_path / str(number)
        old.save(folder)
        with monkeypatch.context() as patch:
            killed_before(patch, number)
            try:
                new.save(folder)
                ended = True
            except Killed:
                pass
        again = Student.load(folder)
        is_new = again.plan == new.plan and torch.equal(again(x), new(x))
        require_same(new if is_new else old, again, x)
        found.append(is_new)
        # Whatever was left there, the next save is whole and leaves nothing else.
        third = make(Tanh(seed=2), x, "paper")
        third.save(folder)
        require_same(third, Student.load(folder), x)
        assert len(names(folder)) == 3
        number += 1
    assert number > 6
    assert found == sorted(found)
    assert not found[0]
    assert found[-1]


def test_a_first_save_cut_short_is_no_student(tmp_path, monkeypatch):
    for number in range(6):
        with monkeypatch.context() as patch:
            killed_before(patch, number)
            with pytest.raises(Killed):
                make(Tanh(), inputs()).save(tmp_path)
        with pytest.raises(StudentFolderError, match=r"config\.json is missing"):
            Student.load(tmp_path)
    make(Tanh(), inputs()).save(tmp_path)
    assert names(tmp_path) == set(FILES)


def test_a_failed_save_leaves_the_older_student(saved, monkeypatch):
    x, before = inputs(), Student.load(saved)

    def fatal(path, content):
        raise OSError("disk full")

    for name in ("atomic_write_bytes", "atomic_write_text"):
        with monkeypatch.context() as patch:
            patch.setattr(saving, name, fatal)
            with pytest.raises(OSError, match="disk full"):
                make(Tanh(seed=1), x).save(saved)
        require_same(before, Student.load(saved), x)


def test_saving_again_and_again_keeps_one_student(tmp_path):
    x = inputs()
    for seed in (0, 1, 1, 2, 0):
        student = make(Tanh(seed=seed), x)
        student.save(tmp_path)
        require_same(student, Student.load(tmp_path), x)
        assert len(names(tmp_path)) == 3


def test_files_of_others_are_left_alone(saved):
    others = {
        "mine.tmp",
        "report.json.0123abcd.tmp",
        "config.json.tmp",
        "config.json.mine.tmp",
        "student-best.safetensors",
        "optimizer.safetensors",
    }
    leftovers = {
        "config.json.0123abcd.tmp",
        "teacher.safetensors.0123abcd.tmp",
        "student-0123456789ab.safetensors.0123abcd.tmp",
        "student-0123456789ab.safetensors",
    }
    for name in others | leftovers:
        (saved / name).touch()
    make(Tanh(), inputs()).save(saved)
    assert names(saved) == others | set(FILES)

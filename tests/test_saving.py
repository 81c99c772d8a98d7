"""A student on disk, and what is refused there."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from cdeq import Recipe, Student
from cdeq.consistency.copying import frozen_copy
from cdeq.consistency.parts import TeacherShapes
from cdeq.consistency.saving import StudentFolderError
from cdeq.consistency.start import PointwiseStart
from cdeq.data.graphs import Graph
from cdeq.models import IGNN, ConvDEQ, TransformerDEQ
from teachers import Normed, OfferedStart, Offering, Pair, Ring, Tanh, Tied, inputs, randomized


class Silent(Tanh):
    """Keeps no record of its arguments."""

    def __init__(self):
        super().__init__()
        del self.config


class Described(OfferedStart):
    def __init__(self, width):
        super().__init__(width)
        self.config = {"width": width}


def make(teacher, x, name="anchored", start_network=None, **changes):
    torch.manual_seed(0)
    student = Student.for_example(teacher, Recipe.from_name(name, **changes), x, start_network)
    randomized(student)
    student.calibrated = (0.0, 0.25, 0.5)
    student.plan = {1e-1: 1, 1e-3: 4}
    return student.eval().requires_grad_(False)


def same(student, again, x):
    for steps in range(6):
        assert torch.equal(student(x, steps=steps), again(x, steps=steps))
    assert again.recipe == student.recipe
    assert again.shapes == student.shapes
    assert again.calibrated == student.calibrated
    assert again.plan == student.plan
    ours, theirs = student.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(t, theirs[name]) and t.dtype == theirs[name].dtype for name, t in ours.items()
    )


RECIPES = [
    ("paper", {}),
    ("anchored", {}),
    ("anchored", {"start": "zero", "delta": "low_rank", "rank": 2}),
    ("anchored", {"schedule": "learned", "gamma": 2.0}),
    ("paper", {"history": "mlp"}),
    ("anchored", {"history": "gru"}),
]


@pytest.mark.parametrize(("name", "changes"), RECIPES)
def test_round_trip_to_the_bit(tmp_path, name, changes):
    x = inputs()
    student = make(Tanh(), x, name, **changes)
    for calibrated in ((), (0.0, 0.25)):
        student.calibrated = calibrated
        student.save(tmp_path)
        again = Student.load(tmp_path)
        same(student, again, x)
        assert not again.training
        assert not any(p.requires_grad for p in again.parameters())
    result, other = student.solve(x, tol=1e-4), again.solve(x, tol=1e-4)
    assert torch.equal(result.output, other.output)
    assert torch.equal(result.steps, other.steps)


@pytest.mark.parametrize("kind", [Tanh, Pair, Ring, Tied, Normed, Offering])
@pytest.mark.parametrize("name", ["paper", "anchored"])
def test_round_trip_of_teachers(tmp_path, kind, name):
    options = {} if kind is Tied else {"seed": 3}
    x, teacher = inputs(), kind(**options)
    student = make(teacher, x, name)
    student.save(tmp_path)
    same(student, Student.load(tmp_path), x)
    same(student, Student.load(tmp_path, teacher=kind), x)
    instance = kind(seed=4)
    again = Student.load(tmp_path, teacher=instance)
    same(student, again, x)
    assert again.teacher is instance


def ring_graph():
    ring = ((torch.eye(6).roll(1, 0) + torch.eye(6).roll(-1, 0)) / 2).to_sparse_csr()
    return Graph(ring, torch.randn(6, 5, generator=torch.Generator().manual_seed(0)))


OURS = {
    "conv": lambda: (ConvDEQ(channels=8, groups=2), torch.randn(2, 1, 8, 8)),
    "text": lambda: (
        TransformerDEQ(vocabulary=11, width=16, heads=2, inner=16, length=8),
        torch.randint(11, (2, 8)),
    ),
    "tied text": lambda: (
        TransformerDEQ(vocabulary=11, width=16, heads=2, inner=16, length=8, tied=True),
        torch.randint(11, (2, 8)),
    ),
    "graph": lambda: (IGNN(features=5, width=8, classes=3), ring_graph()),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("which", OURS)
@pytest.mark.parametrize("name", ["paper", "anchored"])
def test_round_trip_of_cdeqs_own_models(tmp_path, which, name):
    teacher, x = OURS[which]()
    student = make(teacher, x, name)
    student.save(tmp_path)
    same(student, Student.load(tmp_path), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["paper", "anchored"])
def test_dtypes_survive(tmp_path, dtype, name):
    x = inputs(dtype=dtype)
    student = make(Tanh().to(dtype), x, name)
    student.save(tmp_path)
    same(student, Student.load(tmp_path), x)


def test_saving_again_replaces(tmp_path):
    x = inputs()
    make(Tanh(), x).save(tmp_path)
    student = make(Tanh(seed=1), x, "paper")
    student.save(tmp_path)
    same(student, Student.load(tmp_path), x)


def test_the_folder_holds_json_and_safetensors_alone(tmp_path):
    make(Tanh(), inputs()).save(tmp_path / "new" / "folder")
    names = {p.name for p in (tmp_path / "new" / "folder").iterdir()}
    assert names == {"config.json", "teacher.safetensors", "student.safetensors"}


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    import pickle

    make(Tanh(), inputs()).save(tmp_path)

    def never(*arguments, **options):
        raise AssertionError("unpickled")

    for module, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
    ):
        monkeypatch.setattr(module, name, never)
    Student.load(tmp_path)


# Start networks


def test_a_start_network_of_ones_own(tmp_path):
    x = inputs()
    student = make(Tanh(), x, start_network=Described(8))
    student.save(tmp_path)
    again = Student.load(tmp_path)
    assert isinstance(again.start_network, Described)
    same(student, again, x)


def test_a_given_network_is_not_mistaken_for_the_teachers(tmp_path):
    x = inputs()
    student = make(Offering(), x, start_network=Described(8))
    student.save(tmp_path)
    assert isinstance(Student.load(tmp_path).start_network, Described)
    make(Offering(), x, start_network=nn.Linear(8, 8)).save(tmp_path)
    with pytest.raises(StudentFolderError, match=r"start network is a torch.*:Linear"):
        Student.load(tmp_path)
    make(Tanh(), x, start_network=nn.Linear(8, 8)).save(tmp_path)
    with pytest.raises(StudentFolderError, match=r"start network .* keeps no `config`"):
        Student.load(tmp_path)


# Refusals


@pytest.fixture
def saved(tmp_path):
    make(Tanh(), inputs()).save(tmp_path / "student")
    return tmp_path / "student"


FILES = ["config.json", "teacher.safetensors", "student.safetensors"]


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


@pytest.mark.parametrize(("change", "named"), ALTERED)
def test_altered_descriptions(saved, change, named):
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StudentFolderError, match=named):
        Student.load(saved)


@pytest.mark.parametrize("content", [b"[]", b"3", b"{", b"\xff\xfe", b"null"])
def test_descriptions_that_are_none(saved, content):
    (saved / "config.json").write_bytes(content)
    with pytest.raises(StudentFolderError, match=r"config\.json"):
        Student.load(saved)


def test_foreign_classes_are_not_imported(saved):
    path = saved / "config.json"
    config = json.loads(path.read_text())
    config["teacher"]["class"] = "turtledemo.chaos:main"
    path.write_text(json.dumps(config))
    with pytest.raises(
        StudentFolderError, match="import it first; or pass its class or an instance as `teacher=`"
    ):
        Student.load(saved)
    assert "turtledemo.chaos" not in sys.modules
    Student.load(saved, teacher=Tanh)


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
    path = saved / "config.json"
    config = json.loads(path.read_text())
    config["start_network"]["class"] = "teachers:Nobody"
    path.write_text(json.dumps(config))
    with pytest.raises(
        StudentFolderError, match=r"start network's class .* is not there: define it"
    ):
        Student.load(saved)


def test_a_teacher_without_a_config_is_passed_as_an_instance(tmp_path):
    x, student = inputs(), make(Silent(), inputs())
    student.save(tmp_path)
    for given in (None, Silent):
        with pytest.raises(StudentFolderError, match="pass an instance"):
            Student.load(tmp_path, teacher=given)
    same(student, Student.load(tmp_path, teacher=Silent()), x)


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
        same(new if is_new else old, again, x)
        found.append(is_new)
        # Whatever was left there, the next save is whole and leaves nothing else.
        third = make(Tanh(seed=2), x, "paper")
        third.save(folder)
        same(third, Student.load(folder), x)
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
    import cdeq.consistency.saving as saving

    x, before = inputs(), Student.load(saved)

    def fatal(path, content):
        raise OSError("disk full")

    for name in ("atomic_write_bytes", "atomic_write_text"):
        with monkeypatch.context() as patch:
            patch.setattr(saving, name, fatal)
            with pytest.raises(OSError, match="disk full"):
                make(Tanh(seed=1), x).save(saved)
        same(before, Student.load(saved), x)


def test_saving_again_and_again_keeps_one_student(tmp_path):
    x = inputs()
    for seed in (0, 1, 1, 2, 0):
        student = make(Tanh(seed=seed), x)
        student.save(tmp_path)
        same(student, Student.load(tmp_path), x)
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


# Sparse matrices


class Meshed(Ring):
    """Hears its neighbours by a sparse matrix that it keeps as a buffer."""

    def __init__(self, *, layout="csr", size=6, shift=1, **options):
        super().__init__(**options)
        self.config |= {"layout": layout, "size": size}
        matrix = torch.eye(size).roll(shift, 0) * 0.5
        if shift == 2:
            matrix[0, 0] = 0.3  # another number of entries
        self.inner = torch.nn.Module()
        self.inner.register_buffer("mesh", converted(matrix, layout))
        self.mesh = self.inner.mesh  # a second name, not a buffer
        self.register_buffer("mesh_again", self.mesh)

    def step(self, z, context):
        self.calls += 1
        return torch.tanh((self.mesh @ z + self.inner.mesh @ z) @ self.weight.T + context)


def converted(matrix, layout):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta")
        return matrix.to_sparse(layout=getattr(torch, f"sparse_{layout}"))


def meshed(teacher, x, name="anchored"):
    """A student of a teacher that cannot be copied plainly."""
    recipe = Recipe.from_name(name)
    z = teacher.start(teacher.inject(x))
    shapes = TeacherShapes(features=(8,), axes=(1,), weights=("weight", "injection"))
    network = (
        PointwiseStart.matching(teacher.inject(x), z, [1]) if recipe.start == "learned" else None
    )
    student = Student(frozen_copy(teacher), recipe, shapes, network)
    return randomized(student).eval().requires_grad_(False)


@pytest.mark.parametrize("layout", ["csr", "coo"])
@pytest.mark.parametrize("name", ["paper", "anchored"])
def test_sparse_buffers_survive(tmp_path, layout, name):
    x = inputs()
    student = meshed(Meshed(layout=layout, shift=2), x, name)
    student.save(tmp_path)
    for again in (
        Student.load(tmp_path),
        Student.load(tmp_path, teacher=Meshed(layout=layout, shift=3)),
    ):
        teacher = again.teacher
        assert teacher.mesh is teacher.inner.mesh is teacher.mesh_again
        assert teacher.mesh.layout == student.teacher.mesh.layout
        assert torch.equal(teacher.mesh.to_dense(), student.teacher.mesh.to_dense())
        for steps in range(3):
            assert torch.equal(again(x, steps=steps), student(x, steps=steps))


def test_sparse_buffers_that_do_not_fit_are_refused(tmp_path):
    x = inputs()
    meshed(Meshed(), x).save(tmp_path)
    with pytest.raises(
        StudentFolderError, match=r"mesh_again has shape \(6, 6\), the model \(7, 7\)"
    ):
        Student.load(tmp_path, teacher=Meshed(size=7))
    with pytest.raises(StudentFolderError, match=r"unmatched names .*mesh_again\.columns"):
        Student.load(tmp_path, teacher=Meshed(layout="coo"))
    with pytest.raises(
        StudentFolderError, match=r"mesh_again is a torch.sparse_csc tensor.*CSR or COO"
    ):
        meshed(Meshed(layout="csc"), x).save(tmp_path)
    Student.load(tmp_path)


def test_sparse_buffers_that_are_not_persistent_are_not_saved(tmp_path):
    teacher = Tanh()
    teacher.register_buffer("mesh", converted(torch.eye(6), "csc"), persistent=False)
    student = meshed(teacher, inputs())
    student.save(tmp_path)
    same(student, Student.load(tmp_path), inputs())

"""A student on disk comes back to the bit, with any teacher, start network and sparse matrix."""

import pickle
import warnings

import pytest
import torch
from torch import nn

from builders import contents
from cdeq import Recipe, Student
from cdeq.consistency.copying import frozen_copy
from cdeq.consistency.correction import LearnedCorrection
from cdeq.consistency.parts import TeacherShapes
from cdeq.consistency.saving import StudentFolderError
from cdeq.consistency.start import LearnedStart
from cdeq.data.graphs import Graph
from cdeq.equilibrium.states import map_state
from cdeq.models import IGNN, ConvDEQ, TransformerDEQ
from checks import csr, numbers
from saved import FILES, make, require_same
from teachers import Normed, OfferedStart, Offering, Pair, Ring, Tanh, Tied, inputs, randomized


class Described(OfferedStart):
    def __init__(self, width):
        super().__init__(width)
        self.config = {"width": width}


RECIPES = [
    ("paper", {}),
    ("anchored", {}),
    ("anchored", {"start": "teacher", "delta": "low_rank", "rank": 2}),
    ("anchored", {"schedule": "learned", "gamma": 2.0}),
    ("paper", {"history": "mlp"}),
    ("anchored", {"history": "gru"}),
    ("corrected", {}),
    ("corrected", {"leap": 1, "window": 2}),
    ("warm_start", {}),
]


@pytest.mark.parametrize(("name", "changes"), RECIPES)
def test_round_trip_to_the_bit(tmp_path, name, changes):
    x = inputs()
    student = make(Tanh(), x, name, **changes)
    for calibrated in ((), (0.0, 0.25)):
        student.calibrated = calibrated
        student.save(tmp_path)
        again = Student.load(tmp_path)
        require_same(student, again, x)
        assert not again.training
        assert not any(p.requires_grad for p in again.parameters())
    result, other = student.solve(x, tol=1e-4), again.solve(x, tol=1e-4)
    assert torch.equal(result.output, other.output)
    assert torch.equal(result.steps, other.steps)


@pytest.mark.parametrize("kind", [Tanh, Pair, Ring, Tied, Normed, Offering])
@pytest.mark.parametrize("name", ["paper", "anchored", "corrected"])
def test_round_trip_of_teachers(tmp_path, kind, name):
    options = {} if kind is Tied else {"seed": 3}
    x, teacher = inputs(), kind(**options)
    student = make(teacher, x, name)
    student.save(tmp_path)
    require_same(student, Student.load(tmp_path), x)
    require_same(student, Student.load(tmp_path, teacher=kind), x)
    instance = kind(seed=4)
    again = Student.load(tmp_path, teacher=instance)
    require_same(student, again, x)
    assert again.teacher is not instance  # a copy: the caller's own stays as it is


def ring_graph():
    ring = (torch.eye(6).roll(1, 0) + torch.eye(6).roll(-1, 0)) / 2
    return Graph(csr(ring), numbers(6, 5, dtype=torch.float32))


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


@pytest.mark.parametrize("which", OURS)
@pytest.mark.parametrize("name", ["paper", "anchored", "corrected"])
def test_round_trip_of_cdeqs_own_models(tmp_path, which, name):
    teacher, x = OURS[which]()
    student = make(teacher, x, name)
    student.save(tmp_path)
    require_same(student, Student.load(tmp_path), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["paper", "anchored", "corrected"])
def test_dtypes_survive(tmp_path, dtype, name):
    made = torch.promote_types(dtype, torch.float32)
    student = make(Tanh().to(made), inputs(dtype=made), name).to(dtype)
    student.save(tmp_path)
    require_same(student, Student.load(tmp_path), inputs(dtype=dtype))


def test_saving_again_replaces(tmp_path):
    x = inputs()
    make(Tanh(), x).save(tmp_path)
    student = make(Tanh(seed=1), x, "paper")
    student.save(tmp_path)
    require_same(student, Student.load(tmp_path), x)


def test_the_folder_holds_json_and_safetensors_alone(tmp_path):
    make(Tanh(), inputs()).save(tmp_path / "new" / "folder")
    assert set(contents(tmp_path / "new" / "folder")) == set(FILES)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
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
    require_same(student, again, x)


def test_a_given_network_is_not_mistaken_for_the_teachers(tmp_path):
    x = inputs()
    student = make(Offering(), x, start_network=Described(8))
    student.save(tmp_path)
    assert isinstance(Student.load(tmp_path).start_network, Described)
    before, generator = contents(tmp_path), torch.get_rng_state()
    for kind in (Offering, Tanh):
        refused = make(kind(), x, start_network=nn.Linear(8, 8))
        torch.set_rng_state(generator)
        with pytest.raises(StudentFolderError, match=r"start_network, a Linear, could not be load"):
            refused.save(tmp_path)
        assert torch.equal(torch.get_rng_state(), generator)
    assert contents(tmp_path) == before


def test_a_teacher_that_has_come_to_offer_another_network_is_refused(tmp_path, monkeypatch):
    make(Offering(), inputs()).save(tmp_path)
    monkeypatch.setattr(Offering, "start_network", lambda self: nn.Linear(8, 8))
    with pytest.raises(
        StudentFolderError,
        match=r"start_network is a teachers:OfferedStart, the teacher offers a torch.*:Linear",
    ):
        Student.load(tmp_path)


# Corrections


class Halved(nn.Module):
    """N(r) = s r: the least that a correction of one's own must have."""

    def __init__(self, scale=0.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def gate(self, context, start):
        return None

    def forward(self, r, gates):
        return map_state(lambda part: self.scale * part, r)


class DescribedCorrection(Halved):
    def __init__(self, scale=0.0):
        super().__init__(scale)
        self.config = {"scale": scale}


class Correcting(Tanh):
    """Offers a correction of its own."""

    def correction_network(self):
        return Halved()


@pytest.mark.parametrize(
    ("teacher", "given", "kind"),
    [
        (Tanh, None, LearnedCorrection),
        (Pair, None, LearnedCorrection),
        (Correcting, None, Halved),
        (Tanh, DescribedCorrection(), DescribedCorrection),
        (Correcting, DescribedCorrection(), DescribedCorrection),
    ],
)
def test_round_trip_of_corrections(tmp_path, teacher, given, kind):
    x = inputs()
    student = make(teacher(), x, "corrected", correction=given)
    assert type(student.correction) is kind
    student.save(tmp_path)
    again = Student.load(tmp_path, teacher=teacher)
    assert type(again.correction) is kind
    require_same(student, again, x)
    assert not torch.equal(again.gains, torch.ones_like(again.gains))


@pytest.mark.parametrize("teacher", [Tanh, Correcting])
def test_a_correction_that_could_not_be_loaded_again_is_refused_when_saving(tmp_path, teacher):
    class Mine(Halved):
        pass

    student = make(teacher(), inputs(), "corrected", correction=Mine())
    with pytest.raises(
        StudentFolderError, match=r"correction_network, a Mine, .*give it a `config`"
    ):
        student.save(tmp_path / "student")
    assert not (tmp_path / "student").exists()


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
        LearnedStart.matching(teacher.inject(x), z, [1]) if recipe.start == "learned" else None
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
    require_same(student, Student.load(tmp_path), inputs())

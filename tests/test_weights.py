"""theta + c delta, and contexts mixed with the same c."""

import copy
import dataclasses
from collections import OrderedDict
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from cdeq.consistency.copying import copy_of, frozen_copy
from cdeq.consistency.weights import Deltas, mix_contexts, mix_weights
from teachers import Normed, Plain, Tanh, Tied, inputs, randomized, untrained

SHAPES = {"matrix": (6, 5), "kernel": (6, 4, 3, 3), "vector": (6,), "thin": (6, 2)}


def weights():
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def test_full_deltas_start_at_zero_and_are_as_large_as_the_weights():
    deltas = Deltas(weights(), rank=None)
    assert deltas.names == list(SHAPES)
    for change, shape in zip(deltas(), SHAPES.values(), strict=True):
        assert change.shape == shape
        assert not change.any()
    assert sum(p.numel() for p in deltas.parameters()) == sum(w.numel() for w in weights().values())


def test_low_rank_deltas_have_that_rank():
    deltas = Deltas(weights(), rank=3)
    assert not any(change.any() for change in deltas())
    randomized(deltas)
    changes = dict(zip(deltas.names, deltas(), strict=True))
    assert {name: tuple(c.shape) for name, c in changes.items()} == SHAPES
    assert torch.linalg.matrix_rank(changes["matrix"]) == 3
    assert torch.linalg.matrix_rank(changes["kernel"].reshape(6, -1)) == 3
    # Where a low rank saves nothing the change is full.
    counts = [sum(p.numel() for p in c.parameters()) for c in deltas.changes]
    assert counts == [3 * (6 + 5), 3 * (6 + 36), 6, 12]


def test_low_rank_deltas_can_leave_zero():
    deltas = Deltas(weights(), rank=3)
    sum(c.square().sum() + c.sum() for c in deltas()).backward()
    assert all(change.left.grad.any() for change in deltas.changes if hasattr(change, "left"))


@pytest.mark.parametrize("c", [1.0, 0.3, torch.tensor(0.3), torch.tensor(0.0)])
def test_mixing_weights(c):
    theta, delta = list(weights().values()), [w * 2 + 1 for w in weights().values()]
    mixed = mix_weights(list(SHAPES), theta, delta, c)
    for name, t, d in zip(SHAPES, theta, delta, strict=True):
        torch.testing.assert_close(mixed[name], t + float(c) * d)


def test_without_a_share_the_teachers_own_weights_serve():
    assert mix_weights(["a"], [torch.ones(2)], [torch.ones(2)], 0.0) == {}


class Named(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    label: str = "kept"
    later: Any = dataclasses.field(init=False, default=None)


def nest(scale):
    sparse = torch.eye(3).to_sparse() * scale
    frozen = Frozen(a=torch.full((2,), scale))
    object.__setattr__(frozen, "later", torch.full((1,), scale))
    return {
        "tensor": torch.full((2, 2), scale),
        "tuple": (torch.full((3,), scale), [torch.full((1,), scale)]),
        "named": Named(torch.full((2,), scale), sparse),
        "data": frozen,
        "integer": torch.full((2,), int(10 * scale)),
        "word": f"word {scale}",
        "function": (lambda: scale),
        "ordered": OrderedDict(x=torch.full((2,), scale)),
    }


@pytest.mark.parametrize("c", [0.0, 0.3, 1.0, torch.tensor(0.3)])
def test_mixing_nested_contexts(c):
    teacher, student = nest(1.0), nest(3.0)
    mixed = mix_contexts(teacher, student, c)
    expected = 1 + float(c) * 2

    def close(tensor):
        torch.testing.assert_close(tensor, torch.full_like(tensor, expected))

    close(mixed["tensor"])
    close(mixed["tuple"][0])
    close(mixed["tuple"][1][0])
    assert isinstance(mixed["tuple"], tuple)
    assert isinstance(mixed["tuple"][1], list)
    assert type(mixed["named"]) is Named
    close(mixed["named"].a)
    assert type(mixed["data"]) is Frozen
    close(mixed["data"].a)
    close(mixed["data"].later)
    assert mixed["data"].label == "kept"
    close(mixed["ordered"]["x"])
    # The teacher's: sparse, integer, unknown.
    assert mixed["named"].b is teacher["named"].b
    assert mixed["integer"] is teacher["integer"]
    assert mixed["word"] == "word 1.0"
    assert mixed["function"] is teacher["function"]
    assert torch.equal(teacher["tensor"], torch.ones(2, 2))
    assert torch.equal(teacher["data"].a, torch.ones(2))


@dataclasses.dataclass(frozen=True)
class Caching:
    a: torch.Tensor

    @cached_property
    def double(self):
        return 2 * self.a


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: torch.Tensor


def test_what_a_context_has_cached_is_not_taken_over():
    teacher, student = Caching(torch.ones(2)), Caching(torch.full((2,), 3.0))
    assert torch.equal(teacher.double, torch.full((2,), 2.0))
    mixed = mix_contexts(teacher, student, 0.5)
    assert type(mixed) is Caching
    assert torch.equal(mixed.double, torch.full((2,), 4.0))
    slotted = mix_contexts(Slotted(torch.ones(2)), Slotted(torch.full((2,), 3.0)), 0.5)
    assert torch.equal(slotted.a, torch.full((2,), 2.0))


def test_a_shared_context_is_not_mixed():
    context = nest(1.0)
    assert mix_contexts(context, context, 0.5) is context


def test_mixing_is_exact_at_the_ends():
    a, b = torch.linspace(-1, 1, 50), torch.linspace(3, -2, 50)
    assert torch.equal(mix_contexts(a, b, 0.0), a)
    assert torch.equal(mix_contexts(a, b, 1.0), b)


def test_tied_weights_change_in_the_step_and_not_in_the_readout():
    teacher, x = Tied(), inputs()
    student = untrained(teacher, x, start="teacher", injection="student")
    assert student.shapes.weights == ("weight", "injection")
    randomized(student)
    z = student.trajectory(x, 1)[1]
    delta = dict(zip(student.deltas.names, student.deltas(), strict=True))
    changed = torch.tanh(x @ (teacher.injection + delta["injection"]).T)
    torch.testing.assert_close(z, changed)
    torch.testing.assert_close(student(x, steps=1), changed @ teacher.injection)


@pytest.mark.parametrize("recipe", ["paper", "anchored"])
def test_weight_normed_teachers(recipe):
    teacher, x = Normed(), inputs()
    student = untrained(teacher, x, recipe, start="teacher", injection="student")
    names = {f"layer.parametrizations.weight.original{i}" for i in (0, 1)}
    assert set(student.shapes.weights) == {"injection", *names}
    with torch.no_grad():
        torch.testing.assert_close(student.trajectory(x, 1)[1], torch.tanh(teacher.inject(x)))
    randomized(student)
    delta = dict(zip(student.deltas.names, student.deltas(), strict=True))
    z = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    prepared = student.prepare(x)
    g, v = (
        dict(teacher.named_parameters())[n] + delta[n]
        for n in (f"layer.parametrizations.weight.original{i}" for i in (0, 1))
    )
    w = g * v / v.norm(dim=1, keepdim=True)
    expected = torch.tanh(z @ w.T + x @ (teacher.injection + delta["injection"]).T)
    h = student.evaluate(z, student.time_point(0), prepared)
    if recipe == "paper":
        [head] = student.time_heads
        expected = head(expected, 0.0)
    torch.testing.assert_close(h, expected)
    h.sum().backward()
    assert all(p.grad is not None for p in student.deltas.parameters())


# Copies


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_frozen_copy_shares_sparse_matrices_alone(layout):
    teacher = Tanh().train()
    teacher.inner = nn.BatchNorm1d(3)
    teacher.inner.register_buffer("adjacency", torch.eye(3).to_sparse(layout=layout))
    teacher.plain = torch.eye(2).to_sparse(layout=layout)
    if layout != torch.sparse_coo:
        with pytest.raises(NotImplementedError):
            copy.deepcopy(teacher)
    frozen = frozen_copy(teacher)
    assert type(frozen) is Tanh
    assert frozen.inner.adjacency is teacher.inner.adjacency
    assert frozen.plain is teacher.plain
    assert not any(m.training for m in frozen.modules())
    assert not any(p.requires_grad for p in frozen.parameters())
    assert all(m.training for m in teacher.modules())
    assert all(p.requires_grad for p in teacher.parameters())
    assert frozen.weight.data_ptr() != teacher.weight.data_ptr()
    assert frozen.inner.running_mean.data_ptr() != teacher.inner.running_mean.data_ptr()


def test_a_copy_shares_what_it_is_told_to():
    pair = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    copied = copy_of(pair, shared=[pair[0]])
    assert copied[0] is pair[0]
    assert copied[1] is not pair[1]


def test_scalar_weights():
    class Scaled(Plain):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def step(self, z, context):
            return self.scale * z.sin() + context

    student = untrained(Scaled(), start="teacher", delta="low_rank")
    assert student.shapes.weights == ("scale",)
    assert student(inputs()).shape == (6, 5)

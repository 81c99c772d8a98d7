"""The learned start."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from cdeq.consistency.recipes import Recipe
from cdeq.consistency.start import PointwiseStart, context_tensors
from cdeq.consistency.student import Student
from teachers import OfferedStart, Offering, Pair, Ring, Tanh, inputs, randomized, untrained


@dataclasses.dataclass
class Holder:
    a: torch.Tensor
    b: object = None


def test_context_tensors_are_found_in_order_however_nested():
    t = [torch.full((2,), float(i)) for i in range(5)]
    context = {
        "x": (t[0], [t[1]]),
        "skip": torch.eye(2).to_sparse(),
        "data": Holder(t[2], (torch.ones(2, dtype=torch.long), t[3])),
        "word": "x",
        "y": t[4],
    }
    assert [c[0].item() for c in context_tensors(context)] == [0, 1, 2, 3, 4]
    assert context_tensors(torch.ones(3, dtype=torch.long)) == []


def test_it_is_its_equation_and_starts_at_zero():
    context = {"u": torch.randn(4, 7, 6), "other": torch.randn(4, 3), "v": torch.randn(4, 7, 2)}
    network = PointwiseStart.matching(context, torch.zeros(4, 7, 5), [2])
    assert network.sources == [[0, 2]]
    assert not network(context).any()
    assert network(context).shape == (4, 7, 5)
    randomized(network)
    inner, outer = network.inner[0].linear, network.outer[0].linear
    seen = torch.cat([context["u"], context["v"]], dim=2)
    torch.testing.assert_close(network(context), outer(functional.gelu(inner(seen))))


def test_it_sees_one_position_at_a_time():
    network = randomized(
        PointwiseStart.matching(torch.zeros(2, 6, 3, 3), torch.zeros(2, 4, 3, 3), [1])
    )
    u = torch.randn(2, 6, 3, 3)
    changed = u.clone()
    changed[0, :, 1, 2] += 1
    difference = (network(changed) - network(u)).abs().sum(1) > 0
    assert difference.nonzero().tolist() == [[0, 1, 2]]


def test_tuple_states_stay_tuples():
    context = torch.zeros(3, 4)
    two = PointwiseStart.matching(context, (torch.zeros(3, 4), torch.zeros(3, 2)), [1, 1])
    assert [t.shape for t in two(context)] == [(3, 4), (3, 2)]
    one = PointwiseStart.matching(context, (torch.zeros(3, 4),), [1])
    assert isinstance(one(context), tuple)
    again = PointwiseStart(**one.config)
    assert isinstance(again(context), tuple)


def test_a_context_without_the_states_positions_is_refused():
    with pytest.raises(
        ValueError, match=r"start='learned': .*start_network\(\), or use start='zero'"
    ):
        PointwiseStart.matching(torch.zeros(3, 9, 4), torch.zeros(3, 7, 4), [2])


@pytest.mark.parametrize("kind", [Tanh, Pair, Ring])
def test_students_start_from_it(kind):
    x = inputs()
    student = untrained(kind(), x)
    assert isinstance(student.start_network, PointwiseStart)
    randomized(student.start_network)
    z0 = student.trajectory(x, 0)[0]
    expected = student.start_network(student.teacher.inject(x))
    torch.testing.assert_close(z0, expected)
    assert type(z0) is type(student.teacher.start(student.teacher.inject(x)))


def test_the_teachers_own_network_is_preferred_and_a_given_one_to_that():
    x, recipe = inputs(), Recipe.from_name("anchored")
    assert isinstance(Student.for_example(Offering(), recipe, x).start_network, OfferedStart)
    own = nn.Linear(8, 8)
    given = Student.for_example(Offering(), recipe, x, own).start_network
    assert type(given) is nn.Linear
    assert torch.equal(given.weight, own.weight)
    zero = Recipe.from_name("anchored", start="teacher")
    assert Student.for_example(Offering(), zero, x, own).start_network is None


def test_it_takes_the_teachers_dtype():
    x = inputs(dtype=torch.float64)
    student = untrained(Tanh().double(), x)
    assert student.trajectory(x, 2)[2].dtype == torch.float64

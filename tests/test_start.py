"""The learned start."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from cdeq.consistency.groups import context_tensors
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.start import LearnedStart, pooled
from cdeq.consistency.student import Student
from cdeq.equilibrium.memory import Segment
from cdeq.equilibrium.states import map_state
from checks import numbers
from teachers import (
    OfferedStart,
    Offering,
    Pair,
    Ring,
    Tanh,
    inputs,
    randomized,
    small_transformer,
    untrained,
)


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
    start = torch.randn(4, 7, 5)
    network = LearnedStart.matching(context, start, [2])
    assert [group.sources for group in network.groups] == [(0, 2)]
    assert not network(context, start).any()
    assert network(context, start).shape == (4, 7, 5)
    randomized(network)
    inner, outer = network.networks[0].inner.linear, network.networks[0].outer.linear
    seen = torch.cat([context["u"], context["v"], start], dim=2)
    torch.testing.assert_close(network(context, start), outer(functional.gelu(inner(seen))))


def test_it_sees_one_position_at_a_time():
    start = torch.randn(2, 7, 4)
    network = randomized(LearnedStart.matching(torch.zeros(2, 7, 6), start, [2]))
    u = torch.randn(2, 7, 6)
    changed = u.clone()
    changed[0, 3] += 1
    difference = (network(changed, start) - network(u, start)).abs().sum(2) > 0
    assert difference.nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize("channels", [2, 12])
def test_images_are_seen_through_convolutions_at_three_resolutions(channels):
    u, start = torch.randn(2, 3, 11, 9), torch.randn(2, channels, 11, 9)
    network = LearnedStart.matching(u, start, [1])
    assert not network(u, start).any()
    [change] = randomized(network).networks
    full = functional.gelu(change.enter(torch.cat([u, start], dim=1)))
    half = functional.gelu(change.middle(pooled(full, 2)))
    quarter = functional.gelu(change.coarse(pooled(half, 2)))
    assert [tuple(t.shape[2:]) for t in (half, quarter)] == [(6, 5), (3, 3)]
    half = half + functional.interpolate(quarter, size=(6, 5))
    expected = change.outer(full + functional.interpolate(half, size=(11, 9)))
    torch.testing.assert_close(network(u, start), expected)


def test_a_margin_counts_with_what_there_is_of_it():
    x = torch.arange(10.0).reshape(1, 1, 2, 5)
    assert pooled(x, 2).flatten().tolist() == [3.0, 5.0, 6.5]
    assert torch.equal(pooled(torch.ones(1, 2, 7, 9), 4), torch.ones(1, 2, 2, 3))


def test_tuple_states_stay_tuples():
    context = torch.zeros(3, 4)
    pair = (torch.zeros(3, 4), torch.zeros(3, 2))
    two = LearnedStart.matching(context, pair, [1, 1])
    assert [t.shape for t in two(context, pair)] == [(3, 4), (3, 2)]
    one = LearnedStart.matching(context, pair[:1], [1])
    assert isinstance(one(context, pair[:1]), tuple)
    again = LearnedStart(**one.config)
    assert isinstance(again(context, pair[:1]), tuple)


def test_without_a_context_of_the_states_positions_it_sees_the_start_alone():
    context, start = torch.randn(3, 9, 4), torch.randn(3, 7, 4)
    network = randomized(LearnedStart.matching(context, start, [2]))
    assert [group.sources for group in network.groups] == [()]
    assert torch.equal(network(context, start), network(context + 1, start))
    assert not torch.equal(network(context, start), network(context, start + 1))


@pytest.mark.parametrize("kind", [Tanh, Pair, Ring])
def test_students_start_from_it(kind):
    x = inputs()
    student = untrained(kind(), x)
    assert isinstance(student.start_network, LearnedStart)
    randomized(student.start_network)
    z0 = student.trajectory(x, 0)[0]
    context = student.teacher.inject(x)
    start = student.teacher.start(context)
    expected = map_state(torch.add, start, student.start_network(context, start))
    torch.testing.assert_close(z0, expected)
    assert type(z0) is type(start)


class Informed(Tanh):
    """Its start is no zero."""

    def start(self, context):
        return 0.1 * context


def test_a_network_of_ones_own_changes_the_teachers_start_and_sees_the_context_alone():
    x, teacher = inputs(), Informed()
    network = nn.Linear(8, 8)
    student = Student.for_example(teacher, Recipe.from_name("anchored"), x, network)
    context = teacher.inject(x)
    torch.testing.assert_close(student.trajectory(x, 0)[0], 0.1 * context + network(context))


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


# What of a context belongs to a sample's positions


class Tabled(Tanh):
    """A state (B, L, 8) of inputs (B, L, 5); its context has a table of positions (L, L, 3) as well."""

    def inject(self, x):
        length = x.shape[1]
        return {"table": torch.randn(length, length, 3), "u": super().inject(x)}

    def start(self, context):
        return torch.zeros_like(context["u"])

    def step(self, z, context):
        return super().step(z, context["u"])


@pytest.mark.parametrize("size", [1, 4])
def test_a_table_that_all_samples_share_is_not_seen_whatever_its_shape(size):
    x = numbers(size, size, 5, dtype=torch.float32)
    for name in ("anchored", "corrected"):
        student = untrained(Tabled(), x, name)
        assert [group.sources for group in student.start_network.groups] == [(1,)]
        longer = numbers(3, 7, 5, dtype=torch.float32)
        assert student(longer, steps=2).shape == (3, 7, 3)
    assert [group.sources for group in student.correction.groups] == [(1,)]


def test_the_memory_of_a_text_is_not_seen_even_if_it_is_as_long_as_the_text():
    model, tokens = small_transformer(), torch.randint(50, (2, 7))
    context = model.inject(tokens)
    memory = model.remember(torch.randn(2, 7, 16), context)
    assert memory[0].shape == (2, 7, 16)
    student = untrained(model, Segment(tokens, memory), "corrected")
    assert [group.sources for group in student.correction.groups] == [(0,)]
    for x in (tokens[:1, :3], Segment(tokens[:, :1], memory)):
        assert torch.isfinite(student(x, steps=3)).all()


def test_inputs_that_cannot_be_cut_are_taken_as_they_are():
    class Whole(Tanh):
        def inject(self, x):
            if len(x) != 6:
                raise ValueError("six samples, no more and no less")
            return super().inject(x)

    student = untrained(Whole(), inputs(), "corrected")
    assert [group.sources for group in student.correction.groups] == [(0,)]

"""One walker for inputs and contexts: nested tensors in containers of any usual kind."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cdeq.equilibrium.trees import children, map_tensors, tensors_in


class Pair(NamedTuple):
    first: object
    second: object


@dataclass(frozen=True)
class Frozen:
    part: object
    made: object = field(init=False, default=None)


trees = st.recursive(
    st.integers(0, 9).map(lambda n: torch.tensor(float(n))) | st.none() | st.just("leaf"),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), parts, max_size=3)
        | st.tuples(parts, parts).map(lambda both: Pair(*both))
        | parts.map(Frozen)
    ),
)


@pytest.mark.slow
@given(trees)
def test_mapping_keeps_the_structure_and_replaces_each_tensor(tree):
    doubled = map_tensors(lambda a, b: a + b, tree, tree)
    assert [t.item() for t in tensors_in(doubled)] == [2 * t.item() for t in tensors_in(tree)]
    same_kinds(tree, doubled)
    assert map_tensors(lambda t: t, tree) is tree


def same_kinds(a, b):
    assert type(a) is type(b)
    assert children(a).keys() == children(b).keys()
    for key, part in children(a).items():
        same_kinds(part, children(b)[key])


def test_what_is_not_replaced_is_the_very_same():
    module, kept = nn.Linear(1, 1), Frozen([torch.ones(1, dtype=torch.long)])
    tree = {"module": module, "kept": kept, "changed": (torch.ones(1),)}
    mapped = map_tensors(lambda t: t + 1 if t.is_floating_point() else t, tree)
    assert mapped["module"] is module
    assert mapped["kept"] is kept
    assert mapped["changed"][0].item() == 2
    assert map_tensors(torch.neg, OrderedDict(a=torch.ones(1)))["a"].item() == -1


@pytest.mark.parametrize("other", [{"a": 0}, [0, 0], None])
def test_trees_of_different_structure_are_refused(other):
    with pytest.raises(ValueError, match="different structure"):
        map_tensors(torch.add, [torch.ones(1)], other)


def test_a_module_that_is_a_dataclass_is_a_leaf():
    @dataclass(eq=False)
    class Module(nn.Module):
        weight: Tensor

        def __post_init__(self):
            super().__init__()

    class Plain(nn.Module):
        pass

    for module in (object.__new__(Module), Plain()):
        assert children(module) == {}
        assert map_tensors(torch.neg, module) is module

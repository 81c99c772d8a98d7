"""States: flattening and its inverse, norms, and the conventions at zero."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdeq.equilibrium.states import (
    StateLayout,
    map_state,
    relative_distance,
    relative_residual,
    sample_norms,
    tensors_of,
)
from checks import same_tensors

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
sizes = st.integers(0, 4)
trailing = st.lists(sizes, max_size=3)


@st.composite
def states(draw):
    batched = draw(st.booleans())
    batch = [draw(sizes)] if batched else []
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shapes = draw(st.lists(trailing, min_size=1, max_size=3))
    tensors = tuple(torch.randn(batch + s, generator=generator).to(dtype) for s in shapes)
    if len(tensors) == 1 and draw(st.booleans()):
        return tensors[0], batched
    return tensors, batched


@given(states())
def test_restore_inverts_flatten(case):
    state, batched = case
    layout = StateLayout.of(state, batched)
    flat = layout.flatten(state)
    assert flat.shape == (layout.batch, sum(layout.sizes))
    restored = layout.restore(flat)
    assert same_tensors(state, restored)


@pytest.mark.slow
@given(states())
def test_sample_norms_are_those_of_the_numbers(case):
    state, batched = case
    norms = sample_norms(state, batched)
    rows = [
        [t[i] for t in tensors_of(state)] if batched else tensors_of(state)
        for i in range(len(norms))
    ]
    squares = torch.tensor([sum(float(t.double().square().sum()) for t in row) for row in rows])
    torch.testing.assert_close(norms.double(), squares.double().sqrt(), rtol=1e-5, atol=1e-6)


def test_flatten_of_one_tensor_is_a_view():
    z = torch.randn(3, 4, 5)
    assert StateLayout.of(z).flatten(z).data_ptr() == z.data_ptr()


def test_flatten_takes_a_transposed_tensor():
    z = torch.randn(4, 3, 5).transpose(0, 1)
    layout = StateLayout.of(z)
    assert torch.equal(layout.restore(layout.flatten(z)), z)


def test_flatten_keeps_samples_apart():
    state = (torch.zeros(2, 3), torch.ones(2, 1, 2))
    flat = StateLayout.of(state).flatten(state)
    assert flat.tolist() == [[0, 0, 0, 1, 1]] * 2


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ([1.0, 2.0], TypeError, "tensor"),
        ((), TypeError, "tensor"),
        (torch.zeros(2, dtype=torch.long), TypeError, "floating-point"),
        (torch.tensor(1.0), ValueError, "batched=False"),
        ((torch.zeros(2, 1), torch.zeros(3, 1)), ValueError, "batch size"),
        ((torch.zeros(2), torch.zeros(2).double()), TypeError, "one dtype"),
    ],
)
def test_what_is_not_a_state_is_refused(state, error, words):
    with pytest.raises(error, match=words):
        StateLayout.of(state)


def test_another_state_does_not_fit_the_layout():
    layout = StateLayout.of(torch.zeros(2, 3))
    for other in (torch.zeros(3, 2), torch.zeros(2, 3, 1), (torch.zeros(2, 3),)):
        with pytest.raises(ValueError, match=r"\(2, 3\)"):
            layout.flatten(other)


def test_map_state_keeps_the_structure():
    assert torch.equal(map_state(torch.add, torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    mapped = map_state(torch.neg, (torch.ones(1), torch.zeros(2)))
    assert isinstance(mapped, tuple)
    assert [t.tolist() for t in mapped] == [[-1], [0, 0]]


def test_residual_conventions_at_zero():
    z = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    fz = torch.tensor(
        [[0.0, 0.0], [0.0, 9.0], [3.0, 9.0], [1.0, 0.0], [0.0, torch.nan], [torch.inf, 0.0]]
    )
    residual = relative_residual(z, fz)
    assert residual[:4].tolist() == [0, 1, 1, 0]
    assert not residual[4:].isfinite().any()


def test_half_precision_is_measured_in_single():
    z = torch.full((1, 1000), 300.0, dtype=torch.float16)  # |z|^2 is beyond float16
    assert sample_norms(z).dtype == torch.float32
    torch.testing.assert_close(sample_norms(z), torch.tensor([300 * 1000**0.5]))
    torch.testing.assert_close(relative_residual(z, 2 * z), torch.tensor([1.0]))


def test_relative_distance():
    star = (torch.tensor([[3.0], [0.0], [0.0]]), torch.tensor([[4.0], [0.0], [0.0]]))
    z = (torch.tensor([[3.0], [0.0], [1.0]]), torch.tensor([[9.0], [0.0], [0.0]]))
    assert relative_distance(z, star).tolist() == [1, 0, torch.inf]

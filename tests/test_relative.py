"""Relative attention against a slow loop over Transformer-XL's equations, in double precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cdeq.models.text.relative import relative_attention, shifted, sinusoids

CPU = torch.device("cpu")
NAMES = ("q", "k", "v", "r", "content_bias", "position_bias")
sizes = st.fixed_dictionaries(
    {"length": st.integers(1, 5), "memory": st.integers(0, 4), "heads": st.integers(1, 3)}
)
few = settings(deadline=None, max_examples=25)


def parts(length, memory, heads=2, batch=2, size=3, dtype=torch.float64):
    """q, k, v, r and the two biases."""
    draw = torch.Generator().manual_seed(100 * length + 10 * memory + heads)
    keys = memory + length
    shapes = [(batch, heads, length, size)] + [(batch, heads, keys, size)] * 2
    shapes += [(heads, keys, size), (heads, size), (heads, size)]
    return [torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for s in shapes]


def slow_attention(q, k, v, r, content_bias, position_bias):
    """(q_i + b_c) . k_j + (q_i + b_p) . r_(i - j), over sqrt(E), for the keys up to the token itself."""
    batch, heads, length, size = q.shape
    memory = k.shape[2] - length
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            by_distance = dict(enumerate(r[h].flip(0)))  # the last encoding is of distance 0
            for i in range(length):
                place = memory + i
                scores = [
                    (q[b, h, i] + content_bias[h]) @ k[b, h, j]
                    + (q[b, h, i] + position_bias[h]) @ by_distance[place - j]
                    for j in range(place + 1)
                ]
                weights = [math.exp(float(s) / math.sqrt(size)) for s in scores]
                for j, weight in enumerate(weights):
                    out[b, h, i] += weight / sum(weights) * v[b, h, j]
    return out


@few
@given(sizes)
def test_it_is_the_attention_of_the_equations(shape):
    given_parts = parts(**shape)
    expected = slow_attention(*given_parts)
    torch.testing.assert_close(relative_attention(*given_parts), expected, rtol=1e-11, atol=1e-12)


@few
@given(sizes)
def test_with_gradients_it_is_the_same(shape):
    fused = relative_attention(*parts(**shape))
    for i in range(len(NAMES)):
        tracked = [t.requires_grad_(i == j) for j, t in enumerate(parts(**shape))]
        found = relative_attention(*tracked)
        torch.testing.assert_close(found, fused, rtol=1e-11, atol=1e-12)
        with torch.no_grad():
            assert torch.equal(relative_attention(*tracked), fused)
        assert found.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_close(dtype):
    rounded = parts(6, 3, size=8, dtype=dtype)
    expected = relative_attention(*[t.double() for t in rounded])
    tol = 8 * torch.finfo(dtype).eps
    for track in (False, True):
        found = relative_attention(*[t.clone().requires_grad_(track) for t in rounded])
        assert found.dtype == dtype
        torch.testing.assert_close(found.detach().double(), expected, rtol=tol, atol=tol)


@few
@given(sizes)
def test_shifted_puts_each_distance_at_its_key(shape):
    length, memory = shape["length"], shape["memory"]
    keys = memory + length
    # Column c of the argument belongs to distance keys - 1 - c; a token's row is told by its hundreds.
    distances = torch.arange(keys - 1, -1, -1)
    scores = 100 * torch.arange(length)[:, None] + distances
    found = shifted(scores.double().expand(2, shape["heads"], length, keys))
    assert found.shape == (2, shape["heads"], length, keys)
    for i in range(length):
        for j in range(memory + i + 1):
            assert (found[..., i, j] == 100 * i + (memory + i - j)).all(), (i, j)


def test_later_keys_and_values_change_nothing():
    q, k, v, r, content, position = parts(5, 2)
    before = relative_attention(q, k, v, r, content, position)
    k[:, :, 5:], v[:, :, 5:] = 50.0, -7.0  # from the token of index 3 on
    after = relative_attention(q, k, v, r, content, position)
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert not torch.isclose(before[:, :, 3:], after[:, :, 3:]).any()


def test_memory_and_distance_matter():
    q, k, v, r, content, position = parts(3, 2)
    whole = relative_attention(q, k, v, r, content, position)
    alone = relative_attention(q, k[:, :, 2:], v[:, :, 2:], r[:, 2:], content, position)
    assert not torch.isclose(whole, alone).any()
    elsewhere = relative_attention(q, k, v, r.flip(1), content, position)
    assert not torch.isclose(whole, elsewhere).any()


def test_one_token_without_memory_sees_itself():
    given_parts = parts(1, 0)
    torch.testing.assert_close(relative_attention(*given_parts), given_parts[2])


@pytest.mark.parametrize(("length", "memory"), [(3, 2), (1, 0), (2, 0)])
@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_first_and_second_derivatives(length, memory, name):
    arguments = [
        t.requires_grad_(name in (own, "all"))
        for own, t in zip(NAMES, parts(length, memory, heads=1, batch=1, size=2), strict=True)
    ]
    assert torch.autograd.gradcheck(relative_attention, arguments)
    assert torch.autograd.gradgradcheck(relative_attention, arguments)


@few
@given(length=st.integers(1, 12), half=st.integers(1, 6))
def test_sinusoids_are_sines_and_cosines_of_the_distance(length, half):
    table = sinusoids(length, 2 * half, device=CPU, dtype=torch.float64)
    assert table.shape == (length, 2 * half)
    for row in range(length):
        distance = length - 1 - row
        for i in range(half):
            angle = distance / 10_000 ** (2 * i / (2 * half))
            assert float(table[row, i]) == pytest.approx(math.sin(angle), abs=1e-12)
            assert float(table[row, half + i]) == pytest.approx(math.cos(angle), abs=1e-12)


def test_known_angles():
    table = sinusoids(3, 4, device=CPU, dtype=torch.float64)
    expected = [
        [math.sin(2), math.sin(0.02), math.cos(2), math.cos(0.02)],
        [math.sin(1), math.sin(0.01), math.cos(1), math.cos(0.01)],
        [0, 0, 1, 1],
    ]
    torch.testing.assert_close(table, torch.tensor(expected, dtype=torch.float64))


def test_a_longer_table_ends_with_the_shorter_one():
    longer, shorter = (sinusoids(n, 8, device=CPU, dtype=torch.float64) for n in (9, 4))
    assert torch.equal(longer[-4:], shorter)


def test_long_distances_keep_their_digits_in_single_precision():
    single = sinusoids(5000, 16, device=CPU, dtype=torch.float32)
    double = sinusoids(5000, 16, device=CPU, dtype=torch.float64)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-7)


def test_no_tokens_have_no_encodings():
    assert sinusoids(0, 6, device=CPU, dtype=torch.float32).shape == (0, 6)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="even, not 5"):
        sinusoids(3, 5, device=CPU, dtype=torch.float32)


def test_weights_that_act_only_through_the_bias_learn():
    """A bias may be all that is trained: its gradient is that of the slow loop's differences."""
    q, k, v, r, content, position = parts(3, 1)
    content = nn.Parameter(content)
    relative_attention(q, k, v, r, content, position).sum().backward()
    step = 1e-6
    for h in range(2):
        for e in range(3):
            moved = []
            for sign in (1, -1):
                other = content.detach().clone()
                other[h, e] += sign * step
                moved.append(float(slow_attention(q, k, v, r, other, position).sum()))
            slope = (moved[0] - moved[1]) / (2 * step)
            assert float(content.grad[h, e]) == pytest.approx(slope, rel=1e-6, abs=1e-8)

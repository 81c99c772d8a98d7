"""Endpoint augmentation, against the paper's algorithm."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdeq.trajectories import augment_endpoints


def algorithm(steps, probability, first, last, generator):
    """Algorithm 4, lines 7 to 12, line by line."""
    mask = [False] * (steps + 1)
    for k in range(first, steps - last + 1):
        u = torch.rand(1, generator=generator, dtype=torch.float64)
        if u < probability:
            mask[k] = True
    return mask


SIZES = st.integers(0, 40)


@given(SIZES, st.floats(0, 1), st.integers(0, 8), st.integers(0, 8), st.integers(0, 2**31))
def test_augmentation_follows_the_algorithm(steps, probability, first, last, seed):
    mask = augment_endpoints(steps, probability, first, last, torch.Generator().manual_seed(seed))
    assert mask.dtype == torch.bool
    assert mask.tolist() == algorithm(
        steps, probability, first, last, torch.Generator().manual_seed(seed)
    )


@given(SIZES, st.integers(0, 8), st.integers(0, 8))
def test_augmentation_at_probability_zero_and_one(steps, first, last):
    assert not augment_endpoints(steps, 0.0, first, last).any()
    replaced = augment_endpoints(steps, 1.0, first, last).nonzero().flatten().tolist()
    assert replaced == list(range(first, steps - last + 1))


def test_augmentation_defaults_are_the_papers():
    generator = torch.Generator().manual_seed(0)
    masks = torch.stack([augment_endpoints(20, generator=generator) for _ in range(3000)]).double()
    assert not masks[:, :3].any()
    assert not masks[:, 19:].any()
    assert (masks[:, 3:19].mean(0) - 0.1).abs().max() < 0.03


@pytest.mark.parametrize("bad", [(-1,), (5, 1.5), (5, -0.1), (5, float("nan")), (5, 0.1, -1)])
def test_augmentation_refuses_bad_arguments(bad):
    with pytest.raises(ValueError, match="must"):
        augment_endpoints(*bad)

"""Causal windows over a text that is cut, and the activation of a start at one token."""

import pytest
import torch
from torch.nn import functional as F

from cdeq.models.text.windows import SMALL, causal_windows, gelu


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("length", [1, 4])
def test_windows_are_the_same_wherever_a_text_is_cut(kernel, dilation, length):
    whole = torch.randn(2, 9, 3)
    expected = causal_windows(whole, kernel, dilation=dilation)
    for cut in range(10 - length):
        before, x = whole[:, :cut], whole[:, cut : cut + length]
        found = causal_windows(x, kernel, dilation=dilation, before=before)
        assert torch.equal(found, expected[:, cut : cut + length])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, SMALL, SMALL + 1])
def test_a_small_gelu_is_torchs_to_rounding(count, dtype):
    x = torch.linspace(-9, 9, count, dtype=dtype).requires_grad_()
    found, expected = gelu(x), F.gelu(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    for y in (found, expected):
        assert y.requires_grad
    gradients = (torch.autograd.grad(y.sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(*gradients)

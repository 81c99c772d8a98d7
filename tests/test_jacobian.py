"""Jacobian estimates against matrices that are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cdeq.gradients import jacobian_penalty, spectral_radius
from checks import numbers


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def symmetric(*eigenvalues: float) -> Tensor:
    values = torch.tensor(eigenvalues, dtype=torch.float64)
    basis, _ = torch.linalg.qr(numbers(len(eigenvalues), len(eigenvalues), seed=7))
    return basis @ torch.diag(values) @ basis.T


def test_penalty_is_exact_on_a_diagonal_map():
    scale = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    penalty = jacobian_penalty(lambda z: z * scale, numbers(4, 3), generator=generator())
    torch.testing.assert_close(penalty, scale.square().mean())
    (gradient,) = torch.autograd.grad(penalty, scale)
    torch.testing.assert_close(gradient, 2 * scale.detach() / 3)


def test_penalty_converges_to_the_frobenius_norm():
    matrix = numbers(6, 6, seed=3)
    penalty = jacobian_penalty(
        lambda z: z @ matrix.T, numbers(50, 6), probes=100, generator=generator()
    )
    torch.testing.assert_close(penalty, matrix.square().sum() / 6, rtol=0.03, atol=0)


def test_penalty_of_a_tuple_state_counts_cross_terms():
    a, b = 2.0, 3.0

    def f(z: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return a * z[1], b * z[0]

    penalty = jacobian_penalty(f, (numbers(4, 2, 2), numbers(4, 2, 2)), generator=generator())
    assert penalty.item() == pytest.approx((4 * a**2 + 4 * b**2) / 8)


def test_penalty_is_differentiable_through_a_nonlinear_map():
    weight = (numbers(4, 4, seed=2) * 0.3).requires_grad_()
    z = numbers(3, 4, seed=5)

    def penalty(w: Tensor) -> Tensor:
        return jacobian_penalty(lambda s: torch.tanh(s @ w.T), z, probes=2, generator=generator())

    assert torch.autograd.gradcheck(penalty, (weight,))


def test_penalty_repeats_with_the_generator_and_leaves_no_trace():
    matrix, z = numbers(5, 5, seed=3).requires_grad_(), numbers(2, 5).requires_grad_()
    first = jacobian_penalty(lambda s: s @ matrix.T, z, generator=generator(1))
    again = jacobian_penalty(lambda s: s @ matrix.T, z, generator=generator(1))
    other = jacobian_penalty(lambda s: s @ matrix.T, z, generator=generator(2))
    assert first == again != other
    first.backward()
    assert z.grad is None
    with torch.no_grad():
        assert not jacobian_penalty(lambda s: s @ matrix.T, z, probes=2).requires_grad


def test_estimates_of_a_constant_map_are_zero():
    z = numbers(3, 4)
    assert jacobian_penalty(lambda s: torch.ones_like(z), z) == 0
    assert (spectral_radius(lambda s: torch.ones_like(z), z, iterations=5) == 0).all()


@pytest.mark.parametrize(
    "eigenvalues", [(0.9, 0.3, -0.2, 0.1), (-1.4, 0.5, 0.2, 0.0), (0.8, -0.8, 0.3, 0.1)]
)
def test_spectral_radius_is_exact_on_symmetric_maps(eigenvalues):
    matrix = symmetric(*eigenvalues)
    radius = spectral_radius(
        lambda z: z @ matrix.T, numbers(3, 4), iterations=100, generator=generator()
    )
    expected = torch.full((3,), max(abs(e) for e in eigenvalues), dtype=torch.float64)
    torch.testing.assert_close(radius, expected, rtol=1e-10, atol=0)


def test_spectral_radius_of_each_sample():
    scales = torch.tensor([0.5, 1.5], dtype=torch.float64)[:, None]
    radius = spectral_radius(lambda z: scales * z, numbers(2, 3), iterations=4)
    torch.testing.assert_close(radius, scales[:, 0])


def test_spectral_radius_of_a_rotation_and_of_a_general_matrix():
    angle = torch.tensor(0.7)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2).double()
    radius = spectral_radius(lambda z: 0.8 * z @ turn.T, numbers(1, 2), iterations=20)
    torch.testing.assert_close(radius, torch.tensor([0.8], dtype=torch.float64), rtol=1e-6, atol=0)
    matrix = numbers(8, 8, seed=9)
    expected = torch.linalg.eigvals(matrix).abs().max()
    radius = spectral_radius(lambda z: z @ matrix.T, numbers(1, 8), iterations=400)
    torch.testing.assert_close(radius[0], expected, rtol=0.02, atol=0)


def test_spectral_radius_without_a_batch_axis_and_of_a_tuple():
    matrix = symmetric(0.9, 0.2, 0.1, -0.3)

    def f(z: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        flat = torch.cat([z[0].flatten(), z[1]]) @ matrix.T
        return flat[:2].reshape(2, 1), flat[2:]

    radius = spectral_radius(f, (numbers(2, 1), numbers(2)), batched=False, generator=generator())
    torch.testing.assert_close(radius, torch.tensor([0.9], dtype=torch.float64))


def test_numbers_are_checked():
    with pytest.raises(ValueError, match="probe"):
        jacobian_penalty(torch.tanh, numbers(2, 2), probes=0)
    with pytest.raises(ValueError, match="iteration"):
        spectral_radius(torch.tanh, numbers(2, 2), iterations=0)

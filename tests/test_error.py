"""The estimated distance to the equilibrium, on linear maps where the true one is known."""

import math

import pytest
import torch

from cdeq.equilibrium.states import relative_distance
from cdeq.solvers import Anderson, Broyden, Picard, solve
from cdeq.solvers.error import ErrorEstimate, Seen
from checks import numbers
from problems import diverging, tanh

DIM, COUNT = 16, 48


def linear(rate, dtype=torch.float64):
    """z = A z + b with A symmetric, its eigenvalues from -rate / 2 to rate; f, z_0 and the fixed points."""
    q, _ = torch.linalg.qr(numbers(DIM, DIM, seed=0))
    values = torch.linspace(-0.5 * rate, rate, DIM, dtype=torch.float64)
    a, b = q @ values.diag() @ q.T, numbers(COUNT, DIM, seed=1)
    star = torch.linalg.solve(torch.eye(DIM, dtype=torch.float64) - a, b.T).T
    a, b = a.to(dtype), b.to(dtype)
    return (lambda z: z @ a.T + b), torch.zeros_like(b), star


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("tol", [1e-2, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("solver", [Picard(), Picard(mixing=0.6), Anderson(), Anderson(window=2)])
def test_a_solve_by_error_ends_as_near_as_it_says(rate, tol, dtype, solver):
    f, z0, star = linear(rate, dtype)
    found = solve(f, z0, solver, tol=tol, max_steps=3000, measure="error")
    true = relative_distance(found.state.double(), star)
    assert found.converged.all()
    assert (found.error <= tol).all()
    assert (true < 2 * tol).all()
    assert (found.error > 0.5 * true).all()
    if isinstance(solver, Picard):
        assert (found.error < 2 * true).all()
        # No more than the slowest direction can stretch a residual.
        assert (found.error <= 1.1 * found.residual / (1 - rate)).all()
    else:  # steps to come that do not all go the same way, and residuals in fast directions, are nearer than that
        assert found.error.median() < 10 * true.median()


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden()])
def test_a_solve_by_residual_ends_before_it_is_near(solver):
    f, z0, star = linear(0.99)
    by_residual = solve(f, z0, solver, tol=1e-3, max_steps=3000)
    by_error = solve(f, z0, solver, tol=1e-3, max_steps=3000, measure="error")
    assert by_residual.error is None
    assert by_residual.converged.all()
    assert relative_distance(by_residual.state, star).max() > 5e-3
    assert relative_distance(by_error.state, star).max() < 3e-3
    assert by_error.evaluations > by_residual.evaluations


def test_the_estimate_is_the_residual_times_the_largest_stretch():
    z = [numbers(2, 3, seed=s) for s in range(3)]
    r = [numbers(2, 3, seed=s) for s in range(3, 6)]
    size, relative = torch.ones(2, dtype=torch.float64), torch.tensor([0.1, 0.2]).double()
    estimate = ErrorEstimate()
    found, memory = estimate.update(0, Seen(z[0], r[0], size, relative), estimate.init(z[0]))
    assert found.tolist() == [[math.inf], [math.inf]]
    stretch = torch.ones(2, dtype=torch.float64)
    for i in (1, 2):
        found, memory = estimate.update(i, Seen(z[i], r[i], size, relative), memory)
        seen = (z[i] - z[i - 1]).norm(dim=1) / (r[i] - r[i - 1]).norm(dim=1)
        stretch = torch.maximum(stretch, seen)
        # The residuals did not fall: the steps to come are taken to be many.
        steps = (z[i] - z[i - 1]).norm(dim=1) * 0.98 / 0.02
        torch.testing.assert_close(found[:, 0], torch.maximum(stretch * relative, steps))
    # What rounding has a share in tells nothing.
    found, _ = estimate.update(3, Seen(z[2] + 1e-14, r[2] + 1e-15, size, relative), memory)
    torch.testing.assert_close(found[:, 0], stretch * relative)


def test_what_the_solver_says_is_missing_counts_if_it_is_more():
    z, r = numbers(2, 3), numbers(2, 3, seed=2)
    size = torch.ones(2, dtype=torch.float64)
    relative = torch.tensor([0.1, 0.2], dtype=torch.float64)
    estimate = ErrorEstimate()
    missing = torch.tensor([0.5, 0.05], dtype=torch.float64)
    found, memory = estimate.update(0, Seen(z, r, size, relative, missing), estimate.init(z))
    assert found[:, 0].tolist() == [0.5, 0.2]
    # A fall by ten: a ninth of the last step is to come.
    after = Seen(z + 0.01, r - 10, size, relative / 10, missing)
    found, _ = estimate.update(1, after, memory)
    assert found[:, 0].tolist() == pytest.approx([0.5, 0.05])
    after = Seen(z + 0.9, r - 100, size, relative / 10, missing / 10)
    found, _ = estimate.update(1, after, memory)
    assert found[:, 0].tolist() == pytest.approx([0.1 * 3**0.5] * 2)


@pytest.mark.parametrize("solver", [Picard(), Anderson()])
def test_a_start_at_the_equilibrium_is_seen_at_once(solver):
    f, _, star = linear(0.9)
    z0 = torch.zeros_like(star)
    found = solve(lambda z: 0.5 * z, z0, solver, measure="error")
    assert found.evaluations == 1
    assert found.converged.all()
    assert not found.error.any()
    # Some samples at once, the others when they are near.
    mixed = torch.where(torch.arange(COUNT)[:, None] % 2 == 0, star, z0)
    found = solve(f, mixed, solver, tol=1e-4, max_steps=500, measure="error")
    assert found.converged.all()
    assert (found.steps[::2] <= 3).all()
    assert (found.steps[1::2] > 8).all()


def test_a_residual_at_rounding_stops_though_the_tolerance_is_not_reached():
    f, z0, star = linear(0.99, torch.float32)
    found = solve(f, z0, Anderson(), tol=1e-9, max_steps=3000, measure="error")
    assert found.evaluations < 3000
    assert not found.converged.any()
    assert (found.error > 0.5 * relative_distance(found.state.double(), star)).all()


def test_one_evaluation_tells_no_distance_and_a_divergent_map_has_none():
    problem = tanh(torch.float64)
    found = solve(problem.f, problem.z0, max_steps=1, measure="error")
    assert found.error.isinf().all()
    assert not found.converged.any()
    found = solve(diverging, torch.zeros(2, 3), Picard(), measure="error")
    assert not found.converged.any()
    assert not (found.error <= 1e-4).any()

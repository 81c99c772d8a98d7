"""The start that sees far: its linear algebra against a closed form, its reach, its place in a student."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cdeq import FitConfig, Recipe, Student, distill
from cdeq.data import chain_graphs
from cdeq.models import IGNN
from cdeq.models.graph.base import GraphContext
from cdeq.models.graph.start import FarStart, resolvent

WIDTH = 6


@pytest.fixture
def adjacency():
    """Chains of 30 nodes, in double precision."""
    return chain_graphs(30, seed=0, chains=2).graph.adjacency.double()


def dense_resolvent(adjacency, x, a):
    """(I - a A)^-1 x as a dense system."""
    return torch.linalg.solve(torch.eye(len(x), dtype=x.dtype) - a * adjacency.to_dense(), x)


@pytest.mark.parametrize("a", [0.1, 0.9, 0.99, 0.999])
def test_the_resolvent_is_that_of_the_closed_form(adjacency, a):
    x = torch.randn(len(adjacency), 4, dtype=torch.float64)
    found = resolvent(adjacency, x, a, 1000)
    torch.testing.assert_close(found, dense_resolvent(adjacency, x, a), rtol=0, atol=1e-10)


def test_its_error_falls_as_chebyshevs(adjacency):
    """After k products at most 2 r^(k + 1) of the error of zero, r = a / (1 + sqrt(1 - a^2))."""
    x, a = torch.randn(len(adjacency), 1, dtype=torch.float64), 0.99
    exact, rate = dense_resolvent(adjacency, x, a), a / (1 + (1 - a**2) ** 0.5)
    for hops in (5, 20, 60):
        error = torch.linalg.vector_norm(resolvent(adjacency, x, a, hops) - exact)
        assert 0 < error <= 2 * rate ** (hops + 1) * torch.linalg.vector_norm(exact)
    # A geometric series is far behind it.
    series, term = torch.zeros_like(x), x
    for _ in range(61):
        series, term = series + term, a * (adjacency @ term)
    assert torch.linalg.vector_norm(series - exact) > 20 * error


def test_the_resolvent_has_a_gradient(adjacency):
    x = torch.randn(len(adjacency), 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(x)
    (gradient,) = torch.autograd.grad((weights * resolvent(adjacency, x, 0.9, 300)).sum(), x)
    # The resolvent of a symmetric matrix is symmetric.
    torch.testing.assert_close(gradient, dense_resolvent(adjacency, weights, 0.9))


@pytest.mark.parametrize("nonnegative", [False, True])
def test_the_start_is_what_it_says(adjacency, nonnegative):
    start = FarStart(WIDTH, inner=2, hops=400, reach=0.95, nonnegative=nonnegative).double()
    torch.nn.init.normal_(start.expand.weight)
    b = torch.randn(len(adjacency), WIDTH, dtype=torch.float64)
    h = F.leaky_relu(b @ start.compress.weight.T + start.compress.bias, 0.1)
    z = torch.cat([h, 0.05 * dense_resolvent(adjacency, h, 0.95)], dim=1) @ start.expand.weight.T
    torch.testing.assert_close(
        start(GraphContext(b, adjacency)), z.clamp_min(0) if nonnegative else z, atol=1e-10, rtol=0
    )


def test_it_sees_as_many_hops_as_it_has(adjacency):
    b = torch.zeros(len(adjacency), WIDTH, dtype=torch.float64)
    b[0] = 1  # the end of the first chain
    for hops in (0, 3, 12):
        start = FarStart(WIDTH, hops=hops).double()
        torch.nn.init.normal_(start.expand.weight)
        torch.nn.init.zeros_(start.compress.bias)
        assert int((start(GraphContext(b, adjacency)).abs().sum(dim=1) > 0).sum()) == hops + 1


def test_before_training_it_is_zero_and_has_a_gradient(adjacency):
    start = FarStart(WIDTH, nonnegative=True).double()
    z = start(GraphContext(torch.randn(len(adjacency), WIDTH, dtype=torch.float64), adjacency))
    assert (z == 0).all()
    z.sum().backward()
    assert start.expand.weight.grad.abs().sum() > 0


def test_a_reach_of_one_or_more_is_refused():
    with pytest.raises(ValueError, match=r"reach must be between 0 and 1, not 1.0"):
        FarStart(WIDTH, reach=1.0)


def test_a_student_with_it_is_saved_and_loaded(tmp_path):
    task = chain_graphs(12, seed=0, chains=3, features=4)
    torch.manual_seed(0)
    teacher = IGNN(features=4, width=WIDTH, classes=2, kappa=0.99, memory=1.0, bias=False)
    start = FarStart(WIDTH, hops=12, reach=0.99, nonnegative=True)
    recipe = Recipe.from_name("warm_start", start_updates=30)
    fit = FitConfig(updates=2, learning_rate=1e-2)
    student = distill(teacher, [task.graph], recipe=recipe, fit=fit, start_network=start)
    student.save(tmp_path)
    again = Student.load(tmp_path)
    assert again.start_network.config == student.start_network.config
    with torch.no_grad():
        torch.testing.assert_close(again(task.graph, steps=1), student(task.graph, steps=1))


def test_an_ignn_without_bias_knows_nothing_where_nothing_has_come(tmp_path):
    task = chain_graphs(8, seed=0, chains=1)
    silent, usual = (IGNN(features=100, width=WIDTH, classes=2, bias=b) for b in (False, True))
    assert silent.config["bias"] is False
    assert "bias" not in usual.config
    assert IGNN(**silent.config).injection.bias is None
    with torch.no_grad():
        context = silent.inject(task.graph)
        z = silent.step(silent.start(context), context)
        assert (z.view(2, 8, -1)[:, 2:] == 0).all()

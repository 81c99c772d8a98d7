"""Bounds that keep graph networks well posed: the largest eigenvalue of |A|, and the l1 ball."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cdeq.data.graphs import normalised_adjacency
from cdeq.models.graph.bounds import perron_frobenius, project_rows_l1
from checks import csr
from graphs import random_graph

DOUBLE = torch.float64


# The largest eigenvalue of |A|.


def path(nodes: int) -> Tensor:
    ones = torch.ones(nodes - 1, dtype=DOUBLE)
    return torch.diag(ones, 1) + torch.diag(ones, -1)


def largest_eigenvalue(dense: Tensor) -> float:
    return float(torch.linalg.eigvals(dense.abs().double()).abs().max())


@pytest.mark.slow
@given(
    nodes=st.integers(1, 12),
    density=st.floats(0.05, 1.0),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_the_bound_is_never_below_the_eigenvalue(nodes, density, symmetric, seed):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(nodes, nodes, generator=generator, dtype=DOUBLE)
    dense = dense * (torch.rand(nodes, nodes, generator=generator) < density)
    dense = dense + dense.T if symmetric else dense
    exact = largest_eigenvalue(dense)
    for iterations in (1, 3, 500):
        bound = perron_frobenius(csr(dense), max_iterations=iterations)
        assert bound >= exact * (1 - 1e-12)
    if symmetric:  # the last one had time to settle, unless two eigenvalues nearly agree
        assert perron_frobenius(csr(dense), tol=1e-4, max_iterations=20000) <= exact * (1 + 1.1e-4)


def test_the_eigenvalue_of_graphs_known_by_heart():
    ring = torch.roll(torch.eye(8, dtype=DOUBLE), 1, dims=1)
    star = torch.zeros(7, 7, dtype=DOUBLE)
    star[0, 1:] = star[1:, 0] = 1.0
    apart = torch.block_diag(3.0 * ring, torch.tensor([[5.0]]), torch.zeros(2, 2)).double()
    for dense, exact in (
        (ring, 1.0),  # directed, of period 8
        (ring + ring.T, 2.0),  # bipartite
        (-star, math.sqrt(6)),  # bipartite, signed
        (ring * torch.arange(1.0, 9.0), math.factorial(8) ** (1 / 8)),  # of period 8, weighted
        (path(5), math.sqrt(3)),  # bipartite, and not known from its degrees
        (apart, 5.0),  # three components, two nodes without an edge
        (torch.zeros(3, 3, dtype=DOUBLE), 0.0),
    ):
        assert perron_frobenius(csr(dense), tol=1e-10) == pytest.approx(exact, rel=1e-9, abs=0)
        assert largest_eigenvalue(dense) == pytest.approx(exact, rel=1e-9)


def test_the_bound_is_tight_where_other_components_fade():
    # Thousands of iterations, after which the lonely node is beyond the smallest number there is.
    dense = torch.block_diag(path(60), torch.zeros(1, 1))
    found = perron_frobenius(csr(dense), tol=1e-10, max_iterations=20000)
    assert found == pytest.approx(2 * math.cos(math.pi / 61), rel=1e-9)


def test_the_bound_of_a_directed_graph_does_not_trust_rayleigh():
    # Its quotient is above the only eigenvalue, 1, and meets the largest ratio early.
    dense = torch.tensor([[1.0, 4.0], [0.0, 1.0]], dtype=DOUBLE)
    assert 1.0 <= perron_frobenius(csr(dense), tol=0.1) < 1.12


def test_the_eigenvalue_of_a_normalised_adjacency_is_one_after_one_product():
    path = torch.stack([torch.arange(299), torch.arange(1, 300)])  # its gap is of the order 1e-4
    for adjacency in (random_graph().adjacency, normalised_adjacency(path, 310)):
        found = perron_frobenius(adjacency, tol=1e-6, max_iterations=1)
        assert found == pytest.approx(1.0, rel=1e-6)


def test_the_eigenvalue_needs_a_square_finite_sparse_matrix():
    adjacency = random_graph().adjacency
    with pytest.raises(ValueError, match="CSR"):
        perron_frobenius(adjacency.to_dense())
    with pytest.raises(ValueError, match="square"):
        perron_frobenius(csr(torch.ones(2, 3)))
    with pytest.raises(ValueError, match="infinite"):
        perron_frobenius(csr(torch.full((2, 2), torch.inf)))
    with pytest.raises(ValueError, match="tol"):
        perron_frobenius(adjacency, tol=0.0)


# The l1 ball.


def projected_slowly(row: Tensor, radius: float) -> Tensor:
    """Bisection for the shrinkage at which the l1 norm is the radius."""
    if row.abs().sum() <= radius:
        return row
    low, high = 0.0, float(row.abs().max())
    for _ in range(80):
        middle = (low + high) / 2
        if float((row.abs() - middle).clamp_min(0).sum()) > radius:
            low = middle
        else:
            high = middle
    return row.sign() * (row.abs() - high).clamp_min(0)


weights = st.lists(
    st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=4, max_size=4),
    min_size=1,
    max_size=4,
).map(lambda rows: torch.tensor(rows, dtype=DOUBLE))


@pytest.mark.slow
@given(weight=weights, radius=st.floats(1e-3, 1e3), seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_projection_is_feasible_idempotent_and_nearest(weight, radius, seed):
    found = project_rows_l1(weight, radius)
    slowly = torch.stack([projected_slowly(row, radius) for row in weight])
    torch.testing.assert_close(found, slowly, rtol=1e-10, atol=1e-10)
    norms = found.abs().sum(dim=1)
    assert bool((norms <= radius * (1 + 1e-12) + 1e-12).all())
    again = project_rows_l1(found, radius)
    torch.testing.assert_close(again, found, rtol=1e-10, atol=1e-10)
    inside = weight.abs().sum(dim=1) <= radius
    assert torch.equal(found[inside], weight[inside])
    # No other point of the ball is nearer: the residual makes no acute angle with any way into it.
    others = torch.randn(
        50, *weight.shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE
    )
    corners = F.one_hot(torch.arange(4)).double()[:, None].expand(-1, len(weight), -1)
    others = torch.cat([others, corners, -corners])
    others = radius * others / others.abs().sum(dim=2, keepdim=True)
    angles = ((weight - found) * (others - found)).sum(dim=2)
    assert float(angles.max()) <= 1e-9 * (1 + float(weight.abs().max()) * radius)


def test_projection_keeps_its_digits_beside_large_entries():
    weight = torch.tensor([[3e7, 3e7 + 2.0, -3e7 - 4.0, 1.0]])
    expected = torch.tensor([[0.0, 0.0, -1.0, 0.0]])
    torch.testing.assert_close(project_rows_l1(weight, 1.0), expected)
    assert project_rows_l1(torch.full((2, 5), 1e30), 0.5).sum(dim=1).tolist() == pytest.approx(
        [0.5, 0.5]
    )


def test_projection_refuses_what_is_no_ball():
    with pytest.raises(ValueError, match="radius"):
        project_rows_l1(torch.ones(2, 2), 0.0)
    with pytest.raises(ValueError, match="rows"):
        project_rows_l1(torch.ones(2), 1.0)

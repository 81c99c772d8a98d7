"""What keeps an implicit graph network well-posed: the adjacency's largest eigenvalue, and the l1 ball.

Shapes: N nodes; R rows, D columns of a weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cdeq.data.sparse import csr_from_pointers, transposed
from cdeq.models.graph.sparse import sparse_product

ROUNDING = 1 + 1e-5
"""What is put on top of a factor that was computed in single precision, for it is to be a bound."""
SMALLEST_ENTRY = 1e-200
"""Relative to the largest: an entry of the iterated vector that reached zero would bound nothing."""


@torch.no_grad()
def perron_frobenius(adjacency: Tensor, tol: float = 1e-6, max_iterations: int = 1000) -> float:
    """The largest eigenvalue of |A|, A (N, N) in CSR: max_i (|A| x)_i / x_i after power iteration on x > 0.

    By Collatz and Wielandt that ratio never lies below the eigenvalue, so that a weight bounded by it is
    safe even where `max_iterations` end the iteration first. It ends earlier once the ratio is within `tol`,
    relatively, of a lower bound: the smallest ratio or, for a symmetric A, Rayleigh's quotient. Computed in
    double precision; the iteration is that of |A| + s I, which also settles on bipartite graphs, where |A|
    itself has -lambda next to lambda.
    """
    if adjacency.layout != torch.sparse_csr or adjacency.shape[0] != adjacency.shape[1]:
        raise ValueError(
            f"a square CSR matrix is needed, not {adjacency.layout} of shape {tuple(adjacency.shape)}; "
            "see cdeq.data.normalised_adjacency"
        )
    if adjacency.shape[0] == 0:
        raise ValueError("a graph without nodes has no eigenvalue")
    if not tol > 0 or max_iterations < 1:
        raise ValueError(
            f"tol must be positive and max_iterations at least 1, not {tol} and {max_iterations}"
        )
    if not bool(adjacency.values().isfinite().all()):
        raise ValueError("the adjacency has an infinite or undefined entry")
    pointers, columns = adjacency.crow_indices(), adjacency.col_indices()
    size = (adjacency.shape[0], adjacency.shape[1])
    magnitudes = csr_from_pointers(pointers, columns, adjacency.values().abs().double(), size)
    symmetric = _is_symmetric(magnitudes)
    # D^-1/2 A D^-1/2 of an unweighted graph has the eigenvector sqrt(degree): one product is enough.
    x = pointers.diff().clamp_min(1).double().sqrt().unsqueeze(1)
    best = math.inf
    for _ in range(max_iterations):
        x = x / x.max()
        product = sparse_product(magnitudes, x)
        ratios = product / x
        best = min(best, float(ratios.max()))
        lower = float((x * product).sum() / x.square().sum()) if symmetric else float(ratios.min())
        if best - lower <= tol * best:
            break
        x = (product + best / 2 * x).clamp_min(SMALLEST_ENTRY)
    return best


def _is_symmetric(matrix: Tensor) -> bool:
    other = transposed(matrix)
    return (
        torch.equal(matrix.crow_indices(), other.crow_indices())
        and torch.equal(matrix.col_indices(), other.col_indices())
        and torch.allclose(matrix.values(), other.values(), rtol=1e-6, atol=0.0)
    )


@torch.no_grad()
def degree_bound(adjacency: Tensor) -> tuple[float, Tensor]:
    """max_i (|A| v)_i / v_i, and v (N, 1), v_i the root of node i's degree: one product in place of an iteration.

    No less than the largest eigenvalue of |A|, for any v > 0, and so than |A|_2 of a symmetric A; of a symmetrically
    normalised one this v is the eigenvector.
    """
    pointers, columns = adjacency.crow_indices(), adjacency.col_indices()
    entries, nodes = adjacency.values().abs(), adjacency.shape[0]
    v = pointers.diff().clamp_min(1).to(entries.dtype).sqrt()[:, None]
    magnitudes = csr_from_pointers(pointers, columns, entries, (nodes, nodes))
    return float((sparse_product(magnitudes, v) / v).max()), v


@torch.no_grad()
def project_rows_l1(weight: Tensor, radius: float) -> Tensor:
    """argmin_V |V - weight|_F with sum_j |V_ij| <= radius in each row (Duchi et al. 2008, figure 1).

    `weight` is (R, D). A row inside the ball stays as it is, bit by bit; of the others each entry shrinks
    by the same amount theta, and stops at zero.
    """
    if weight.ndim != 2:
        raise ValueError(
            f"the rows of a matrix are projected, not a tensor of shape {tuple(weight.shape)}"
        )
    if not 0 < radius < math.inf:
        raise ValueError(f"the radius must be positive and finite, not {radius}")
    magnitudes = weight.abs()
    largest = magnitudes.amax(dim=1, keepdim=True)
    # Measured from the largest entry: a sum of large entries would drown a small radius in rounding.
    below = magnitudes.sort(dim=1, descending=True).values - largest
    counts = torch.arange(1, weight.shape[1] + 1, device=weight.device, dtype=weight.dtype)
    thetas = (below.cumsum(dim=1) - radius) / counts
    kept = (below > thetas).sum(dim=1, keepdim=True).clamp_min(1)
    theta = thetas.gather(1, kept - 1)
    shrunk = weight.sign() * (magnitudes - largest - theta).clamp_min(0)
    return torch.where(magnitudes.sum(dim=1, keepdim=True) > radius, shrunk, weight)

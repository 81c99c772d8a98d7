"""The efficient infinite-depth graph neural network (Liu et al. 2021). Shapes: N nodes, F features, D width."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from cdeq.data.graphs import Graph
from cdeq.equilibrium.contract import Contraction
from cdeq.models.graph.base import GraphContext, GraphSizes, ImplicitGraphNetwork
from cdeq.models.graph.bounds import ROUNDING, degree_bound
from cdeq.models.graph.sparse import sparse_product

DENSE_LIMIT = 5000
"""Nodes above which the eigenvectors of A, N x N numbers in N^3 time, are not computed."""


class ClosedForm(NamedTuple):
    """The equilibrium (N, D) without fixed-point iteration, and how many products with A it took."""

    state: Tensor
    products: int


class EIGNN(ImplicitGraphNetwork):
    """Z = gamma A Z g(F) + X W^T, g(F) = F^T F / (|F^T F|_F + 1e-12): Z = gamma g(F) Z S + X, transposed.

    Linear in Z, and well-posed whatever the weights: g(F) has its eigenvalues in [0, 1], a normalised
    adjacency in [-1, 1], and gamma < 1. `step` is one iteration of the first line; `closed_form` solves it
    directly. The features are not spread by A before the first step.
    """

    has_bias = False

    def __init__(self, *, gamma: float = 0.8, **sizes: Unpack[GraphSizes]):
        super().__init__(**sizes)
        self.config |= {"gamma": gamma}
        if not 0 < gamma < 1:
            raise ValueError(f"gamma must be between 0 and 1, not {gamma}")
        self.gamma, width = gamma, self.config["width"]
        self.factor = nn.Parameter(torch.randn(width, width) / width**0.5)

    def coupling(self) -> Tensor:
        """g(F) (D, D), symmetric, with eigenvalues in [0, 1]."""
        square = self.factor.t() @ self.factor
        return square / (torch.linalg.matrix_norm(square) + 1e-12)

    def inject(self, x: Graph) -> GraphContext:
        adjacency, features = x
        return GraphContext(self.project_features(features), adjacency)

    def step(self, z: Tensor, context: GraphContext) -> Tensor:
        propagated = sparse_product(context.adjacency, z)
        return torch.addmm(context.injection, propagated, self.coupling(), alpha=self.gamma)

    @torch.no_grad()
    def contraction(self, context: GraphContext) -> Contraction:
        """|gamma A Z g(F)| <= gamma |A|_2 |g(F)|_2 |Z|, with |A|_2 bounded by the degrees."""
        spread, _ = degree_bound(context.adjacency)
        coupling = float(torch.linalg.matrix_norm(self.coupling(), 2))
        return Contraction(self.gamma * spread * coupling * ROUNDING)

    @torch.no_grad()
    def closed_form(self, x: Graph, tol: float = 1e-6, max_iterations: int = 500) -> ClosedForm:
        """(I - gamma lambda_i A) y_i = r_i with g(F) = Q diag(lambda) Q^T, y_i, r_i columns of Z Q, X W^T Q.

        D independent systems, solved together by conjugate gradients until each has a relative residual of
        at most `tol`; a RuntimeError if one has not after `max_iterations`. Without gradient: for one, give
        the state to `cdeq.solve_with_gradient` as its start `z0`.
        """
        injection, adjacency = self.inject(x)
        eigenvalues, vectors = torch.linalg.eigh(self.coupling())
        solution, products = _conjugate_gradients(
            adjacency, self.gamma * eigenvalues, injection @ vectors, tol, max_iterations
        )
        return ClosedForm(solution @ vectors.t(), products)

    @torch.no_grad()
    def closed_form_dense(self, x: Graph) -> Tensor:
        """Z = Q_A ((Q_A^T X W^T Q) / (1 - gamma lambda_A lambda^T)) Q^T, from all eigenvectors Q_A of A.

        As the original does; for small graphs only. (N, D), without gradient.
        """
        injection, adjacency = self.inject(x)
        if len(injection) > DENSE_LIMIT:
            raise ValueError(
                f"the eigenvectors of a graph of {len(injection)} nodes are too many "
                f"(at most {DENSE_LIMIT} nodes); use closed_form, which needs none"
            )
        eigenvalues, vectors = torch.linalg.eigh(self.coupling())
        graph_eigenvalues, graph_vectors = torch.linalg.eigh(adjacency.to_dense())
        spectral = graph_vectors.t() @ injection @ vectors
        spectral = spectral / (1 - self.gamma * graph_eigenvalues[:, None] * eigenvalues)
        return graph_vectors @ spectral @ vectors.t()


def _conjugate_gradients(
    adjacency: Tensor, shrinkage: Tensor, right: Tensor, tol: float, max_iterations: int
) -> tuple[Tensor, int]:
    """Columns y_i of (I - shrinkage_i A) y_i = right_i (Hestenes and Stiefel 1952), and the products with A.

    Each column has a step length of its own. One that is solved is left where it is, its length zero.
    """

    def apply(v: Tensor) -> Tensor:
        return v - shrinkage * sparse_product(adjacency, v)

    tiny = torch.finfo(right.dtype).tiny
    # Columns of length one, for the square of a small residual could be too small a number.
    scale = torch.linalg.vector_norm(right, dim=0, dtype=torch.float64).to(right.dtype)
    scale = scale.clamp_min(tiny)
    right = right / scale
    y, residual, direction = torch.zeros_like(right), right, right
    square = residual.square().sum(dim=0)
    products = 0
    for _ in range(max_iterations):
        image = apply(direction)
        products += 1
        length = square / (direction * image).sum(dim=0).clamp_min(tiny) * (square > tol**2)
        y = y + length * direction
        residual = residual - length * image
        before, square = square, residual.square().sum(dim=0)
        direction = residual + square / before.clamp_min(tiny) * direction
        if bool((square <= tol**2).all()):
            # The updated residual drifts from the true one, and only that counts.
            residual = direction = right - apply(y)
            products += 1
            square = residual.square().sum(dim=0)
            if bool((square <= tol**2).all()):
                return scale * y, products
    worst = float(square.max().sqrt())
    raise RuntimeError(
        f"conjugate gradients reached a relative residual of {worst:.1e}, not {tol:.1e}, in "
        f"{max_iterations} iterations: allow more, a larger tol, or compute in double precision"
    )

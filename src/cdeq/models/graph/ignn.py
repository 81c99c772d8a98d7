"""The implicit graph neural network (Gu et al. 2020). Shapes: N nodes, F features, D width."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.equilibrium.contract import Contraction
from cdeq.models.graph.base import GraphContext, GraphSizes, ImplicitGraphNetwork
from cdeq.models.graph.bounds import ROUNDING, degree_bound, project_rows_l1
from cdeq.models.graph.sparse import sparse_product
from cdeq.models.graph.start import PropagatedStart


class IGNN(ImplicitGraphNetwork):
    """Z = relu(A Z W^T + b), b = A (U Omega^T + bias): X = relu(W X A + b(U)) with X = Z^T.

    Well-posed by construction: every row of W has l1 norm at most kappa / lambda, kappa < 1, where lambda is
    `spectral_bound`, the largest eigenvalue of |A| (1 for a normalised adjacency; `bounds.perron_frobenius`
    finds that of any other). So Picard converges whatever the weights. `memory` is the share of kappa on W's
    diagonal at the start of training: how far a node's state first travels. `bias` False leaves out the bias, as
    Gu et al. do: with kappa near 1 it adds up to far more than what comes from a node many hops away.
    """

    def __init__(
        self,
        *,
        kappa: float = 0.95,
        memory: float = 0.8,
        spectral_bound: float = 1.0,
        bias: bool = True,
        **sizes: Unpack[GraphSizes],
    ):
        super().__init__(**sizes)
        self.config |= {"kappa": kappa, "memory": memory, "spectral_bound": spectral_bound}
        if not bias:
            self.config["bias"] = False
            self.injection.register_parameter("bias", None)
        if not 0 < kappa < 1:
            raise ValueError(f"kappa must be between 0 and 1, not {kappa}")
        if not 0 < spectral_bound < math.inf:
            raise ValueError(f"spectral_bound must be positive and finite, not {spectral_bound}")
        self.radius = kappa / spectral_bound
        width = self.config["width"]
        noise = torch.randn(width, width)
        noise = noise / noise.abs().sum(dim=1, keepdim=True)
        self.weight = nn.Parameter(self.radius * (memory * torch.eye(width) + (1 - memory) * noise))

    @torch.no_grad()
    def project(self) -> None:
        """Put each row of W on the nearest point of its l1 ball, as training does after each update."""
        self.weight.copy_(project_rows_l1(self.weight, self.radius))

    def bounded_weight(self) -> Tensor:
        """W, its rows scaled back into their l1 ball where they leave it: a guard for weights not projected."""
        norms = self.weight.abs().sum(dim=1, keepdim=True)
        return self.weight * (self.radius / norms.clamp_min(self.radius))

    def step(self, z: Tensor, context: GraphContext) -> Tensor:
        propagated = sparse_product(context.adjacency, z)
        return F.relu(torch.addmm(context.injection, propagated, self.bounded_weight().t()))

    @torch.no_grad()
    def contraction(self, context: GraphContext) -> Contraction:
        """In the norm max_ij |z_ij| / v_i, v_i the root of node i's degree: by max_i (|A| v)_i / v_i times |W|_inf.

        For any v > 0: |A z W^T|_ij <= sum_k |A_ik| v_k |z|_v |W_j|_1, and relu does not widen a difference. For a
        symmetrically normalised adjacency this v is the eigenvector, and the factor is at most kappa.
        """
        spread, v = degree_bound(context.adjacency)
        rows = float(self.bounded_weight().abs().sum(dim=1).max())

        def norm(z: Tensor) -> Tensor:
            return (z.abs().amax(dim=1, keepdim=True) / v).amax()[None]

        return Contraction(spread * rows * ROUNDING, norm, "max_ij |z_ij| / sqrt(degree_i)")  # type: ignore[arg-type]

    def start_network(self) -> nn.Module:
        """A few hops of the injection, on few columns."""
        return PropagatedStart(self.config["width"], nonnegative=True)

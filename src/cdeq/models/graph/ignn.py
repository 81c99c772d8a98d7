"""The implicit graph neural network (Gu et al. 2020). Shapes: N nodes, F features, D width."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.data.graphs import Graph
from cdeq.models.graph.bounds import project_rows_l1
from cdeq.models.graph.dropout import checked_probability, drop
from cdeq.models.graph.sparse import project_features, sparse_product
from cdeq.models.graph.start import PropagatedStart


class GraphContext(NamedTuple):
    """The injection b (N, D), which depends on the weights, and the adjacency, which does not."""

    injection: Tensor
    adjacency: Tensor


class IGNN(nn.Module):
    """Z = relu(A Z W^T + b), b = A (U Omega^T + bias): X = relu(W X A + b(U)) with X = Z^T.

    Well-posed by construction: every row of W has l1 norm at most kappa / lambda, kappa < 1, where lambda is
    `spectral_bound`, the largest eigenvalue of |A| (1 for a normalised adjacency; `bounds.perron_frobenius`
    finds that of any other). So Picard converges whatever the weights. `memory` is the share of kappa on W's
    diagonal at the start of training: how far a node's state first travels. `dropout` acts in training
    only, on the features before A spreads them, once an input, and on the state before the head.
    """

    batched = False

    def __init__(
        self,
        *,
        features: int,
        width: int = 64,
        classes: int = 10,
        kappa: float = 0.95,
        memory: float = 0.8,
        dropout: float = 0.0,
        spectral_bound: float = 1.0,
    ):
        super().__init__()
        if not 0 < kappa < 1:
            raise ValueError(f"kappa must be between 0 and 1, not {kappa}")
        if not 0 < spectral_bound < math.inf:
            raise ValueError(f"spectral_bound must be positive and finite, not {spectral_bound}")
        self.config: dict[str, Any] = {
            "features": features,
            "width": width,
            "classes": classes,
            "kappa": kappa,
            "memory": memory,
            "dropout": dropout,
            "spectral_bound": spectral_bound,
        }
        self.radius = kappa / spectral_bound
        self.injection = nn.Linear(features, width)
        self.dropout = checked_probability(dropout)
        self.head = nn.Linear(width, classes)
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

    def inject(self, x: Graph) -> GraphContext:
        adjacency, features = x
        projected = drop(project_features(self.injection, features), self.dropout, self.training)
        return GraphContext(sparse_product(adjacency, projected), adjacency)

    def start(self, context: GraphContext) -> Tensor:
        return torch.zeros_like(context.injection)

    def step(self, z: Tensor, context: GraphContext) -> Tensor:
        propagated = sparse_product(context.adjacency, z)
        return F.relu(torch.addmm(context.injection, propagated, self.bounded_weight().t()))

    def readout(self, z: Tensor, context: GraphContext) -> Tensor:
        """Logits (N, classes)."""
        return self.head(drop(z, self.dropout, self.training))

    def start_network(self) -> nn.Module:
        """A few hops of the injection, on few columns."""
        return PropagatedStart(self.config["width"], nonnegative=True)

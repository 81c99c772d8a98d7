"""The implicit graph neural network (Gu et al. 2020). Shapes: N nodes, F features, D width."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.data.graphs import Graph
from cdeq.models.graph.sparse import sparse_product


class GraphContext(NamedTuple):
    """The injection b (N, D), which depends on the weights, and the adjacency, which does not."""

    injection: Tensor
    adjacency: Tensor


class IGNN(nn.Module):
    """Z = relu(A Z W^T + b), b = A (U Omega^T + bias): X = relu(W X A + b(U)) with X = Z^T.

    Well-posed by construction: every row of W has l1 norm at most `kappa` < 1, and the normalised
    adjacency has largest eigenvalue 1, so Picard converges whatever the weights. `memory` is the
    share of kappa on W's diagonal at the start of training: how far a node's state first travels.
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
    ):
        super().__init__()
        if not 0 < kappa < 1:
            raise ValueError(f"kappa must be between 0 and 1, not {kappa}")
        self.config: dict[str, Any] = {
            "features": features,
            "width": width,
            "classes": classes,
            "kappa": kappa,
            "memory": memory,
        }
        self.kappa = kappa
        self.injection = nn.Linear(features, width)
        self.head = nn.Linear(width, classes)
        noise = torch.randn(width, width)
        noise = noise / noise.abs().sum(dim=1, keepdim=True)
        self.weight = nn.Parameter(kappa * (memory * torch.eye(width) + (1 - memory) * noise))

    def bounded_weight(self) -> Tensor:
        """W, its rows scaled back into the l1 ball of radius kappa where they leave it."""
        norms = self.weight.abs().sum(dim=1, keepdim=True)
        return self.weight * (self.kappa / norms.clamp_min(self.kappa))

    def inject(self, x: Graph) -> GraphContext:
        adjacency, features = x
        return GraphContext(sparse_product(adjacency, self.injection(features)), adjacency)

    def start(self, context: GraphContext) -> Tensor:
        return torch.zeros_like(context.injection)

    def step(self, z: Tensor, context: GraphContext) -> Tensor:
        propagated = sparse_product(context.adjacency, z)
        return F.relu(torch.addmm(context.injection, propagated, self.bounded_weight().t()))

    def readout(self, z: Tensor, context: GraphContext) -> Tensor:
        """Logits (N, classes)."""
        return self.head(z)

    def start_network(self) -> nn.Module:
        """Two pointwise layers on the injection."""
        return InjectionStart(self.config["width"])


class InjectionStart(nn.Module):
    """s(b) = W2 relu(W1 b), zero before training."""

    def __init__(self, width: int, inner: int = 32):
        super().__init__()
        self.expand = nn.Linear(width, inner)
        self.contract = nn.Linear(inner, width)
        nn.init.zeros_(self.contract.weight)
        nn.init.zeros_(self.contract.bias)

    def forward(self, context: GraphContext) -> Tensor:
        return self.contract(F.relu(self.expand(context.injection)))

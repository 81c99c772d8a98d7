"""What implicit graph networks share. Shapes: N nodes, F features, D width."""

from __future__ import annotations

from typing import NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from cdeq.data.graphs import Graph
from cdeq.data.sparse import SparseMatrix
from cdeq.models.arguments import arguments_of
from cdeq.models.graph.dropout import checked_probability, drop
from cdeq.models.graph.sparse import project_features, sparse_product
from cdeq.models.graph.start import PropagatedStart


class GraphContext(NamedTuple):
    """The injection b (N, D), which depends on the weights, and the adjacency, which does not."""

    injection: Tensor
    adjacency: Tensor


class GraphSizes(TypedDict):
    """The arguments that all implicit graph networks take: those of `ImplicitGraphNetwork`."""

    features: int
    width: NotRequired[int]
    classes: NotRequired[int]
    dropout: NotRequired[float]


class ImplicitGraphNetwork(nn.Module):
    """b = A (U Omega^T + bias), a start of zeros and a linear head; the map itself is each network's own.

    `dropout` acts in training only, on the features before A spreads them, once for each input, and on the state
    before the head.
    """

    batched = False
    has_bias = True

    def __init__(self, *, features: int, width: int = 64, classes: int = 10, dropout: float = 0.0):
        super().__init__()
        self.config = arguments_of(locals())
        self.injection = nn.Linear(features, width, bias=self.has_bias)
        self.dropout = checked_probability(dropout)
        self.head = nn.Linear(width, classes)

    def project_features(self, features: Tensor | SparseMatrix) -> Tensor:
        """U Omega^T + bias (N, D), behind dropout."""
        return drop(project_features(self.injection, features), self.dropout, self.training)

    def inject(self, x: Graph) -> GraphContext:
        adjacency, features = x
        return GraphContext(sparse_product(adjacency, self.project_features(features)), adjacency)

    def start(self, context: GraphContext) -> Tensor:
        return torch.zeros_like(context.injection)

    def readout(self, z: Tensor, context: GraphContext) -> Tensor:
        """Logits (N, classes)."""
        return self.head(drop(z, self.dropout, self.training))

    def start_network(self) -> nn.Module:
        """A few hops of the injection, on few columns."""
        return PropagatedStart(self.config["width"])

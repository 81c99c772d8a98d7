"""A learned start for equilibrium models on graphs. Shapes: N nodes, D width, H inner, K hops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.models.arguments import arguments_of
from cdeq.models.graph.sparse import sparse_product


class PropagatedStart(nn.Module):
    """s(b) = W2 [h, A h, ..., A^K h], h = relu(W1 b) (N, H), zero before training.

    From one node, a step sees one hop further; what an equilibrium knows beyond its first steps is hops. Here they
    are made on H columns and not on the state's D, so six of them cost about as much as one or two steps.
    `nonnegative`: for states that are, the result is cut off at zero.
    """

    def __init__(self, width: int, inner: int = 16, hops: int = 6, nonnegative: bool = False):
        super().__init__()
        self.config = arguments_of(locals())
        self.hops, self.nonnegative = hops, nonnegative
        self.compress = nn.Linear(width, inner)
        self.expand = nn.Linear(inner * (hops + 1), width)
        nn.init.zeros_(self.expand.weight)
        nn.init.zeros_(self.expand.bias)

    def forward(self, context: Any) -> Tensor:
        """From a context with an `injection` (N, D) and an `adjacency` (N, N) to a state (N, D)."""
        reached = [F.relu(self.compress(context.injection))]
        for _ in range(self.hops):
            reached.append(sparse_product(context.adjacency, reached[-1]))
        z = self.expand(torch.cat(reached, dim=1))
        # Not relu: its gradient at 0 is 0, and a start that is zero everywhere would stay so.
        return z.clamp_min(0) if self.nonnegative else z

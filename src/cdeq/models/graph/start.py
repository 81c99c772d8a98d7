"""Learned starts for equilibrium models on graphs. Shapes: N nodes, D width, H inner, K hops."""

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


class FarStart(nn.Module):
    """s(b) = W2 [h, R h], R = (I - a A)^-1, h = relu(W1 b) (N, H), zero before training.

    For equilibria that know of nodes a hundred hops away: R b is that of an IGNN with W = a I, where it is positive.
    Along a path R fades by a factor e in about 1 / sqrt(3 (1 - a)) nodes; a is `reach`. R is computed by K `hops`,
    products with A, so nothing is seen from further away than K nodes. `nonnegative` as for `PropagatedStart`.
    """

    def __init__(
        self,
        width: int,
        inner: int = 4,
        hops: int = 150,
        reach: float = 0.999,
        nonnegative: bool = False,
    ):
        super().__init__()
        self.config = arguments_of(locals())
        if not 0 < reach < 1:
            raise ValueError(f"reach must be between 0 and 1, not {reach}")
        self.hops, self.reach, self.nonnegative = hops, reach, nonnegative
        self.compress = nn.Linear(width, inner)
        self.expand = nn.Linear(2 * inner, width)
        nn.init.zeros_(self.expand.weight)
        nn.init.zeros_(self.expand.bias)

    def forward(self, context: Any) -> Tensor:
        """From a context with an `injection` (N, D) and an `adjacency` (N, N) to a state (N, D)."""
        h = F.relu(self.compress(context.injection))
        far = resolvent(context.adjacency, h, self.reach, self.hops)
        z = self.expand(torch.cat([h, far], dim=1))
        return z.clamp_min(0) if self.nonnegative else z


def resolvent(adjacency: Tensor, x: Tensor, shrinkage: float, hops: int) -> Tensor:
    """(I - a A)^-1 x for x (N, H), by Chebyshev's semi-iteration (Golub and Varga 1961); a is `shrinkage`, below 1.

    A is symmetric with eigenvalues in [-1, 1]. One product with it for each hop; the error falls by a factor
    a / (1 + sqrt(1 - a^2)) with each, in place of the a of a geometric series.
    """
    before, y, weight = torch.zeros_like(x), x, 2.0
    for _ in range(hops):
        weight = 1 / (1 - shrinkage**2 * weight / 4)
        after = torch.add(x, sparse_product(adjacency, y), alpha=shrinkage)
        before, y = y, torch.lerp(before, after, weight)
    return y

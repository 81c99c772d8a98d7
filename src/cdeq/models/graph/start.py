"""Learned starts for equilibrium models on graphs. Shapes: N nodes, D width, H inner, K hops, S reaches."""

from __future__ import annotations

from collections.abc import Sequence
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
    """s(b) = W2 [h_1, R_1 h_1, ..., h_S, R_S h_S], R_i = (1 - a_i) (I - a_i A)^-1, h_i = relu(W1_i b), zero before training.

    For equilibria that know of nodes a hundred hops away. R_i is a mean over walks of all lengths, of 1 / (1 - a_i) steps
    on average; on a path it reaches some 1 / sqrt(3 (1 - a_i)) nodes far, times three or four. Its K hops are made for
    all S `reaches` a_i at once, on S H columns, and nothing is known from further than K hops: choose K as large as the
    graph is wide. `nonnegative` as for `PropagatedStart`.
    """

    def __init__(
        self,
        width: int,
        inner: int = 4,
        hops: int = 100,
        reaches: Sequence[float] = (0.99, 0.999),
        nonnegative: bool = False,
    ):
        super().__init__()
        self.config = arguments_of(locals()) | {"reaches": list(reaches)}
        if not all(0 < reach < 1 for reach in reaches):
            raise ValueError(f"reaches must be between 0 and 1, not {list(reaches)}")
        self.hops, self.nonnegative = hops, nonnegative
        columns = inner * len(reaches)
        self.compress = nn.Linear(width, columns)
        self.expand = nn.Linear(2 * columns, width)
        nn.init.zeros_(self.expand.weight)
        nn.init.zeros_(self.expand.bias)
        each = torch.tensor(reaches).repeat_interleave(inner)
        self.register_buffer("reach", each, persistent=False)

    def forward(self, context: Any) -> Tensor:
        """From a context with an `injection` (N, D) and an `adjacency` (N, N) to a state (N, D)."""
        reach: Any = self.reach
        h = F.relu(self.compress(context.injection))
        far = resolvent(context.adjacency, (1 - reach) * h, reach, self.hops)
        z = self.expand(torch.cat([h, far], dim=1))
        return z.clamp_min(0) if self.nonnegative else z


def resolvent(adjacency: Tensor, x: Tensor, shrinkage: Tensor, hops: int) -> Tensor:
    """(I - a_i A)^-1 x_i for each column i of x (N, H), by Chebyshev's semi-iteration (Golub and Varga 1961).

    A symmetric with eigenvalues in [-1, 1], a = `shrinkage` (H,) below 1. One product with A for each hop; the error
    falls by a / (1 + sqrt(1 - a^2)) with each, in place of the a of a geometric series.
    """
    weight = torch.ones_like(shrinkage)
    before, y = torch.zeros_like(x), x
    for hop in range(hops):
        weight = 1 / (1 - shrinkage**2 * weight * (0.5 if hop == 0 else 0.25))
        after = shrinkage * sparse_product(adjacency, y) + x
        before, y = y, torch.lerp(before, after, weight)
    return y

"""Learned starts for equilibrium models on graphs. Shapes: N nodes, D width, H inner, K hops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.models.arguments import arguments_of
from cdeq.models.graph.sparse import sparse_product

LEAK = 0.1
"""Slope of a leaky relu below zero: of few columns all might be zero at the nodes that matter, and would stay so."""


def cut_off(z: Tensor) -> Tensor:
    """max(z, 0) with a gradient of 1 at 0, so that a start that is zero everywhere does not stay so.

    That of relu is 0 there; that of `clamp_min` is 1 or 0 by the version of torch. Where no gradient is recorded it is
    relu, twenty times as fast.
    """
    return z.masked_fill(z < 0, 0) if torch.is_grad_enabled() else F.relu(z)


class PropagatedStart(nn.Module):
    """s(b) = W2 [h, A h, ..., A^K h], h = relu(W1 b) (N, H), zero before training.

    From one node, a step sees one hop further; what an equilibrium knows beyond its first steps is hops. Here they
    are made on H columns and not on the state's D, so six of them cost little more than one step. (On PubMed 16 columns
    instead of 8 cost two thirds of a step more, and bring the start and the next steps 5% nearer.)
    `nonnegative`: for states that are, the result is cut off at zero.
    """

    def __init__(self, width: int, inner: int = 8, hops: int = 6, nonnegative: bool = False):
        super().__init__()
        self.config = arguments_of(locals())
        self.hops, self.nonnegative = hops, nonnegative
        self.compress = nn.Linear(width, inner)
        self.expand = nn.Linear(inner * (hops + 1), width)
        nn.init.zeros_(self.expand.weight)
        nn.init.zeros_(self.expand.bias)

    def output_layers(self) -> list[list[nn.Module]]:
        """The linear layers at the end, for the one tensor of the state."""
        return [[self.expand]]

    def forward(self, context: Any) -> Tensor:
        """From a context with an `injection` (N, D) and an `adjacency` (N, N) to a state (N, D)."""
        reached = [F.relu(self.compress(context.injection))]
        for _ in range(self.hops):
            reached.append(sparse_product(context.adjacency, reached[-1]))
        z = self.expand(torch.cat(reached, dim=1))
        return cut_off(z) if self.nonnegative else z


class FarStart(nn.Module):
    """s(b) = W2 [h, R h], R = (1 - a) (I - a A)^-1, h = leaky_relu(W1 b) (N, H), zero before training.

    For equilibria that know of nodes a hundred hops away: that of an IGNN with W = a I, where it is positive, is R b up
    to a factor. With it R h is as large as h, and an update of W2 changes the start as little as any other.
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

    def output_layers(self) -> list[list[nn.Module]]:
        """The linear layers at the end, for the one tensor of the state."""
        return [[self.expand]]

    def forward(self, context: Any) -> Tensor:
        """From a context with an `injection` (N, D) and an `adjacency` (N, N) to a state (N, D)."""
        h = F.leaky_relu(self.compress(context.injection), LEAK)
        far = (1 - self.reach) * resolvent(context.adjacency, h, self.reach, self.hops)
        z = self.expand(torch.cat([h, far], dim=1))
        return cut_off(z) if self.nonnegative else z


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

"""The monotone implicit graph neural network (Baker et al. 2023). Shapes: N nodes, F features, D width."""

from __future__ import annotations

import copy
import math
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.equilibrium.contract import Contraction
from cdeq.models.graph.base import GraphContext, GraphSizes, ImplicitGraphNetwork
from cdeq.models.graph.bounds import ROUNDING, degree_bound
from cdeq.models.graph.sparse import sparse_product

NEGATIVE_SHARE = 0.2
"""Of the signs in D: without any the Cayley transform reaches no reflection."""


class MIGNN(ImplicitGraphNetwork):
    """Z = relu(A Z W^T + b), b = A (U Omega^T + bias), W = kappa sigmoid(mu) (I - C)(I + C)^-1 D.

    C = P - P^T is skew-symmetric and D a fixed diagonal of signs, so that W is an orthogonal matrix times
    less than kappa < 1. With a normalised adjacency, |A|_2 = 1, I - W (x) A is strongly monotone whatever
    the weights. What is solved for is the pre-activation u, by the Peaceman-Rachford splitting

        z = relu(u),  u_half = 2 z - u,  z_half = V(u_half + alpha b),  u' = 2 z_half - u_half,

    V = ((1 + alpha) I - alpha W (x) A)^-1; the equilibrium is z = relu(u). V is applied inexactly, by `sweeps`
    sweeps y <- (u_half + alpha b + alpha A y W^T) / (1 + alpha) from y = z. Because they start there, the
    equilibrium is that of the first line for any number of sweeps, and for alpha <= 1 the step is a
    contraction. With the defaults, alpha = 1 and one sweep, it is u' = A relu(u) W^T + b.

    A sweep takes one product with A, as one evaluation of the first line does, so a step counts as `sweeps`
    evaluations: `Solution.evaluations` times `model.sweeps`. The method's own solver is
    `cdeq.solvers.Anderson(window=5, mixing=0.5)`.
    """

    signs: Tensor

    def __init__(
        self,
        *,
        kappa: float = 0.9,
        alpha: float = 1.0,
        sweeps: int = 1,
        **sizes: Unpack[GraphSizes],
    ):
        super().__init__(**sizes)
        self.config |= {"kappa": kappa, "alpha": alpha, "sweeps": sweeps}
        if not 0 < kappa < 1:
            raise ValueError(f"kappa must be between 0 and 1, not {kappa}")
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha must be positive and finite, not {alpha}")
        self.kappa, self.alpha, self.sweeps = kappa, alpha, _checked_sweeps(sweeps)
        width = self.config["width"]
        self.free = nn.Parameter(torch.empty(width, width).uniform_(-1, 1) / width**0.5)
        self.mu = nn.Parameter(torch.ones(1))
        signs = torch.ones(width)
        signs[torch.randperm(width)[: round(NEGATIVE_SHARE * width)]] = -1
        self.register_buffer("signs", signs)

    def with_sweeps(self, sweeps: int) -> MIGNN:
        """A copy with the same weights and equilibrium, whose step applies V by another number of sweeps."""
        other = copy.deepcopy(self)
        other.sweeps = other.config["sweeps"] = _checked_sweeps(sweeps)
        return other

    def orthogonal_weight(self) -> Tensor:
        """W (D, D), with W W^T = (kappa sigmoid(mu))^2 I."""
        skew = self.free - self.free.t()
        identity = torch.eye(len(skew), device=skew.device, dtype=skew.dtype)
        # The two factors commute, so one solve is enough.
        rotation = torch.linalg.solve(identity + skew, identity - skew)
        return self.kappa * torch.sigmoid(self.mu) * rotation * self.signs

    def step(self, u: Tensor, context: GraphContext) -> Tensor:
        b, rate = context.injection, self.alpha / (1 + self.alpha)
        # Not kept in the context: a student's context mixes two weights, and W is not linear in them.
        weight = self.orthogonal_weight().t()
        z_half, u_half = F.relu(u), u.abs()  # |u| = 2 relu(u) - u
        if self.sweeps > 1:
            constant = torch.lerp(u_half, b, rate)  # (u_half + alpha b) / (1 + alpha)
            for _ in range(self.sweeps - 1):
                propagated = sparse_product(context.adjacency, z_half)
                z_half = torch.addmm(constant, propagated, weight, alpha=rate)
        # The last sweep and the reflection 2 z_half - u_half at once, which saves passes over the state.
        propagated = sparse_product(context.adjacency, z_half)
        return torch.addmm(torch.lerp(u_half, b, 2 * rate), propagated, weight, alpha=2 * rate)

    @torch.no_grad()
    def contraction(self, context: GraphContext) -> Contraction:
        """|1 - 2r| + 2 (1 - r) (s + s^2 + ... + s^(n-1)) + 2 s^n, r = alpha / (1 + alpha), s = r |A|_2 |W|_2, n sweeps.

        The last sweep has |u| with weights 1 - r, (1 - r) r (W (x) A), ..., and relu(u) with (r W (x) A)^n; twice that
        less |u| is the step, and neither |u| nor relu(u) widens a difference.
        """
        spread, _ = degree_bound(context.adjacency)
        rate = self.alpha / (1 + self.alpha)
        sweep = rate * spread * float(self.kappa * torch.sigmoid(self.mu))
        between = sum(sweep**i for i in range(1, self.sweeps))
        factor = abs(1 - 2 * rate) + 2 * (1 - rate) * between + 2 * sweep**self.sweeps
        return Contraction(factor * ROUNDING)

    def readout(self, u: Tensor, context: GraphContext) -> Tensor:
        """Logits (N, classes) of z = relu(u)."""
        return super().readout(F.relu(u), context)


def _checked_sweeps(sweeps: int) -> int:
    if sweeps < 1:
        raise ValueError(f"a step takes at least 1 sweep, not {sweeps}")
    return sweeps

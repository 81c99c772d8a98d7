"""Anderson mixing with learned weights (Bai et al. 2022, Neural Deep Equilibrium Solvers).

Shapes: B samples, n <= m states remembered, C numbers that describe a residual. Weights alpha (n,) and
beta () serve the whole state; alpha (B, n) and beta (B,) serve each sample of a state with a batch axis.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.equilibrium.contract import Context, EquilibriumModel, check_contract, is_batched
from cdeq.equilibrium.states import State, map_state, norm_dtype, relative_distance, tensors_of
from cdeq.placement import in_single

SMALLEST_RESIDUAL = 1e-12
"""Relative residuals below this tell no more about how to mix; their logarithm must stay finite."""


def centred(alpha_hat: Tensor) -> Tensor:
    """alpha = alpha_hat + (1 - sum_i alpha_hat_i) / n: the nearest weights that sum to 1, over the last axis."""
    return alpha_hat + (1 - alpha_hat.sum(dim=-1, keepdim=True)) / alpha_hat.shape[-1]


def weighted_sum(states: Sequence[State], weights: Tensor) -> State:
    """sum_i w_i z_i in at least single precision, in the dtype of the first; w (n,) or (B, n)."""
    if weights.shape[-1] != len(states) or not states:
        raise ValueError(f"{len(states)} states need as many weights, not {weights.shape[-1]}")

    def combine(*parts: Tensor) -> Tensor:
        dtype = norm_dtype(parts[0].dtype)
        trailing = (1,) * (parts[0].ndim - (weights.ndim - 1))
        # State by state: stacking them for one product would copy all that are remembered.
        scales = [w.reshape(*w.shape, *trailing).to(dtype) for w in weights.unbind(-1)]
        total = scales[0] * parts[0].to(dtype)
        for scale, part in zip(scales[1:], parts[1:], strict=True):
            total.addcmul_(scale, part.to(dtype))  # in place: no gradient needs the partial sums
        return total.to(parts[0].dtype)

    return map_state(combine, *states)


def mixed_state(
    states: Sequence[State], images: Sequence[State], alpha: Tensor, beta: Tensor
) -> State:
    """beta sum_i alpha_i f(z_i) + (1 - beta) sum_i alpha_i z_i, for states z_i and their images f(z_i)."""
    if len(states) != len(images):
        raise ValueError(f"{len(states)} states, but {len(images)} images: one each is needed")
    beta = beta.unsqueeze(-1)
    weights = torch.cat([(1 - beta) * alpha, beta * alpha], dim=-1)
    return weighted_sum([*states, *images], weights)


def mixed_residual(states: Sequence[State], images: Sequence[State], alpha: Tensor) -> State:
    """G alpha = sum_i alpha_i (f(z_i) - z_i): what Anderson acceleration makes as small as it can."""
    return weighted_sum([*states, *images], torch.cat([-alpha, alpha], dim=-1))


class MixingNetwork(nn.Module, ABC):
    """(alpha_hat, beta) = TCN(d_1 ... d_n), with d_i = `describe` of the residual f(z_i) - z_i.

    Two causal convolutions over the history; the output at the newest residual has a channel for
    the weight of each age and one for beta, so every weight depends on all residuals up to now.
    beta = 2 sigmoid, between 0 and 2, where the published one is a sigmoid: that one comes near 1 only
    where its gradient is gone, this one is 1 in the middle of its range. Untrained, all weight is on the
    newest state and beta = 1: Picard iteration, exactly.
    """

    def __init__(self, *, features: int, hidden: int, window: int = 6, kernel: int = 5):
        super().__init__()
        for name, size in [("hidden", hidden), ("window", window), ("kernel", kernel)]:
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        self.window, self.kernel = window, kernel
        self.first = nn.Conv1d(features, hidden, kernel)
        self.second = nn.Conv1d(hidden, window + 1, kernel)
        nn.init.zeros_(self.second.weight)
        assert self.second.bias is not None
        with torch.no_grad():
            self.second.bias.zero_()[0] = 1  # the weight of age 0, the newest

    @abstractmethod
    def describe(self, z: State, image: State, context: Context) -> Tensor:
        """The residual f(z) - z in C numbers, (C,) or (B, C); called once for each state."""

    def forward(self, descriptions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """alpha_hat (n,) and beta (), or (B, n) and (B,), from n <= m descriptions, the newest last."""
        n = len(descriptions)
        if not 1 <= n <= self.window:
            raise ValueError(f"between 1 and {self.window} descriptions are mixed, not {n}")
        past = (self.kernel - 1, 0)  # zeros before the first residual and none after the last
        history = F.relu(self.first(F.pad(torch.stack(list(descriptions), dim=-1), past)))
        newest = self.second(F.pad(history, past)[..., -self.kernel :]).squeeze(-1)
        return newest[..., :n].flip(-1), 2 * torch.sigmoid(newest[..., -1])


class Mixing(NamedTuple):
    """One step of a learned solver: the new state, and what it was mixed from."""

    state: State
    states: list[State]
    images: list[State]
    alpha: Tensor
    beta: Tensor


class LearnedSolver(nn.Module):
    """z_0 = h(context); z_{k+1} = beta_k sum_i alpha_i f(z_i) + (1 - beta_k) sum_i alpha_i z_i.

    `initial` is h, `predictor` gives the weights from the residuals so far; f is the teacher's map. At most
    m = `predictor.window` states are mixed, the current one among them. Nothing bounds the iterates: unlike
    Anderson acceleration, a learned solver need not converge, and can be trusted only as far as it was tried.
    """

    def __init__(self, initial: nn.Module, predictor: MixingNetwork):
        super().__init__()
        self.initial, self.predictor = initial, predictor

    @property
    def window(self) -> int:
        return self.predictor.window

    def mixings(
        self, teacher: EquilibriumModel, context: Context, z_0: State, steps: int
    ) -> Iterator[Mixing]:
        """The steps from `z_0`, one evaluation of the teacher's map each, made when asked for."""
        if steps < 0:
            raise ValueError(f"steps must not be negative, not {steps}")
        z = z_0
        states: deque[State] = deque(maxlen=self.window)
        images: deque[State] = deque(maxlen=self.window)
        # A residual is described when it is new and never again.
        descriptions: deque[Tensor] = deque(maxlen=self.window)
        for _ in range(steps):
            image = in_single(teacher.step(z, context))
            states.append(z)
            images.append(image)
            descriptions.append(self.predictor.describe(z, image, context))
            alpha_hat, beta = self.predictor(list(descriptions))
            alpha = centred(alpha_hat)
            z = mixed_state(states, images, alpha, beta)
            yield Mixing(z, list(states), list(images), alpha, beta)

    def rollout(self, teacher: EquilibriumModel, context: Context, steps: int) -> Iterator[State]:
        """z_0 ... z_steps; z_k has cost k evaluations of the teacher's map.

        Gradients pass through those evaluations to both networks, and to the teacher's weights unless
        they are frozen; under `torch.no_grad()` nothing is recorded.
        """
        z_0 = in_single(self.initial(context))
        yield z_0
        for mixing in self.mixings(teacher, context, z_0, steps):
            yield mixing.state


class SolvedBatch(Protocol):
    """All that the objective reads of a batch: the teacher's input and its equilibrium z*."""

    @property
    def x(self) -> Any: ...
    @property
    def endpoint(self) -> State: ...


@dataclass(frozen=True, kw_only=True)
class SolverLossWeights:
    """Weights of the objective's three terms; the last falls to 0 linearly over `anneal` updates."""

    distance: float = 0.1
    start: float = 5.0
    residual: float = 1e-4
    anneal: int = 1000

    def __post_init__(self) -> None:
        for name in ("distance", "start", "residual", "anneal"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")

    def residual_at(self, update: int) -> float:
        """The last term's weight at an update."""
        return self.residual * max(0.0, 1 - update / self.anneal) if self.anneal else 0.0


class SolverObjective(nn.Module):
    """.1 sum_k w_k |z_k - z*| / |z*| + 5 |z_0 - z*|^2 / |z*|^2 + 1e-4 sum_k |G_k alpha_k|_1, k = 1 ... depth.

    w_k = k / (1 + ... + depth) rises linearly and sums to 1; |.|_1 is the mean over entries. The
    published first two terms are not relative to z*: relative, their weights mean the same on every task.
    The teacher is a frozen copy in evaluation mode, so that the caller's keeps its mode and its gradients.
    """

    def __init__(
        self,
        solver: LearnedSolver,
        teacher: nn.Module,
        depth: int,
        weights: SolverLossWeights | None = None,
    ):
        super().__init__()
        check_contract(teacher)
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.solver, self.depth = solver, depth
        self.weights = SolverLossWeights() if weights is None else weights
        self.teacher: Any = copy.deepcopy(teacher).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> SolverObjective:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, batch: SolvedBatch, update: int) -> tuple[Tensor, dict[str, Tensor]]:
        batched, endpoint = is_batched(self.teacher), batch.endpoint
        context = self.teacher.inject(batch.x)
        z_0 = in_single(self.solver.initial(context))
        start = relative_distance(z_0, endpoint, batched)
        distances, residuals = [], []
        for mixing in self.solver.mixings(self.teacher, context, z_0, self.depth):
            distances.append(relative_distance(mixing.state, endpoint, batched).mean())
            mixed = mixed_residual(mixing.states, mixing.images, mixing.alpha)
            residuals.append(_mean_size(mixed))
        total = self.depth * (self.depth + 1) / 2
        rising = [k / total * distance for k, distance in enumerate(distances, start=1)]
        loss = (
            self.weights.distance * torch.stack(rising).sum()
            + self.weights.start * start.square().mean()
            + self.weights.residual_at(update) * torch.stack(residuals).sum()
        )
        return loss, {
            "distance_0": start.detach().mean(),
            "distance_1": distances[0].detach(),
            "distance": distances[-1].detach(),
        }


def _mean_size(state: State) -> Tensor:
    """The mean of |entry| over all entries of a state."""
    tensors = tensors_of(state)
    return torch.stack([t.abs().sum() for t in tensors]).sum() / sum(t.numel() for t in tensors)

"""More maps that are not cdeq's own: textbook algorithms without weights, and a network with hardly any data.

Shapes: B samples, A atoms of a dictionary, D numbers of a signal, n points of each side of a transport.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cdeq
from cdeq.data.embedded import digits_images
from stranger_maps import Stranger


class Algorithm(nn.Module):
    """A map of its inputs alone, from zeros."""

    def inject(self, x: Any) -> Any:
        return x

    def start(self, context: Any) -> Tensor:
        return torch.zeros_like(context)

    def readout(self, z: Tensor, context: Any) -> Tensor:
        return z


class SparseCode(Algorithm):
    """ISTA: z = shrink(z - t D'(D z - x)); some codes are exactly zero. Daubechies et al. 2004."""

    def __init__(self, dictionary: Tensor, penalty: float = 0.1):
        super().__init__()
        self.register_buffer("d", dictionary)
        self.penalty, self.rate = penalty, 1 / float(torch.linalg.matrix_norm(dictionary, 2)) ** 2

    def start(self, context: Tensor) -> Tensor:
        return context.new_zeros(len(context), self.d.shape[1])

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        moved = z - self.rate * ((z @ self.d.T - context) @ self.d)
        return moved.sign() * F.relu(moved.abs() - self.rate * self.penalty)


class Jacobi(Algorithm):
    """Damped Jacobi steps for Poisson's equation on a grid, zero around it."""

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        p = F.pad(z, (1, 1, 1, 1))
        beside = p[..., 1:-1, :-2] + p[..., 1:-1, 2:] + p[..., :-2, 1:-1] + p[..., 2:, 1:-1]
        return 0.2 * z + 0.8 * (beside + context) / 4


class MeanField(Algorithm):
    """m = tanh(h + sum J m) on a grid of spins; fields and couplings are the input's, (B, 3, H, W)."""

    def inject(self, x: Tensor) -> dict[str, Tensor]:
        return {"field": x[:, :1], "right": x[:, 1:2, :, :-1], "down": x[:, 2:, :-1]}

    def start(self, context: dict[str, Tensor]) -> Tensor:
        return torch.zeros_like(context["field"])

    def step(self, z: Tensor, context: dict[str, Tensor]) -> Tensor:
        right, down = context["right"], context["down"]
        total = context["field"] + F.pad(right * z[..., 1:], (0, 1))
        total = total + F.pad(right * z[..., :-1], (1, 0))
        total = total + F.pad(down * z[..., 1:, :], (0, 0, 0, 1))
        return torch.tanh(total + F.pad(down * z[..., :-1, :], (0, 0, 1, 0)))


class Sinkhorn(Algorithm):
    """Entropic optimal transport, both sides in one step; z (B, n) is the dual of the first. Cuturi 2013."""

    width = 0.1

    def start(self, context: dict[str, Tensor]) -> Tensor:
        return torch.zeros_like(context["first"])

    def step(self, z: Tensor, context: dict[str, Tensor]) -> Tensor:
        cost, w = context["cost"], self.width
        other = context["second"].log() - torch.logsumexp((z[:, :, None] - cost) / w, dim=1)
        own = context["first"].log() - torch.logsumexp(other[:, None] - cost / w, dim=2)
        return w * (own - own.mean(dim=1, keepdim=True))


class TanhNetwork(Algorithm):
    """z = tanh(W z + E x) with a head; scaled to a spectral radius of .9 once it is trained."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.embed, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.inner = nn.Linear(width, width)
        nn.init.orthogonal_(self.inner.weight, gain=0.6)

    def inject(self, x: Tensor) -> Tensor:
        return self.embed(x.flatten(1))

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + context)

    def readout(self, z: Tensor, context: Tensor) -> Tensor:
        return self.head(z)


Draw = Callable[[int, torch.Generator], Any]


def _drawn(teacher: nn.Module, draw: Draw, size: int) -> Stranger:
    """Sixteen batches to distil on, and two of twice the size to judge on."""

    def batch(count: int, seed: int) -> Any:
        return draw(count, torch.Generator().manual_seed(seed))

    train = [batch(size, 100 + i) for i in range(16)]
    return Stranger(teacher, train, [batch(2 * size, i) for i in range(2)])


def sparse_coding(atoms: int = 64, length: int = 32) -> Stranger:
    dictionary = torch.randn(length, atoms, generator=torch.Generator().manual_seed(0))
    dictionary = dictionary / dictionary.norm(dim=0)

    def draw(count: int, g: torch.Generator) -> Tensor:
        code = torch.randn(count, atoms, generator=g) * (
            torch.rand(count, atoms, generator=g) < 0.1
        )
        return code @ dictionary.T + 0.02 * torch.randn(count, length, generator=g)

    return _drawn(SparseCode(dictionary), draw, 64)


def poisson(side: int = 16) -> Stranger:
    return _drawn(Jacobi(), lambda count, g: torch.randn(count, 1, side, side, generator=g), 32)


def spins(side: int = 12) -> Stranger:
    def draw(count: int, g: torch.Generator) -> Tensor:
        fields = 0.5 * torch.randn(count, 1, side, side, generator=g)
        couplings = 0.2 + 0.12 * torch.randn(count, 2, side, side, generator=g)
        return torch.cat([fields, couplings], dim=1)

    return _drawn(MeanField(), draw, 32)


def transport(points: int = 20) -> Stranger:
    def draw(count: int, g: torch.Generator) -> dict[str, Tensor]:
        here, there = (torch.rand(count, points, 2, generator=g) for _ in range(2))
        first, second = (
            torch.softmax(0.5 * torch.randn(count, points, generator=g), dim=1) for _ in range(2)
        )
        cost = (here[:, :, None] - there[:, None]).square().sum(dim=-1)
        return {"cost": cost, "first": first, "second": second}

    return _drawn(Sinkhorn(), draw, 64)


def two_batches() -> Stranger:
    digits = digits_images(0)
    batches = list(zip(digits.train.x.split(64), digits.train.y.split(64), strict=True))[:-1]
    torch.manual_seed(0)
    model = TanhNetwork()
    fit = cdeq.FitConfig(updates=150, learning_rate=3e-3)
    cdeq.teach(model, batches, cdeq.TeachConfig(fit=fit, depths=(12, 16)))
    with torch.no_grad():
        weight = model.inner.weight
        weight.mul_(0.9 / torch.linalg.eigvals(weight).abs().max())
    test = [digits.test.x[:128], digits.test.x[128:256]]
    return Stranger(model, [x for x, _ in batches[:2]], test)


ALGORITHMS: dict[str, Callable[[], Stranger]] = {
    "sparse coding": sparse_coding,
    "Poisson's equation": poisson,
    "spins, mean field": spins,
    "optimal transport": transport,
    "network, two batches": two_batches,
}

"""Equilibrium maps that are not cdeq's own teachers: linear, monotone, a denoiser, planning, optimisation, torchdeq.

Some have weights, some none; some are slow on purpose. Shapes: B samples, D numbers in each, N unknowns, M constraints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cdeq
from cdeq.data.embedded import digits_images


@dataclass(frozen=True)
class Stranger:
    """A map, inputs to distil it on and inputs to judge it on, and `more` like both, for counts of samples."""

    teacher: nn.Module
    train: list[Any]
    test: list[Any]
    more: list[Any] = field(default_factory=list)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Linear(nn.Module):
    """z = A z + B x. The start is a guess that comes with the input: it knows something."""

    def __init__(self, a: Tensor, b: Tensor):
        super().__init__()
        self.a = nn.Parameter(a)
        self.register_buffer("b", b)

    def inject(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"injected": x["x"] @ self.b.T, "guess": x["guess"]}

    def start(self, context: dict[str, Tensor]) -> Tensor:
        return context["guess"]

    def step(self, z: Tensor, context: dict[str, Tensor]) -> Tensor:
        return z @ self.a.T + context["injected"]

    def readout(self, z: Tensor, context: dict[str, Tensor]) -> Tensor:
        return z


def linear(radius: float, *, normal: bool = True, dim: int = 64, inputs: int = 16) -> Stranger:
    """A random map of this spectral radius: symmetric, or far from normal (large powers before they fall)."""
    g, double = _generator(0), {"dtype": torch.float64}
    q, _ = torch.linalg.qr(torch.randn(dim, dim, generator=g, **double))
    values = torch.rand(dim, generator=g, **double) * 1.6 * radius - 0.6 * radius
    values[0], values[1], values[2] = radius, radius - 0.5 * (1 - radius), 0.95 * radius
    middle = torch.diag(values)
    if not normal:
        above = torch.randn(dim, dim, generator=g, **double) * 1.5 / math.sqrt(dim)
        middle = middle + torch.triu(above, 1)
    a = q @ middle @ q.T
    b = torch.randn(dim, inputs, generator=g, **double) / math.sqrt(inputs)
    inverse = torch.linalg.inv(torch.eye(dim, **double) - a)

    def batch(size: int, seed: int) -> dict[str, Tensor]:
        g = _generator(seed)
        x = torch.randn(size, inputs, generator=g, **double)
        star = x @ b.T @ inverse.T
        noise = torch.randn(star.shape, generator=g, **double) / math.sqrt(dim)
        guess = star + 0.5 * star.norm(dim=1, keepdim=True) * noise
        return {"x": x.float(), "guess": guess.float()}

    return Stranger(
        Linear(a.float(), b.float()),
        [batch(64, 100 + i) for i in range(16)],
        [batch(128, i) for i in range(2)],
        [batch(128, i) for i in range(2, 10)],
    )


class Monotone(nn.Module):
    """z = relu(W z + U x + b) with W = (1 - m) I - A'A + S - S' (Winston & Kolter 2020), by forward-backward steps."""

    def __init__(self, inputs: int = 64, width: int = 80, margin: float = 0.1, step: float = 0.12):
        super().__init__()
        self.a = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.s = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.input, self.output = nn.Linear(inputs, width), nn.Linear(width, 10)
        self.margin, self.step_size = margin, step

    def inject(self, x: Tensor) -> Tensor:
        return self.input(x.flatten(1))

    def start(self, context: Tensor) -> Tensor:
        return torch.zeros_like(context)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        eye = torch.eye(len(self.a), dtype=z.dtype, device=z.device)
        w = (1 - self.margin) * eye - self.a.T @ self.a + self.s - self.s.T
        return torch.relu(z - self.step_size * (z - z @ w.T - context))

    def readout(self, z: Tensor, context: Tensor) -> Tensor:
        return self.output(z)


def monotone() -> Stranger:
    digits = digits_images(0)
    torch.manual_seed(0)
    model = Monotone()
    batches = list(zip(digits.train.x.split(64), digits.train.y.split(64), strict=True))[:-1]
    config = cdeq.TeachConfig(
        fit=cdeq.FitConfig(updates=150),
        depths=(30, 40),
        gradient=cdeq.Phantom(steps=4, damping=1.0),
    )
    cdeq.teach(model, batches, config)
    return Stranger(model, [x for x, _ in batches], [digits.test.x[:128], digits.test.x[128:256]])


class Denoiser(nn.Module):
    """A gradient step on |z - y|^2 / 2 + weight sum sqrt(|Dz|^2 + eps^2): smoothed total variation. No weights."""

    def __init__(self, weight: float = 0.15, eps: float = 0.02):
        super().__init__()
        self.weight, self.eps = weight, eps
        self.step_size = 1 / (1 + 8 * weight / eps)

    def inject(self, x: Tensor) -> Tensor:
        return x

    def start(self, context: Tensor) -> Tensor:
        return context  # the noisy image

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        right = F.pad(z[..., :, 1:] - z[..., :, :-1], (0, 1))
        down = F.pad(z[..., 1:, :] - z[..., :-1, :], (0, 0, 0, 1))
        right = right / (right.square() + self.eps**2).sqrt()
        down = down / (down.square() + self.eps**2).sqrt()
        divergence = right - F.pad(right[..., :, :-1], (1, 0))
        divergence = divergence + down - F.pad(down[..., :-1, :], (0, 0, 1, 0))
        return z - self.step_size * (z - context - self.weight * divergence)

    def readout(self, z: Tensor, context: Tensor) -> Tensor:
        return z


def _noisy_shapes(count: int, seed: int, size: int = 32) -> Tensor:
    """Rectangles and discs of random grey, with noise."""
    g, images = _generator(seed), []
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    for _ in range(count):
        image = torch.full((size, size), float(torch.rand((), generator=g)))
        for _ in range(5):
            across, down, wide, high = (torch.rand(4, generator=g) * size).tolist()
            wide, high = wide / 3 + 2, high / 3 + 2
            inside = ((x - across).abs() < wide) & ((y - down).abs() < high)
            if torch.rand((), generator=g) < 0.5:
                inside = (x - across) ** 2 + (y - down) ** 2 < wide**2
            image = torch.where(inside, torch.rand((), generator=g), image)
        images.append(image)
    clean = torch.stack(images)[:, None]
    return clean + 0.15 * torch.randn(clean.shape, generator=g)


def denoiser() -> Stranger:
    return Stranger(
        Denoiser(),
        [_noisy_shapes(32, 100 + i) for i in range(12)],
        [_noisy_shapes(32, i) for i in range(2)],
        [_noisy_shapes(32, i) for i in range(2, 14)],
    )


class ValueIteration(nn.Module):
    """V = r + gamma max over a cell and its four neighbours, walls closed (B, 1, H, W). It has no weights."""

    def __init__(self, discount: float = 0.95, closed: float = -1e3):
        super().__init__()
        self.discount, self.closed = discount, closed

    def inject(self, x: Tensor) -> dict[str, Tensor]:
        return {"reward": x[:, :1], "free": 1 - x[:, 1:]}

    def start(self, context: dict[str, Tensor]) -> Tensor:
        return torch.zeros_like(context["reward"])

    def step(self, z: Tensor, context: dict[str, Tensor]) -> Tensor:
        free = context["free"]
        value = torch.where(free > 0, z, self.closed)
        around = F.pad(value, (1, 1, 1, 1), value=self.closed)
        moves = [around[..., 1:-1, :-2], around[..., 1:-1, 2:], around[..., :-2, 1:-1]]
        moves += [around[..., 2:, 1:-1], value]
        return (context["reward"] + self.discount * torch.stack(moves).amax(dim=0)) * free

    def readout(self, z: Tensor, context: dict[str, Tensor]) -> Tensor:
        return z


def _grid_worlds(count: int, seed: int, size: int = 16) -> Tensor:
    """Reward and walls (B, 2, H, W): small costs everywhere, two goals."""
    g = _generator(seed)
    walls = (torch.rand(count, 1, size, size, generator=g) < 0.2).float()
    reward = -0.1 * torch.rand(count, 1, size, size, generator=g)
    for i in range(count):
        for row, column in torch.randint(size, (2, 2), generator=g).tolist():
            reward[i, 0, row, column], walls[i, 0, row, column] = 1.0, 0.0
    return torch.cat([reward, walls], dim=1)


def value_iteration() -> Stranger:
    return Stranger(
        ValueIteration(),
        [_grid_worlds(64, 100 + i) for i in range(12)],
        [_grid_worlds(64, i) for i in range(2)],
        [_grid_worlds(64, i) for i in range(2, 8)],
    )


class Splitting(nn.Module):
    """min x'Px/2 + q'x, l <= A x <= u, by ADMM as in OSQP (Stellato et al. 2020), its matrix inverted once.

    The state (B, N + M) is x and the point whose projection on [l, u] is the constraint's value. It has no weights.
    """

    def __init__(self, p: Tensor, a: Tensor, penalty: float = 0.3, relaxation: float = 1.6):
        super().__init__()
        self.register_buffer("a", a)
        damping = 1e-6 * torch.eye(len(p), dtype=p.dtype)
        self.register_buffer("inverse", torch.linalg.inv(p + damping + penalty * a.T @ a))
        self.unknowns, self.penalty, self.relaxation = len(p), penalty, relaxation

    def inject(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return x

    def start(self, context: dict[str, Tensor]) -> Tensor:
        return F.pad(torch.zeros_like(context["q"]), (0, len(self.a)))

    def step(self, z: Tensor, context: dict[str, Tensor]) -> Tensor:
        x, point = z.split([self.unknowns, len(self.a)], dim=1)
        value = torch.clamp(point, context["low"], context["high"])
        dual = point - value
        right = 1e-6 * x - context["q"] + self.penalty * (value - dual) @ self.a
        new = right @ self.inverse.T
        relaxed = self.relaxation
        x = relaxed * new + (1 - relaxed) * x
        point = relaxed * new @ self.a.T + (1 - relaxed) * value + dual
        return torch.cat([x, point], dim=1)

    def readout(self, z: Tensor, context: dict[str, Tensor]) -> Tensor:
        return z[:, : self.unknowns]


def quadratic_programs(unknowns: int = 30, constraints: int = 45) -> Stranger:
    """One problem with other costs and bounds every time, as in model predictive control."""
    g, double = _generator(0), {"dtype": torch.float64}
    root = torch.randn(unknowns, unknowns, generator=g, **double)
    p = root @ root.T / unknowns + 0.01 * torch.eye(unknowns, **double)
    a = torch.randn(constraints, unknowns, generator=g, **double) / math.sqrt(unknowns)
    usual = torch.randn(unknowns, generator=g)

    def batch(size: int, seed: int) -> dict[str, Tensor]:
        g = _generator(seed)
        q = usual + 0.7 * torch.randn(size, unknowns, generator=g)
        bound = 0.2 + 0.5 * torch.rand(size, constraints, generator=g)
        return {"q": q, "low": -bound, "high": bound}

    return Stranger(
        Splitting(p.float(), a.float()),
        [batch(64, 100 + i) for i in range(16)],
        [batch(128, i) for i in range(2)],
        [batch(128, i) for i in range(2, 10)],
    )


def torchdeq_pair() -> Stranger:
    """A model written on torchdeq and trained there, its state two tensors that drive each other."""
    from torchdeq import get_deq

    class Pair(nn.Module):
        def __init__(self, width: int = 48):
            super().__init__()
            self.embed, self.head = nn.Linear(64, width), nn.Linear(2 * width, 10)
            self.first, self.second = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
            self.deq = get_deq(f_solver="anderson", f_max_iter=40, f_tol=1e-4)

        def forward(self, x: Tensor) -> Tensor:
            injected = self.embed(x.flatten(1))

            def step(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
                both = torch.cat([a, b], dim=1)
                return (
                    0.1 * a + 0.9 * torch.tanh(self.first(both) + injected),
                    0.6 * b + 0.4 * torch.tanh(self.second(both)),
                )

            zero = torch.zeros_like(injected)
            states, _ = self.deq(step, (zero, zero))
            return self.head(torch.cat(states[-1], dim=1))

    digits = digits_images(0)
    torch.manual_seed(0)
    model = Pair()
    batches = list(zip(digits.train.x.split(64), digits.train.y.split(64), strict=True))[:-1]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(6):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    teacher = cdeq.from_torchdeq(model.eval())
    return Stranger(teacher, [x for x, _ in batches], [digits.test.x[:128], digits.test.x[128:256]])


STRANGERS: dict[str, Callable[[], Stranger]] = {
    "linear, radius 0.9": lambda: linear(0.9),
    "linear, radius 0.99": lambda: linear(0.99),
    "linear, radius 0.999": lambda: linear(0.999),
    "linear, not normal": lambda: linear(0.9, normal=False),
    "monotone network": monotone,
    "denoiser": denoiser,
    "torchdeq, two tensors": torchdeq_pair,
    "value iteration": value_iteration,
    "quadratic programs": quadratic_programs,
}

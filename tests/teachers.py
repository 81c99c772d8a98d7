"""Tiny teachers for the tests of students: contractions, with few weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cdeq import Recipe, Student
from cdeq.models.text.deq_transformer import DEQTransformer

INPUTS, WIDTH, CLASSES = 5, 8, 3


def contraction(rows: int, columns: int, norm: float, generator: torch.Generator) -> Tensor:
    """A random matrix of this spectral norm."""
    a = torch.randn(rows, columns, generator=generator)
    return norm * a / torch.linalg.matrix_norm(a, 2)


class Plain(nn.Module):
    """The context is the input, the start zero, the answer the state; the step is a subclass's."""

    def inject(self, x: Any) -> Any:
        return x

    def start(self, context: Any) -> Any:
        return torch.zeros_like(context)

    def readout(self, z: Any, context: Any) -> Any:
        return z


class Tanh(Plain):
    """f(z, x) = tanh(W z + U x), |W| = `norm`; the context is U x, the readout linear.

    Counts the calls of `step` in `calls`, and has a readout weight that no step uses.
    """

    def __init__(self, *, width: int = WIDTH, norm: float = 0.8, seed: int = 0):
        super().__init__()
        self.config: dict[str, Any] = {"width": width, "norm": norm, "seed": seed}
        g = torch.Generator().manual_seed(seed)
        self.width, self.calls = width, 0
        self.weight = nn.Parameter(contraction(width, width, norm, g))
        self.injection = nn.Parameter(torch.randn(width, INPUTS, generator=g))
        self.head = nn.Parameter(torch.randn(CLASSES, width, generator=g))

    def inject(self, x: Tensor) -> Any:
        return x @ self.injection.T

    def step(self, z: Any, context: Any) -> Any:
        self.calls += 1
        return torch.tanh(z @ self.weight.T + context)

    def readout(self, z: Any, context: Any) -> Tensor:
        return z @ self.head.T


class Linear(Tanh):
    """f(z, x) = W z + U x: the error shrinks by |W| in each step at the slowest."""

    def step(self, z: Any, context: Any) -> Any:
        self.calls += 1
        return z @ self.weight.T + context

    def equilibrium(self, x: Tensor) -> Tensor:
        eye = torch.eye(self.width, dtype=x.dtype)
        return torch.linalg.solve(eye - self.weight.detach(), self.inject(x).detach().T).T


class Pair(Tanh):
    """A state of two tensors of different shapes, the second with its own context."""

    def inject(self, x: Tensor) -> Any:
        u = x @ self.injection.T
        return {"u": u, "v": u[..., :2]}

    def start(self, context: Any) -> Any:
        return torch.zeros_like(context["u"]), torch.zeros_like(context["v"])

    def step(self, z: Any, context: Any) -> Any:
        self.calls += 1
        a, b = z
        first = torch.tanh(a @ self.weight.T + context["u"] + 0.1 * b.sum(-1, keepdim=True))
        return first, 0.5 * b + 0.2 * first[..., :2] + context["v"]

    def readout(self, z: Any, context: Any) -> Tensor:
        return z[0] @ self.head.T


class Ring(Tanh):
    """A ring graph as one sample: each node hears its left neighbour."""

    batched = False

    def step(self, z: Any, context: Any) -> Any:
        self.calls += 1
        return torch.tanh(z.roll(1, 0) @ self.weight.T + context)


class Tied(Tanh):
    """The readout uses the injection's weight, under a second name."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.head = self.injection

    def readout(self, z: Any, context: Any) -> Tensor:
        return z @ self.head


class Normed(Tanh):
    """W as magnitude times direction, by torch's own parametrization."""

    def __init__(self, *, width: int = WIDTH, norm: float = 0.8, seed: int = 0):
        super().__init__(width=width, norm=norm, seed=seed)
        layer = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            layer.weight.copy_(self.weight)
        del self.weight
        self.layer = nn.utils.parametrizations.weight_norm(layer)

    def step(self, z: Any, context: Any) -> Any:
        self.calls += 1
        return torch.tanh(self.layer(z) + context)


class Offering(Tanh):
    """Offers a start network of its own."""

    def start_network(self) -> nn.Module:
        return OfferedStart(self.width)


class OfferedStart(nn.Module):
    """z_0 = V u, zero before training."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, context: Tensor) -> Tensor:
        return self.linear(context)


def small_transformer(
    kind: type[DEQTransformer] = DEQTransformer, **changes: Any
) -> DEQTransformer:
    """A DEQ-Transformer of 50 words that remembers 7 tokens; the same weights each time."""
    torch.manual_seed(0)
    sizes = {"vocabulary": 50, "width": 16, "heads": 2, "inner": 24, "memory": 7}
    return kind(**{**sizes, "keep": 0.5, "direct": True, **changes})


class Weightless:
    """The four methods, and not a weight."""

    def inject(self, x: Tensor) -> Tensor:
        return x

    def start(self, context: Tensor) -> Tensor:
        return torch.zeros_like(context)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return 0.5 * z + context

    def readout(self, z: Tensor, context: Tensor) -> Tensor:
        return z


def inputs(size: int = 6, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B, INPUTS) random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, INPUTS, generator=generator, dtype=torch.float64).to(dtype)


def batches(count: int = 4, size: int = 6, labels: bool = True) -> list[tuple[Tensor, ...]]:
    """A loader: a list of (x, y) or (x,)."""
    found: list[tuple[Tensor, ...]] = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        y = torch.randint(CLASSES, (size,), generator=generator)
        found.append((inputs(size, seed=100 + i), y) if labels else (inputs(size, seed=100 + i),))
    return found


def untrained(
    teacher: nn.Module, x: Any = None, recipe: str | Recipe = "anchored", **changes: Any
) -> Student:
    """A student as its training begins, always with the same random start network and history."""
    recipe = Recipe.from_name(recipe, **changes) if isinstance(recipe, str) else recipe
    torch.manual_seed(0)
    return Student.for_example(teacher, recipe, inputs() if x is None else x)


def randomized(module: Any, scale: float = 0.1, seed: int = 5) -> Any:
    """The module with noise on all weights that can be trained, as if it had been."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) * scale)
    return module


def students(
    kind: type[Tanh] = Linear,
    name: str = "corrected",
    noise: float = 0.1,
    norm: float = 0.8,
    **changes: Any,
) -> Student:
    """A student that is not trained: its start and corrections are noise, so that bounds have something to do."""
    student = untrained(kind(norm=norm), inputs(), name, **changes)
    return randomized(student, noise).requires_grad_(False).eval()


def held_out(count: int = 2, size: int = 128, seed: int = 50) -> list[Tensor]:
    """Inputs to calibrate on."""
    return [inputs(size, seed=seed + i) for i in range(count)]

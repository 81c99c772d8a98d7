"""IGNN-Solver: a learned solver for implicit graph networks. Shapes: N nodes, D width, C = hidden + 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.equilibrium.contract import Context
from cdeq.equilibrium.states import State, residual_ratio, subtract
from cdeq.models.arguments import arguments_of
from cdeq.models.graph.sparse import sparse_product
from cdeq.models.graph.start import cut_off
from cdeq.models.learned_solvers.mixing import SMALLEST_RESIDUAL, LearnedSolver, MixingNetwork


class IGNNSolver(LearnedSolver):
    """z_0 = relu(W2 W1 b); z_{k+1} mixes the last m states with weights that a small graph network predicts.

    For teachers on one graph whose state is one tensor (N, D) and whose context has the `injection`
    b (N, D) and the `adjacency` (N, N), normalised and symmetric, in CSR; the IGNN is one.
    The published start takes the node features; b is their projection, which the teacher has computed
    already and which is small where features are many.
    """

    def __init__(self, *, width: int, inner: int = 32, hidden: int = 20, window: int = 6):
        if width < 1 or inner < 1:
            raise ValueError(f"width and inner must be at least 1, not {width} and {inner}")
        super().__init__(
            GraphStart(width=width, inner=inner),
            GraphMixing(width=width, hidden=hidden, window=window),
        )
        self.config = arguments_of(locals())


class GraphStart(nn.Module):
    """z_0 = relu(W2 (W1 b)), zero before training."""

    def __init__(self, *, width: int, inner: int):
        super().__init__()
        self.compress = nn.Linear(width, inner)
        self.expand = nn.Linear(inner, width)
        nn.init.zeros_(self.expand.weight)
        nn.init.zeros_(self.expand.bias)

    def forward(self, context: Context) -> Tensor:
        injection = getattr(context, "injection", None)
        if not isinstance(injection, Tensor) or injection.ndim != 2:
            raise TypeError(
                "IGNNSolver starts from a context with an injection (N, D); "
                f"{type(context).__name__} has none"
            )
        return cut_off(self.expand(self.compress(injection)))


class GraphMixing(MixingNetwork):
    """d = [mean over nodes of relu(A (P r / rms(r))), log10 |r| / |z|], with the residual r = f(z) - z.

    The direction of the residual goes through the graph and its size goes beside it, because sizes
    fall by orders of magnitude on the way to the equilibrium and directions do not. At z = 0 the
    relative size is taken to be 1.
    """

    def __init__(self, *, width: int, hidden: int = 20, window: int = 6):
        super().__init__(features=hidden + 1, hidden=hidden, window=window)
        self.project = nn.Linear(width, hidden)

    def describe(self, z: State, image: State, context: Context) -> Tensor:
        """(C,)"""
        if not isinstance(z, Tensor) or not isinstance(image, Tensor):
            raise TypeError("IGNNSolver is for states of one tensor (N, D), not tuples of tensors")
        residual = subtract(image, z)
        size = torch.linalg.vector_norm(residual)
        rms = size / residual.numel() ** 0.5
        # A residual of zero has no direction; divided by a tiny number its gradient would explode.
        direction = residual / torch.where(rms > 0, rms, 1)
        # Projected first, so that the sparse product runs over `hidden` columns and not D.
        nodes = F.relu(sparse_product(context.adjacency, self.project(direction)))
        ratio = residual_ratio(size, torch.linalg.vector_norm(z, dtype=size.dtype))
        return torch.cat([nodes.mean(dim=0), ratio.clamp_min(SMALLEST_RESIDUAL).log10()[None]])

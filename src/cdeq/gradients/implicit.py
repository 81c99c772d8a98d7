"""The implicit function theorem (Bai et al. 2019, theorem 1): exact, in the memory of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from cdeq.equilibrium.states import State, StateLayout, norm_dtype, tensors_of
from cdeq.gradients.base import AtEquilibrium, Step
from cdeq.solvers import Anderson, Solution, Solver, solve


@dataclass(frozen=True, kw_only=True)
class Implicit(AtEquilibrium):
    """dL/dtheta = u^T df/dtheta with u = g + J^T u, where g = dL/dz* and J = df/dz at z*.

    One evaluation of f after the solve; the linear system is solved in the backward pass by
    `solver`, with at most `max_steps` products J^T u. `tol` bounds |g + J^T u - u| / |u| of each
    sample. Where it is not reached the best u found is used; the first is u = g, the Jacobian-free
    gradient.
    """

    solver: Solver = field(default_factory=Anderson)
    tol: float = 1e-6
    max_steps: int = 50

    def attach(self, step: Step, z_star: State, batched: bool = True) -> State:
        layout = StateLayout.of(z_star, batched)
        leaves = tuple(t.detach().requires_grad_() for t in tensors_of(z_star))
        fz = step(leaves if layout.is_tuple else leaves[0])
        images = tuple(a.to(z.dtype) for a, z in zip(tensors_of(fz), leaves, strict=True))
        if not _has_other_leaves(images, leaves):
            images = tuple(t.detach() for t in images)
        else:
            images = _SolveCotangent.apply(self, batched, leaves, *images)
        return images if layout.is_tuple else images[0]

    def solve_cotangent(
        self, z: Sequence[Tensor], fz: Sequence[Tensor], g: Sequence[Tensor], batched: bool = True
    ) -> Solution:
        """u = g + J^T u, given fz = f(z) with its graph back to z. Its state is a tuple."""
        # Half precision is too coarse for a linear system; products stay in the dtype of the map.
        start = tuple(t.to(norm_dtype(t.dtype)) for t in g)
        differentiable = [i for i, image in enumerate(fz) if image.requires_grad]

        def affine(u: State) -> State:
            products = torch.autograd.grad(
                [fz[i] for i in differentiable],
                list(z),
                [u[i].to(fz[i].dtype) for i in differentiable],
                retain_graph=True,
                materialize_grads=True,
            )
            return tuple(a + p for a, p in zip(start, products, strict=True))

        return solve(
            affine, start, self.solver, tol=self.tol, max_steps=self.max_steps, batched=batched
        )


class _SolveCotangent(torch.autograd.Function):
    """The identity on f(z). Backward, g becomes u = g + J^T u, and goes on into the graph of f.

    J^T u is taken through that same graph, so backward sees the weights, the dropout masks and the
    precision of the forward pass, even if the module has changed since.
    """

    @staticmethod
    def forward(
        ctx: Any, gradient: Implicit, batched: bool, z: tuple[Tensor, ...], *fz: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.gradient, ctx.batched = gradient, batched
        ctx.save_for_backward(*z, *fz)
        # Copies: the caller could not change a view in place.
        return tuple(t.clone() for t in fz)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing unpacks no tensor twice
        z, fz = saved[: len(g)], saved[len(g) :]
        with torch.no_grad():
            u = ctx.gradient.solve_cotangent(z, fz, g, ctx.batched).state
            u = tuple(a.to(b.dtype) for a, b in zip(u, fz, strict=True))
        if torch.is_grad_enabled():  # by create_graph: there may be a second derivative
            u = _Undifferentiable.apply(*(a.detach().requires_grad_() for a in u))
        return None, None, None, *u


class _Undifferentiable(torch.autograd.Function):
    """The identity, with an error for a derivative: u depends on z*, which this would leave out.

    `once_differentiable` would not do: it silently accepts a constant g, such as that of a sum.
    """

    @staticmethod
    def forward(ctx: Any, *u: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in u)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(
            "the implicit gradient can be differentiated once only; for second derivatives use "
            "Unrolled or Phantom"
        )


def _has_other_leaves(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Whether the graph of `outputs` reaches a leaf (a weight, an input) other than `leaves`."""
    todo = [get_gradient_edge(t).node for t in outputs if t.requires_grad]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            if all(node.variable is not leaf for leaf in leaves):  # type: ignore[attr-defined]
                return True
            continue
        upstream = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= upstream
        todo.extend(upstream)
    return False

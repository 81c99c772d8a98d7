"""The Jacobian J = df/dz of an equilibrium map, never formed: its size and its spectral radius.

Shapes: B samples, D numbers in each sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdeq.equilibrium.states import State, StateLayout, tensors_of
from cdeq.gradients.base import Step


def jacobian_penalty(
    f: Step, z: State, *, probes: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """|J|_F^2 / D, averaged over samples (Bai et al. 2021), by Hutchinson's estimate.

    |J|_F^2 = E |v^T J|^2 over random signs v, of which `probes` are drawn. One evaluation of f at
    the detached `z`; differentiable with respect to all else that f depends on. `generator` lives
    on the device of `z`.
    """
    if probes < 1:
        raise ValueError(f"at least 1 probe is needed, not {probes}")
    leaves, images = _linearise(f, z)
    trainable = torch.is_grad_enabled()
    total: Tensor | float = 0.0
    for i in range(probes):
        signs = [_random_signs(t, generator) for t in images]
        keep = trainable or i + 1 < probes
        for product in _vjp(images, leaves, signs, keep=keep, create_graph=trainable):
            total = total + product.square().sum()
    return torch.as_tensor(total) / (probes * sum(t.numel() for t in leaves))


def spectral_radius(
    f: Step,
    z: State,
    *,
    iterations: int = 100,
    generator: torch.Generator | None = None,
    batched: bool = True,
) -> Tensor:
    """The largest |eigenvalue| of J for each sample, (B,), by power iteration on J^T.

    The geometric mean of the growth over the last half of the iterations, which also settles where
    the leading eigenvalues are a complex or an opposite pair. One evaluation of f.
    """
    if iterations < 1:
        raise ValueError(f"at least 1 iteration is needed, not {iterations}")
    leaves, images = _linearise(f, z)
    layout = StateLayout.of(leaves, batched)
    v = torch.cat([_random_normal(t, generator).reshape(layout.batch, -1) for t in leaves], dim=1)
    tiny = torch.finfo(v.dtype).tiny
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(tiny)
    logs = []
    for i in range(iterations):
        directions = tensors_of(layout.restore(v))
        v = layout.flatten(_vjp(images, leaves, directions, keep=i + 1 < iterations))
        growth = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        v = v / growth.clamp_min(tiny)
        logs.append(growth.squeeze(1).log())
    return torch.stack(logs[iterations // 2 :]).mean(dim=0).exp()


def _linearise(f: Step, z: State) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """z as leaves, and f(z) with its graph back to them."""
    leaves = tuple(t.detach().requires_grad_() for t in tensors_of(z))
    with torch.enable_grad():
        images = tensors_of(f(leaves[0] if isinstance(z, Tensor) else leaves))
    return leaves, images


def _vjp(
    images: Sequence[Tensor],
    leaves: Sequence[Tensor],
    v: Sequence[Tensor],
    *,
    keep: bool,
    create_graph: bool = False,
) -> tuple[Tensor, ...]:
    pairs = [(image, a) for image, a in zip(images, v, strict=True) if image.requires_grad]
    if not pairs:  # a constant map
        return tuple(torch.zeros_like(t) for t in leaves)
    return torch.autograd.grad(
        [image for image, _ in pairs],
        list(leaves),
        [a for _, a in pairs],
        retain_graph=keep,
        create_graph=create_graph,
        materialize_grads=True,
    )


def _random_signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    bits = torch.randint(2, like.shape, generator=generator, device=like.device)
    return bits.to(like.dtype) * 2 - 1


def _random_normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)

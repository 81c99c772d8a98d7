"""HyperDEQ: a learned solver for batches of texts or images (Bai et al. 2022, Neural Deep Equilibrium Solvers).

Shapes: B samples, D width, L tokens, C channels of an injection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.equilibrium.contract import Context, EquilibriumModel, is_batched
from cdeq.equilibrium.states import State, residual_ratio, row_norms, subtract
from cdeq.models.learned_solvers.mixing import (
    SMALLEST_RESIDUAL,
    LearnedSolver,
    Mixing,
    MixingNetwork,
)
from cdeq.models.text.windows import causal_windows


class HyperDEQ(LearnedSolver):
    """z_0 = h(context); z_{k+1} mixes the last m states with weights predicted for each sample.

    For teachers whose state is one tensor, its first axis the samples and `feature_axis` the D = `width`
    features: -1 for texts (B, L, D), 1 for images (B, D, H, W). `initial` is h, from a context to such a state;
    `ConvolutionalStart` is the published one for texts. Being a module, it is not in `config`.

    The weights of a sample depend on all its positions, as those of Anderson acceleration do: short of the
    equilibrium, a text's earlier tokens learn a little of the later ones from them.
    """

    def __init__(
        self,
        *,
        width: int,
        initial: nn.Module,
        hidden: int = 20,
        window: int = 6,
        feature_axis: int = -1,
    ):
        mixing = StateMixing(width=width, hidden=hidden, window=window, feature_axis=feature_axis)
        super().__init__(initial, mixing)
        self.config: dict[str, Any] = {
            "width": width,
            "hidden": hidden,
            "window": window,
            "feature_axis": feature_axis,
        }

    def mixings(
        self, teacher: EquilibriumModel, context: Context, z_0: State, steps: int
    ) -> Iterator[Mixing]:
        """As of any learned solver, once the start is known to be a state of this teacher."""
        if not is_batched(teacher):
            raise ValueError(
                f"HyperDEQ mixes each sample of a batch by itself; the state of {type(teacher).__name__} has no "
                "batch axis. For graphs there is IGNNSolver."
            )
        wanted = _one_tensor(teacher.start(context))
        got = _one_tensor(z_0).shape
        if got != wanted.shape:
            raise ValueError(
                f"the start network gives a state {tuple(got)}, the teacher wants {tuple(wanted.shape)}"
            )
        return super().mixings(teacher, context, z_0, steps)


class StateMixing(MixingNetwork):
    """d = [mean over positions of relu(P r / rms(r)), log10 |r| / |z|], with r = f(z) - z, for each sample.

    The direction of the residual is projected and its size goes beside it, because sizes fall by
    orders of magnitude on the way to the equilibrium and directions do not. At z = 0 the relative
    size is taken to be 1.
    """

    def __init__(self, *, width: int, hidden: int = 20, window: int = 6, feature_axis: int = -1):
        if width < 1:
            raise ValueError(f"width must be at least 1, not {width}")
        if feature_axis == 0:
            raise ValueError("feature_axis must not be 0: the first axis of a state is its samples")
        super().__init__(features=hidden + 1, hidden=hidden, window=window)
        self.width, self.feature_axis = width, feature_axis
        self.project = nn.Linear(width, hidden)

    def describe(self, z: State, image: State, context: Context) -> Tensor:
        """(B, hidden + 1)"""
        z, image = _one_tensor(z), _one_tensor(image)
        self._check_shapes(z, image)
        batch, residual = z.shape[0], subtract(image, z)
        sizes = row_norms(residual.flatten(1))
        rms = sizes / residual.flatten(1).shape[1] ** 0.5
        # A residual of zero has no direction; divided by a tiny number its gradient would explode.
        scale = torch.where(rms > 0, rms, 1).reshape(batch, *[1] * (z.ndim - 1))
        direction = (residual / scale).movedim(self.feature_axis, -1)
        positions = F.relu(self.project(direction.to(self.project.weight.dtype)))
        pooled = positions.reshape(batch, -1, positions.shape[-1]).mean(dim=1)
        ratio = residual_ratio(sizes, row_norms(z.flatten(1))).clamp_min(SMALLEST_RESIDUAL)
        return torch.cat([pooled, ratio.log10()[:, None].to(pooled.dtype)], dim=1)

    def _check_shapes(self, z: Tensor, image: Tensor) -> None:
        axis, shape = self.feature_axis, tuple(z.shape)
        if not -z.ndim < axis < z.ndim or shape[axis] != self.width:
            raise ValueError(
                f"a state (B, ...) with {self.width} features on axis {axis} was expected, not {shape}; "
                "change width or feature_axis"
            )
        if image.shape != z.shape:
            raise ValueError(f"a state {shape} has an image of another shape, {tuple(image.shape)}")


class ConvolutionalStart(nn.Module):
    """z_0 = W2 relu(conv(u)), a convolution over the injection u of a token and the `kernel` - 1 before it.

    The context of a text teacher is the injection (B, L, C), C = `width_in`, or has it as `injection`.
    Zero before training.
    """

    def __init__(self, *, width_in: int, width: int, inner: int = 200, kernel: int = 3):
        super().__init__()
        self.config: dict[str, Any] = {
            "width_in": width_in,
            "width": width,
            "inner": inner,
            "kernel": kernel,
        }
        for name, size in self.config.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        self.width_in, self.kernel = width_in, kernel
        self.mix = nn.Linear(kernel * width_in, inner)
        self.out = nn.Linear(inner, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, context: Context) -> Tensor:
        """(B, L, D)"""
        injection = context if isinstance(context, Tensor) else getattr(context, "injection", None)
        if not isinstance(injection, Tensor):
            raise TypeError(
                "ConvolutionalStart starts from an injection (B, L, C), or a context that has one; "
                f"{type(context).__name__} has none"
            )
        if injection.ndim != 3 or injection.shape[-1] != self.width_in:
            raise ValueError(
                f"an injection (B, L, {self.width_in}) was expected, not {tuple(injection.shape)}"
            )
        return self.out(F.relu(self.mix(causal_windows(injection, self.kernel))))


def _one_tensor(state: State) -> Tensor:
    if not isinstance(state, Tensor):
        raise TypeError(
            "HyperDEQ is for states of one tensor with a batch axis, "
            f"not for a {type(state).__name__} of tensors"
        )
    return state

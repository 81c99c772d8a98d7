"""HyperDEQ: a learned solver for batches of texts or images (Bai et al. 2022, Neural Deep Equilibrium Solvers).

Shapes: B samples, D width, L tokens, C channels of an injection. A state of several tensors has a width D_i
for each part i, as the scales of a multiscale image model have: (B, D_i, H_i, W_i).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.equilibrium.contract import Context, EquilibriumModel, is_batched
from cdeq.equilibrium.states import (
    State,
    StateLayout,
    residual_ratio,
    row_norms,
    subtract,
    tensors_of,
)
from cdeq.models.arguments import arguments_of
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
    features: -1 for texts (B, L, D), 1 for images (B, D, H, W). Or a tuple of such tensors, `width` then being
    the tuple of their D_i: all parts of a sample are mixed with the same weights. `initial` is h, from a context
    to such a state; `ConvolutionalStart` is the published one for texts. Being a module, it is not in `config`.

    The weights of a sample depend on all its positions, as those of Anderson acceleration do: before the
    equilibrium is reached, the state of a token therefore depends slightly on later tokens.
    """

    predictor: StateMixing

    def __init__(
        self,
        *,
        width: int | Sequence[int],
        initial: nn.Module,
        hidden: int = 20,
        window: int = 6,
        feature_axis: int = -1,
    ):
        mixing = StateMixing(width=width, hidden=hidden, window=window, feature_axis=feature_axis)
        super().__init__(initial, mixing)
        self.config: dict[str, Any] = {
            # A list, because JSON has no tuples: read back, the config is the same.
            "width": list(width) if isinstance(width, Sequence) else width,
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
        wanted = self.predictor.parts(teacher.start(context), "the teacher's state")
        given = self.predictor.parts(z_0, "the state of the start network")
        for i, (got, want) in enumerate(zip(given, wanted, strict=True)):
            if got.shape != want.shape:
                place = f" at part {i}" if self.predictor.several else ""
                raise ValueError(
                    f"the start network gives a state {tuple(got.shape)}{place}, "
                    f"the teacher wants {tuple(want.shape)}"
                )
        return super().mixings(teacher, context, z_0, steps)


class StateMixing(MixingNetwork):
    """d = [mean_i mean over positions of relu(P_i r_i / rms(r_i)), log10 |r| / |z|], r = f(z) - z, for each sample.

    The direction of the residual is projected and its size goes beside it, because sizes fall by
    orders of magnitude on the way to the equilibrium and directions do not. At z = 0 the relative
    size is taken to be 1. A state of one tensor has one part, i = 0. Of several, each part r_i has an rms and a
    projection of its own, so that a scale of few or small numbers counts as much as the others; |r| and
    |z| are of the whole state.
    """

    def __init__(
        self,
        *,
        width: int | Sequence[int],
        hidden: int = 20,
        window: int = 6,
        feature_axis: int = -1,
    ):
        widths = tuple(width) if isinstance(width, Sequence) else (width,)
        if not widths:
            raise ValueError("width must have a number for each tensor of the state, not be empty")
        if min(widths) < 1:
            raise ValueError(f"width must be at least 1, not {width}")
        if feature_axis == 0:
            raise ValueError("feature_axis must not be 0: the first axis of a state is its samples")
        super().__init__(features=hidden + 1, hidden=hidden, window=window)
        self.widths, self.feature_axis = widths, feature_axis
        self.several = isinstance(width, Sequence)
        self.project: nn.Linear | nn.ModuleList
        if self.several:
            self.project = nn.ModuleList(nn.Linear(each, hidden) for each in widths)
        else:
            self.project = nn.Linear(widths[0], hidden)

    def describe(self, z: State, image: State, context: Context) -> Tensor:
        """(B, hidden + 1)"""
        states, images = self.parts(z, "a state"), self.parts(image, "the image of a state")
        for i, (z_i, f_i) in enumerate(zip(states, images, strict=True)):
            self._check_shapes(i, z_i, f_i)
        residuals = [subtract(f_i, z_i) for z_i, f_i in zip(states, images, strict=True)]
        sizes = [row_norms(r_i.flatten(1)) for r_i in residuals]
        projections = [self.project] if isinstance(self.project, nn.Linear) else self.project
        pooled = torch.stack(
            [
                _pooled_direction(residual, size, project, self.feature_axis)
                for residual, size, project in zip(residuals, sizes, projections, strict=True)
            ]
        ).mean(dim=0)
        norms = [row_norms(z_i.flatten(1)) for z_i in states]
        ratio = residual_ratio(_norm_of(sizes), _norm_of(norms)).clamp_min(SMALLEST_RESIDUAL)
        return torch.cat([pooled, ratio.log10()[:, None].to(pooled.dtype)], dim=1)

    def parts(self, state: State, whose: str) -> tuple[Tensor, ...]:
        """The tensors of a state, if they are as many as `width` says; `whose` names it in errors."""
        layout = StateLayout.of(state)
        if not self.several and layout.is_tuple:
            raise TypeError(
                f"HyperDEQ with width {self.widths[0]} is for states of one tensor with a batch axis; {whose} is a "
                f"tuple of {len(layout.shapes)}. Give width as a tuple, one number for each tensor."
            )
        if self.several and not layout.is_tuple:
            raise TypeError(
                f"HyperDEQ with width {self.widths} is for states that are tuples of tensors; {whose} is one tensor. "
                "Give width as a single number."
            )
        if len(layout.shapes) != len(self.widths):
            raise ValueError(
                f"{whose} has {len(layout.shapes)} tensors, width has {len(self.widths)} numbers: "
                "one for each tensor is needed"
            )
        return tensors_of(state)

    def _check_shapes(self, i: int, z: Tensor, image: Tensor) -> None:
        axis, shape = self.feature_axis, tuple(z.shape)
        place = f" at part {i} of the state" if self.several else ""
        if not -z.ndim < axis < z.ndim or shape[axis] != self.widths[i]:
            raise ValueError(
                f"a state (B, ...) with {self.widths[i]} features on axis {axis} was expected{place}, not {shape}; "
                "change width or feature_axis"
            )
        if image.shape != z.shape:
            raise ValueError(
                f"a state {shape} has an image of another shape, {tuple(image.shape)}{place}"
            )


def _pooled_direction(
    residual: Tensor, size: Tensor, project: nn.Module, feature_axis: int
) -> Tensor:
    """mean over positions of relu(P r / rms(r)), (B, hidden), for a residual (B, ...) with its norms (B,)."""
    batch, dtype = residual.shape[0], next(project.parameters()).dtype
    rms = size / residual.flatten(1).shape[1] ** 0.5
    # A residual of zero has no direction; divided by a tiny number its gradient would explode.
    scale = torch.where(rms > 0, rms, 1).reshape(batch, *[1] * (residual.ndim - 1))
    direction = (residual / scale).movedim(feature_axis, -1)
    positions = F.relu(project(direction.to(dtype)))
    return positions.reshape(batch, -1, positions.shape[-1]).mean(dim=1)


def _norm_of(part_norms: list[Tensor]) -> Tensor:
    """The norm of each sample, (B,), from the norms of its parts."""
    return part_norms[0] if len(part_norms) == 1 else row_norms(torch.stack(part_norms, dim=1))


class ConvolutionalStart(nn.Module):
    """z_0 = W2 relu(conv(u)), a convolution over the injection u of a token and the `kernel` - 1 before it.

    The context of a text teacher is the injection (B, L, C), C = `width_in`, or has it as `injection`.
    Zero before training.
    """

    def __init__(self, *, width_in: int, width: int, inner: int = 200, kernel: int = 3):
        super().__init__()
        self.config = arguments_of(locals())
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

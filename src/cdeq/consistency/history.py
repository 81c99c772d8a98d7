"""History modules: what a student makes of its last evaluations (z_i, h_i), the newest last.

A module is called with the newest evaluation and its memory of those before, and returns the prediction P and the
memory for the next step. A memory begins as None. Shapes: B samples, D numbers in each sample, n = window + 1
evaluations at most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import Tensor, nn

from cdeq.consistency.features import FeatureLinear
from cdeq.equilibrium.states import (
    State,
    StateLayout,
    map_state,
    norm_dtype,
    subtract,
    tensors_of,
)
from cdeq.solvers.anderson import Anderson, anderson_weights, running_sums

Evaluation = tuple[State, State]
"""A state z and the student's evaluation h(z) there."""
HistoryMemory = Any
"""What a history module keeps between steps: of its own kind, None at the beginning."""


class NoHistory(nn.Module):
    """P = h(z): the newest evaluation alone."""

    def forward(self, z: State, h: State, memory: HistoryMemory) -> tuple[State, HistoryMemory]:
        return h, None


class WindowHistory(nn.Module, ABC):
    """Keeps the last `window` + 1 evaluations; a subclass predicts from them."""

    window: int

    def forward(self, z: State, h: State, memory: HistoryMemory) -> tuple[State, HistoryMemory]:
        evaluations: list[Evaluation] = [*(memory or ())[-self.window :], (z, h)]
        return self.predict(evaluations), evaluations

    @abstractmethod
    def predict(self, evaluations: list[Evaluation]) -> State:
        """P from the evaluations, the newest last."""


class AndersonHistory(WindowHistory):
    """P = sum_i alpha_i (beta h_i + (1 - beta) z_i), alpha as in Anderson acceleration (paper, eq:AA_step_in_CM).

    The weights alpha are held constant in the gradient. Mixes in at least single precision.
    """

    def __init__(
        self,
        window: int,
        mixing: float,
        batched: bool,
        ridge: float = 1e-6,
        causal: bool = False,
        fading: float = 1.0,
    ):
        super().__init__()
        self.window, self.mixing, self.batched, self.ridge = window, mixing, batched, ridge
        self.causal, self.fading, self.spare = causal, fading, Spare()

    def positions(self, z: State) -> int | None:
        """Positions that have mixing weights of their own; None for one set of weights for each sample."""
        return z.shape[1] if self.causal and isinstance(z, Tensor) and z.ndim == 3 else None

    def predict(self, evaluations: list[Evaluation]) -> State:
        if len(evaluations) == 1 and self.mixing == 1.0:
            return evaluations[0][1]
        layout = StateLayout.of(evaluations[-1][0], self.batched)
        z = torch.stack([layout.flatten(z) for z, _ in evaluations], dim=1)
        h = torch.stack([layout.flatten(h) for _, h in evaluations], dim=1)
        dtype = norm_dtype(z.dtype)
        positions = self.positions(evaluations[-1][0])
        with torch.no_grad():
            residuals = subtract(h, z)
            alpha = self._weights(residuals, positions).to(dtype)
        images = h.to(dtype)
        if self.mixing != 1.0:
            images = z.to(dtype).lerp(images, self.mixing)
        if positions is None:
            mixed = torch.bmm(alpha[:, None], images).squeeze(1)
        else:
            parts = images.unflatten(2, (positions, -1)).movedim(2, 1)
            mixed = torch.matmul(alpha[:, :, None], parts).flatten(1)
        return layout.restore(mixed.to(z.dtype))

    def _weights(self, residuals: Tensor, positions: int | None) -> Tensor:
        """alpha (B, n), or (B, L, n) for each position from the positions up to it."""
        if positions is None:
            return anderson_weights(residuals @ residuals.mT, self.ridge)
        parts = residuals.unflatten(2, (positions, -1)).movedim(2, 1)
        products = torch.matmul(parts, parts.mT)
        gram = running_sums(products.flatten(2), self.fading).view_as(products)
        return anderson_weights(gram.flatten(0, 1), self.ridge).unflatten(0, gram.shape[:2])


class Spare:
    """The buffers of a rollout that has ended, for the next one of the same size: at most one set, on the CPU.

    Memory fresh from the system costs more to touch for the first time than all that is computed in it. A rollout takes
    the buffers out, so that no two ever share them. A copy begins without any.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Any, Any]] = []

    def __reduce__(self) -> tuple[type[Spare], tuple[()]]:
        return Spare, ()

    def take(self, kind: Any) -> Any:
        """The buffers that were given as of this kind; those of another are let go."""
        try:
            known, buffers = self.kept.pop()
        except IndexError:
            return None
        return buffers if known == kind else None

    def give(self, kind: Any, buffers: Any) -> None:
        self.kept[:] = [(kind, buffers)]

    def ring(self, solver: Anderson, z: Tensor) -> Any:
        """Ring buffers of the solver for states like z (B, D)."""
        made_now = torch.is_inference_mode_enabled()
        kind = (solver, *z.shape, norm_dtype(z.dtype), z.device, made_now)
        return self.take(kind) or solver.init(z)

    def end(self, solver: Anderson, ring: Any) -> None:
        """Nobody works in these ring buffers any more."""
        if ring.gram.device.type == "cpu":
            batch, _, size = ring.images.shape
            of = ring.images.dtype, ring.images.device, ring.images.is_inference()
            self.give((solver, batch, size, *of), ring)


class RunningAnderson:
    """`AndersonHistory` along one rollout without gradients, in the solver's own ring buffers.

    Products of residuals are formed once; `AndersonHistory` forms all of them at each step.
    """

    def __init__(self, history: AndersonHistory, window: int, z: State):
        self.batched, self.spare = history.batched, history.spare
        self.ring = cast(Any, None)
        self.solver = Anderson(
            window=window,
            mixing=history.mixing,
            ridge=history.ridge,
            positions=history.positions(z),
            fading=history.fading,
        )

    def __call__(self, z: State, h: State, memory: HistoryMemory) -> tuple[State, HistoryMemory]:
        layout = StateLayout.of(z, self.batched)
        count, kept = memory or (0, self.begin(z, layout))
        residual, image = self.places(count, kept, layout)
        subtract_into(residual, h, z)
        map_state(Tensor.copy_, image, h)
        self.solver.multiply(count, kept)
        return self.mixed(count, kept, layout, z), (count + 1, kept)

    def begin(self, z: State, layout: StateLayout) -> Any:
        """Ring buffers for this rollout."""
        like = tensors_of(z)[0].new_empty(()).expand(layout.batch, sum(layout.sizes))
        self.ring = self.spare.ring(self.solver, like)
        return self.ring

    def end(self) -> None:
        """The rollout is over: another one may have the buffers."""
        if self.ring is not None:
            self.spare.end(self.solver, self.ring)
        self.ring = None

    def places(self, count: int, ring: Any, layout: StateLayout) -> tuple[State, State]:
        """Where the newest residual and image are kept, as states."""
        residual, image = self.solver.slots(count, ring)
        return layout.restore(residual), layout.restore(image)

    def mixed(self, count: int, ring: Any, layout: StateLayout, z: State) -> State:
        """The next state, of the shapes and dtype of z, once the newest residual is multiplied."""
        alpha = self.solver.weights(count, ring)
        sizes = layout.sizes if layout.is_tuple else [ring.images.shape[-1]]
        # Each tensor by itself: they come out contiguous, as f likes them.
        parts = [self.solver.combined(alpha, part) for part in ring.images.split(sizes, dim=-1)]
        parts = [
            part.reshape(t.shape).to(t.dtype) for part, t in zip(parts, tensors_of(z), strict=True)
        ]
        return _like(z, parts)


def subtract_into(place: State, a: State, b: State) -> None:
    """a - b, subtracted in the dtype of the place it is written to."""
    map_state(lambda out, a, b: torch.sub(a.to(out.dtype), b, out=out), place, a, b)


def _newest_two(evaluations: list[Evaluation], index: int) -> list[tuple[Tensor, Tensor]]:
    """(z, h) of one state tensor for the last two evaluations, the newest twice if it is the only one."""
    pairs = [(tensors_of(z)[index], tensors_of(h)[index]) for z, h in evaluations[-2:]]
    return pairs if len(pairs) == 2 else pairs * 2


def _like(state: State, parts: list[Tensor]) -> State:
    return parts[0] if isinstance(state, Tensor) else tuple(parts)


class MLPHistory(WindowHistory):
    """P = h + MLP[h_k || h_k-1 || z_k || z_k-1], of widths 4d, 2d, d (paper, tab:aa_module_ablations).

    A free map in place of mixing. Starts as P = h.
    """

    window = 1

    def __init__(self, features: tuple[int, ...], axes: tuple[int, ...]):
        super().__init__()
        self.inner = nn.ModuleList(
            FeatureLinear(4 * f, 2 * f, a) for f, a in zip(features, axes, strict=True)
        )
        self.outer = nn.ModuleList(
            _zeroed(FeatureLinear(2 * f, f, a)) for f, a in zip(features, axes, strict=True)
        )
        self.axes = axes

    def predict(self, evaluations: list[Evaluation]) -> State:
        parts = []
        for i, axis in enumerate(self.axes):
            (z1, h1), (z2, h2) = _newest_two(evaluations, i)
            hidden = self.inner[i](torch.cat([h2, h1, z2, z1], dim=axis))
            parts.append(h2 + self.outer[i](nn.functional.gelu(hidden)))
        return _like(evaluations[-1][1], parts)


class GRUHistory(WindowHistory):
    """P = h + V GRU(h_k-1, h_k): a gated memory in place of mixing. Starts as P = h."""

    window = 1

    def __init__(self, features: tuple[int, ...], axes: tuple[int, ...]):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(2 * f, f) for f in features)
        self.outer = nn.ModuleList(
            _zeroed(FeatureLinear(f, f, a)) for f, a in zip(features, axes, strict=True)
        )
        self.axes = axes

    def predict(self, evaluations: list[Evaluation]) -> State:
        parts = []
        for i, axis in enumerate(self.axes):
            hidden: Tensor | None = None
            shape = torch.Size()
            for z, h in _newest_two(evaluations, i):
                seen = torch.cat([z, h], dim=axis).movedim(axis, -1)
                shape = seen.shape[:-1]
                hidden = self.cells[i](seen.reshape(-1, seen.shape[-1]), hidden)
            assert hidden is not None
            memory = hidden.reshape(*shape, -1).movedim(-1, axis)
            parts.append(tensors_of(evaluations[-1][1])[i] + self.outer[i](memory))
        return _like(evaluations[-1][1], parts)


def _zeroed(layer: FeatureLinear) -> FeatureLinear:
    nn.init.zeros_(layer.linear.weight)
    nn.init.zeros_(layer.linear.bias)
    return layer

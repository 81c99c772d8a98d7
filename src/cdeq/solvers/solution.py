"""What a solve returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cdeq.equilibrium.states import State


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The outcome of a solve, sample by sample.

    `state`: a converged sample's state is the one whose residual met the tolerance. When the budget runs
        out it is the newest state, or the best one measured if the residual was no longer falling.
    `residual` (B,): |f(z) - z| / |z| of `state` where `measured`; of the state before it elsewhere (the
        newest state of an exhausted budget has cost its last evaluation and was never measured). It is
        infinite where f gave no finite answer at all; then `state` is the start.
    `steps` (B,): evaluations of f until the sample stopped. `evaluations`: calls of f on the whole batch.
    `error` (B,): an estimate of the relative distance to the equilibrium, if it was asked for: the residual times the
        largest |z_k - z_j| / |r_k - r_j| seen along the way, which is 1 / (1 - q) where f contracts by q.
    `history` (evaluations, B): the residual of z_0, z_1, ...; a stopped sample repeats its last value.
    `values` (B, M): all that the measure says of `state`, what the tolerance bounds first; `value_history`
        (evaluations, B, M): the same of z_0, z_1, ...
    `seconds` (evaluations,): from the beginning of the solve to the residual of z_0, z_1, ...
    `handed_over` (B,): whether `state` comes from the plain method that a learned solver went over to.
    """

    state: State
    converged: Tensor
    measured: Tensor
    residual: Tensor
    steps: Tensor
    evaluations: int
    history: Tensor
    error: Tensor | None = None
    values: Tensor | None = None
    value_history: Tensor | None = None
    seconds: Tensor | None = None
    handed_over: Tensor | None = None

"""The one solve loop: counts every evaluation, stops each sample by itself, never loses a good state.

Shapes: B samples, n of them at work, D numbers in each sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cdeq.equilibrium.contract import Context, EquilibriumModel, is_batched
from cdeq.equilibrium.rows import is_by_sample, rows_of_context, rows_of_memory
from cdeq.equilibrium.states import (
    State,
    StateLayout,
    residual_ratio,
    row_norms,
    subtract,
    tensors_of,
)
from cdeq.placement import not_cast
from cdeq.solvers.anderson import Anderson
from cdeq.solvers.base import MAX_STEPS, TOL, Callback, Solver, first_state, solver_for
from cdeq.solvers.error import ErrorEstimate, Measure, Seen, rounding
from cdeq.solvers.solution import Solution

Map = Callable[[State], State]
FEWEST = 16
"""Samples below which it is not worth trying whether some can be left out; once that is known, two are enough."""


@dataclass
class _Samples:
    """The samples at work; each tensor has them along its first axis."""

    index: Tensor  # their places in the batch
    z: Tensor
    size: Tensor  # |z|, which also tells whether z is finite without another pass
    residual: Tensor  # the last one measured
    values: Tensor  # (n, M): what the tolerance bounds (the residual, or a measure of the error), and what else is kept
    best: Tensor
    best_residual: Tensor
    best_values: Tensor
    active: Tensor
    handed_over: Tensor  # whether the solver had gone over to another method when z was made
    memory: Any  # the solver's
    known: Any  # the measure's

    @classmethod
    def begin(cls, z: Tensor, size: Tensor, solver: Solver, measure: Measure | None) -> _Samples:
        infinity, no = torch.full_like(size, torch.inf), torch.zeros_like(size, dtype=torch.bool)
        known = None if measure is None else measure.init(z)
        index, column = torch.arange(len(z), device=z.device), infinity[:, None]
        inner = (solver.init(z), known)
        return cls(index, z, size, infinity, column, z, infinity, column, ~no, no, *inner)

    def judge(
        self, k: int, fz: Tensor, difference: Tensor, solver: Solver, measure: Measure | None
    ) -> None:
        """Take in f(z) and the residual of z, and remember z if it is the best so far."""
        relative = residual_ratio(row_norms(difference), self.size)
        # A stopped sample repeats its last residual, which cannot be better than its best.
        self.residual = torch.where(self.active, relative, self.residual)
        values = self.residual[:, None]
        if measure is not None:
            missing = None
            if (estimate := getattr(solver, "missing", None)) is not None:
                missing, self.memory = estimate(k, self.z, fz, difference, self.memory)
                missing = None if missing is None else residual_ratio(missing, self.size)
            seen = Seen(self.z, difference, self.size, relative, missing)
            values, self.known = measure.update(k, seen, self.known)
        self.values = torch.where(self.active[:, None], values, self.values)
        if (gave_up := getattr(solver, "handed_over", None)) is not None:
            self.handed_over = torch.where(self.active, gave_up(self.memory), self.handed_over)
        # Not where it is NaN. Where no value is known yet, by the residual.
        value, best = self.values[:, 0], self.best_values[:, 0]
        unknown = best.isinf() & (self.residual < self.best_residual)
        improved = self.active & ((value < best) | unknown)
        self.best = _rows(improved | ~self.active, self.z, self.best)  # stopped: z is its best
        self.best_residual = torch.where(improved, self.residual, self.best_residual)
        self.best_values = _rows(improved, self.values, self.best_values.expand_as(self.values))

    def write_to(self, whole: _Samples) -> None:
        """Put these samples back to their places in the batch."""
        for field in fields(self):
            if field.name not in ("index", "memory", "known"):
                getattr(whole, field.name)[self.index] = getattr(self, field.name)


@torch.no_grad()
def solve(
    f: Map,
    z0: State,
    solver: Solver | None = None,
    *,
    tol: float = TOL,
    max_steps: int = MAX_STEPS,
    batched: bool = True,
    callback: Callback | None = None,
    measured_only: bool = False,
    measure: Literal["residual", "error"] | Measure = "residual",
    select: Callable[[Tensor], Map] | None = None,
) -> Solution:
    """Solve z = f(z) from `z0` with at most `max_steps` evaluations of f, without recording gradients.

    `solver`: Anderson's method unless another is given.
    `tol` bounds the relative residual |f(z) - z| / |z| of each sample; 0 spends the whole budget.
    `callback(k, z_k)` sees every state, z_0 included, before it is changed; z_k has cost k evaluations.
    `measure`: what `tol` bounds; "error" is the estimated distance to the equilibrium, which for a slow map is many
    times the residual (see `Solution`). A sample whose residual is at rounding stops as well.
    `measured_only` returns no state whose residual is unknown: the best one measured, not the newest.
    `select(rows)`: f for some samples alone, by index (n,). With it, and without a callback, the samples that have
    stopped are left out once they are half of those at work. It is tried on one sample first (an evaluation of one
    sample that is not counted); where it fails or disagrees with f, none is left out.
    A sample that has stopped, by convergence or by a number that is not finite, stays at its best state.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, not {max_steps}")
    if not tol >= 0:
        raise ValueError(f"tol must not be negative, not {tol}")
    began, clock = time.perf_counter(), list[float]()
    layout = StateLayout.of(z0, batched)
    z = layout.flatten(z0)
    size = row_norms(z)
    if not bool(size.isfinite().all()):
        raise ValueError("z0 must be finite, and so must its norm")
    if callback is not None:
        callback(0, z0)
    solver = solver or Anderson()
    measured_by = _measure(measure)
    now = whole = _Samples.begin(z, size, solver, measured_by)
    begun = now.memory
    all_active, may_select = True, select is not None and callback is None and batched
    tried = False
    history: list[Tensor] = []
    values: list[Tensor] = []
    active_history: list[Tensor] = []

    for k in range(max_steps):
        fz = _evaluate(f, now.z, layout)
        difference = subtract(fz, now.z)
        active_history.append(_in_batch(now, whole, "active"))
        now.judge(k, fz, difference, solver, measured_by)
        history.append(_in_batch(now, whole, "residual"))
        values.append(_in_batch(now, whole, "values"))
        now.active = now.active & (now.values[:, 0] > tol)  # stops at NaN, too
        if measured_by is not None:
            now.active = now.active & (now.residual > rounding(z.dtype))

        z, going_on = now.z, bool(now.active.any())
        clock.append(time.perf_counter() - began)
        if going_on:
            with not_cast(z):
                proposal, now.memory = solver.update(k, z, fz, difference, now.memory)
            now.size = row_norms(proposal)
            now.active = now.active & now.size.isfinite()
            all_active = bool(now.active.all())
            now.z = proposal if all_active else torch.where(now.active[:, None], proposal, now.best)
        else:
            now.z, all_active = now.best, False
        if callback is not None:
            callback(k + 1, layout.restore(now.z))
        if not all_active and not bool(now.active.any()):
            break
        if may_select and not all_active and len(z) >= (2 if tried else FEWEST):
            rows = now.active.nonzero().squeeze(1)
            if 2 * len(rows) > len(z):
                continue
            assert select is not None
            may_select = is_by_sample((now.memory, now.known), len(z))
            may_select = may_select and (tried or _is_row_by_row(select, now, (z, fz), layout))
            if tried := may_select:
                if now is whole:  # from now on a copy of the batch, without its memories
                    whole = rows_of_memory(replace(now, memory=None, known=None), now.index)
                now.write_to(whole)
                now = rows_of_memory(now, rows)
                f, layout, all_active = select(now.index), layout.resized(len(rows)), True

    if now is not whole:
        now.write_to(whole)
    if (end := getattr(solver, "end", None)) is not None:
        end(begun)
    layout = layout.resized(len(whole.z))
    # A sample still running has an unmeasured newest state: kept if the last value was its best.
    value, best = whole.values[:, 0], whole.best_values[:, 0]
    newest = whole.active & (value <= best) & (not measured_only)
    return Solution(
        state=layout.restore(_rows(newest, whole.z, whole.best)),
        converged=best <= tol,
        measured=~newest,
        residual=whole.best_residual,
        steps=torch.stack(active_history).sum(dim=0),
        evaluations=len(history),
        history=torch.stack(history),
        error=None if measured_by is None else best,
        values=whole.best_values,
        value_history=torch.stack(values),
        seconds=torch.tensor(clock, dtype=torch.float64),
        handed_over=whole.handed_over,
    )


def _measure(measure: str | Measure) -> Measure | None:
    """The measure by its name; None for the residual."""
    if not isinstance(measure, str):
        return measure
    if measure not in ("residual", "error"):
        raise ValueError(f'measure must be "residual", "error" or a Measure, not {measure!r}')
    return ErrorEstimate() if measure == "error" else None


def _in_batch(now: _Samples, whole: _Samples, name: str) -> Tensor:
    """What is known of the samples at work, among the last known of the whole batch."""
    if now is whole:
        return getattr(now, name)
    return getattr(whole, name).index_copy(0, now.index, getattr(now, name))


def _is_row_by_row(
    select: Callable[[Tensor], Map],
    now: _Samples,
    evaluated: tuple[Tensor, Tensor],
    layout: StateLayout,
) -> bool:
    """Whether f of one sample alone is what it was in the batch."""
    z, fz = evaluated
    last = int(now.active.nonzero()[-1])
    try:
        alone = _evaluate(select(now.index[last : last + 1]), z[last : last + 1], layout.resized(1))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    away = row_norms(subtract(alone, fz[last : last + 1]))
    # Kernels for other sizes round otherwise; what does not belong to samples is off by much more.
    near = torch.finfo(z.dtype).eps ** 0.5 * row_norms(fz[last : last + 1])
    return bool((away <= near).all())


def _evaluate(f: Map, z: Tensor, layout: StateLayout) -> Tensor:
    """f at a flat state, flat, in the dtype of the state (under autocast f may answer in another)."""
    image = f(layout.restore(z))
    try:
        return layout.flatten(image).to(z.dtype)
    except ValueError as error:
        raise ValueError(f"f must return a state like the one it is given: {error}") from None


def _rows(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The rows of `new` where the mask (B,) holds, of `old` elsewhere; no copy if it holds everywhere."""
    return new if bool(mask.all()) else torch.where(mask[:, None], new, old)


def solve_model(
    model: EquilibriumModel,
    context: Context,
    solver: Solver | None = None,
    *,
    z0: State | None = None,
    tol: float = TOL,
    max_steps: int = MAX_STEPS,
    callback: Callback | None = None,
    measured_only: bool = False,
    measure: Literal["residual", "error"] | Measure = "residual",
    compact: bool = True,
) -> Solution:
    """Solve for a model's equilibrium in a given context, from its own start unless `z0` is given.

    Anderson's method mixes the states of a causal model position by position. `compact`: once half of the samples of a
    batch have stopped, f is evaluated on the others alone, if their contexts can be told apart (see `solve`).
    """
    solver = solver or Anderson()
    z0 = first_state(solver, model, context) if z0 is None else z0
    batched = is_batched(model)

    def select(rows: Tensor) -> Map:
        size = len(tensors_of(z0)[0])
        part = rows_of_context(model, context, rows, size)
        return lambda z: model.step(z, part)

    return solve(
        lambda z: model.step(z, context),
        z0,
        solver_for(solver, model, context, z0),
        tol=tol,
        max_steps=max_steps,
        batched=batched,
        callback=callback,
        measured_only=measured_only,
        measure=measure,
        select=select if compact else None,
    )

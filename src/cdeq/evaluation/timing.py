"""What methods cost: median seconds, measured in turns, so that a busy machine slows them all."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cdeq.equilibrium.contract import EquilibriumModel
from cdeq.evaluation.methods import Explicit, Method

ROLLED = 4
"""Steps in a row by which the cost of a method's own step is measured."""
SLOW = 3.0
"""Seconds above which work is timed once."""

Work = Callable[[], object]
Seconds = dict[Any, float]
"""Keys: (method, count), (method, "extra"), (method, "rolled"), (method, "step"), (explicit model, None), "step" and
"inject"."""


@torch.no_grad()
def median_times(
    works: dict[Any, Callable[[], Work]], repeats: int
) -> dict[Any, tuple[float, float]]:
    """Median wall and CPU seconds of what each `works[name]()` returns; making it ready is not timed.

    The first round warms up. For work of more than `SLOW` seconds, beside which warming up is nothing, it is the
    only one.
    """
    times: dict[Any, list[tuple[float, float]]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, ready in works.items():
            if times[name] and times[name][0][0] > SLOW:
                continue
            work = ready()
            _synchronise()
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            _synchronise()
            spent = (time.perf_counter() - wall, time.process_time() - cpu)
            if repeat == 1 and times[name]:
                times[name].clear()
            times[name].append(spent)
    return {
        name: (statistics.median(w for w, _ in found), statistics.median(c for _, c in found))
        for name, found in times.items()
    }


def _synchronise() -> None:
    """Wait for a GPU, which works on after a call has returned."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def median_seconds(works: dict[Any, Work], repeats: int) -> dict[Any, float]:
    """Median wall seconds of each work, in turns."""
    ready: dict[Any, Callable[[], Work]] = {
        name: partial(lambda work: work, work) for name, work in works.items()
    }
    return {name: wall for name, (wall, _) in median_times(ready, repeats).items()}


def measure_seconds(
    methods: dict[str, Method],
    teacher: EquilibriumModel,
    x: Any,
    counts: tuple[int, ...],
    *,
    explicit: dict[str, Explicit],
    repeats: int,
    others: dict[str, Explicit] | None = None,
) -> Seconds:
    """Median seconds of all methods on one input, from input to output.

    A method made for certain step counts is timed at those alone. `others` have no step count, as explicit models
    have none, but take their turns among the methods.
    """
    works: dict[Any, Work] = {
        (name, None): partial(other.output, x) for name, other in (others or {}).items()
    }
    for name, method in methods.items():
        works |= {
            (name, k): partial(method.output, x, k) for k in method.counts or counts if k in counts
        }
        if method.extra is not None:
            works[name, "extra"] = partial(method.extra, x)
            works[name, "rolled"] = partial(_roll, method, x)
        if method.own is not None:
            works[name, "step"] = _step_of(method.own.model, x)
    works |= {"step": _step_of(teacher, x), "inject": lambda: teacher.inject(x)}
    seconds = median_seconds(works, repeats)
    # Apart from the rest: a large model leaves nothing of the others in the processor's caches.
    return seconds | median_seconds(
        {(name, None): partial(model.output, x) for name, model in explicit.items()}, repeats
    )


def _roll(method: Method, x: Any) -> None:
    """Injection, what comes once for each input, and `ROLLED` steps."""
    deque(method.states(x, ROLLED), maxlen=0)


@torch.no_grad()
def _step_of(model: EquilibriumModel, x: Any) -> Work:
    """One evaluation of a model's map, at a state that is not zero."""
    context = model.inject(x)
    z = model.step(model.start(context), context)
    return lambda: model.step(z, context)

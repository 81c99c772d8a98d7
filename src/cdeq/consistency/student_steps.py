"""A student's steps: one evaluation of f each, corrected, mixed with those before it, and held to its boundary.

Shapes: B samples; a state is as the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cdeq.consistency.correction import FOLLOWED
from cdeq.consistency.history import AndersonHistory, HistoryMemory, RunningAnderson
from cdeq.consistency.parts import Prepared, StepMemory, TimePoint
from cdeq.consistency.safeguard import GuardedAnderson
from cdeq.consistency.solver import like_start
from cdeq.consistency.student_clock import StudentClock
from cdeq.consistency.weights import mix_weights
from cdeq.equilibrium.contract import Context, Input
from cdeq.equilibrium.states import State, map_state, tensors_of
from cdeq.equilibrium.trees import tensors_in
from cdeq.placement import in_single, is_plain, not_cast

History = Callable[[State, State, HistoryMemory], tuple[State, HistoryMemory]]


class StudentSteps(StudentClock):
    """A student from one state to the next, in training and in use."""

    def weights_at(self, c: float | Tensor) -> dict[str, Tensor]:
        """theta + c delta by name, of the weights that the student changes."""
        names = self.deltas.names
        theta: list[Tensor] = [self.methods.model.get_parameter(name) for name in names]
        return mix_weights(names, theta, self.deltas(), c)

    def prepare(self, x: Input) -> Prepared:
        """Contexts and weights for the input, computed once."""
        names = self.deltas.names
        theta: list[Tensor] = [self.methods.model.get_parameter(name) for name in names]
        delta = self.deltas()
        whole = mix_weights(names, theta, delta, 1.0)

        def call(c: float | Tensor, z: State, context: Context) -> State:
            at_once = isinstance(c, float) and c == 1.0
            weights = whole if at_once else mix_weights(names, theta, delta, c)
            return self.methods.under(weights, "step", z, context)

        base = changed = self.teacher.inject(x)
        if self.recipe.injection == "student":
            changed = self.methods.under(whole, "inject", x)
        return Prepared(base, changed, call)

    def begin(self, prepared: Prepared) -> State:
        """z_0: the teacher's own start, with the learned change of it if there is one."""
        return self.changed_start(in_single(self.teacher.start(prepared.base)), prepared.base)

    def changed_start(self, start: State, context: Context) -> State:
        """A start with the learned change of it."""
        if self.start_network is None:
            return start
        takes_start = getattr(self.start_network, "takes_start", False)
        change = self.start_network(context, *([start] if takes_start else []))
        return map_state(torch.add, start, change)

    def evaluate(self, z: State, point: TimePoint, prepared: Prepared) -> State:
        """h(z, t): the one evaluation of f that a step costs."""
        if self.time_heads is None:
            return prepared.step(z, point.strength)
        heads = iter(self.time_heads)
        return map_state(lambda part: next(heads)(part, point.time), prepared.step(z, 1.0))

    def bounded(self, z: State, predicted: State, point: TimePoint) -> State:
        """g = c_skip z + c_out P (paper, eq:cm_definition); P itself where the weights carry the boundary."""
        if self.recipe.boundary == "weights":
            return predicted
        c_out = point.strength
        return map_state(lambda old, new: old + c_out * (new - old), z, predicted)

    def advance(
        self,
        z: State,
        point: TimePoint,
        memory: StepMemory | None,
        prepared: Prepared,
        history: History | None = None,
    ) -> tuple[State, StepMemory]:
        """The one step of inference and training: the next state, and what the steps after it must know."""
        history = history or self.history
        number, gates, kept = memory or StepMemory(0, None, None)
        h = in_single(self.evaluate(z, point, prepared))
        gates = self.gates(h, prepared.base, number, gates)
        leaps = self.recipe.schedule == "leap" and number < self.recipe.leap  # another map's
        if self.correction is not None and isinstance(history, GuardedAnderson) and not leaps:
            correct = partial(self.corrected, number=number, gates=gates)
            predicted, kept = history.guarded(z, h, correct, kept)
        else:
            if self.correction is not None:
                h = self.corrected_image(z, h, number, gates)
            with not_cast(z):
                predicted, kept = (h, kept) if leaps else history(z, h, kept)
        return self.bounded(z, predicted, point), StepMemory(number + 1, gates, kept)

    def only_step(self, z: State, point: TimePoint, prepared: Prepared) -> State:
        """`advance` where no step follows: a single evaluation has nothing to be mixed with, and nothing is kept."""
        h = in_single(self.evaluate(z, point, prepared))
        gates = self.gates(h, prepared.base, 0, None)
        if self.correction is not None:
            change = self.correction_of(map_state(torch.sub, h, z), 0, gates)
            h = map_state(torch.add, h, change)
        return self.bounded(z, h, point)

    def gates(self, image: State, context: Context, number: int, last: Any) -> Any:
        """The gates of the correction at a step: of f(z), or after the first few steps those of the last."""
        correction: Any = self.correction
        if correction is None or number >= FOLLOWED:
            return last
        if number and hasattr(correction, "follow"):
            return correction.follow(last, context, image)
        return correction.gate(context, image)

    def correction_of(self, residual: State, number: int, gates: Any) -> State:
        """N(r) at a step, with the gain of its number."""
        assert self.correction is not None
        gain = self._gain(number)
        change = self.correction(residual, gates)
        return map_state(lambda part: gain * part, change)

    def corrected(
        self,
        z: State,
        f: State,
        out: tuple[State, State] | None = None,
        *,
        number: int,
        gates: Any,
    ) -> State:
        """p = r + N(r) at a step, r = f - z; with `out`, written to the first of them, and z + p to the second."""
        correction: Any = self.correction
        if out is not None and hasattr(correction, "corrected") and is_plain(z, f, *out):
            gain = self._gain(number).to(tensors_of(z)[0].dtype)
            correction.corrected(z, f, gates, gain, *out)
            return out[0]
        residual = map_state(torch.sub, f, z)
        p = map_state(torch.add, residual, self.correction_of(residual, number, gates))
        if out is not None:
            map_state(Tensor.copy_, out[0], p)
            map_state(lambda image, z, p: torch.add(z, p, out=image), out[1], z, out[0])
        return p

    def corrected_image(self, z: State, f: State, number: int, gates: Any) -> State:
        """f + N(r) at a step, r = f - z."""
        if is_plain(z, f):
            places = map_state(torch.empty_like, z), map_state(torch.empty_like, z)
            self.corrected(z, f, places, number=number, gates=gates)
            return places[1]
        change = self.correction_of(map_state(torch.sub, f, z), number, gates)
        return map_state(torch.add, f, change)

    def _gain(self, number: int) -> Tensor:
        assert self.gains is not None
        return self.gains[min(number, len(self.gains) - 1)]

    def rollout(self, prepared: Prepared, steps: int, z0: State | None = None) -> Iterator[State]:
        """z_0, z_1, ..., z_steps (paper, alg:multistep_aa); z_j has cost j evaluations. `z0`: where to begin."""
        if z0 is None:
            z = self.begin(prepared)
        else:
            z = like_start(z0, in_single(self.teacher.start(prepared.base)))
        yield z
        history: History = self.history
        if steps == 1 and self.recipe.mixing == 1.0 and isinstance(history, AndersonHistory):
            yield self.only_step(z, self.time_point(0), prepared)
            return
        if isinstance(history, AndersonHistory) and not self._is_tracked(z, prepared):
            guarded = self.recipe.safeguard and not self.training
            # On a CPU what is not needed of the ring buffers is never touched, and takes no memory.
            on_cpu = tensors_of(z)[0].device.type == "cpu"
            window = history.window if on_cpu else max(min(history.window, steps - 1), 1)
            history = (GuardedAnderson if guarded else RunningAnderson)(history, window, z)
        memory: StepMemory | None = None
        try:
            for j in range(steps):
                z, memory = self.advance(z, self.time_point(j), memory, prepared, history)
                yield z
        finally:
            if isinstance(history, RunningAnderson):
                history.end()

    def _is_tracked(self, z: State, prepared: Prepared) -> bool:
        """Whether gradients are recorded for a rollout from this state."""
        return torch.is_grad_enabled() and any(
            t.requires_grad
            for t in (*tensors_of(z), *tensors_in(prepared.base), *self.parameters())
        )

"""A student put to use: the weights of each of its steps made once, not mixed again for every input."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cdeq.consistency.copying import copy_of
from cdeq.consistency.parts import Prepared
from cdeq.equilibrium.contract import Context, Input
from cdeq.equilibrium.states import State

if TYPE_CHECKING:
    from cdeq.consistency.student import Student


@torch.no_grad()
def fold_weights(model: Any, weights: dict[str, Tensor] | None = None) -> Any:
    """A copy to evaluate, with other weights if given by name, whose normalised weights are computed once for all.

    For a single token, normalising the weights takes longer than multiplying by them. What is the same stays shared:
    a large vocabulary is not copied.
    """
    if not isinstance(model, nn.Module):
        return model
    weights = weights or {}
    same = [p for name, p in model.named_parameters() if name not in weights]
    copied = copy_of(model, same).eval()
    for name, weight in weights.items():
        copied.get_parameter(name).copy_(weight)
    for module in list(copied.modules()):
        if not parametrize.is_parametrized(module):
            continue
        found = {name: getattr(module, name) for name in module.parametrizations}  # type: ignore[union-attr]
        # Not remove_parametrizations, which changes the class itself: copies share it with the original.
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module.parametrizations
        for name, weight in found.items():
            module.register_parameter(name, nn.Parameter(weight.detach(), requires_grad=False))
    return copied


def settle(model: Any, *, children: bool = True) -> Any:
    """Put a module's weights and modules among its plain attributes: nn.Module searches for them at each use.

    For one token the searches take as long as the products. Only for copies that never change: what is assigned or
    moved later may leave the old ones behind.
    """
    if isinstance(model, nn.Module):
        for module in model.modules() if children else (model,):
            vars(module).update(module._parameters | module._buffers | module._modules)
    return model


class BakedStudent:
    """Prepares inputs for `student.rollout` with one folded teacher for each strength of its first steps.

    It is a snapshot: training the student further does not change it.
    """

    def __init__(self, student: Student, steps: int):
        if steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}")
        # Its parts are copied, so that nothing of it changes with the student.
        self.student = student.with_parts(copy_of(student.own_parts())).eval()
        self.steps = steps
        with torch.no_grad():
            strengths = {float(student.time_point(j).strength) for j in range(steps)}
            if student.time_heads is not None:
                strengths = {1.0}
            self.models = {
                c: fold_weights(student.teacher, student.weights_at(c))
                for c in sorted(strengths | {0.0, 1.0})
            }

    def settled(self) -> BakedStudent:
        """Itself, to be used for many small inputs and for nothing else; see `settle`."""
        for part in (*self.models.values(), self.student.own_parts()):
            settle(part)
        settle(self.student, children=False)  # the teacher inside is not its own
        return self

    def prepare(self, x: Input) -> Prepared:
        """Contexts for the input; the weights are there already."""
        base = changed = self.models[0.0].inject(x)
        if self.student.recipe.injection == "student":
            changed = self.models[1.0].inject(x)
        return Prepared(base, changed, self._call)

    def follow(self, x: Input, last: Prepared) -> Prepared:
        """As `prepare`, for a segment of a text right after the last one, from which its models take what they can."""
        base = changed = self.models[0.0].follow(x, last.base)
        if self.student.recipe.injection == "student":
            changed = self.models[1.0].follow(x, last.changed)
        return Prepared(base, changed, self._call)

    def _call(self, c: float | Tensor, z: State, context: Context) -> State:
        return self.models[float(c)].step(z, context)

    @torch.no_grad()
    def state(self, x: Input) -> tuple[State, Context]:
        """The state after the baked number of steps, and the teacher's context."""
        prepared = self.prepare(x)
        return self.run(prepared), prepared.base

    def run(self, prepared: Prepared) -> State:
        """The state after the baked number of steps, for what `prepare` or `follow` made; call it without gradients."""
        return deque(self.student.rollout(prepared, self.steps), maxlen=1).pop()

"""The student: a teacher's copy that reaches its equilibrium in a few evaluations.

Shapes: B samples; a state is as the teacher's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cdeq.consistency.boundary import out_coefficient
from cdeq.consistency.calibration import calibrate
from cdeq.consistency.certify import CertifiedSolution, certified_solve
from cdeq.consistency.clock import inference_fraction, solver_time
from cdeq.consistency.copying import copy_of, frozen_copy
from cdeq.consistency.features import TimeHead, feature_axis_of
from cdeq.consistency.history import (
    AndersonHistory,
    Evaluation,
    GRUHistory,
    MLPHistory,
    NoHistory,
    RunningAnderson,
)
from cdeq.consistency.parts import Form, Moment, Prepared, TeacherMethods, check_teacher
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.saving import load_student, save_student
from cdeq.consistency.start import PointwiseStart
from cdeq.consistency.weights import Deltas, mix_contexts, mix_weights
from cdeq.equilibrium.contract import EquilibriumModel, Input, check_contract, is_batched
from cdeq.equilibrium.states import State, map_state, tensors_of
from cdeq.solvers.loop import Solver

NEGLIGIBLE_STRENGTH = 1e-6
"""Below this share of the student's change a step is the teacher's own."""


class Student(nn.Module):
    """g_phi: maps a state at solver time t towards the equilibrium, one evaluation of f a step.

    Made by `cdeq.distill`, or `Student.load`. The teacher inside is a frozen copy.
    """

    def __init__(
        self, teacher: nn.Module, recipe: Recipe, form: Form, start_network: nn.Module | None
    ):
        super().__init__()
        check_contract(teacher)
        self.recipe, self.form = recipe, form
        self.methods = TeacherMethods(teacher.requires_grad_(False).eval())
        weights = dict(teacher.named_parameters())
        self.deltas = Deltas(
            {name: weights[name].detach() for name in form.weights},
            rank=recipe.rank if recipe.delta == "low_rank" else None,
        )
        self.time_heads = (
            nn.ModuleList(TimeHead(f, a) for f, a in zip(form.features, form.axes, strict=True))
            if recipe.boundary == "state"
            else None
        )
        self.history = {
            "anderson": lambda: AndersonHistory(recipe.mixing, self.batched),
            "mlp": lambda: MLPHistory(form.features, form.axes),
            "gru": lambda: GRUHistory(form.features, form.axes),
            "none": NoHistory,
        }[recipe.history]()
        self.start_network = start_network
        self.rates: nn.Parameter | None = None
        if recipe.schedule == "learned":
            decay = torch.full((recipe.depth,), recipe.decay)
            self.rates = nn.Parameter(torch.logit(decay))
        self.calibrated: tuple[float, ...] = ()
        self.plan: dict[float, int] = {}
        self._fit_to(next(w for w in weights.values() if w.is_floating_point()))

    def _fit_to(self, weight: Tensor) -> None:
        """Put the parts beside the teacher where its weights are, in their dtype."""
        for part in (self.time_heads, self.history, self.start_network):
            if part is not None:
                part.to(weight.device, weight.dtype)
        self.to(weight.device)

    @classmethod
    def for_example(
        cls, teacher: nn.Module, recipe: Recipe, x: Input, start_network: nn.Module | None = None
    ) -> Student:
        """An untrained student of (a frozen copy of) `teacher`, its shapes read off one input."""
        check_teacher(teacher)
        teacher = frozen_copy(teacher)
        with torch.no_grad():
            context = teacher.inject(x)  # type: ignore[operator]
            z0 = teacher.start(context)  # type: ignore[operator]
        axes = [feature_axis_of(z, recipe.feature_axis) for z in tensors_of(z0)]
        features = [z.shape[a] for z, a in zip(tensors_of(z0), axes, strict=True)]
        if recipe.start == "zero":
            start_network = None
        elif start_network is not None:
            start_network = copy_of(start_network).requires_grad_(True)
        else:
            offered = getattr(teacher, "start_network", None)
            start_network = offered() if offered else PointwiseStart.matching(context, z0, axes)
        names = tuple(name for name, p in teacher.named_parameters() if p.is_floating_point())
        form = Form(features=tuple(features), axes=tuple(axes), weights=names)
        probe = cls(teacher, recipe, form, start_network)
        form = Form(features=form.features, axes=form.axes, weights=probe._weights_in_use(x, z0))
        return cls(teacher, recipe, form, start_network)

    def _weights_in_use(self, x: Input, z: State) -> tuple[str, ...]:
        """The weights that a step depends on; the readout's stay the teacher's."""
        with torch.enable_grad():
            delta = [d.detach().requires_grad_() for d in self.deltas()]
            prepared = self._prepare(x, delta)
            out = sum(
                t.float().sum() for t in tensors_of(self.evaluate(z, self.moment(0), prepared))
            )
            assert isinstance(out, Tensor)
            found = torch.autograd.grad(out, delta, allow_unused=True) if out.requires_grad else []
        names = tuple(n for n, g in zip(self.deltas.names, found, strict=False) if g is not None)
        if not names:
            raise ValueError(
                "no weight of the teacher takes part in its step: there is nothing to distil"
            )
        return names

    @property
    def teacher(self) -> EquilibriumModel:
        return self.methods.model  # type: ignore[return-value]

    @property
    def batched(self) -> bool:
        return is_batched(self.teacher)

    def train(self, mode: bool = True) -> Student:
        """As usual, but the teacher inside stays in evaluation mode."""
        super().train(mode)
        self.methods.eval()
        return self

    def _call(self, method: str, weights: dict[str, Tensor], *arguments: Any) -> Any:
        if not weights:
            return self.methods(method, *arguments)
        named = {f"model.{name}": weight for name, weight in weights.items()}
        return functional_call(self.methods, named, (method, *arguments))

    # The clock.

    def moment_at(self, fraction: float) -> Moment:
        """The moment at a fraction of solver time."""
        r = self.recipe
        t = solver_time(fraction, r.eps, r.end)
        strength = out_coefficient(t, gamma=r.gamma, eps=r.eps, end=r.end)
        return Moment(t, strength if strength >= NEGLIGIBLE_STRENGTH else 0.0)

    def moment(self, j: int) -> Moment:
        """The moment of inference step j = 0, 1, ...: calibrated, or as in training."""
        known = len(self.calibrated)
        if not known:
            return self.trained_moment(j)
        rest = 1.0 - self.calibrated[min(j, known - 1)]
        return self.moment_at(1.0 - rest * self.recipe.decay ** max(j - known + 1, 0))

    def trained_moment(self, j: int) -> Moment:
        """The moment of step j on the clock of training: learned, or fraction 1 - decay^j."""
        if self.rates is None or j == 0:
            return self.moment_at(inference_fraction(j, self.recipe.decay))
        rates = torch.sigmoid(self.rates)
        left = rates[: min(j, len(rates))].prod() * rates[-1] ** max(j - len(rates), 0)
        moment = self.moment_at(1.0 - float(left.detach()))
        if not left.requires_grad:
            return moment
        return moment._replace(strength=1.0 - (1.0 - left) ** self.recipe.gamma)

    # Steps.

    def prepare(self, x: Input) -> Prepared:
        """Contexts and weights for the input, computed once."""
        return self._prepare(x, self.deltas())

    def _prepare(self, x: Input, delta: list[Tensor]) -> Prepared:
        own = dict(self.methods.model.named_parameters())
        theta: list[Tensor] = [own[name] for name in self.deltas.names]
        weights = mix_weights(self.deltas.names, theta, delta, 1.0)
        base = changed = self.teacher.inject(x)
        if self.recipe.injection == "student":
            changed = self._call("inject", weights, x)
        return Prepared(base, changed, theta, delta, weights)

    def begin(self, prepared: Prepared) -> State:
        """z_0: the teacher's own start, or the learned one."""
        if self.start_network is None:
            return self.teacher.start(prepared.base)
        return self.start_network(prepared.base)

    def evaluate(self, z: State, moment: Moment, prepared: Prepared) -> State:
        """h(z, t): the one evaluation of f that a step costs."""
        if self.time_heads is None:
            c = moment.strength
            weights = (
                prepared.weights
                if isinstance(c, float) and c == 1.0
                else mix_weights(self.deltas.names, prepared.theta, prepared.delta, c)
            )
            return self._call("step", weights, z, mix_contexts(prepared.base, prepared.changed, c))
        heads = iter(self.time_heads)
        f = self._call("step", prepared.weights, z, prepared.changed)
        return map_state(lambda part: next(heads)(part, moment.time), f)

    def combine(self, evaluations: list[Evaluation], moment: Moment) -> State:
        """g: the next state from the last evaluations, the newest last (paper, Eqs. 7 and 10)."""
        return self._bounded(evaluations[-1][0], self.history(evaluations), moment)

    def _bounded(self, z: State, predicted: State, moment: Moment) -> State:
        """c_skip z + c_out P under the boundary on the state; P itself where the weights carry it."""
        if self.recipe.boundary == "weights":
            return predicted
        c_out = moment.strength
        return map_state(lambda old, p: old + c_out * (p - old), z, predicted)

    def advance(
        self, z: State, moment: Moment, evaluations: list[Evaluation], prepared: Prepared
    ) -> tuple[State, list[Evaluation]]:
        """One step: the next state, and the evaluations to remember for the one after it."""
        evaluations = self._remembered(evaluations, z, self.evaluate(z, moment, prepared))
        return self.combine(evaluations, moment), evaluations

    def _remembered(self, evaluations: list[Evaluation], z: State, h: State) -> list[Evaluation]:
        """The newest evaluation and those before it that the history module looks at."""
        keep = 0 if self.recipe.history == "none" else self.recipe.window
        return [*evaluations[-keep:], (z, h)] if keep else [(z, h)]

    def rollout(self, prepared: Prepared, steps: int) -> Iterator[State]:
        """z_0, z_1, ..., z_steps (paper, Algorithm 1); z_j has cost j evaluations."""
        z = self.begin(prepared)
        yield z
        evaluations: list[Evaluation] = []
        running: RunningAnderson | None = None
        for j in range(steps):
            moment = self.moment(j)
            h = self.evaluate(z, moment, prepared)
            if j == 0 and steps > 1 and not _is_tracked(z, h):
                running = self._running_history(z, steps)
            if running is not None:
                z = self._bounded(z, running(z, h), moment)
            else:
                evaluations = self._remembered(evaluations, z, h)
                z = self.combine(evaluations, moment)
            yield z

    def _running_history(self, z: State, steps: int) -> RunningAnderson | None:
        """Anderson mixing in place, for a rollout that nobody differentiates."""
        if not isinstance(self.history, AndersonHistory):
            return None
        return RunningAnderson(z, self.history, min(self.recipe.window, steps - 1))

    # Use.

    def forward(self, x: Input, steps: int = 2) -> Tensor:
        """The output after `steps` evaluations of f."""
        if steps < 0:
            raise ValueError(f"steps must not be negative, not {steps}")
        prepared = self.prepare(x)
        *_, z = self.rollout(prepared, steps)
        return self.teacher.readout(z, prepared.base)

    def trajectory(self, x: Input, steps: int) -> list[State]:
        """The states z_0 ... z_steps."""
        return list(self.rollout(self.prepare(x), steps))

    def solve(
        self,
        x: Input,
        tol: float = 1e-3,
        max_steps: int = 50,
        *,
        student_steps: int | None = None,
        solver: Solver | None = None,
    ) -> CertifiedSolution:
        """As many evaluations as the tolerance takes, certified; see `certified_solve`."""
        return certified_solve(
            self, x, tol=tol, max_steps=max_steps, student_steps=student_steps, solver=solver
        )

    def calibrate(
        self, loader: Iterable[Any], steps: int = 8, max_batches: int | None = None
    ) -> tuple[float, ...]:
        """Choose the clock of the first steps on held-out data; see `cdeq.consistency.calibration`."""
        return calibrate(self, loader, steps=steps, max_batches=max_batches)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The student's own weights, without the teacher's."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def save(self, folder: str | Path) -> None:
        """Write the student and its teacher as a folder of config.json and safetensors."""
        save_student(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, teacher: nn.Module | type | None = None) -> Student:
        """Read a saved student; `teacher`: its class, or an instance to fill, where the folder cannot tell."""
        return load_student(cls, Path(folder), teacher)


def _is_tracked(*states: State) -> bool:
    """Whether a gradient is recorded for any of the states."""
    return any(t.requires_grad for state in states for t in tensors_of(state))

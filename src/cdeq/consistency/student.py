"""The student: a teacher's copy that reaches its equilibrium in a few evaluations.

Shapes: B samples; a state is as the teacher's.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdeq.consistency.baking import BakedStudent
from cdeq.consistency.boundary import out_coefficient
from cdeq.consistency.calibration import calibrate
from cdeq.consistency.certificate import Certificate
from cdeq.consistency.certify import CertifiedSolution, Level, certified_solve
from cdeq.consistency.clock import inference_fraction, solver_time
from cdeq.consistency.copying import copy_of, frozen_copy
from cdeq.consistency.correction import FOLLOWED, LearnedCorrection
from cdeq.consistency.deployment import described_input, export_student
from cdeq.consistency.features import TimeHead, feature_axis_of
from cdeq.consistency.groups import shared_tensors
from cdeq.consistency.history import (
    AndersonHistory,
    GRUHistory,
    HistoryMemory,
    MLPHistory,
    NoHistory,
    RunningAnderson,
)
from cdeq.consistency.parts import (
    Prepared,
    StepMemory,
    TeacherMethods,
    TeacherShapes,
    TimePoint,
    check_teacher,
    try_teacher,
    weights_in_use,
)
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.report import DistillationReport
from cdeq.consistency.safeguard import GuardedAnderson
from cdeq.consistency.saving import load_student, save_student
from cdeq.consistency.sharing import fetch_student, push_student, share_student
from cdeq.consistency.solver import StudentSolver, like_start
from cdeq.consistency.start import LearnedStart
from cdeq.consistency.unrolling import UnrolledStudent
from cdeq.consistency.weights import Deltas, mix_weights
from cdeq.equilibrium.contract import (
    Context,
    EquilibriumModel,
    Input,
    check_contract,
    fading_of,
    is_batched,
)
from cdeq.equilibrium.states import State, map_state, tensors_of
from cdeq.equilibrium.trees import tensors_in
from cdeq.placement import dtype_beside, in_single, is_plain, not_cast, representative_tensor
from cdeq.solvers.anderson import Anderson
from cdeq.solvers.base import MAX_STEPS, TOL, Solver

NEGLIGIBLE_STRENGTH = 1e-6
"""Below this share of the student's change a step is the teacher's own."""

LOOSE = ("rates", "gains")
"""Parameters of the student that are in no module of its own."""

History = Callable[[State, State, HistoryMemory], tuple[State, HistoryMemory]]


class Student(nn.Module):
    """g_phi: maps a state at solver time t towards the equilibrium, one evaluation of f for each step.

    Made by `cdeq.distill`, or `Student.load`. The teacher inside is a frozen copy.
    """

    def __init__(
        self,
        teacher: nn.Module,
        recipe: Recipe,
        shapes: TeacherShapes,
        start_network: nn.Module | None,
        correction: nn.Module | None = None,
    ):
        super().__init__()
        check_contract(teacher)
        self.recipe, self.shapes = recipe, shapes
        self.methods = TeacherMethods(teacher.requires_grad_(False).eval())
        weights = dict(teacher.named_parameters())
        self.deltas = Deltas(
            {name: weights[name].detach() for name in shapes.weights},
            rank=recipe.rank if recipe.delta == "low_rank" else None,
        )
        sizes = list(zip(shapes.features, shapes.axes, strict=True))
        self.time_heads = (
            nn.ModuleList(TimeHead(features, axis) for features, axis in sizes)
            if recipe.boundary == "state"
            else None
        )
        histories: dict[str, Callable[[], nn.Module]] = {
            "anderson": lambda: AndersonHistory(
                recipe.window,
                recipe.mixing,
                self.batched,
                causal=getattr(teacher, "causal", False),
                fading=fading_of(teacher),
            ),
            "mlp": lambda: MLPHistory(shapes.features, shapes.axes),
            "gru": lambda: GRUHistory(shapes.features, shapes.axes),
            "none": NoHistory,
        }
        self.history = histories[recipe.history]()
        self.start_network, self.correction = start_network, correction
        self.gains: nn.Parameter | None = None
        if correction is not None:
            self.gains = nn.Parameter(torch.ones(recipe.depth))
        self.rates: nn.Parameter | None = None
        if recipe.schedule == "learned":
            decay = torch.full((recipe.depth,), recipe.decay)
            self.rates = nn.Parameter(torch.logit(decay))
        self.calibrated: tuple[float, ...] = ()
        self.plan: dict[float, int] = {}
        self.report: DistillationReport | None = None
        self.certificate: Certificate | None = None
        self.example: dict[str, Any] | None = None
        self.card: dict[str, Any] | None = None
        like = representative_tensor(teacher)
        self._fit_to(like, like.dtype)

    def _fit_to(self, like: Tensor, dtype: torch.dtype) -> None:
        """Put the parts beside the teacher where its weights are, in a dtype."""
        for part in (self.time_heads, self.history, self.start_network, self.correction):
            if part is not None:
                part.to(like.device, dtype)
        self.to(like.device)

    @classmethod
    def for_example(
        cls,
        teacher: nn.Module,
        recipe: Recipe,
        x: Input,
        start_network: nn.Module | None = None,
        correction: nn.Module | None = None,
    ) -> Student:
        """An untrained student of (a frozen copy of) `teacher`, its shapes read off one input."""
        check_teacher(teacher, needs_weights=recipe.changes_weights)
        teacher = frozen_copy(teacher)
        with torch.no_grad():
            context, z0 = try_teacher(teacher, x)
            shared = shared_tensors(teacher, x, context, z0)  # type: ignore[arg-type]
        axes = [feature_axis_of(z, recipe.feature_axis) for z in tensors_of(z0)]
        shape_of = (context, z0, axes, shared)
        start_network = (
            _chosen(teacher, "start_network", start_network, LearnedStart, shape_of)
            if recipe.start == "learned"
            else None
        )
        correction = (
            _chosen(teacher, "correction_network", correction, LearnedCorrection, shape_of)
            if recipe.correction == "learned"
            else None
        )
        shapes = TeacherShapes(
            features=tuple(z.shape[a] for z, a in zip(tensors_of(z0), axes, strict=True)),
            axes=tuple(axes),
            weights=weights_in_use(teacher, x, with_injection=recipe.injection == "student")
            if recipe.changes_weights
            else (),
        )
        student = cls(teacher, recipe, shapes, start_network, correction)
        # A teacher without weights computes in the dtype of its inputs.
        student._fit_to(representative_tensor(teacher), dtype_beside(teacher, z0))
        student.example = described_input(x)
        return student

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

    # The clock.

    def time_point_at(self, fraction: float) -> TimePoint:
        """The point at a fraction of solver time."""
        r = self.recipe
        t = solver_time(fraction, r.eps, r.end)
        strength = out_coefficient(t, gamma=r.gamma, eps=r.eps, end=r.end)
        return TimePoint(t, strength if strength >= NEGLIGIBLE_STRENGTH else 0.0)

    def time_point(self, j: int) -> TimePoint:
        """The point of inference step j = 0, 1, ...: calibrated, or as in training."""
        known = len(self.calibrated)
        if not known or self.recipe.schedule == "leap":
            return self.trained_time_point(j)
        rest = 1.0 - self.calibrated[min(j, known - 1)]
        return self.time_point_at(1.0 - rest * self.recipe.decay ** max(j - known + 1, 0))

    def trained_time_point(self, j: int) -> TimePoint:
        """The point of step j on the clock of training: a leap or none, learned, or fraction 1 - decay^j."""
        if self.recipe.schedule == "leap":
            return self.time_point_at(0.0 if j < self.recipe.leap else 1.0)
        if self.rates is None or j == 0:
            return self.time_point_at(inference_fraction(j, self.recipe.decay))
        rates = torch.sigmoid(self.rates)
        left = rates[: min(j, len(rates))].prod() * rates[-1] ** max(j - len(rates), 0)
        point = self.time_point_at(1.0 - float(left.detach()))
        if not left.requires_grad:
            return point
        return point._replace(strength=1.0 - (1.0 - left) ** self.recipe.gamma)

    # Steps.

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

    # Use.

    def forward(self, x: Input, steps: int = 2, z0: State | None = None) -> Tensor:
        """The output after `steps` evaluations of f, from the learned start or from `z0`.

        A state of a similar input, such as the frame before, is a good `z0`.
        """
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps must be a whole number, 0 or more, not {steps!r}")
        prepared = self.prepare(x)
        z = deque(self.rollout(prepared, steps, z0), maxlen=1).pop()  # which holds no other
        return self.teacher.readout(z, prepared.base)

    def trajectory(self, x: Input, steps: int, z0: State | None = None) -> list[State]:
        """The states z_0 ... z_steps."""
        return list(self.rollout(self.prepare(x), steps, z0))

    def baked(self, steps: int) -> BakedStudent:
        """The student as it is now, with the weights of its first `steps` steps made once for all inputs."""
        return BakedStudent(self, steps)

    @property
    def is_solver(self) -> bool:
        """Whether all its steps are evaluations of the teacher's own f under Anderson's method."""
        recipe = self.recipe
        return not recipe.changes_weights and recipe.history == "anderson"

    @property
    def corrects_solves(self) -> bool:
        """Whether its solves use its corrections: not where they were found to save too few evaluations."""
        return self.correction is not None and (not self.plan or any(self.plan.values()))

    def as_solver(self) -> StudentSolver:
        """The student as a solver, for `cdeq.solve_model`, `cdeq.solve_with_gradient` and `cdeq.TeachConfig`."""
        if not self.is_solver:
            raise ValueError(
                f"a student of the recipe {self.recipe.name!r} is no solver: its steps are not the teacher's own under "
                "Anderson's method; those of 'corrected' and 'warm_start' are"
            )
        history = self.history
        assert isinstance(history, AndersonHistory)
        mixing = Anderson(window=history.window, mixing=history.mixing, ridge=history.ridge)
        return StudentSolver(self, mixing, self.corrects_solves)

    def unrolled(self, steps: int, *, check: bool = True) -> UnrolledStudent:
        """Its first `steps` steps as a plain module, for `torch.compile`: x to (output, residual)."""
        return UnrolledStudent(self, steps, check=check)

    def export(
        self,
        path: str | Path,
        x: Input,
        steps: int = 2,
        *,
        check: bool = True,
        certified: bool = False,
    ) -> list[Path]:
        """Write the first `steps` steps as ONNX (`.onnx`) or for torch (`.pt2`): x to (output, residual).

        `x`: an input to take the shapes from; the number of samples stays open, and for a causal model the lengths.
        The residual is that of the state read out, and costs one more evaluation; without `check` it is left out.
        `certified`: the state and the context, too, and beside the file another, `.step`, with the teacher's step, to
        go on from there. Returns the files.
        """
        return export_student(self, path, x, steps, check=check, certified=certified)

    def solve(
        self,
        x: Input,
        tol: float = TOL,
        max_steps: int = MAX_STEPS,
        *,
        measure: Level = "error",
        z0: State | None = None,
        solver: Solver | None = None,
        student_steps: int | None = None,
    ) -> CertifiedSolution:
        """As many evaluations as it takes for an estimated error of `tol`; see `certified_solve`.

        `measure`: what `tol` bounds, the estimated "error", the measured "residual", or the "bound".
        """
        return certified_solve(
            self,
            x,
            tol=tol,
            measure=measure,
            max_steps=max_steps,
            z0=z0,
            solver=solver,
            student_steps=student_steps,
        )

    def calibrate(
        self,
        loader: Iterable[Any],
        steps: int = 8,
        max_batches: int | None = None,
        *,
        confidence: float | None = 0.99,
    ) -> tuple[float, ...]:
        """On held-out data, set the bound of `solve` and choose the clock of the first steps, if there is one.

        See `cdeq.consistency.calibration`.
        """
        return calibrate(self, loader, steps=steps, max_batches=max_batches, confidence=confidence)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The student's own weights, without the teacher's."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def own_parts(self) -> nn.ModuleDict:
        """The modules with the student's own weights, by name; the teacher is not among them."""
        parts = {name: part for name, part in self.named_children() if name != "methods"}
        for name in LOOSE:
            if getattr(self, name) is not None:
                parts[name] = nn.ParameterList([getattr(self, name)])
        return nn.ModuleDict(parts)

    def with_parts(self, parts: nn.ModuleDict) -> Student:
        """A student with the same teacher and other parts of its own, none of them copied."""
        other = copy.copy(self)
        other._modules = {**self._modules, **{k: v for k, v in parts.items() if k not in LOOSE}}
        other._parameters = dict(self._parameters)
        for name in LOOSE:
            if name in parts:
                other._parameters[name] = parts[name][0]  # type: ignore[index]
        return other

    def save(self, folder: str | Path) -> None:
        """Write the student and its teacher as a folder of config.json and safetensors."""
        save_student(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, teacher: nn.Module | type | None = None) -> Student:
        """Read a saved student; `teacher`: its class, or an instance to fill, if the class cannot be imported."""
        return load_student(cls, Path(folder), teacher)

    def save_pretrained(self, folder: str | Path) -> None:
        """`save`, with a model card, README.md, beside it; a README.md of your own is kept."""
        share_student(self, Path(folder))

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload to the Hugging Face hub, as `owner/name`; returns the address of the commit.

        `options` are huggingface_hub's: private, token, branch, commit_message, create_pr.
        """
        return push_student(self, repo_id, **options)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_repo: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        teacher: nn.Module | type | None = None,
    ) -> Student:
        """A student from a folder, or from a repository `owner/name` of the Hugging Face hub.

        `revision`: a branch, a tag or a commit. No code of a repository is run: a teacher whose class is not cdeq's is
        refused, unless you pass the class, or an instance to fill, as `teacher`.
        """
        return fetch_student(
            cls,
            folder_or_repo,
            teacher,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
        )


def _chosen(
    teacher: nn.Module,
    offer: str,
    given: nn.Module | None,
    default: Any,
    shape_of: tuple[Context, State, list[int], set[int]],
) -> nn.Module:
    """A network of the student's: the user's own, the one that the teacher offers, or the default for its state."""
    if given is not None:
        return copy_of(given).requires_grad_(True)
    offered = getattr(teacher, offer, None)
    return offered() if offered else default.matching(*shape_of)

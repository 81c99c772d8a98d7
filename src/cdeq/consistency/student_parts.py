"""What a student is made of: the teacher inside, and the parts with weights of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from cdeq.consistency.certificate import Certificate
from cdeq.consistency.copying import copy_of, frozen_copy
from cdeq.consistency.correction import LearnedCorrection
from cdeq.consistency.deployment import described_input
from cdeq.consistency.features import TimeHead, feature_axis_of
from cdeq.consistency.groups import shared_tensors
from cdeq.consistency.history import AndersonHistory, GRUHistory, MLPHistory, NoHistory
from cdeq.consistency.parts import (
    TeacherMethods,
    TeacherShapes,
    check_teacher,
    try_teacher,
    weights_in_use,
)
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.report import DistillationReport
from cdeq.consistency.start import LearnedStart
from cdeq.consistency.weights import Deltas
from cdeq.equilibrium.contract import (
    Context,
    EquilibriumModel,
    Input,
    check_contract,
    fading_of,
    is_batched,
)
from cdeq.equilibrium.states import State, tensors_of
from cdeq.placement import dtype_beside, representative_tensor

LOOSE = ("rates", "gains")
"""Parameters of the student that are in no module of its own."""


class StudentParts(nn.Module):
    """A frozen teacher, and beside it changes of its weights, time heads, a history, a start and corrections."""

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
    ) -> Self:
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

    def train(self, mode: bool = True) -> Self:
        """As usual, but the teacher inside stays in evaluation mode."""
        super().train(mode)
        self.methods.eval()
        return self

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

    def with_parts(self, parts: nn.ModuleDict) -> Self:
        """A student with the same teacher and other parts of its own, none of them copied."""
        other = copy.copy(self)
        other._modules = {**self._modules, **{k: v for k, v in parts.items() if k not in LOOSE}}
        other._parameters = dict(self._parameters)
        for name in LOOSE:
            if name in parts:
                other._parameters[name] = parts[name][0]  # type: ignore[index]
        return other


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

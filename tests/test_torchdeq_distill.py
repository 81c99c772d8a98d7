"""A model written on torchdeq, from adapter to saved student."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    # torchdeq's docstrings hold escapes that Python 3.12 warns about when it first compiles them.
    warnings.filterwarnings("ignore", "invalid escape sequence", SyntaxWarning)
    pytest.importorskip("torchdeq")

from torchdeq import get_deq

import cdeq
from cdeq import FitConfig, Recipe, Student, distill
from cdeq.consistency.saving import StudentFolderError
from cdeq.consistency.weights import mix_contexts
from cdeq.equilibrium import from_torchdeq
from cdeq.equilibrium.states import relative_distance, relative_residual
from cdeq.solvers import Anderson, solve_model
from teachers import randomized

DIM = 8


class User(nn.Module):
    """A model as torchdeq's own guide has it; its map closes over the injected input."""

    def __init__(self, seed: int = 0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.embed, self.layer, self.head = (
            nn.Linear(3, DIM),
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 2),
        )
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * 0.4)
            self.layer.weight.mul_(0.9 / torch.linalg.matrix_norm(self.layer.weight, 2))
        self.deq = get_deq(f_max_iter=60, f_tol=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        injected = self.embed(x)
        z_out, _ = self.deq(
            lambda z: torch.tanh(self.layer(z) + injected), torch.zeros_like(injected)
        )
        return self.head(z_out[-1])


def adapted(seed: int = 0):
    return from_torchdeq(User(seed).eval())


def data(count: int = 3, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, generator=g), torch.randint(2, (size,), generator=g))
        for _ in range(count)
    ]


def untrained(recipe: str, **changes) -> Student:
    torch.manual_seed(0)
    return randomized(
        Student.for_example(adapted(), Recipe.from_name(recipe, **changes), data()[0][0])
    )


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe.from_name("paper"),
        Recipe.from_name("anchored"),
        Recipe.from_name("anchored", injection="student"),
    ],
    ids=lambda r: f"{r.name}, injection of the {r.injection}",
)
@pytest.mark.slow
def test_from_adapter_to_saved_student(tmp_path, recipe):
    teacher, batches = adapted(), data()
    x = batches[0][0]
    config = FitConfig(updates=40, learning_rate=1e-2)
    student = distill(teacher, batches, recipe=recipe, fit=config)
    changed = ("embed", "layer") if recipe.injection == "student" else ("layer",)
    names = {f"model.{layer}.{kind}" for layer in changed for kind in ("weight", "bias")}
    assert set(student.shapes.weights) == names
    with (
        torch.no_grad()
    ):  # one step of the student is nearer to the equilibrium than one of the map
        context = teacher.inject(x)
        equilibrium = solve_model(teacher, context, Anderson(), tol=1e-6, max_steps=200).state
        plain = teacher.step(teacher.start(context), context)
        *_, first = student.rollout(student.prepare(x), 1)
        distances = [relative_distance(z, equilibrium).mean() for z in (first, plain)]
        assert distances[0] < 0.9 * distances[1]
    student.calibrate(batches, steps=4, confidence=None)
    assert student.calibrated

    solution = student.solve(x, tol=1e-4, measure="residual")
    assert solution.converged.all()
    with torch.no_grad():
        z = solution.state
        true = relative_residual(z, teacher.step(z, context))
        torch.testing.assert_close(solution.residual, true, rtol=1e-2, atol=1e-6)
        torch.testing.assert_close(z, equilibrium, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(solution.output, teacher.readout(z, context))

    student.save(tmp_path)
    with pytest.raises(StudentFolderError, match="pass an instance as `teacher=`"):
        Student.load(tmp_path)
    instance = adapted(seed=5)
    again = cdeq.Student.load(tmp_path, teacher=instance)
    assert again.teacher is not instance
    assert again.calibrated == student.calibrated
    with torch.no_grad():
        for steps in range(4):
            assert torch.equal(again(x, steps=steps), student(x, steps=steps))


def test_a_mixed_context_is_the_hand_mixed_one_after_its_base_was_stepped():
    student, x = untrained("anchored", injection="student"), data()[0][0]
    with torch.no_grad():
        prepared = student.prepare(x)
        base, changed = prepared.base, prepared.changed
        z = torch.randn(len(x), DIM, generator=torch.Generator().manual_seed(3))
        before = student.teacher.step(z, base)
        student.teacher.step(z, changed)
        for c in (0.3, 1.0, torch.tensor(0.3)):
            mixed = mix_contexts(base, changed, c)
            pairs = zip(base.tensors, changed.tensors, strict=True)
            tensors = tuple(a + float(c) * (b - a) for a, b in pairs)
            by_hand = student.teacher.step(z, dataclasses.replace(base, tensors=tensors))
            torch.testing.assert_close(student.teacher.step(z, mixed), by_hand)
            assert not torch.allclose(by_hand, before, atol=1e-3)


def test_the_steps_of_a_student_are_its_equation():
    """z_{j+1} = tanh(W_j z_j + b_j + u_j), all of them theta + c_j delta, whatever was stepped before."""
    changes = {"start": "teacher", "decay": 0.6, "injection": "student"}
    student, x = untrained("anchored", **changes), data()[0][0]
    theta = {n: p.detach() for n, p in adapted().named_parameters()}
    delta = dict(zip(student.deltas.names, student.deltas(), strict=True))
    with torch.no_grad():
        prepared = student.prepare(x)
        student.teacher.step(student.begin(prepared), prepared.base)
        states = list(student.rollout(prepared, 4))
        u = [x @ w.T + b for w, b in zip(*weights_of("embed", theta, delta), strict=True)]
        for j in range(4):
            c = 0.6**j
            (w, dw), (b, db) = (
                (theta[f"model.layer.{k}"], delta[f"model.layer.{k}"]) for k in ("weight", "bias")
            )
            injected = u[0] + c * (u[1] - u[0])
            expected = torch.tanh(states[j] @ (w + c * dw).T + b + c * db + injected)
            torch.testing.assert_close(states[j + 1], expected)


def weights_of(layer, theta, delta):
    """Weights and biases of a layer under theta and theta + delta."""
    names = [f"model.{layer}.{kind}" for kind in ("weight", "bias")]
    return [[theta[n], theta[n] + delta[n]] for n in names]

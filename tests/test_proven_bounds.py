"""Bounds that a model's declared contraction proves."""

import pytest
import torch

from cdeq.equilibrium.contract import Contraction, declared_contraction
from cdeq.equilibrium.states import relative_distance
from cdeq.models import EIGNN, IGNN, MIGNN
from checks import csr, numbers
from teachers import Linear, Ring, inputs, students, untrained


class Declared(Linear):
    """Says what its spectral norm is."""

    contraction = 0.8


def test_a_declared_contraction_proves_a_bound():
    student, x = students(Declared).double(), inputs(64, dtype=torch.float64)
    star = student.teacher.equilibrium(x)
    for tol in (1e-1, 1e-3, 1e-6):
        result = student.solve(x, tol=tol, measure="bound", max_steps=300)
        assert result.converged.all()
        assert result.bound_kind == "proven"
        assert result.confidence is None
        true = relative_distance(result.state, star)
        assert (true <= result.bound).all()
        assert (result.bound <= tol).all()
        away = result.residual / (1 - 0.8)
        torch.testing.assert_close(result.bound, away / (1 - away))


def test_a_contraction_may_have_a_norm_of_its_own():
    class Largest(Ring):
        def contraction(self, context):
            rows = float(self.weight.abs().sum(dim=1).max())
            return Contraction(rows, lambda z: z.abs().amax()[None], "largest entry")

    student, x = students(Largest, norm=0.4).double(), inputs(dtype=torch.float64)
    result = student.solve(x, tol=1e-3, measure="bound", max_steps=300)
    star = student.solve(x, tol=1e-12, measure="residual", max_steps=500).state
    assert result.converged.all()
    assert (result.state - star).abs().max() / star.abs().max() <= result.bound


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(IGNN, {}), (EIGNN, {}), (MIGNN, {}), (MIGNN, {"sweeps": 3}), (MIGNN, {"alpha": 0.5})],
    ids=str,
)
def test_implicit_graph_networks_prove_their_own_bounds(kind, settings):
    g = torch.Generator().manual_seed(0)
    near = (torch.rand(30, 30, generator=g) < 0.1).double()
    near = ((near + near.T + torch.eye(30)) > 0).double()
    root = near.sum(dim=1).rsqrt()
    x = (csr(root[:, None] * near * root), numbers(30, 4))
    torch.manual_seed(0)
    model = kind(features=4, width=6, classes=3, **settings).double()
    student = untrained(model, x, "warm_start")
    context = student.teacher.inject(x)
    declared = declared_contraction(student.teacher, context)
    norm = declared.norm or (lambda z: z.norm()[None])
    star = student.solve(x, tol=1e-13, measure="residual", max_steps=500).state
    for tol in (1e-1, 1e-3, 1e-6):
        result = student.solve(x, tol=tol, measure="bound", max_steps=300)
        assert result.bound_kind == "proven"
        assert result.converged.all()
        assert norm(result.state - star) / norm(star) <= result.bound <= tol
    pairs = [(numbers(30, 6, seed=i), numbers(30, 6, seed=i + 9)) for i in range(9)]
    seen = [
        float(norm(student.teacher.step(a, context) - student.teacher.step(b, context)))
        / float(norm(a - b))
        for a, b in pairs
    ]
    assert max(seen) <= declared.factor < 0.96  # kappa is 0.95 at most


def test_a_monotone_map_that_does_not_contract_has_its_bound_too():
    """z = relu(z - a (G z - x)), G strongly monotone by m and of norm L: |z - z*| <= |r| (1 + a L) / (a m)."""
    spin = numbers(8, 8)
    g = 0.5 * torch.eye(8) + 0.3 * (spin - spin.T)
    a, m, size = 0.3, 0.5, float(torch.linalg.matrix_norm(g, 2))

    class Monotone(Linear):
        contraction = 1 - a * m / (1 + a * size)

        def step(self, z, context):
            return torch.relu(z - a * (z @ g.T - context))

    assert torch.linalg.matrix_norm(torch.eye(8) - a * g, 2) > 1
    model = Monotone().double()
    x = inputs(32, dtype=torch.float64)
    student = untrained(model, x, "warm_start").double()
    star = student.solve(x, tol=1e-13, measure="residual", max_steps=3000).state
    for tol in (1e-1, 1e-3):
        result = student.solve(x, tol=tol, measure="bound", max_steps=3000)
        assert result.converged.all()
        assert (relative_distance(result.state, star) <= result.bound).all()


def test_what_does_not_contract_proves_nothing():
    for declared, expected in ((None, None), (1.0, None), (1.5, None), (0.5, Contraction(0.5))):
        model = Linear()
        model.contraction = declared
        assert declared_contraction(model, None) == expected
    model.contraction = -1.0
    with pytest.raises(ValueError, match="must not be negative"):
        declared_contraction(model, None)

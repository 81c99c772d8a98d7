"""Implicit graph networks: closed forms, splitting, gradients, dropout, sparse features."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.data.graphs import Graph, normalised_adjacency
from cdeq.data.sparse import SparseMatrix
from cdeq.gradients import spectral_radius
from cdeq.models import EIGNN, IGNN, MIGNN
from cdeq.models.graph import eignn, mignn
from cdeq.models.graph.bounds import perron_frobenius, project_rows_l1
from cdeq.models.graph.ignn import GraphContext
from cdeq.models.graph.start import PropagatedStart
from cdeq.solvers import Anderson, Picard, solve_model
from cdeq.training.loop import FitConfig
from cdeq.training.teaching import TeachConfig, teach
from checks import csr, numbers, require_implicit_gradients
from graphs import FEATURES, random_graph

NODES, WIDTH, CLASSES = 24, 6, 3
DOUBLE = torch.float64


def make(kind: type[nn.Module], **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(features=FEATURES, width=WIDTH, classes=CLASSES, **options).double().eval()


def settled(model: Any, x: Graph, **options: Any) -> Tensor:
    """Picard's limit to the last digits."""
    options = {"tol": 1e-14, "max_steps": 2000, **options}
    with torch.no_grad():
        solution = solve_model(model, model.inject(x), Picard(), **options)
    assert bool(solution.converged.all())
    return solution.state


def scrambled(model: Any, scale: float) -> Any:
    """The model with weights that nothing has bounded."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(scale * torch.randn_like(p))
    return model


every_kind = pytest.mark.parametrize("kind", [IGNN, EIGNN, MIGNN])


# IGNN.


def test_ignn_projects_its_weight_and_training_calls_it():
    model = make(IGNN, kappa=0.8, spectral_bound=2.0)
    before = scrambled(model, 3.0).weight.detach().clone()
    model.project()
    torch.testing.assert_close(model.weight.detach(), project_rows_l1(before, 0.4))
    torch.testing.assert_close(model.bounded_weight(), model.weight)
    # A learning rate that leaves the ball in every update.
    x, labels = random_graph(), torch.arange(NODES) % CLASSES
    config = TeachConfig(fit=FitConfig(updates=3, learning_rate=1.0), depths=(5, 5))
    teach(model, lambda update: (x, labels), config)
    assert not torch.allclose(model.weight.detach(), project_rows_l1(before, 0.4))
    assert float(model.weight.detach().abs().sum(dim=1).max()) <= 0.4 + 1e-12


@pytest.mark.parametrize("scale", [0.5, 30.0])
def test_ignn_is_well_posed_on_an_adjacency_that_is_not_normalised(scale):
    x = random_graph()
    x = x._replace(adjacency=csr(scale * x.adjacency.to_dense()))
    bound = perron_frobenius(x.adjacency)
    assert bound == pytest.approx(scale)
    model = scrambled(make(IGNN, kappa=0.9, spectral_bound=bound), 10.0)
    state = settled(model, x)
    expected = torch.relu(
        x.adjacency.to_dense() @ state @ model.bounded_weight().T + model.inject(x).injection
    )
    torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_ignn_refuses_a_spectral_bound_that_is_none(bound):
    with pytest.raises(ValueError, match="spectral_bound"):
        IGNN(features=FEATURES, spectral_bound=bound)


# EIGNN.


def test_eignn_closed_forms_agree_with_the_iteration():
    model, x = make(EIGNN, gamma=0.95), random_graph(60)
    with torch.no_grad():  # one strong direction, so that the equilibrium is far
        model.factor.copy_(torch.outer(numbers(WIDTH, seed=2), numbers(WIDTH, seed=3)))
        model.factor.add_(0.1 * numbers(WIDTH, WIDTH, seed=4))
    limit = settled(model, x)
    solved = model.closed_form(x, tol=1e-12)
    assert solved.products < 70  # steepest descent would take hundreds
    torch.testing.assert_close(solved.state, limit, rtol=0, atol=1e-8)
    torch.testing.assert_close(model.closed_form_dense(x), limit, rtol=0, atol=1e-8)
    assert limit.abs().max() > 2 * model.inject(x).injection.abs().max()


def test_eignn_closed_form_is_the_kronecker_solution():
    model, x = make(EIGNN), random_graph(7)
    injection = model.inject(x).injection.detach()
    square = model.factor.T @ model.factor
    coupling = (square / square.square().sum().sqrt()).detach()
    system = torch.eye(7 * WIDTH, dtype=DOUBLE)
    system -= 0.8 * torch.kron(x.adjacency.to_dense(), coupling.T.contiguous())
    exact = torch.linalg.solve(system, injection.reshape(-1)).reshape(7, WIDTH)
    torch.testing.assert_close(model.closed_form(x, tol=1e-13).state, exact, rtol=0, atol=1e-11)
    torch.testing.assert_close(model.closed_form_dense(x), exact, rtol=0, atol=1e-11)
    torch.testing.assert_close(settled(model, x), exact, rtol=0, atol=1e-11)


def test_eignn_counts_the_products_of_its_closed_form(monkeypatch):
    calls = []

    def counting(*arguments: Tensor) -> Tensor:
        calls.append(arguments)
        return original(*arguments)

    original = eignn.sparse_product
    monkeypatch.setattr(eignn, "sparse_product", counting)
    model, x = make(EIGNN), random_graph(60)
    products = [model.closed_form(x, tol=tol).products for tol in (1e-3, 1e-6, 1e-12)]
    assert sum(products) == len(calls)
    assert products == sorted(set(products))


def test_eignn_closed_form_meets_its_tolerance_in_single_precision():
    model, x = make(EIGNN).float(), random_graph(60)
    x = Graph(x.adjacency.float(), 1e-20 * x.features.float())  # squares would underflow
    state = model.closed_form(x).state
    with torch.no_grad():
        context = model.inject(x)
        change = (model.step(state, context) - state).double()
    assert 0 < float(change.norm()) <= 2e-6 * float(context.injection.double().norm())


def test_eignn_closed_form_of_nothing_is_nothing():
    x = random_graph()
    x = x._replace(features=torch.zeros_like(x.features))
    assert not make(EIGNN).closed_form(x).state.any()


def test_eignn_says_when_its_closed_form_is_out_of_reach():
    model = make(EIGNN)
    with pytest.raises(RuntimeError, match="in 2 iterations"):
        model.closed_form(random_graph(), max_iterations=2)
    # Single precision cannot reach this, though the residual that the recursion carries along can.
    single = Graph(random_graph(60).adjacency.float(), random_graph(60).features.float())
    with pytest.raises(RuntimeError, match="double precision"):
        make(EIGNN).float().closed_form(single, tol=1e-8)
    large = eignn.DENSE_LIMIT + 1
    adjacency = normalised_adjacency(torch.zeros(2, 0, dtype=torch.long), large).double()
    with pytest.raises(ValueError, match="closed_form"):
        model.closed_form_dense(Graph(adjacency, torch.zeros(large, FEATURES, dtype=DOUBLE)))
    with pytest.raises(ValueError, match="gamma"):
        EIGNN(features=FEATURES, gamma=1.0)


# MIGNN.


def activation_equilibrium(model: Any, x: Graph) -> Tensor:
    """z = relu(A z W^T + b) by its own iteration, dense."""
    weight, injection = model.orthogonal_weight().detach(), model.inject(x).injection.detach()
    dense, z = x.adjacency.to_dense(), torch.zeros_like(injection)
    for _ in range(1000):
        z = torch.relu(dense @ z @ weight.T + injection)
    return z


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_mignn_has_one_equilibrium_for_any_number_of_sweeps(alpha):
    model, x = make(MIGNN, alpha=alpha), random_graph()
    exact = activation_equilibrium(model, x)
    assert 0.2 < float((exact > 0).double().mean()) < 0.8
    for sweeps in range(1, 6):
        z = torch.relu(settled(model.with_sweeps(sweeps), x))
        torch.testing.assert_close(z, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_mignn_with_many_sweeps_is_the_exact_splitting(alpha):
    model, x = make(MIGNN, alpha=alpha, sweeps=200), random_graph()
    context, u = model.inject(x), numbers(NODES, WIDTH, seed=5)
    weight = model.orthogonal_weight().detach()
    system = (1 + alpha) * torch.eye(NODES * WIDTH, dtype=DOUBLE)
    system -= alpha * torch.kron(x.adjacency.to_dense(), weight.contiguous())
    z = torch.relu(u)
    u_half = 2 * z - u
    right = (u_half + alpha * context.injection).detach().reshape(-1)
    z_half = torch.linalg.solve(system, right).reshape(NODES, WIDTH)
    torch.testing.assert_close(model.step(u, context), 2 * z_half - u_half)


def test_mignn_by_default_iterates_the_map_on_pre_activations():
    model, x = make(MIGNN), random_graph()
    context, u = model.inject(x), numbers(NODES, WIDTH, seed=5)
    expected = x.adjacency.to_dense() @ torch.relu(u) @ model.orthogonal_weight().T
    torch.testing.assert_close(model.step(u, context), expected + context.injection)
    torch.testing.assert_close(
        model.readout(u, context), F.linear(torch.relu(u), model.head.weight, model.head.bias)
    )


def test_mignn_takes_one_product_a_sweep(monkeypatch):
    model, x = make(MIGNN, alpha=0.5), random_graph()
    context, u = model.inject(x), numbers(NODES, WIDTH, seed=5)
    dense, weight = x.adjacency.to_dense(), model.orthogonal_weight()
    calls, original = [], mignn.sparse_product

    def counting(*arguments: Tensor) -> Tensor:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(mignn, "sparse_product", counting)
    z, u_half = torch.relu(u), 2 * torch.relu(u) - u
    for sweeps in (1, 2, 3):
        z = (u_half + 0.5 * context.injection + 0.5 * dense @ z @ weight.T) / 1.5
        calls.clear()
        found = model.with_sweeps(sweeps).step(u, context)
        assert len(calls) == sweeps
        torch.testing.assert_close(found, 2 * z - u_half)


@pytest.mark.slow
@given(
    alpha=st.floats(0.05, 1.0), sweeps=st.integers(1, 6), scale=st.sampled_from([0.1, 1.0, 30.0])
)
@settings(max_examples=40)
def test_mignn_step_is_a_contraction_whatever_its_weights(alpha, sweeps, scale):
    model, x = scrambled(make(MIGNN, alpha=alpha, sweeps=sweeps), scale), random_graph()
    with torch.no_grad():
        model.mu.fill_(30.0)  # the largest weights there are
        weight, context = model.orthogonal_weight(), model.inject(x)
        identity = torch.eye(WIDTH, dtype=DOUBLE)
        torch.testing.assert_close(weight @ weight.T, 0.81 * identity)
        a, b = numbers(2, NODES, WIDTH, seed=6)
        change = model.step(a, context) - model.step(b, context)
    assert float(change.norm()) < float((a - b).norm())


def test_mignn_weight_is_the_cayley_transform_with_a_fifth_reflected():
    model = MIGNN(features=FEATURES, width=20).double()
    skew = model.free - model.free.T
    identity = torch.eye(20, dtype=DOUBLE)
    transform = (identity - skew) @ torch.linalg.inv(identity + skew) @ torch.diag(model.signs)
    expected = 0.9 * torch.sigmoid(model.mu) * transform
    torch.testing.assert_close(model.orthogonal_weight(), expected)
    assert int((model.signs == -1).sum()) == 4
    assert int((model.signs == 1).sum()) == 16


def test_mignn_copy_with_other_sweeps_is_its_own():
    model = make(MIGNN, sweeps=2)
    other = model.with_sweeps(5)
    assert (model.sweeps, other.sweeps, other.config["sweeps"]) == (2, 5, 5)
    assert MIGNN(**other.config).sweeps == 5
    assert torch.equal(other.free, model.free)
    assert other.free is not model.free
    for broken in (lambda: model.with_sweeps(0), lambda: MIGNN(features=3, sweeps=0)):
        with pytest.raises(ValueError, match="sweep"):
            broken()
    with pytest.raises(ValueError, match="alpha"):
        MIGNN(features=3, alpha=0.0)
    with pytest.raises(ValueError, match="kappa"):
        MIGNN(features=3, kappa=1.0)


def test_mignn_converges_with_the_solver_its_docstring_names():
    model, x = make(MIGNN, sweeps=2), random_graph()
    with torch.no_grad():
        solver = Anderson(window=5, mixing=0.5)
        solution = solve_model(model, model.inject(x), solver, tol=1e-10, max_steps=100)
    assert bool(solution.converged.all())
    z = torch.relu(solution.state)
    torch.testing.assert_close(z, activation_equilibrium(model, x), rtol=0, atol=1e-8)


# All three.

GRADIENT_CASES: dict[str, Callable[[], Any]] = {
    "IGNN": lambda: make(IGNN, spectral_bound=1.1),
    "IGNN, rows outside the ball": lambda: scrambled(make(IGNN), 1.0),
    "EIGNN": lambda: make(EIGNN),
    "MIGNN": lambda: make(MIGNN),
    "MIGNN, 3 sweeps": lambda: make(MIGNN, alpha=0.5, sweeps=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_implicit_gradients_are_those_of_the_unrolled_iteration(case):
    labels = torch.arange(NODES) % CLASSES
    require_implicit_gradients(
        GRADIENT_CASES[case](),
        random_graph(),
        lambda output: F.cross_entropy(output, labels),
        unrolled=300,
        tolerance=1e-7,
        least=1e-5,
    )


@every_kind
def test_any_weights_leave_the_map_a_contraction_at_its_equilibrium(kind):
    x = random_graph()
    for scale in (0.1, 3.0, 100.0):
        model = scrambled(make(kind), scale)
        star = settled(model, x)
        context = model.inject(x)
        radius = spectral_radius(lambda z, m=model, c=context: m.step(z, c), star, batched=False)
        assert float(radius) < 0.96


def assert_half_is_dropped(dropped: Tensor, whole: Tensor) -> None:
    """Each number is gone or doubled, about half of them each."""
    gone = dropped.abs() < 1e-8
    torch.testing.assert_close(dropped[~gone], 2 * whole[~gone])
    assert 0.3 < float(gone.double().mean()) < 0.7


@every_kind
def test_dropout_is_drawn_once_for_each_input_and_in_training_only(kind):
    model, plain, x = make(kind, dropout=0.5), make(kind), random_graph()
    torch.testing.assert_close(model.inject(x), plain.inject(x))
    z = numbers(NODES, WIDTH, seed=5)
    context = model.inject(x)
    torch.testing.assert_close(model.readout(z, context), plain.readout(z, context))

    model.train()
    torch.manual_seed(3)
    context = model.inject(x)
    assert not torch.allclose(model.inject(x).injection, context.injection)
    assert torch.equal(model.step(z, context), model.step(z, context))
    dropped = context.injection.detach()
    if kind is not EIGNN:  # the mask is seen before A has spread it
        dropped = torch.linalg.solve(x.adjacency.to_dense(), dropped)
    whole = F.linear(x.features, model.injection.weight, model.injection.bias).detach()
    assert_half_is_dropped(dropped, whole)

    model.head = nn.Identity()
    first, second = model.readout(z, context), model.readout(z, context)
    assert not torch.allclose(first, second)
    state = torch.relu(z) if kind is MIGNN else z
    assert_half_is_dropped(first[state != 0], state[state != 0])
    with pytest.raises(ValueError, match="dropout"):
        make(kind, dropout=1.5)


@every_kind
def test_sparse_features_give_the_same_numbers_and_gradients(kind):
    model, x = make(kind), random_graph()
    features = x.features * (x.features > 0.3)
    sparse = x._replace(features=SparseMatrix.of(csr(features)))
    upstream, found = numbers(NODES, WIDTH, seed=8), []
    for given_graph in (x._replace(features=features), sparse):
        injection = model.inject(given_graph).injection
        (gradient,) = torch.autograd.grad(injection, model.injection.weight, upstream)
        found.append((injection, gradient))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("nonnegative", [False, True])
def test_the_start_is_a_polynomial_of_the_adjacency(nonnegative):
    x = random_graph()
    start = PropagatedStart(WIDTH, inner=3, hops=4, nonnegative=nonnegative).double()
    context = GraphContext(numbers(NODES, WIDTH, seed=6), x.adjacency)
    assert not start(context).any()
    nn.init.normal_(start.expand.weight)
    hidden = torch.relu(start.compress(context.injection))
    dense = x.adjacency.to_dense()
    reached = [torch.linalg.matrix_power(dense, k) @ hidden for k in range(5)]
    wanted = start.expand(torch.cat(reached, dim=1))
    wanted = wanted.clamp_min(0) if nonnegative else wanted
    torch.testing.assert_close(start(context), wanted)
    assert (start(context) < 0).any() != nonnegative


def test_a_start_cut_off_at_zero_can_leave_zero():
    start = PropagatedStart(WIDTH, nonnegative=True).double()
    context = GraphContext(numbers(NODES, WIDTH, seed=6), random_graph().adjacency)
    (start(context) - 1).square().sum().backward()
    assert start.expand.weight.grad.any()

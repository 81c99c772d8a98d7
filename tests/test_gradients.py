"""Gradients through an equilibrium, against closed forms, finite differences and plain autograd."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cdeq.equilibrium import from_functions
from cdeq.gradients import GRADIENTS, Implicit, JacobianFree, Phantom, Unrolled, solve_with_gradient
from cdeq.solvers import Anderson, Broyden, Picard
from checks import numbers
from teachers import Plain

DIM, BATCH = 5, 3
EXACT = {"solver": Anderson(), "tol": 1e-13, "max_steps": 200}
IMPLICIT = Implicit(tol=1e-13, max_steps=200)


def contraction(dim: int = DIM, factor: float = 0.6, seed: int = 0) -> Tensor:
    matrix = numbers(dim, dim, seed=seed)
    return matrix * (factor / torch.linalg.matrix_norm(matrix, 2))


class Linear(Plain):
    """z = W z + b + x, so z* = (I - W)^-1 (b + x)."""

    def __init__(self, batched: bool = True):
        super().__init__()
        self.batched = batched
        self.weight = nn.Parameter(contraction())
        self.bias = nn.Parameter(numbers(DIM, seed=2))
        self.evaluations = 0

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        self.evaluations += 1
        return z @ self.weight.T + self.bias + context

    def exact(self, context: Tensor) -> Tensor:
        identity = torch.eye(DIM, dtype=torch.float64)
        return torch.linalg.solve(identity - self.weight, (self.bias + context)[..., None])[..., 0]


class Tanh(Linear):
    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(super().step(z, context))


class Pair(Linear):
    """Two tensors of different shapes that depend on each other: (B, 2, 2) and (B, 1)."""

    def start(self, context: Tensor) -> tuple[Tensor, Tensor]:
        shape = context.shape[:-1]
        return context.new_zeros(*shape, 2, 2), context.new_zeros(*shape, 1)

    def step(self, z: tuple[Tensor, Tensor], context: Tensor) -> tuple[Tensor, Tensor]:
        flat = super().step(torch.cat([z[0].flatten(-2), z[1]], dim=-1), context)
        return flat[..., :4].unflatten(-1, (2, 2)), flat[..., 4:]


def losses_gradients(loss: Tensor, model: Linear, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [model.weight, model.bias, x])


def weighted(z: Tensor, seed: int = 3) -> Tensor:
    return (z * numbers(*z.shape, seed=seed)).sum()


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


@pytest.mark.parametrize("shape", [(BATCH, DIM), (DIM,)], ids=["batched", "one sample"])
@pytest.mark.parametrize(
    "adjoint", [Anderson(), Picard(), Broyden()], ids=lambda s: type(s).__name__
)
def test_implicit_on_a_linear_map_is_the_closed_form(adjoint, shape):
    model, x = Linear(batched=len(shape) == 2), numbers(*shape).requires_grad_()
    gradient = Implicit(solver=adjoint, tol=1e-13, max_steps=200)
    solution = solve_with_gradient(model, x, gradient=gradient, **EXACT)
    expected = losses_gradients(weighted(model.exact(x)), model, x)
    assert solution.converged.all()
    assert_close(losses_gradients(weighted(solution.state), model, x), expected, 1e-10)
    # The same by hand: u = (I - W^T)^-1 g, dL/db = sum u, dL/dW = sum u z*^T.
    g, z = numbers(*shape, seed=3).reshape(-1, DIM), model.exact(x).detach().reshape(-1, DIM)
    u = torch.linalg.solve(torch.eye(DIM, dtype=torch.float64) - model.weight.detach().T, g.T).T
    assert_close(expected, (u.T @ z, u.sum(0), u.reshape(shape)), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("batched", [True, False])
def test_implicit_passes_gradcheck(batched):
    model = Tanh(batched)
    x = numbers(2, DIM) if batched else numbers(DIM)

    def state(weight: Tensor, bias: Tensor, context: Tensor) -> Tensor:
        def step(z: Tensor, c: Tensor) -> Tensor:
            return torch.tanh(z @ weight.T + bias + c)

        function_model = from_functions(step, batched=batched)
        return solve_with_gradient(function_model, context, gradient=IMPLICIT, **EXACT).state

    arguments = (model.weight, model.bias, x.requires_grad_())
    assert torch.autograd.gradcheck(state, arguments, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(BATCH, DIM), (DIM,)], ids=["batched", "one sample"])
@pytest.mark.parametrize(
    "gradient",
    [IMPLICIT, Phantom(steps=4, damping=0.7), JacobianFree(), Unrolled(steps=6, mixing=0.8)],
    ids=lambda g: type(g).__name__,
)
def test_a_tuple_state_has_the_gradient_of_the_flat_one(gradient, shape):
    x = numbers(*shape).requires_grad_()
    pair, flat = Pair(len(shape) == 2), Linear(len(shape) == 2)
    first, second = solve_with_gradient(pair, x, gradient=gradient, **EXACT).state
    assert first.shape == (*shape[:-1], 2, 2)
    joined = torch.cat([first.flatten(-2), second], dim=-1)
    z = solve_with_gradient(flat, x, gradient=gradient, **EXACT).state
    torch.testing.assert_close(joined, z, rtol=1e-10, atol=1e-10)
    actual = losses_gradients(weighted(joined), pair, x)
    assert_close(actual, losses_gradients(weighted(z), flat, x), 1e-9)


def test_implicit_on_part_of_a_tuple_state():
    x = numbers(BATCH, DIM).requires_grad_()
    model = Pair()
    _, second = solve_with_gradient(model, x, gradient=IMPLICIT, **EXACT).state
    expected = losses_gradients(weighted(model.exact(x)[:, 4:]), model, x)
    assert_close(losses_gradients(weighted(second), model, x), expected, 1e-10)


def test_implicit_with_a_component_that_has_no_gradient():
    """One tensor of the state is a constant, the other does not depend on itself."""
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    constant = numbers(BATCH, 2)
    model = from_functions(
        lambda z, c: (constant, scale * z[0] + c), start=lambda c: (torch.zeros_like(c),) * 2
    )
    state = solve_with_gradient(model, numbers(BATCH, 2), gradient=IMPLICIT, **EXACT).state
    (actual,) = torch.autograd.grad(state[1].sum(), scale)
    torch.testing.assert_close(actual, constant.sum())


@pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (3, 1.0), (5, 0.5)])
def test_phantom_on_a_linear_map_is_its_truncated_series(steps, damping):
    """u = d sum_{i<k} ((1 - d) I + d W^T)^i g."""
    model, x = Linear(), numbers(BATCH, DIM).requires_grad_()
    z = solve_with_gradient(model, x, gradient=Phantom(steps=steps, damping=damping), **EXACT).state
    weight = model.weight.detach()
    factor = (1 - damping) * torch.eye(DIM, dtype=torch.float64) + damping * weight
    g = numbers(BATCH, DIM, seed=3)
    u = damping * sum(g @ torch.linalg.matrix_power(factor, i) for i in range(steps))
    star = model.exact(x).detach()
    torch.testing.assert_close(z, star, rtol=1e-10, atol=1e-10)
    assert_close(losses_gradients(weighted(z), model, x), (u.T @ star, u.sum(0), u), 1e-10)


def test_jacobian_free_on_a_linear_map():
    model, x = Linear(), numbers(BATCH, DIM).requires_grad_()
    z = solve_with_gradient(model, x, gradient=JacobianFree(), **EXACT).state
    g, star = numbers(BATCH, DIM, seed=3), model.exact(x).detach()
    assert_close(losses_gradients(weighted(z), model, x), (g.T @ star, g.sum(0), g), 1e-10)


@pytest.mark.parametrize("mixing", [1.0, 0.6])
def test_unrolled_is_plain_autograd(mixing):
    model, x = Tanh(), numbers(BATCH, DIM).requires_grad_()
    solution = solve_with_gradient(model, x, gradient=Unrolled(steps=7, mixing=mixing), **EXACT)
    z = torch.zeros_like(x)
    for _ in range(7):
        z = (1 - mixing) * z + mixing * model.step(z, x)
    torch.testing.assert_close(solution.state, z)
    actual = losses_gradients(weighted(solution.state), model, x)
    assert_close(actual, losses_gradients(weighted(z), model, x), 1e-12)
    assert solution.evaluations == 7
    assert solution.history.shape == (7, BATCH)
    assert not solution.history.requires_grad
    assert not solution.converged.any()


def test_unrolled_passes_the_gradient_to_the_start():
    model, x = Tanh(), numbers(BATCH, DIM)
    z0 = numbers(BATCH, DIM, seed=5).requires_grad_()
    z = solve_with_gradient(model, x, gradient=Unrolled(steps=2), z0=z0, **EXACT).state
    expected = torch.autograd.grad(weighted(model.step(model.step(z0, x), x)), z0)
    assert_close(torch.autograd.grad(weighted(z), z0), expected, 1e-12)


@pytest.mark.parametrize("name", GRADIENTS)
def test_without_gradients_nothing_more_is_evaluated(name):
    model, x = Tanh(), numbers(BATCH, DIM)
    with torch.no_grad():
        solution = solve_with_gradient(model, x, gradient=GRADIENTS[name](), solver=Picard())
    assert model.evaluations == solution.evaluations
    assert not solution.state.requires_grad


@pytest.mark.parametrize(
    ("gradient", "extra"), [(Implicit(), 1), (Phantom(steps=4), 4), (JacobianFree(), 1)]
)
def test_evaluations_with_gradient(gradient, extra):
    model, x = Tanh(), numbers(BATCH, DIM)
    solution = solve_with_gradient(model, x, gradient=gradient, solver=Picard())
    assert model.evaluations == solution.evaluations + extra
    solution.state.sum().backward()
    assert model.evaluations == solution.evaluations + extra


def test_implicit_of_a_frozen_model_needs_no_gradient():
    model = Tanh().requires_grad_(False)
    assert not solve_with_gradient(
        model, numbers(2, DIM), gradient=Implicit(), **EXACT
    ).state.requires_grad


def test_implicit_samples_do_not_touch_each_other():
    model, x = Tanh(), numbers(BATCH, DIM).requires_grad_()
    alone = x[:1].detach().requires_grad_()
    together = solve_with_gradient(model, x, gradient=IMPLICIT, **EXACT).state
    single = solve_with_gradient(model, alone, gradient=IMPLICIT, **EXACT).state
    (a,) = torch.autograd.grad(weighted(together[:1]), x)
    (b,) = torch.autograd.grad(weighted(single), alone)
    torch.testing.assert_close(a[:1], b, rtol=1e-10, atol=1e-10)
    assert (a[1:] == 0).all()


def test_implicit_backward_twice():
    model, x = Tanh(), numbers(BATCH, DIM).requires_grad_()
    state = solve_with_gradient(model, x, gradient=IMPLICIT, **EXACT).state
    weighted(state).backward(retain_graph=True)
    once = model.weight.grad.clone()
    weighted(state).backward()
    torch.testing.assert_close(model.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        weighted(state).backward()
    # A second forward and backward, and a change of the state in place.
    model.zero_grad()
    state = solve_with_gradient(model, x, gradient=IMPLICIT, **EXACT).state
    weighted(state.mul_(2)).backward()
    torch.testing.assert_close(model.weight.grad, 2 * once)


@pytest.mark.parametrize("loss", [torch.sum, weighted, torch.linalg.vector_norm])
def test_implicit_cannot_be_differentiated_twice(loss):
    model, x = Tanh(), numbers(BATCH, DIM).requires_grad_()
    state = solve_with_gradient(model, x, gradient=IMPLICIT, **EXACT).state
    (first,) = torch.autograd.grad(loss(state), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        first.sum().backward()


def test_implicit_backward_uses_the_weights_of_the_forward():
    """As with `functional_call`, which takes its weights away before backward runs."""
    model, x = Tanh(), numbers(BATCH, DIM).requires_grad_()
    expected = torch.autograd.grad(
        weighted(solve_with_gradient(model, x, gradient=IMPLICIT, **EXACT).state), x
    )
    state = solve_with_gradient(model, x, gradient=IMPLICIT, **EXACT).state
    model.weight = nn.Parameter(torch.zeros_like(model.weight))
    assert_close(torch.autograd.grad(weighted(state), x), expected, 1e-12)


def test_a_model_can_be_copied_and_saved_after_backward():
    model, x = Tanh(), numbers(BATCH, DIM)
    weighted(solve_with_gradient(model, x, gradient=IMPLICIT, **EXACT).state).backward()
    twin = copy.deepcopy(model)
    other = Tanh()
    other.load_state_dict(model.state_dict())
    for copied in (twin, other):
        copied.zero_grad()
        weighted(solve_with_gradient(copied, x, gradient=IMPLICIT, **EXACT).state).backward()
        torch.testing.assert_close(copied.weight.grad, model.weight.grad)
    assert not model._forward_hooks
    assert model.weight._backward_hooks is None


class Marker:
    """Something in the graph that can be watched."""


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, marker):
        ctx.marker = marker
        return z.clone()

    @staticmethod
    def backward(ctx, g):
        return g, None


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", GRADIENTS)
def test_nothing_keeps_the_graph_alive(name, backward):
    weight = contraction().requires_grad_()

    def run() -> list[weakref.ref]:
        marker, x = Marker(), numbers(BATCH, DIM)
        model = from_functions(lambda z, c: torch.tanh(Mark.apply(z @ weight.T, marker) + c))
        state = solve_with_gradient(model, x, gradient=GRADIENTS[name](), **EXACT).state
        if backward:
            state.sum().backward()
        return [weakref.ref(marker), weakref.ref(x), weakref.ref(state)]

    gc.disable()  # reference counting alone must do
    try:
        assert [reference() for reference in run()] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.slow
def test_memory_does_not_grow_with_iterations():
    model, x = Tanh(), numbers(BATCH, DIM)

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    def iterate() -> None:
        solve_with_gradient(model, x, gradient=Implicit(), solver=Anderson()).state.sum().backward()

    iterate()
    before = live_tensors()
    for _ in range(5):
        iterate()
    assert live_tensors() <= before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_implicit_in_lower_precision(dtype):
    exact, model = Linear(), Linear().to(dtype)
    x = numbers(BATCH, DIM)
    state = solve_with_gradient(model, x.to(dtype), gradient=Implicit(), solver=Picard()).state
    assert state.dtype == dtype
    state.sum().backward()
    exact.exact(x).sum().backward()
    error = (model.weight.grad.double() - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert error < (1e-3 if dtype == torch.float32 else 0.1)


def test_implicit_under_autocast():
    model = Tanh().float()
    x = numbers(BATCH, DIM).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = solve_with_gradient(
            model, x, gradient=Implicit(), solver=Picard(), max_steps=10
        ).state
    assert state.dtype == torch.float32
    state.sum().backward()
    assert torch.isfinite(model.weight.grad).all()


def test_implicit_under_activation_checkpointing():
    model, x = Tanh(), numbers(BATCH, DIM)

    def forward(context: Tensor) -> Tensor:
        return weighted(solve_with_gradient(model, context, gradient=IMPLICIT, **EXACT).state)

    forward(x).backward()
    expected = model.weight.grad
    model.zero_grad()
    checkpoint(forward, x, use_reentrant=False).backward()
    torch.testing.assert_close(model.weight.grad, expected)


class Trained(nn.Module):
    """As a user wraps it: the equilibrium is found inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return solve_with_gradient(self.inner, x, gradient=IMPLICIT, **EXACT).state


@pytest.mark.parametrize("find_unused", [True, False])
def test_implicit_under_distributed_data_parallel(tmp_path, find_unused):
    x = numbers(BATCH, DIM)
    plain = Trained()
    weighted(plain(x)).backward()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        wrapped = DistributedDataParallel(Trained(), find_unused_parameters=find_unused)
        for _ in range(2):
            wrapped.zero_grad()
            weighted(wrapped(x)).backward()
            torch.testing.assert_close(wrapped.module.inner.weight.grad, plain.inner.weight.grad)
        del wrapped
    finally:
        torch.distributed.destroy_process_group()


def test_solve_cotangent_says_whether_it_converged():
    model, x = Tanh(), numbers(BATCH, DIM)
    z = numbers(BATCH, DIM, seed=4).requires_grad_()
    fz, g = model.step(z, x), torch.ones(BATCH, DIM, dtype=torch.float64)
    assert Implicit(tol=1e-8).solve_cotangent([z], [fz], [g]).converged.all()
    assert not Implicit(tol=1e-8, max_steps=1).solve_cotangent([z], [fz], [g]).converged.any()


def test_gradients_are_frozen_keyword_only_and_check_their_numbers():
    with pytest.raises(FrozenInstanceError):
        Phantom().steps = 3
    with pytest.raises(TypeError):
        Implicit(Anderson())
    with pytest.raises(ValueError, match="at least 1 step"):
        Phantom(steps=0)
    with pytest.raises(ValueError, match="damping"):
        Phantom(damping=0.0)
    with pytest.raises(ValueError, match="at least 1 step"):
        Unrolled(steps=0)

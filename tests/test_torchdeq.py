"""The torchdeq adapter and our gradients, against torchdeq itself."""

from __future__ import annotations

import copy
import dataclasses
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

with warnings.catch_warnings():
    # torchdeq's docstrings hold escapes that Python 3.12 warns about when it first compiles them.
    warnings.filterwarnings("ignore", "invalid escape sequence", SyntaxWarning)
    pytest.importorskip("torchdeq")

from torchdeq import get_deq, reset_deq
from torchdeq.dropout import VariationalDropout1d
from torchdeq.norm import apply_norm, reset_norm

from cdeq.equilibrium import CapturedContext, check_contract, from_torchdeq
from cdeq.gradients import Implicit, JacobianFree, Phantom, solve_with_gradient
from cdeq.solvers import Anderson, Picard, solve_model

DIM, BATCH = 6, 4
EXACT = {"solver": Anderson(), "tol": 1e-12, "max_steps": 200}
DEQ = {"f_max_iter": 300, "f_tol": 1e-12, "b_max_iter": 300, "b_tol": 1e-12, "core": "indexing"}


class User(nn.Module):
    """A model as torchdeq's own guide has it."""

    def __init__(self, norm: str | None = None, reset: bool = True, **deq):
        super().__init__()
        self.embed = nn.Linear(3, DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 2)
        self.reset = reset
        with torch.no_grad():
            self.layer.weight.mul_(0.8 / torch.linalg.matrix_norm(self.layer.weight, 2))
        self.double()
        if norm is not None:
            apply_norm(self.layer, norm)
            self.double()
        self.deq = get_deq(**{**DEQ, **deq})

    def forward(self, x: Tensor) -> Tensor:
        if self.reset:
            reset_norm(self)
        injected = self.embed(x)
        z0 = torch.zeros_like(injected)
        z_out, info = self.deq(lambda z: torch.tanh(self.layer(z) + injected), z0)
        assert "nstep" in info
        return self.head(z_out[-1])


class MultiScale(nn.Module):
    """Two states of different shapes; the map takes and returns them one by one."""

    def __init__(self, **deq):
        super().__init__()
        self.embed = nn.Linear(3, DIM)
        self.down, self.up = nn.Linear(DIM, 4), nn.Linear(4, DIM)
        self.head = nn.Linear(DIM + 4, 2)
        self.double()
        self.deq = get_deq(**{**DEQ, **deq})

    def f(self, fine: Tensor, coarse: Tensor, injected: Tensor) -> list[Tensor]:
        up = self.up(coarse.flatten(1))
        down = self.down(fine).unflatten(1, (2, 2))
        return [torch.tanh(0.5 * up + injected), torch.tanh(0.5 * down)]

    def forward(self, x: Tensor) -> Tensor:
        injected = self.embed(x)
        z0 = [torch.zeros_like(injected), injected.new_zeros(x.shape[0], 2, 2)]
        z_out, _ = self.deq(lambda a, b: self.f(a, b, injected), z0)
        fine, coarse = z_out[-1]
        return self.head(torch.cat([fine, coarse.flatten(1)], dim=1))


def build(kind: type[nn.Module], seed: int = 0, **options) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(**options).eval()


def inputs(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)


def answer(adapter: nn.Module, x: Tensor, solver=EXACT["solver"]) -> Tensor:
    context = adapter.inject(x)
    solution = solve_model(adapter, context, solver, tol=1e-12, max_steps=200)
    assert solution.converged.all()
    return adapter.readout(solution.state, context)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n.removeprefix("model."): p.grad for n, p in model.named_parameters()}


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor], tol: float = 1e-7) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=tol, atol=tol)


@pytest.mark.parametrize("core", ["indexing", "sliced"])
@pytest.mark.parametrize("solver", [Anderson(), Picard()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("kind", [User, MultiScale])
def test_the_equilibrium_is_torchdeqs(kind, solver, core):
    model, x = build(kind, core=core), inputs()
    adapter = from_torchdeq(model)
    check_contract(adapter)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(answer(adapter, x, solver), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(adapter(x), expected)


@pytest.mark.parametrize("kind", [User, MultiScale])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Implicit(tol=1e-12, max_steps=200), {"ift": True}),
        (Implicit(tol=1e-12, max_steps=200), {"hook_ift": True}),
        (JacobianFree(), {"grad": 1}),
        (Phantom(steps=1, damping=1.0), {"grad": 1}),
        (Phantom(steps=5, damping=0.5), {"grad": 5, "tau": 0.5}),
        (Phantom(steps=3, damping=0.8), {"grad": 3, "tau": 0.8}),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, dict) else ",".join(v),
)
def test_our_gradients_are_torchdeqs(kind, ours, theirs):
    x, target = inputs().requires_grad_(), inputs(seed=2)[:, :2]
    model = build(kind, **theirs).train()
    expected = gradients(model, (model(x) - target).square().sum())
    expected["x"], x.grad = x.grad, None
    adapter = from_torchdeq(build(kind))
    context = adapter.inject(x)
    state = solve_with_gradient(adapter, context, gradient=ours, **EXACT).state
    actual = gradients(adapter, (adapter.readout(state, context) - target).square().sum())
    actual["x"] = x.grad
    compare(actual, expected)


@pytest.mark.parametrize("reset", [True, False], ids=["reset in forward", "reset outside"])
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_a_norm_is_folded_on_a_copy(norm, reset):
    model, x = build(User, norm=norm, reset=reset), inputs()
    model.train()
    for _ in range(50):  # spectral norm takes one power iteration at each
        reset_deq(model)
    model.eval()
    with torch.no_grad():  # an optimiser's step, after which the stored weights are stale
        for p in model.parameters():
            p.mul_(0.9)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    adapter = from_torchdeq(model)
    assert adapter.model is not model
    reset_deq(model)
    with torch.no_grad():
        torch.testing.assert_close(answer(adapter, x), model(x), rtol=1e-9, atol=1e-9)
    compare(model.state_dict(), before, 0.0)
    assert hasattr(model.layer, "_deq_norm")
    assert isinstance(adapter.model.layer.weight, nn.Parameter)
    assert not any("_g" in n or "_v" in n or "_orig" in n for n in adapter.state_dict())
    # The folded copy can be trained, copied and saved.
    context = adapter.inject(x)
    solve_with_gradient(adapter, context, gradient=Implicit(), **EXACT).state.sum().backward()
    twin = copy.deepcopy(adapter)
    twin.load_state_dict(adapter.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(answer(twin, x), answer(adapter, x))
    assert adapter.model.layer.weight.grad is not None


def test_a_frozen_model_stays_frozen_when_folded():
    model = build(User, norm="weight_norm").requires_grad_(False)
    assert not any(p.requires_grad for p in from_torchdeq(model).parameters())


@pytest.mark.parametrize("kind", [User, MultiScale])
def test_a_copy_is_independent_and_refuses_foreign_contexts(kind):
    adapter, x = from_torchdeq(build(kind)), inputs()
    expected = answer(adapter, x)
    twin = copy.deepcopy(adapter)
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(0.1)
    torch.testing.assert_close(answer(twin, x), expected)
    assert not torch.allclose(answer(adapter, x), expected)
    context = adapter.inject(x)
    with pytest.raises(ValueError, match="another copy"):
        twin.step(twin.start(context), context)


def test_without_a_norm_the_weights_are_shared():
    model = build(User)
    adapter = from_torchdeq(model)
    assert adapter.model is model
    assert [n.removeprefix("model.") for n in adapter.state_dict()] == list(model.state_dict())


class Methods(nn.Module):
    """One forward for all methods, as `functional_call` needs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, method: str, *arguments):
        return getattr(self.model, method)(*arguments)


@pytest.mark.parametrize("kind", [User, MultiScale])
def test_other_weights_by_functional_call(kind):
    x = inputs()
    adapter = from_torchdeq(build(kind))
    other = from_torchdeq(build(kind, seed=5))
    weights = {f"model.{n}": p.detach() for n, p in other.named_parameters()}
    call = partial(functional_call, Methods(adapter), weights)
    context, expected = call(("inject", x)), other.inject(x)
    z = map_like(torch.randn_like, adapter.start(context))
    torch.testing.assert_close(call(("step", z, context)), other.step(z, expected))
    torch.testing.assert_close(call(("readout", z, context)), other.readout(z, expected))
    # Nothing of it stays.
    fresh = from_torchdeq(build(kind))
    torch.testing.assert_close(answer(adapter, x), answer(fresh, x))


def map_like(function, state):
    return function(state) if isinstance(state, Tensor) else tuple(map(function, state))


def test_implicit_gradients_reach_swapped_weights():
    """Backward runs after `functional_call` has put the model's own weights back."""
    x = inputs()
    adapter, other = from_torchdeq(build(User)), from_torchdeq(build(User, seed=5))
    weights = {f"solver.{n}": p for n, p in other.named_parameters()}

    class Solve(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.solver = adapter

        def forward(self, x: Tensor) -> Tensor:
            context = self.solver.inject(x)
            gradient = Implicit(tol=1e-12, max_steps=200)
            return solve_with_gradient(self.solver, context, gradient=gradient, **EXACT).state

    actual = gradients(other, functional_call(Solve(), weights, (x,)).square().sum())
    actual = {k: v.clone() for k, v in actual.items() if v is not None}
    state = solve_with_gradient(
        other, other.inject(x), gradient=Implicit(tol=1e-12, max_steps=200), **EXACT
    ).state
    expected = gradients(other, state.square().sum())
    compare(actual, {k: v for k, v in expected.items() if v is not None})
    assert all(p.grad is None for p in adapter.parameters())


def test_captured_tensors_can_be_replaced():
    adapter, x, y = from_torchdeq(build(User)), inputs(), inputs(seed=8)
    first, second = adapter.inject(x), adapter.inject(y)
    assert isinstance(first, CapturedContext)
    (injected,) = first.tensors
    torch.testing.assert_close(injected, adapter.model.embed(x))
    mean = [(a + b) / 2 for a, b in zip(first.tensors, second.tensors, strict=True)]
    mixed = dataclasses.replace(first, tensors=tuple(mean))
    z = torch.randn_like(first.start)
    expected = adapter.step(z, adapter.inject((x + y) / 2))  # the embedding is affine
    torch.testing.assert_close(adapter.step(z, mixed), expected)
    torch.testing.assert_close(adapter.step(z, first), adapter.step(z, adapter.inject(x)))


class Styles(User):
    """Other ways to hand the map over: a partial, defaults, a nested function, a bound method."""

    style = "partial"

    def map(self, z: Tensor, parts: dict[str, list[Tensor]]) -> Tensor:
        return torch.tanh(self.layer(z) + parts["injected"][0])

    def stored(self, z: Tensor) -> Tensor:
        return self.map(z, self.parts)

    def forward(self, x: Tensor) -> Tensor:
        parts = {"injected": [self.embed(x)]}

        def nested(z: Tensor, *, depth: int = 1) -> Tensor:
            return self.map(z, parts) if depth == 0 else nested(z, depth=depth - 1)

        self.parts = parts
        functions = {
            "partial": partial(self.map, parts=parts),
            "default": lambda z, p=parts["injected"][0]: self.map(z, {"injected": [p]}),
            "nested": nested,
            "bound": self.stored,
        }
        z_out, _ = self.deq(functions[self.style], z_init=x.new_zeros(x.shape[0], DIM))
        return self.head(z_out[-1])


@pytest.mark.parametrize("style", ["partial", "default", "nested", "bound"])
def test_ways_to_hand_the_map_over(style):
    model, x = build(Styles), inputs()
    model.style = style
    adapter = from_torchdeq(model)
    with torch.no_grad():
        torch.testing.assert_close(answer(adapter, x), model(x), rtol=1e-9, atol=1e-9)
    if style != "bound":
        context = adapter.inject(x)
        doubled = dataclasses.replace(context, tensors=tuple(2 * t for t in context.tensors))
        z = torch.zeros_like(context.start)
        expected = torch.tanh(model.layer(z) + 2 * model.embed(x))
        torch.testing.assert_close(adapter.step(z, doubled), expected)


class Several(User):
    """Two inputs, two DEQs, two outputs, and a dropout of torchdeq's."""

    def __init__(self) -> None:
        super().__init__()
        self.other = get_deq(**DEQ)
        self.dropout = VariationalDropout1d(0.5)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, str]:
        first, _ = self.other(lambda z: 0.5 * torch.cos(z) + scale, torch.zeros_like(x))
        try:
            return super().forward(self.dropout(first[-1])), "extra"
        except Exception:
            raise AssertionError("a model's own handler must not see the interception") from None


def test_several_deqs_inputs_and_outputs():
    model, x = build(Several), (inputs(), inputs(seed=3))
    with pytest.raises(ValueError, match="deq, other"):
        from_torchdeq(model)
    with pytest.raises(ValueError, match="not a torchdeq DEQ"):
        from_torchdeq(model, "head")
    adapter = from_torchdeq(model, "deq", output=lambda result: result[0])
    with torch.no_grad():
        torch.testing.assert_close(answer(adapter, x), model(*x)[0], rtol=1e-9, atol=1e-9)


class Broken(User):
    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "none":
            return self.head(self.embed(x))
        result = super().forward(x)
        if self.fault == "twice":
            result = result + super().forward(x)
        if self.fault == "raise":
            raise KeyError("the user's own")
        return result


def test_nothing_stays_patched_after_an_error():
    model, x = build(Broken), inputs()
    adapter = from_torchdeq(model)
    expected, context = model(x), adapter.inject(x)
    z = context.start
    for fault, error in [("raise", KeyError), ("twice", RuntimeError)]:
        model.fault = fault
        with pytest.raises(error):
            adapter.readout(z, context)
        assert "forward" not in vars(model.deq)
    model.fault = "none"
    with pytest.raises(RuntimeError, match="did not call its DEQ"):
        adapter.inject(x)
    assert "forward" not in vars(model.deq)
    model.fault = ""
    torch.testing.assert_close(model(x), expected)


def test_one_adapter_inside_another_call_of_itself():
    class Nested(User):
        adapter = None

        def forward(self, x: Tensor) -> Tensor:
            if self.adapter is None:
                return super().forward(x)
            adapter, self.adapter = self.adapter[0], None
            x = x + answer(adapter, x).sum()
            self.adapter = (adapter,)  # in a tuple, so that it is not registered as a module
            return super().forward(x)

    model, x = build(Nested), inputs()
    adapter = from_torchdeq(model)
    with torch.no_grad():
        expected = model(x + model(x).sum())
        model.adapter = (adapter,)
        torch.testing.assert_close(answer(adapter, x), expected, rtol=1e-9, atol=1e-9)


def test_models_without_torchdeq():
    with pytest.raises(ValueError, match="has no torchdeq DEQ"):
        from_torchdeq(nn.Linear(2, 2))


def test_a_clear_error_where_torchdeq_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdeq", None)
    with pytest.raises(ImportError, match="pip install torchdeq"):
        from_torchdeq(nn.Linear(2, 2))

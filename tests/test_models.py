"""The models: contract, weights swapped from outside, causality, well-posedness."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from cdeq.equilibrium import check_contract, is_batched
from cdeq.gradients import jacobian_penalty
from cdeq.models import EIGNN, IGNN, MIGNN, MODELS, ConvDEQ, DEQTransformer, TransformerDEQ
from cdeq.models.graph.sparse import sparse_product
from cdeq.models.text.transformer import causal_attention
from cdeq.solvers import Picard, solve_model
from checks import csr, equilibrium, require_copies
from graphs import random_graph

NODES = 30
GRAPH_MODELS = {"EIGNN": EIGNN, "IGNN": IGNN, "MIGNN": MIGNN}


def make(name: str) -> tuple[nn.Module, Any, tuple[int, ...], tuple[int, ...]]:
    """A small model, an input, and the shapes of its state and output."""
    torch.manual_seed(0)
    if name == "ConvDEQ":
        model = ConvDEQ(channels=8, groups=2, classes=3)
        return model, torch.randn(4, 1, 8, 8), (4, 8, 8, 8), (4, 3)
    if name == "DEQTransformer":
        model = DEQTransformer(vocabulary=11, width=16, heads=2, inner=24, keep=0.3)
        return model, torch.randint(11, (4, 12)), (4, 12, 16), (4, 12, 16)
    if name in ("TransformerDEQ", "tied"):
        model = TransformerDEQ(vocabulary=11, width=16, heads=2, inner=24, tied=name == "tied")
        return model, torch.randint(11, (4, 12)), (4, 12, 16), (4, 12, 11)
    model = GRAPH_MODELS[name](features=5, width=8, classes=3)
    return model, random_graph(NODES, torch.float32), (NODES, 8), (NODES, 3)


# MDEQ, whose state is a tuple, has test_mdeq.py.
every_model = pytest.mark.parametrize("name", [*(m for m in MODELS if m != "MDEQ"), "tied"])


@every_model
def test_contract_shapes_and_initial_contraction(name):
    model, x, state_shape, output_shape = make(name)
    check_contract(model)
    assert is_batched(model) == (name not in GRAPH_MODELS)
    context = model.inject(x)
    z = model.start(context)
    assert z.shape == state_shape
    assert not z.any()
    assert model.step(z, context).shape == state_shape
    star = equilibrium(model, x, tol=1e-5, max_steps=100)
    assert model.readout(star, context).shape == output_shape
    assert star.abs().mean() > 1e-2


@every_model
def test_copies_are_the_same_and_independent(name):
    model, x, *_ = make(name)
    require_copies(model, x)


class Caller(nn.Module):
    """Any method of a model as `forward`, which is all that functional_call calls."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, method: str, *arguments: Any) -> Any:
        return getattr(self.model, method)(*arguments)


@every_model
def test_swapped_weights_reach_every_method(name):
    model, x, *_ = make(name)
    caller = Caller(model)
    context, z = model.inject(x), equilibrium(model, x, tol=1e-5)
    changed = {n: p + 0.3 * torch.randn_like(p) for n, p in caller.named_parameters()}
    original = {n: p.clone() for n, p in model.named_parameters()}
    for method, arguments in (("inject", (x,)), ("step", (z, context)), ("readout", (z, context))):
        if method == "readout" and name == "DEQTransformer":
            continue  # its readout is the state: words are scored by its adaptive softmax
        old, new = (
            caller(method, *arguments),
            functional_call(caller, changed, (method, *arguments)),
        )
        if method == "inject" and name in GRAPH_MODELS:
            assert new.adjacency is old.adjacency  # shared, so that a mix of contexts keeps it
        if method == "inject" and not isinstance(old, Tensor):
            old, new = old.injection, new.injection
        assert not torch.allclose(old, new)
        gradients = torch.autograd.grad(new.sum(), list(changed.values()), allow_unused=True)
        assert any(g is not None for g in gradients)
    for n, p in model.named_parameters():
        assert torch.equal(p, original[n])


@every_model
def test_jacobian_penalty_has_a_gradient(name):
    model, x, *_ = make(name)
    context, z = model.inject(x), equilibrium(model, x, tol=1e-5)
    penalty = jacobian_penalty(lambda state: model.step(state, context), z)
    assert penalty > 0
    penalty.backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


@every_model
def test_start_network_begins_at_zero_and_learns(name):
    model, x, state_shape, _ = make(name)
    context = model.inject(x)
    network = copy.deepcopy(model.start_network())
    guess = network(context)
    assert guess.shape == state_shape
    assert not guess.any()
    star = equilibrium(model, x, tol=1e-5)
    (network(context) - star).square().sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in network.parameters())
    assert all(not n.startswith("start") for n, _ in model.named_parameters())


def test_no_token_sees_a_later_one():
    model, x, *_ = make("TransformerDEQ")
    changed = x.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 11
    network = model.start_network()
    nn.init.normal_(network.out.weight)
    with torch.no_grad():
        a, b = model.inject(x), model.inject(changed)
        z = torch.randn(4, 12, 16)
        other = torch.cat([z[:, :7], torch.randn(4, 5, 16)], dim=1)
        pairs = [
            (model.step(z, a), model.step(other, b)),
            (network(a), network(b)),
            (
                solve_model(model, a, Picard(), tol=0, max_steps=40).state,
                solve_model(model, b, Picard(), tol=0, max_steps=40).state,
            ),
        ]
    for first, second in pairs:
        torch.testing.assert_close(first[:, :7], second[:, :7])
        assert not torch.allclose(first[:, 7:], second[:, 7:])


def test_attention_is_the_same_with_and_without_gradient():
    q, k, v = torch.randn(3, 2, 2, 9, 4, dtype=torch.float64)
    fused = causal_attention(q, k, v)
    torch.testing.assert_close(causal_attention(q.requires_grad_(), k, v), fused)


def test_positions_are_relative():
    model, *_ = make("TransformerDEQ")
    x = torch.full((1, 10), 3)
    with torch.no_grad():
        z = torch.randn(1, 1, 16).expand(1, 10, 16)
        out = model.step(z, model.inject(x))
    # Equal tokens everywhere: a token's average over equal values does not depend on where it is.
    torch.testing.assert_close(out, out[:, :1].expand_as(out))


def test_text_refuses_odd_heads():
    with pytest.raises(ValueError, match="multiple of"):
        TransformerDEQ(vocabulary=5, width=10, heads=4)


def test_sparse_product_has_the_dense_gradients():
    dense = torch.randn(6, 4, dtype=torch.float64) * (torch.rand(6, 4) < 0.5)
    matrix = csr(dense)
    transpose = csr(dense.T)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(sparse_product(matrix, x, transpose), dense @ x)

    def product(t: Tensor) -> Tensor:
        return sparse_product(matrix, t, transpose)

    assert torch.autograd.gradcheck(product, x)
    assert torch.autograd.gradgradcheck(product, x)
    upstream = torch.randn(6, 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(product(x), x, upstream)
    torch.testing.assert_close(gradient, dense.T @ upstream)


def test_ignn_step_and_gradient_match_dense():
    model = IGNN(features=5, width=4, classes=2).double()
    x = random_graph(NODES)
    context, dense = model.inject(x), x.adjacency.to_dense()
    z = torch.randn(NODES, 4, dtype=torch.float64, requires_grad=True)
    injection = dense @ model.injection(x.features)
    expected = torch.relu(dense @ z @ model.bounded_weight().T + injection)
    actual = model.step(z, context)
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(actual)
    ours, theirs = (
        torch.autograd.grad(out, (z, model.weight), upstream, retain_graph=True)
        for out in (actual, expected)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_ignn_is_well_posed_whatever_its_weights(scale):
    model = IGNN(features=5, width=8, classes=3, kappa=0.9)
    with torch.no_grad():
        model.weight.copy_(scale * torch.randn(8, 8))
    norms = model.bounded_weight().abs().sum(dim=1)
    assert norms.max() <= 0.9 + 1e-6
    inside = model.weight.abs().sum(dim=1) <= 0.9
    torch.testing.assert_close(model.bounded_weight()[inside], model.weight[inside])
    context = model.inject(random_graph(NODES, torch.float32))
    assert bool(solve_model(model, context, Picard(), tol=1e-5, max_steps=200).converged.all())


@pytest.mark.parametrize("kappa", [0.0, 1.0, 1.5])
def test_ignn_refuses_a_bound_that_is_none(kappa):
    with pytest.raises(ValueError, match="kappa"):
        IGNN(features=5, kappa=kappa)

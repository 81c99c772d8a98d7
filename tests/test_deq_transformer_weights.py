"""DEQ-Transformer: its weights, its gradients, and its start network, in double precision."""

import pytest
import torch
from torch.func import functional_call

from cdeq.equilibrium.memory import Segment
from cdeq.gradients import Implicit, jacobian_penalty, solve_with_gradient
from cdeq.models.text.deq_transformer import DEQTransformer
from cdeq.solvers import Anderson
from checks import require_copies, require_implicit_gradients
from deq_texts import LENGTH, SETTLING, WIDTH, WORDS, build, some_memory, some_state, text

# Weights.


def test_copies_and_saved_weights_give_the_same_answer():
    require_copies(build(**SETTLING), text())


def test_config_names_every_argument():
    given_arguments = {
        **{"vocabulary": 40, "width": 8, "heads": 1, "inner": 5, "memory": 3, "cutoffs": (9, 20)},
        **{"divisor": 2, "dropout": 0.2, "keep": 0.7, "direct": True, "fading": 0.5},
    }
    model = DEQTransformer(**given_arguments)
    assert model.config == {**given_arguments, "cutoffs": [9, 20]}
    # Also from what can be read only once.
    assert DEQTransformer(**{**given_arguments, "cutoffs": iter((9, 20))}).config == model.config


def test_changed_weights_in_a_functional_call_change_the_step():
    class Whole(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, z, x):
            return self.model.step(z, self.model.inject(x))

    model = build(**SETTLING)
    whole, z = Whole(model), some_state()
    x = Segment(text(), some_memory())
    plain = whole(z, x).detach()
    inactive = []
    for name, weight in whole.named_parameters():
        noise = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator())
        found = functional_call(whole, {name: weight.detach() + 0.1 * noise}, (z, x))
        if torch.equal(found, plain):
            inactive.append(name.removeprefix("model."))
    # Words are scored, not read, with these.
    assert inactive == ["words.word_bias", "words.cluster_vectors", "words.cluster_bias"]
    assert torch.equal(whole(z, x), plain)


def test_all_products_of_the_block_have_normalised_weights():
    model = build()
    for name in ("qkv", "positions", "out", "expand", "contract"):
        layer = getattr(model, name)
        size = layer.parametrizations.weight.original0
        norms = layer.weight.norm(dim=1, keepdim=True)
        torch.testing.assert_close(norms, size, rtol=1e-12, atol=0)


# Gradients.


@pytest.mark.slow
@pytest.mark.parametrize("form", [SETTLING, {"keep": 0.3}], ids=str)
def test_implicit_gradients_are_those_of_a_long_unrolled_solve(form):
    model, tokens, targets = build(**form), text(2, 6), text(2, 6, seed=7)
    with torch.no_grad():  # well inside a contraction, where unrolling converges too
        for layer in (model.out, model.contract):
            layer.parametrizations.weight.original0.mul_(0.6)
    require_implicit_gradients(
        model,
        Segment(tokens, some_memory(2, 3)),
        lambda output: model.loss(output, targets),
        unrolled=150,
        tolerance=1e-6,
        least=1e-6,
    )


def test_gradients_pass_through_the_keys_and_values_of_the_memory():
    model, tokens = build(**SETTLING), text(2, 6)
    memory = some_memory(2, 3)

    def grads(cut):
        model.zero_grad()
        context = model.inject(Segment(tokens, memory))
        if cut:
            context = context._replace(keys=context.keys.detach(), values=context.values.detach())
        solution = solve_with_gradient(
            model, context, solver=Anderson(), gradient=Implicit(tol=1e-12), tol=1e-12
        )
        solution.state[..., 0].sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    whole, cut = grads(False), grads(True)
    changed = {n for n in whole if not torch.allclose(whole[n], cut[n], rtol=1e-6, atol=1e-9)}
    # Only the products that make keys and values of the remembered states.
    assert changed == {f"qkv.parametrizations.weight.original{i}" for i in (0, 1)}


def test_the_jacobian_penalty_can_be_differentiated():
    model, tokens = build(**SETTLING), text(2, 5)
    memory = some_memory(2, 3)
    z = some_state(2, 5)
    weight = model.contract.parametrizations.weight.original0

    def penalty():
        context = model.inject(Segment(tokens, memory))
        draw = torch.Generator().manual_seed(0)
        return jacobian_penalty(lambda s: model.step(s, context), z, generator=draw)

    value = penalty()
    assert float(value.detach()) > 0
    value.backward()
    for name in ("qkv", "positions", "out", "expand", "contract"):
        for p in getattr(model, name).parametrizations.weight.parameters():
            assert bool(p.grad.isfinite().all()), name
            assert bool(p.grad.any()), name
    # The slope in one direction, against a difference.
    direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator())
    slope, step, moved = float((weight.grad * direction).sum()), 1e-6, []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * step * direction)
        moved.append(float(penalty().detach()))
        with torch.no_grad():
            weight.sub_(sign * step * direction)
    assert slope == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-5)


# The start network.


@pytest.mark.parametrize("form", [{}, SETTLING], ids=str)
def test_the_start_network_is_zero_before_training_and_causal(form):
    model, tokens = build(**form), text()
    network = model.start_network().double()
    context = model.inject(tokens)
    start = network(context)
    assert start.shape == model.start(context).shape
    assert not start.any()
    with torch.no_grad():
        network.out.weight.normal_(generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[:, 6] = (other[:, 6] + 1) % WORDS
    before, after = network(context), network(model.inject(other))
    changed = (before != after).any(-1)
    # The token itself and all after it, which attend to it.
    expected = torch.arange(LENGTH) >= 6
    assert torch.equal(changed, expected.expand(3, -1))


@torch.no_grad()
@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_text_that_is_cut_starts_as_the_whole_one(cut):
    """If what is remembered of the first part is what the start attends to in the whole: its own first guess."""
    model, tokens = build(), text()
    network = model.start_network().double()
    torch.nn.init.normal_(network.out.weight)
    network.qkv.weight.copy_(model.qkv.weight)
    network.qkv.bias.zero_()
    whole = network(model.inject(tokens))
    first = model.inject(tokens[:, :cut])
    memory = model.remember(network.first_guess(first), first)
    rest = network(model.inject(Segment(tokens[:, cut:], memory)))
    torch.testing.assert_close(torch.cat((network(first), rest), 1), whole)


@torch.no_grad()
def test_a_start_is_at_most_twice_as_long_as_a_state_whatever_is_remembered():
    model = build()
    network = model.start_network().double()
    torch.nn.init.normal_(network.out.weight)
    far = tuple(1e6 * part for part in some_memory())
    start = network(model.inject(Segment(text(), far)))
    context = model.inject(text())
    longest = 2 * model.step(model.start(context), context).norm(dim=-1).max()
    assert torch.all(start.norm(dim=-1) <= longest * (1 + 1e-3))
    assert start.norm(dim=-1).max() > 0.9 * longest


def test_a_start_network_takes_one_token():
    model = build()
    assert model.start_network().double()(model.inject(text(length=1))).shape == (3, 1, WIDTH)

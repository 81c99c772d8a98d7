"""DEQ-Transformer: its equation, causality, memory, dropout, gradients and sizes, in double precision."""

import copy
import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from torch.nn import functional as F

from cdeq import FitConfig, distill, record, teach
from cdeq.data.text import Corpus, Streams, Vocabulary
from cdeq.equilibrium.contract import check_contract
from cdeq.equilibrium.memory import Remembering, Segment
from cdeq.gradients import Implicit, Unrolled, jacobian_penalty, solve_with_gradient
from cdeq.models.text.deq_transformer import DEQTransformer
from cdeq.models.text.relative import sinusoids
from cdeq.solvers import Anderson, Picard, solve_model
from cdeq.training.segments import CarriedMemory, full_memory
from cdeq_experiments.text_plans import SCALES

WORDS, WIDTH, HEADS, INNER, LENGTH = 50, 16, 2, 24, 12
SETTLING = {"keep": 0.5, "direct": True}
every_form = pytest.mark.parametrize(
    "form", [{}, SETTLING, {"keep": 0.3}, {"direct": True}], ids=str
)


def build(**changes):
    torch.manual_seed(0)
    sizes = {"vocabulary": WORDS, "width": WIDTH, "heads": HEADS, "inner": INNER}
    shared = {"memory": LENGTH, "cutoffs": (10, 25), "divisor": 2}
    model = DEQTransformer(**{**sizes, **shared, **changes}).double().eval()
    with torch.no_grad():  # zero before training, which would hide them
        for bias in (model.content_bias, model.position_bias):
            bias.normal_()
    return model


def text(batch=3, length=LENGTH, seed=1):
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def some_memory(batch=3, length=4):
    """A memory of states that are no equilibria."""
    draw = torch.Generator().manual_seed(2)
    shapes = [(batch, length, WIDTH), (batch, length, 2 * WIDTH)]
    return tuple(torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)


def some_state(batch=3, length=LENGTH):
    draw = torch.Generator().manual_seed(3)
    return torch.randn(batch, length, WIDTH, generator=draw, dtype=torch.float64)


@torch.no_grad()
def solved(model, context, tol=1e-11):
    found = solve_model(model, context, Anderson(), tol=tol, max_steps=400)
    assert bool(found.converged.all())
    return found.state


# The map.


def slow_step(model, z, tokens, memory):
    """The equation, one text and one token at a time."""
    state, remembered = memory
    size = WIDTH // HEADS
    qkv, positions = model.qkv.weight, model.positions.weight
    u = model.injection(model.words.embed(tokens))
    out = torch.zeros_like(z)
    for b in range(len(tokens)):
        known = torch.cat((state[b], z[b]))
        added = torch.cat((remembered[b], u[b, :, WIDTH : 3 * WIDTH]))
        encodings = sinusoids(len(known), WIDTH, device=z.device, dtype=z.dtype).flip(0)
        for i in range(z.shape[1]):
            place, heads = len(state[b]) + i, []
            for h in range(HEADS):
                rows = slice(h * size, (h + 1) * size)
                q = (qkv[:WIDTH] @ z[b, i] + u[b, i, :WIDTH])[rows]
                keys = (known @ qkv[WIDTH : 2 * WIDTH].T + added[:, :WIDTH])[:, rows]
                values = (known @ qkv[2 * WIDTH :].T + added[:, WIDTH:])[:, rows]
                scores = [
                    (q + model.content_bias[h]) @ keys[j]
                    + (q + model.position_bias[h]) @ (positions @ encodings[place - j])[rows]
                    for j in range(place + 1)
                ]
                heads.append((torch.stack(scores) / size**0.5).softmax(0) @ values[: place + 1])
            total = model.keep * z[b, i] + model.out.weight @ torch.cat(heads)
            if model.direct:
                total = total + u[b, i, 3 * WIDTH :]
            y = F.layer_norm(total, (WIDTH,))
            hidden = F.relu(model.expand.weight @ y + model.expand.bias)
            grown = y + model.contract.weight @ hidden + model.contract.bias
            out[b, i] = F.layer_norm(grown, (WIDTH,))
    return out


@every_form
@pytest.mark.parametrize("remembered", [0, 1, 4])
@pytest.mark.parametrize("length", [1, 5])
@torch.no_grad()
def test_a_step_is_the_equation(form, remembered, length):
    model, tokens = build(**form), text(2, length)
    memory = some_memory(2, remembered)
    z = some_state(2, length)
    found = model.step(z, model.inject(Segment(tokens, memory)))
    expected = slow_step(model, z, tokens, memory)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_the_four_methods_and_memory():
    model, tokens = build(), text()
    assert check_contract(model) is model
    assert isinstance(model, Remembering)
    context = model.inject(Segment(tokens, some_memory()))
    z0 = model.start(context)
    assert z0.shape == (3, LENGTH, WIDTH)
    assert not z0.any()
    z1 = model.step(z0, context)
    assert z1.shape == z0.shape
    assert z1.dtype == torch.float64
    torch.testing.assert_close(z1.mean(-1), torch.zeros_like(z1[..., 0]), rtol=0, atol=1e-12)
    features = model.readout(z1, context)
    assert features.shape == (3, LENGTH, WIDTH)
    probabilities = model.words.log_probabilities(features).exp()
    assert probabilities.shape == (3, LENGTH, WORDS)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones_like(probabilities[..., 0]))


@torch.no_grad()
def test_the_loss_is_the_mean_over_the_targets_that_count():
    model, features, targets = build(), some_state(), text(seed=4)
    targets[0, :3], targets[2] = -100, -1
    logs = model.words.log_probabilities(features)
    counted = [
        -float(logs[b, i, targets[b, i]])
        for b in range(3)
        for i in range(LENGTH)
        if targets[b, i] >= 0
    ]
    expected = sum(counted) / len(counted)
    assert float(model.loss(features, targets)) == pytest.approx(expected, rel=1e-12)
    assert float(model.loss(features, torch.full_like(targets, -100))) == 0


@settings(deadline=None, max_examples=12)
@given(cut=st.integers(1, LENGTH - 1), seed=st.integers(0, 5), form=st.sampled_from([{}, SETTLING]))
@torch.no_grad()
def test_later_tokens_change_nothing_before_them(cut, seed, form):
    model, tokens = build(**form), text()
    other = tokens.clone()
    other[:, cut:] = (other[:, cut:] + 1 + text(seed=seed)[:, cut:] % (WORDS - 1)) % WORDS
    memory = some_memory()
    states = []
    for x in (tokens, other):
        context = model.inject(Segment(x, memory))
        seen = []
        solve_model(
            model,
            context,
            Picard(),
            tol=0.0,
            max_steps=6,
            callback=lambda k, z, seen=seen: seen.append(z),
        )
        states.append(torch.stack(seen))
    ours, theirs = states
    assert len(ours) == 7
    torch.testing.assert_close(ours[:, :, :cut], theirs[:, :, :cut], rtol=0, atol=1e-12)
    # And each later token's own state is another one, after every step.
    assert (ours[1:, :, cut:] - theirs[1:, :, cut:]).norm(dim=-1).min() > 1e-6


def test_keep_and_direct_change_the_map():
    tokens, z = text(), some_state()
    steps = {}
    for keep in (1.0, 0.5, 0.0):
        model = build(keep=keep)
        steps[keep] = model.step(z, model.inject(tokens))
    assert (steps[1.0] - steps[0.5]).abs().max() > 0.1
    # Without keep a token's own state counts only through its attention: in its query and its key.
    model = build(keep=0.0)
    with torch.no_grad():
        model.out.parametrizations.weight.original0.zero_()
    context = model.inject(tokens)
    torch.testing.assert_close(model.step(z, context), model.step(2 * z + 1, context))
    model = build(direct=True)
    context = model.inject(tokens)
    assert context.injection.shape[-1] == 4 * WIDTH
    without = context._replace(injection=context.injection.clone())
    without.injection[..., 3 * WIDTH :] = 0
    assert (model.step(z, context) - model.step(z, without)).abs().max() > 0.1
    assert build().inject(tokens).injection.shape[-1] == 3 * WIDTH


# Memory.


@every_form
@pytest.mark.parametrize("cut", [1, 5, LENGTH - 1])
@torch.no_grad()
def test_a_text_in_two_segments_has_the_equilibrium_of_the_whole(form, cut):
    model, tokens = build(**form), text()
    context = model.inject(tokens)
    whole = solved(model, context)
    first = model.inject(tokens[:, :cut])
    before = solved(model, first)
    second = model.inject(Segment(tokens[:, cut:], model.remember(before, first)))
    after = solved(model, second)
    torch.testing.assert_close(torch.cat((before, after), 1), whole, rtol=0, atol=1e-6)
    for ours, theirs in zip(
        model.remember(after, second), model.remember(whole, context), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    # The second segment by itself is another text.
    alone = solved(model, model.inject(tokens[:, cut:]))
    assert (alone - after).norm() > 1e-2 * after.norm()


@torch.no_grad()
def test_many_segments_with_a_memory_that_covers_them():
    model, tokens = build(**SETTLING), text()
    whole = solved(model, model.inject(tokens))
    memory, states = (), []
    for piece in tokens.tensor_split((3, 4, 9), dim=1):
        context = model.inject(Segment(piece, memory))
        states.append(solved(model, context))
        memory = model.remember(states[-1], context)
    torch.testing.assert_close(torch.cat(states, 1), whole, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_memory_too_short_is_another_text():
    model, tokens = build(memory=2, **SETTLING), text()
    whole = solved(model, model.inject(tokens))
    first = model.inject(tokens[:, :6])
    memory = model.remember(solved(model, first), first)
    after = solved(model, model.inject(Segment(tokens[:, 6:], memory)))
    assert (after - whole[:, 6:]).norm() > 1e-3 * after.norm()


@settings(deadline=None, max_examples=20)
@given(length=st.integers(0, 9), before=st.integers(0, 7), after=st.integers(1, 7))
def test_memory_is_the_last_tokens_up_to_its_length(length, before, after):
    model, tokens = build(memory=length), text(length=after)
    memory, z = some_memory(length=before), some_state(length=after)
    context = model.inject(Segment(tokens, memory))
    state, injected = model.remember(z, context)
    kept = min(length, before + after)
    first = before + after - kept
    expected = torch.cat((memory[0], z), 1)[:, first:]
    u = context.injection[..., WIDTH : 3 * WIDTH]
    assert torch.equal(state, expected)
    assert torch.equal(injected, torch.cat((memory[1], u), 1)[:, first:])
    assert state.shape == (3, kept, WIDTH)
    assert injected.shape == (3, kept, 2 * WIDTH)
    assert not state.requires_grad
    assert not injected.requires_grad
    # It is a copy: writing into the state reaches no memory.
    z.zero_()
    assert torch.equal(state, expected)


@torch.no_grad()
def test_no_memory_is_the_beginning_of_a_text():
    model, tokens, z = build(), text(), some_state()
    nothing = model.no_memory(3)
    assert [m.shape for m in nothing] == [(3, 0, WIDTH), (3, 0, 2 * WIDTH)]
    assert {m.dtype for m in nothing} == {torch.float64}
    alone = model.step(z, model.inject(tokens))
    for x in (Segment(tokens), Segment(tokens, ()), Segment(tokens, nothing)):
        assert torch.equal(model.step(z, model.inject(x)), alone)
    remembered = model.step(z, model.inject(Segment(tokens, some_memory())))
    assert not torch.isclose(remembered, alone).all(-1).any()


# Dropout.


def test_dropout_is_one_mask_for_a_solve():
    model, z = build(dropout=0.4).train(), some_state()
    # The same word everywhere: what differs between tokens is not the input's doing.
    tokens = torch.full((3, LENGTH), 7)
    torch.manual_seed(0)
    context, other = model.inject(tokens), model.inject(tokens)
    assert torch.equal(model.step(z, context), model.step(z, context))
    assert not torch.isclose(model.step(z, context), model.step(z, other)).any(-1).all()
    for mask, width in ((context.attention_mask, WIDTH), (context.inner_mask, INNER)):
        assert mask.shape == (3, 1, width)  # one for all tokens of a text
        values = torch.tensor([0, 1 / 0.6], dtype=torch.float64)
        torch.testing.assert_close(mask.unique(), values)
        assert not torch.equal(mask[0], mask[1])  # each text has its own
    # The embedding's mask, too, is the same for all tokens of a text and another for each text.
    u = context.injection
    assert torch.equal(u, u[:, :1].expand_as(u))
    assert not torch.isclose(u[0], u[1]).all()
    assert not torch.equal(u, other.injection)


def test_dropped_units_are_out_of_the_step():
    model, tokens, z = build(dropout=0.4).train(), text(), some_state()
    torch.manual_seed(0)
    context = model.inject(tokens)
    # A hidden unit that is dropped for the first text and kept for the second.
    first, second = context.inner_mask[:2, 0]
    unit = int(((first == 0) & (second > 0)).nonzero()[0])
    before = model.step(z, context)
    with torch.no_grad():
        model.expand.bias[unit] += 100.0
    after = model.step(z, context)
    assert torch.equal(before[0], after[0])
    assert not torch.isclose(before[1], after[1]).all(-1).any()


@pytest.mark.parametrize("mode", ["evaluation", "rate 0"])
def test_without_dropout_there_is_no_mask(mode):
    model = build(dropout=0.4) if mode == "evaluation" else build().train()
    first, second = model.inject(text()), model.inject(text())
    assert first.attention_mask is None
    assert first.inner_mask is None
    assert torch.equal(first.injection, second.injection)
    z = some_state()
    assert torch.equal(model.step(z, first), model.step(z, second))
    assert torch.equal(model.step(z, first), build().step(z, build().inject(text())))


# Weights.


def test_copies_and_saved_weights_give_the_same_step():
    model, tokens, z = build(**SETTLING), text(), some_state()
    expected = model.step(z, model.inject(tokens)).detach()
    twin = copy.deepcopy(model)
    assert torch.equal(twin.step(z, twin.inject(tokens)), expected)
    with torch.no_grad():
        twin.qkv.parametrizations.weight.original0.mul_(1.5)
    assert not torch.isclose(twin.step(z, twin.inject(tokens)), expected).all()
    assert torch.equal(model.step(z, model.inject(tokens)), expected)

    config = json.loads(json.dumps(model.config))
    rebuilt = DEQTransformer(**config).double()
    assert not torch.isclose(rebuilt.step(z, rebuilt.inject(tokens)), expected).all()
    assert rebuilt.config == model.config
    rebuilt.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(rebuilt.step(z, rebuilt.inject(tokens)), expected)


def test_config_names_every_argument():
    given_arguments = {
        **{"vocabulary": 40, "width": 8, "heads": 1, "inner": 5, "memory": 3, "cutoffs": (9, 20)},
        **{"divisor": 2, "dropout": 0.2, "keep": 0.7, "direct": True},
    }
    model = DEQTransformer(**given_arguments)
    assert model.config == {**given_arguments, "cutoffs": [9, 20]}
    # Also from what can be read but once.
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


@pytest.mark.parametrize("form", [SETTLING, {"keep": 0.3}], ids=str)
def test_implicit_gradients_are_those_of_a_long_unrolled_solve(form):
    model, tokens, targets = build(**form), text(2, 6), text(2, 6, seed=7)
    with torch.no_grad():  # well inside a contraction, where unrolling converges too
        for layer in (model.out, model.contract):
            layer.parametrizations.weight.original0.mul_(0.6)
    memory = some_memory(2, 3)
    found = {}
    for name, gradient in (
        ("implicit", Implicit(tol=1e-13, max_steps=400)),
        ("unrolled", Unrolled(steps=300)),
    ):
        model.zero_grad()
        context = model.inject(Segment(tokens, memory))
        solution = solve_with_gradient(
            model, context, solver=Anderson(), gradient=gradient, tol=1e-13, max_steps=400
        )
        model.loss(model.readout(solution.state, context), targets).backward()
        found[name] = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert found["implicit"].keys() == dict(model.named_parameters()).keys()
    for name, grad in found["implicit"].items():
        expected = found["unrolled"][name]
        assert expected.norm() > 1e-6, name
        error = (grad - expected).norm() / expected.norm()
        assert error < 1e-6, (name, float(error))


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
    # A token's own injection and those of the two before it.
    expected = torch.zeros(LENGTH, dtype=torch.bool)
    expected[6:9] = True
    assert torch.equal(changed, expected.expand(3, -1))


@torch.no_grad()
@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_text_that_is_cut_starts_as_the_whole_one(cut):
    model, tokens = build(), text()
    network = model.start_network().double()
    torch.nn.init.normal_(network.out.weight)
    whole = network(model.inject(tokens))
    first = model.inject(tokens[:, :cut])
    memory = model.remember(model.start(first), first)
    rest = network(model.inject(Segment(tokens[:, cut:], memory)))
    torch.testing.assert_close(torch.cat((network(first), rest), 1), whole)


def test_a_start_network_takes_one_token():
    model = build()
    assert model.start_network().double()(model.inject(text(length=1))).shape == (3, 1, WIDTH)


# Errors.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "multiple of 2 \\* heads = 6, not 16"),
        ({"heads": 0}, "heads and inner must be at least 1, not 0"),
        ({"width": 0}, "width"),
        ({"inner": 0}, "at least 1, not 2 and 0"),
        ({"memory": -1}, "memory must not be negative, not -1"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), not 1.0"),
        ({"dropout": -0.1}, "dropout"),
        ({"cutoffs": (25, 10)}, "increasing"),
        ({"cutoffs": (10, WORDS)}, "below the vocabulary of 50"),
        ({"vocabulary": 0, "cutoffs": ()}, "vocabulary of 0"),
        ({"divisor": 16, "cutoffs": (10, 25)}, "at least one number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 4, WIDTH), (2, 4, 2 * WIDTH)],
        [(3, 4, 8), (3, 4, 16)],
        [(3, 4, WIDTH), (3, 5, 2 * WIDTH)],
        [(3, 4, WIDTH)],
        [(3, WIDTH), (3, 2 * WIDTH)],
    ],
)
def test_a_memory_of_other_texts_or_models_is_refused(shapes):
    memory = tuple(torch.zeros(s, dtype=torch.float64) for s in shapes)
    with pytest.raises(ValueError, match="not of this model and 3 texts"):
        build().inject(Segment(text(), memory))


def test_tokens_without_a_batch_are_refused():
    with pytest.raises(ValueError, match=r"shape \(B, L\), not \(12,\)"):
        build().inject(text()[0])


# The published model.

WIKITEXT_103 = 267_735


def reduced_paper_plan(**changes):
    sizes = {"width": 20, "heads": 2, "inner": 32, "memory": 6, "cutoffs": (10, 20), "divisor": 2}
    return dataclasses.replace(SCALES["paper"], **sizes, batch=2, length=6, **changes)


def corpus(count=150):
    words = Vocabulary(("<eos>", "<unk>", *(f"w{i}" for i in range(WORDS - 2))))
    tokens = torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(0))
    return Corpus("random", words, tokens, tokens[:40], tokens[:40])


def test_the_published_model_has_about_98_million_weights():
    with torch.device("meta"):
        plan = SCALES["paper"]
        model = DEQTransformer(
            vocabulary=WIKITEXT_103,
            width=plan.width,
            heads=plan.heads,
            inner=plan.inner,
            memory=plan.memory,
            cutoffs=plan.cutoffs,
            divisor=plan.divisor,
            dropout=plan.dropout,
            keep=plan.keep,
            direct=plan.direct,
        )
    assert plan.keep == 1.0
    assert not plan.direct
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(98e6, rel=0.02)


def test_the_published_plan_learns_and_is_distilled_at_a_reduced_width(tmp_path):
    plan, known = reduced_paper_plan(), corpus()
    torch.manual_seed(0)
    model = plan.build(known)
    assert model.config["keep"] == 1.0
    assert model.config["dropout"] == 0.05
    streams = plan.streams(known.train)
    assert isinstance(streams, Streams)
    assert len(streams) > 3
    before = {n: p.detach().clone() for n, p in model.named_parameters()}

    def left(memory):
        context = model.inject(Segment(streams.segment(0)[0], memory))
        return model.remember(model.start(context), context)

    carried = CarriedMemory(full_memory(left), len(streams))
    for config in (plan.pretraining, plan.teaching):
        once = dataclasses.replace(
            config, fit=dataclasses.replace(config.fit, updates=2, warmup=0, log_every=1)
        )
        losses = []
        teach(
            model,
            streams.segment,
            once,
            task_loss=model.loss,
            carried=carried,
            progress=lambda done, total, shown, losses=losses: losses.append(shown),
        )
        assert len(losses) == 2
        assert all(0 < shown["loss"] < 10 for shown in losses)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(before)

    model.requires_grad_(False)
    segments = [streams.segment(i) for i in range(3)]
    store = record(model, segments, tmp_path, mode="endpoint", max_steps=40, tol=1e-3, carried=True)
    student = distill(
        model,
        store,
        recipe="anchored",
        fit=FitConfig(updates=1, learning_rate=1e-3),
        task_loss=model.loss,
    )
    assert any(bool(d.any()) for d in student.deltas())
    x = store[1].x
    assert x.memory[0].shape == (2, 6, 20)
    assert student(x, steps=2).shape == (2, 6, 20)

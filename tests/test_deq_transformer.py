"""DEQ-Transformer: its equation, causality, memory and dropout, in double precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from cdeq.equilibrium.contract import check_contract
from cdeq.equilibrium.memory import Remembering, Segment
from cdeq.models.text.relative import sinusoids
from cdeq.solvers import Picard
from checks import equilibrium, solver_states
from deq_texts import (
    HEADS,
    INNER,
    LENGTH,
    SETTLING,
    WIDTH,
    WORDS,
    build,
    some_memory,
    some_state,
    text,
)

every_form = pytest.mark.parametrize(
    "form", [{}, SETTLING, {"keep": 0.3}, {"direct": True}], ids=str
)


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


@pytest.mark.slow
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
def test_keys_of_distances_that_are_known_are_those_that_are_computed():
    model, short, long = build(), text(2, 4), text(2, LENGTH)
    expected = [model.inject(tokens).positions for tokens in (short, long)]
    model.tabulate(5)
    for tokens, keys in zip((short, long), expected, strict=True):
        torch.testing.assert_close(model.inject(tokens).positions, keys)
    assert "known_keys" not in model.state_dict()


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


@settings(max_examples=12)
@given(cut=st.integers(1, LENGTH - 1), seed=st.integers(0, 5), form=st.sampled_from([{}, SETTLING]))
@torch.no_grad()
def test_later_tokens_change_nothing_before_them(cut, seed, form):
    model, tokens = build(**form), text()
    other = tokens.clone()
    other[:, cut:] = (other[:, cut:] + 1 + text(seed=seed)[:, cut:] % (WORDS - 1)) % WORDS
    memory = some_memory()
    states = []
    for x in (tokens, other):
        states.append(torch.stack(solver_states(model, Segment(x, memory), 6, Picard())))
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


@torch.no_grad()
def read(model, x):
    """The equilibrium of a text, and the memory that it leaves."""
    state = equilibrium(model, x, tol=1e-9)
    return state, model.remember(state, model.inject(x))


@every_form
@pytest.mark.parametrize("cut", [1, 5, LENGTH - 1])
@torch.no_grad()
def test_a_text_in_two_segments_has_the_equilibrium_of_the_whole(form, cut):
    model, tokens = build(**form), text()
    whole, memory = read(model, tokens)
    before, left = read(model, tokens[:, :cut])
    after, ends = read(model, Segment(tokens[:, cut:], left))
    torch.testing.assert_close(torch.cat((before, after), 1), whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(ends, memory, rtol=0, atol=1e-6)
    # The second segment by itself is another text.
    alone, _ = read(model, tokens[:, cut:])
    assert (alone - after).norm() > 1e-2 * after.norm()


@torch.no_grad()
def test_many_segments_with_a_memory_that_covers_them():
    model, tokens = build(**SETTLING), text()
    whole, _ = read(model, tokens)
    memory, states = (), []
    for piece in tokens.tensor_split((3, 4, 9), dim=1):
        state, memory = read(model, Segment(piece, memory))
        states.append(state)
    torch.testing.assert_close(torch.cat(states, 1), whole, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_memory_too_short_is_another_text():
    model, tokens = build(memory=2, **SETTLING), text()
    whole, _ = read(model, tokens)
    _, memory = read(model, tokens[:, :6])
    after, _ = read(model, Segment(tokens[:, 6:], memory))
    assert (after - whole[:, 6:]).norm() > 1e-3 * after.norm()


@settings(max_examples=20)
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

"""Explicit language models: segments joined by memory, causality, saving, learning; in double precision."""

import copy
import json
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from cdeq.models.text.relative import sinusoids
from cdeq_experiments.rivals.qrnn import QRNN, forget_pool, locked_dropout
from cdeq_experiments.rivals.text_convolutions import TCN, CausalConv, GatedConvNet
from cdeq_experiments.rivals.transformer_xl import TransformerXL

WORDS, LENGTH = 11, 24
SHARED = {"vocabulary": WORDS, "width": 16, "cutoffs": (4, 8)}
MODELS = {
    "tcn": (TCN, {"channels": 12, "levels": 3, "kernel": 3}),
    "tcn of one size": (TCN, {"channels": 16, "levels": 2, "kernel": 2}),
    "gated": (GatedConvNet, {"channels": 12, "levels": 2, "kernel": 3}),
    "pointwise gated": (GatedConvNet, {"channels": 12, "levels": 1, "kernel": 1}),
    "qrnn": (QRNN, {"channels": 12, "layers": 3}),
    "qrnn of one layer": (QRNN, {"channels": 12, "layers": 1}),
    "transformer": (TransformerXL, {"heads": 4, "inner": 24, "layers": 2, "memory": LENGTH}),
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name, **changes):
    torch.manual_seed(0)
    kind, arguments = MODELS[name]
    return kind(**{**SHARED, **arguments, **changes}).double()


def text(batch=3, length=LENGTH):
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(1))


@every_model
@settings(max_examples=8)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), min_size=1, max_size=4))
def test_segments_with_memory_give_the_features_of_the_whole_text(name, cuts):
    model, tokens = build(name), text()
    whole, whole_memory = model(tokens)
    memory, parts = None, []
    for segment in tokens.tensor_split(sorted(cuts), dim=1):
        features, memory = model(segment, memory)
        parts.append(features)
    assert torch.allclose(torch.cat(parts, dim=1), whole, rtol=1e-11, atol=1e-12)
    for carried, direct in zip(memory, whole_memory, strict=True):
        assert torch.allclose(carried, direct, rtol=1e-11, atol=1e-12)


@every_model
def test_a_segment_without_its_memory_has_other_features(name):
    model, tokens = build(name), text()
    if name == "pointwise gated":
        assert all(tail.numel() == 0 for tail in model(tokens)[1])
        return
    whole, _ = model(tokens)
    assert (model(tokens[:, 12:])[0][:, 0] - whole[:, 12]).abs().max() > 1e-3


@every_model
def test_features_depend_on_no_later_token_and_on_no_other_stream(name):
    model, tokens = build(name), text()
    features, _ = model(tokens)
    for position in (0, 7, LENGTH - 1):
        changed = tokens.clone()
        changed[1, position] = (changed[1, position] + 5) % WORDS
        difference = (model(changed)[0] - features).abs().amax(-1)
        assert (difference[1, :position] < 1e-12).all()
        assert difference[1, position] > 1e-3
        assert (difference[[0, 2]] < 1e-12).all()


@every_model
def test_memory_is_detached_has_the_streams_first_and_keeps_its_shapes(name):
    model, memory, shapes = build(name), None, []
    for _ in range(3):
        features, memory = model(text(), memory)
        assert features.shape == (3, LENGTH, 16)
        assert features.requires_grad
        assert not any(tensor.requires_grad for tensor in memory)
        assert all(tensor.shape[0] == 3 for tensor in memory)
        shapes.append([tuple(tensor.shape) for tensor in memory])
    assert shapes[0] == shapes[1] == shapes[2]
    # A segment shorter than the memory moves it on, and does not shorten it.
    assert [tuple(tensor.shape) for tensor in model(text(length=1), memory)[1]] == shapes[0]


def test_transformer_memory_grows_to_its_length_and_forgets_what_is_older():
    model = build("transformer", memory=10)
    first, second = text().split(12, dim=1)
    assert [m.shape[1] for m in model(first[:, :4])[1]] == [4, 4]
    _, memory = model(first)
    assert [m.shape[1] for m in memory] == [10, 10]
    # One layer sees only the embeddings of its memory, here those of the last ten tokens.
    shallow = build("transformer", memory=10, layers=1)
    _, memory = shallow(first)
    for forgotten, same in ((1, True), (2, False)):
        changed = first.clone()
        changed[:, forgotten] = (changed[:, forgotten] + 5) % WORDS
        again, _ = shallow(second, shallow(changed)[1])
        assert torch.allclose(again, shallow(second, memory)[0], rtol=1e-12) == same
    none = build("transformer", memory=0)
    assert torch.allclose(none(second, none(first)[1])[0], none(second)[0], rtol=1e-12)


@every_model
def test_memory_of_another_model_or_batch_is_refused(name):
    model = build(name)
    _, memory = model(text())
    for wrong in (memory[:-1], (*memory, memory[0])):
        with pytest.raises(ValueError, match="memory of shapes"):
            model(text(), wrong)
    with pytest.raises(ValueError, match="2 streams"):
        model(text(batch=2), memory)


@every_model
def test_copies_saved_states_and_configurations_rebuild_the_model(name):
    model, tokens = build(name), text()
    features, _ = model(tokens)
    state = model.state_dict()
    assert len({value.data_ptr() for value in state.values()}) == len(state)
    # A configuration is kept as JSON, which has lists for tuples.
    rebuilt = type(model)(**json.loads(json.dumps(model.config))).double()
    assert rebuilt.config == model.config
    rebuilt.load_state_dict(state)
    for other in (rebuilt, copy.deepcopy(model)):
        assert torch.equal(other(tokens)[0], features)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
    assert torch.equal(model(tokens)[0], features)


@every_model
def test_every_parameter_has_a_gradient(name):
    model, tokens = build(name), text(batch=6)
    _, memory = model(tokens)
    model.words.nll(model(tokens[:, :-1], memory)[0], tokens[:, 1:]).mean().backward()
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.abs().max() > 0, label


@every_model
def test_a_new_model_finds_all_words_about_equally_likely(name):
    torch.manual_seed(0)
    kind, arguments = MODELS[name]
    model = kind(**{**SHARED, **arguments, "vocabulary": 2000, "width": 64, "cutoffs": (200, 800)})
    tokens = torch.randint(2000, (16, 33))
    nll = model.words.nll(model(tokens[:, :-1])[0], tokens[:, 1:]).mean().item()
    assert math.log(2000) - 0.1 < nll < math.log(2000) + 1.5


CYCLE = (0, 9, 1, 2, 9, 3, 4, 9, 5, 0, 9, 6)
LEARNERS = ["tcn", "gated", "qrnn", "transformer"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_sixty_updates_learn_a_cyclic_text_far_better_than_its_frequencies(name):
    model = build(name).float()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    # After a nine the next word is known only from the word before it.
    stream = torch.tensor(CYCLE).repeat(11)
    tokens = torch.stack([stream[start : start + 121] for start in (0, 3, 5, 10)])
    counts = Counter(CYCLE)
    unigram = -sum(n / len(CYCLE) * math.log(n / len(CYCLE)) for n in counts.values())
    for _ in range(12):
        memory = None
        for start in range(0, 120, 24):
            segment = tokens[:, start : start + 25]
            features, memory = model(segment[:, :-1], memory)
            loss = model.words.nll(features, segment[:, 1:]).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
    assert loss.item() < 0.25 * unigram


@every_model
def test_dropout_acts_in_training_only(name):
    dropping, plain, tokens = build(name, dropout=0.5), build(name), text()
    assert torch.equal(dropping.eval()(tokens)[0], plain(tokens)[0])
    dropping.train()
    first, second = dropping(tokens)[0], dropping(tokens)[0]
    assert torch.isfinite(first).all()
    assert (first - second).abs().max() > 1e-3


@every_model
def test_autocast_keeps_memory_and_loss_close(name):
    model, tokens = build(name).float(), text()
    expected = model.words.nll(model(tokens[:, 12:], model(tokens[:, :12])[1])[0], tokens[:, 12:])
    with torch.autocast("cpu", torch.bfloat16):
        _, memory = model(tokens[:, :12])
        features, _ = model(tokens[:, 12:], memory)
        nll = model.words.nll(features, tokens[:, 12:])
    assert abs(nll.mean().item() - expected.mean().item()) < 0.05


def test_locked_dropout_keeps_one_mask_for_a_stream_and_the_mean():
    torch.manual_seed(0)
    dropped = locked_dropout(torch.ones(200, 5, 40), 0.25, training=True)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert abs(dropped.mean().item() - 1) < 0.05
    assert (dropped[0] != dropped[1]).any()


def test_weight_dropout_changes_the_features_in_training_only():
    dropping, plain, tokens = build("qrnn", weight_dropout=0.5), build("qrnn"), text()
    assert torch.equal(dropping.eval()(tokens)[0], plain(tokens)[0])
    dropping.train()
    assert (dropping(tokens)[0] - dropping(tokens)[0]).abs().max() > 1e-3
    # One draw of the weights serves the whole segment: equal tokens give equal gates.
    dropping = build("qrnn of one layer", weight_dropout=0.5).train()
    same, _ = dropping(torch.zeros(2, 6, dtype=torch.long))
    assert torch.equal(same[0], same[1])


@settings(max_examples=25)
@given(length=st.integers(1, 12), seed=st.integers(0, 99))
def test_forget_pooling_is_the_sum_of_what_each_token_leaves(length, seed):
    torch.manual_seed(seed)
    z = torch.randn(2, length, 3, dtype=torch.float64)
    f = torch.rand(2, length, 3, dtype=torch.float64)
    c = torch.randn(2, 3, dtype=torch.float64)
    for t in range(length):
        left = [f[:, s + 1 : t + 1].prod(dim=1) * (1 - f[:, s]) * z[:, s] for s in range(t + 1)]
        expected = f[:, : t + 1].prod(dim=1) * c + sum(left)
        assert torch.allclose(forget_pool(z, f, c)[:, t], expected, rtol=1e-10, atol=1e-12)


def test_the_quasi_recurrent_layer_is_that_of_the_paper():
    model, tokens = build("qrnn of one layer"), text(batch=1)
    x, layer = model.words.embed(tokens)[0], model.projections[0]
    c, before, expected = torch.zeros(16).double(), torch.zeros(16).double(), []
    for now in x:
        z, f, o = (layer.weight @ torch.cat((before, now)) + layer.bias).view(3, 16)
        c = f.sigmoid() * c + (1 - f.sigmoid()) * z.tanh()
        expected.append(o.sigmoid() * c)
        before = now
    assert torch.allclose(model(tokens)[0][0], torch.stack(expected), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (2, 1), (3, 1), (3, 4), (5, 2)])
def test_causal_convolution_is_that_of_torch_after_padding(kernel, dilation):
    torch.manual_seed(0)
    convolution = CausalConv(6, 10, kernel=kernel, dilation=dilation).double()
    x = torch.randn(2, 13, 6, dtype=torch.float64)
    weight = convolution.linear.weight.view(10, kernel, 6).transpose(1, 2)
    padded = F.pad(x.transpose(1, 2), ((kernel - 1) * dilation, 0))
    expected = F.conv1d(padded, weight, convolution.linear.bias, dilation=dilation)
    y, _ = convolution(x, x.new_zeros(2, convolution.past, 6))
    assert torch.allclose(y, expected.transpose(1, 2), rtol=1e-11, atol=1e-12)


def test_weights_are_normalised_for_each_output_channel():
    convolution = CausalConv(6, 10, kernel=3)
    with torch.no_grad():
        convolution.linear.parametrizations.weight.original0.copy_(torch.arange(1.0, 11)[:, None])
    assert torch.allclose(convolution.linear.weight.norm(dim=1), torch.arange(1.0, 11))


@pytest.mark.parametrize(
    ("name", "reach"),
    [("tcn", 2 * 2 * (1 + 2 + 4)), ("tcn of one size", 2 * 1 * (1 + 2)), ("gated", 5 * 2)],
)
def test_convolutions_see_as_far_as_their_kernels_and_dilations_reach(name, reach):
    model, tokens = build(name), text(length=40)
    features, _ = model(tokens)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 5) % WORDS
    difference = (model(changed)[0] - features).abs().amax(dim=(0, 2))
    assert difference[5 + reach] > 1e-9
    assert (difference[6 + reach :] < 1e-13).all()


def test_the_tcn_and_the_gated_network_are_those_of_their_papers():
    tokens = text()
    tcn = build("tcn")
    h = tcn.words.embed(tokens)
    for first, second, skip in zip(*[iter(tcn.layers)] * 3, strict=True):
        y = F.relu(first(h, h.new_zeros(3, first.past, h.shape[-1]))[0])
        y = F.relu(second(y, y.new_zeros(3, second.past, y.shape[-1]))[0])
        h = F.relu(skip(h) + y)
    assert torch.allclose(tcn(tokens)[0], h, rtol=1e-12)

    def gated(convolution, x):
        values, gates = convolution(x, x.new_zeros(3, convolution.past, x.shape[-1]))[0].chunk(
            2, dim=-1
        )
        return values * gates.sigmoid()

    net = build("gated")
    h = gated(net.gated[0], net.words.embed(tokens))
    for i in (1, 3):
        h = h + gated(net.gated[i + 1], gated(net.gated[i], h))
    assert torch.allclose(net(tokens)[0], net.exit(h), rtol=1e-12)


def test_the_transformer_layer_is_that_of_the_paper():
    model = build("transformer", layers=1, heads=2)
    with torch.no_grad():
        for parameter in model.blocks[0].parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    before, tokens = text(batch=1).split(12, dim=1)
    _, memory = model(before)
    block, x = model.blocks[0], model.words.embed(torch.cat((before, tokens), dim=1))[0]
    encodings = sinusoids(LENGTH, 16, device=x.device, dtype=x.dtype).flip(
        0
    )  # by distance 0, 1, ...
    key_weight, value_weight = block.key_value.weight.split(16)
    expected = []
    for i in range(12, LENGTH):
        heads = []
        for head in range(2):
            rows = slice(8 * head, 8 * head + 8)
            q = block.query.weight[rows] @ x[i]
            scores = [
                (q + block.content_bias[head]) @ (key_weight[rows] @ x[j])
                + (q + block.position_bias[head]) @ (block.position.weight[rows] @ encodings[i - j])
                for j in range(i + 1)
            ]
            weights = (torch.stack(scores) / 8**0.5).softmax(0)
            heads.append(weights @ (x[: i + 1] @ value_weight[rows].T))
        y = block.attention_norm(x[i] + block.out.weight @ torch.cat(heads))
        expected.append(block.norm(y + block.contract(F.relu(block.expand(y)))))
    assert torch.allclose(model(tokens, memory)[0][0], torch.stack(expected), rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tcn", {"levels": 0}, "at least 1"),
        ("gated", {"kernel": 0}, "at least 1"),
        ("gated", {"dropout": 1.5}, "dropout"),
        ("qrnn", {"layers": 0}, "at least 1"),
        ("qrnn", {"dropout": 1.0}, "dropout must be"),
        ("qrnn", {"weight_dropout": -0.1}, "weight_dropout must be"),
        ("transformer", {"heads": 3}, "multiple of heads"),
        ("transformer", {"memory": -1}, "memory must be at least 0"),
        ("transformer", {"cutoffs": (8, 4)}, "increasing"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        build(name, **changes)

"""The tied adaptive vocabulary against its own full distribution, in double precision."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdeq.models.text.adaptive import AdaptiveVocabulary

WORDS, WIDTH = 20, 16
CUTOFFS = [(), (5,), (1, 19), (4, 9)]


def vocabulary(cutoffs, divisor=4, seed=0):
    """All parameters random, so that no bias or cluster vector is left at its starting zero."""
    torch.manual_seed(seed)
    words = AdaptiveVocabulary(
        vocabulary=WORDS, width=WIDTH, cutoffs=cutoffs, divisor=divisor
    ).double()
    with torch.no_grad():
        for parameter in words.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return words


def dense(words, features):
    """Probabilities (..., V) by the definition, one word at a time."""
    edges, logits = words.edges, []
    tails = len(edges) - 2
    for w in range(WORDS):
        i = sum(w >= edge for edge in edges[1:-1])
        vector = words.vectors[i][w - edges[i]]
        if i:
            vector = words.projections[i - 1] @ vector
        logits.append(features @ vector + words.word_bias[w])
    weights = torch.stack(logits, -1).exp()
    head = weights[..., : edges[1]].sum(-1)
    clusters = [
        (features @ words.cluster_vectors[i] + words.cluster_bias[i]).exp() for i in range(tails)
    ]
    total = head + sum(clusters)
    probabilities = [weights[..., : edges[1]] / total[..., None]]
    for i in range(tails):
        inside = weights[..., edges[i + 1] : edges[i + 2]]
        inside = inside / inside.sum(-1, keepdim=True)
        probabilities.append(inside * (clusters[i] / total)[..., None])
    return torch.cat(probabilities, -1)


@pytest.mark.parametrize("divisor", [1, 2, 4])
@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_probabilities_are_those_of_the_definition_and_sum_to_one(cutoffs, divisor):
    words = vocabulary(cutoffs, divisor)
    features = torch.randn(3, 4, WIDTH, dtype=torch.float64) / 4
    probabilities = words.log_probabilities(features).exp()
    assert probabilities.shape == (3, 4, WORDS)
    assert (probabilities.sum(-1) - 1).abs().max() < 1e-12
    assert torch.allclose(probabilities, dense(words, features), rtol=1e-11, atol=0)


@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_a_scorer_is_a_snapshot_of_the_log_probabilities(cutoffs):
    words, features = vocabulary(cutoffs), torch.randn(3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = words.log_probabilities(features)
        scorer = words.scorer()
        for parameter in words.parameters():
            parameter.zero_()
    for h, scores in zip(features, expected, strict=True):
        torch.testing.assert_close(scorer(h), scores, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_a_token_by_itself_has_the_vector_that_it_has_among_others(cutoffs):
    words = vocabulary(cutoffs)
    one_by_one = torch.stack([words.embed_one(token) for token in range(WORDS)])
    torch.testing.assert_close(one_by_one, words.embed(torch.arange(WORDS)), rtol=1e-12, atol=0)
    for outside in (-1, WORDS):
        with pytest.raises(IndexError, match="not in a vocabulary of 20"):
            words.embed_one(outside)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    cutoffs=st.sampled_from(CUTOFFS),
    targets=st.lists(st.integers(-3, WORDS - 1), min_size=0, max_size=12),
    seed=st.integers(0, 100),
)
def test_nll_is_the_gathered_log_probability_and_zero_where_ignored(cutoffs, targets, seed):
    words = vocabulary(cutoffs, seed=seed)
    features = torch.randn(len(targets), WIDTH, dtype=torch.float64)
    words_there = torch.tensor(targets, dtype=torch.long)
    nll = words.nll(features, words_there)
    full = -words.log_probabilities(features)
    gathered = full.gather(-1, words_there.clamp(min=0)[:, None]).squeeze(-1)
    expected = gathered.where(words_there >= 0, torch.zeros_like(gathered))
    assert torch.allclose(nll, expected, rtol=1e-10, atol=1e-10)
    assert (nll[words_there < 0] == 0).all()


def test_nll_keeps_the_shape_of_its_targets_and_ignored_positions_give_no_gradient():
    words = vocabulary((4, 9))
    features = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0, -1, 5], [19, 4, -100]])
    nll = words.nll(features, targets)
    assert nll.shape == (2, 3)
    (gradient,) = torch.autograd.grad(nll.sum(), features)
    assert (gradient[targets < 0] == 0).all()
    assert (gradient[targets >= 0].abs().amax(-1) > 0).all()


def test_gradients_of_nll_and_embedding_match_finite_differences():
    words = vocabulary((4, 9))
    names = [name for name, _ in words.named_parameters()]
    tokens = torch.tensor([0, 3, 4, 8, 9, 19, -1])

    def loss(features, *parameters):
        return torch.func.functional_call(
            Scored(words),
            {f"words.{n}": p for n, p in zip(names, parameters, strict=True)},
            (features, tokens),
        )

    features = (torch.randn(7, WIDTH, dtype=torch.float64) / 4).requires_grad_()
    parameters = [p.detach().clone().requires_grad_() for p in words.parameters()]
    assert torch.autograd.gradcheck(loss, (features, *parameters), fast_mode=True)


class Scored(torch.nn.Module):
    """Both uses of the tables in one output."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    def forward(self, features, tokens):
        embedded = self.words.embed(tokens.clamp(min=0))
        return self.words.nll(features, tokens).sum() + embedded.square().sum()


# Clusters of two words at least: the softmax over one word has no gradient.
@pytest.mark.parametrize("cutoffs", [(), (5,), (1, 18), (4, 9)])
def test_embedding_is_the_scaled_projected_vector_and_tables_are_tied(cutoffs):
    words = vocabulary(cutoffs)
    tokens = torch.arange(WORDS).view(4, 5)
    expected = []
    for w in range(WORDS):
        i = sum(w >= edge for edge in words.edges[1:-1])
        vector = words.vectors[i][w - words.edges[i]]
        expected.append(4.0 * (words.projections[i - 1] @ vector if i else vector))
    embedded = words.embed(tokens)
    assert torch.allclose(embedded, torch.stack(expected).view(4, 5, WIDTH), rtol=1e-12)

    tables = [*words.vectors, *words.projections]
    features = torch.randn(4, 5, WIDTH, dtype=torch.float64)
    for output in (embedded.square().sum(), words.nll(features, tokens).sum()):
        for gradient in torch.autograd.grad(output, tables):
            assert (gradient.abs().amax(-1) > 0).all()


def test_a_word_has_gradients_in_its_own_row_only():
    words = vocabulary((4, 9))
    words.embed(torch.tensor([6])).sum().backward()
    touched = [table.grad.abs().sum(-1).nonzero().squeeze(-1).tolist() for table in words.vectors]
    assert touched == [[], [2], []]


def test_a_new_vocabulary_finds_all_words_about_equally_likely():
    torch.manual_seed(0)
    words = AdaptiveVocabulary(vocabulary=5000, width=64, cutoffs=(300, 1500))
    for low, high in ((0, 300), (300, 1500), (1500, 5000)):
        tokens = torch.randint(low, high, (400,))
        assert 0.7 < words.embed(tokens).std() < 1.4
        nll = words.nll(torch.randn(400, 64), tokens).mean().item()
        # Logits of unit variance cost half a nat beside the uniform distribution.
        assert abs(nll - math.log(5000) - 0.5) < 0.35


@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_copies_and_saved_states_hold_every_table_once(cutoffs):
    words = vocabulary(cutoffs)
    state = words.state_dict()
    assert len({value.data_ptr() for value in state.values()}) == len(state)
    assert sum(v.numel() for v in state.values()) == sum(p.numel() for p in words.parameters())
    rebuilt = AdaptiveVocabulary(**words.config).double()
    rebuilt.load_state_dict(state)
    features = torch.randn(6, WIDTH, dtype=torch.float64)
    targets = torch.arange(0, 18, 3)
    for other in (rebuilt, copy.deepcopy(words)):
        assert torch.equal(other.nll(features, targets), words.nll(features, targets))
        assert torch.equal(other.embed(targets), words.embed(targets))
        with torch.no_grad():
            other.vectors[0].zero_()
    assert words.vectors[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"cutoffs": (9, 4)}, "increasing"),
        ({"cutoffs": (4, 4)}, "increasing"),
        ({"cutoffs": (0, 4)}, "positive"),
        ({"cutoffs": (4, 20)}, "below the vocabulary of 20"),
        ({"vocabulary": 0}, "vocabulary of 0"),
        ({"cutoffs": (4, 9, 12)}, "fewer cutoffs"),
        ({"divisor": 0}, "at least 1"),
        ({"width": 0}, "at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings_, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveVocabulary(**{"vocabulary": WORDS, "width": WIDTH, **settings_})


@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_words_outside_the_vocabulary_are_refused(cutoffs):
    words = vocabulary(cutoffs)
    for bad in (-1, WORDS):
        with pytest.raises(IndexError):
            words.embed(torch.tensor([0, bad]))
    with pytest.raises(IndexError):
        words.nll(torch.zeros(1, WIDTH, dtype=torch.float64), torch.tensor([WORDS]))
    with pytest.raises(ValueError, match="features"):
        words.nll(torch.zeros(2, WIDTH), torch.tensor([1]))

"""Language models scored as the field does it: in segments, each method with the memory that it leaves itself."""

import math

import pytest
import torch

from cdeq.data.text import Streams
from cdeq.equilibrium.memory import Segment
from cdeq.evaluation import (
    find_text_equilibria,
    measure_text_quality,
    perplexity,
    score_explicit_text,
    solver_method,
)
from cdeq.models import DEQTransformer
from cdeq.solvers import Anderson, Picard, solve_model
from cdeq_experiments.rivals.qrnn import QRNN

TEXT = torch.randint(32, (150,), generator=torch.Generator().manual_seed(0))


def teacher():
    torch.manual_seed(1)
    sizes = {"vocabulary": 32, "width": 8, "heads": 2, "inner": 16, "memory": 40, "keep": 0.5}
    return DEQTransformer(**sizes).double().eval()


@torch.no_grad()
def test_a_text_in_segments_scores_as_the_whole_text():
    tokens, model = TEXT[:36], teacher()
    found, timed = find_text_equilibria(model, list(Streams(tokens, 1, 7)), perplexity())
    context = model.inject(tokens[None, :-1])
    z = solve_model(model, context, Anderson(), tol=1e-12, max_steps=300).state
    nll = model.words.nll(z, tokens[None, 1:])
    assert found.metric == pytest.approx(math.exp(float(nll.mean())), rel=1e-3)
    assert timed.tokens.shape == (1, 7)
    assert timed.memory[0].shape == (1, 28, 8)
    assert torch.cat(found.states, 1).shape == z.shape


@torch.no_grad()
def test_each_count_meets_its_own_memory():
    model, segments = teacher(), list(Streams(TEXT[:46], 2, 6))
    known, _ = find_text_equilibria(model, segments, perplexity())
    method, seen = solver_method(model, Picard()), []
    found = measure_text_quality(
        method, model, segments, known.states, perplexity(), (1, 3, 60), lambda *a: seen.append(a)
    )
    memory, total, count, distances, residuals = (), 0.0, 0, [], []
    for (tokens, targets), star in zip(segments, known.states, strict=True):
        context = model.inject(Segment(tokens, memory))
        z = model.start(context)
        for _ in range(3):
            z = model.step(z, context)
        memory = model.remember(z, context)
        total += float(model.words.nll(z, targets).sum())
        count += int((targets >= 0).sum())
        distances += [(a - b).norm() / b.norm() for a, b in zip(z, star, strict=True)]
        after = model.step(z, context)
        residuals += [(b - a).norm() / a.norm() for a, b in zip(z, after, strict=True)]
    assert count == 45
    assert found[3].metric == pytest.approx(math.exp(total / count), rel=1e-9)
    assert found[3].distance == pytest.approx(float(torch.stack(distances).mean()), rel=1e-6)
    assert found[3].residual == pytest.approx(float(torch.stack(residuals).mean()), rel=1e-6)
    assert found[60].metric == pytest.approx(known.metric, rel=1e-3)
    assert found[1].distance > found[3].distance > found[60].distance
    assert seen[-1] == (3 * len(segments), 3 * len(segments))
    alone = measure_text_quality(method, model, segments, None, perplexity(), (1,))
    assert (alone[1].distance, alone[1].residual) == (None, None)


@torch.no_grad()
def test_an_explicit_model_keeps_its_memory():
    torch.manual_seed(0)
    model = QRNN(vocabulary=32, width=8, channels=8, layers=2).double().eval()
    whole = model.words.nll(model(TEXT[None, :-1], None)[0], TEXT[None, 1:]).mean()
    for length in (7, 400):
        score = score_explicit_text(model, list(Streams(TEXT, 1, length)), perplexity())
        assert score == pytest.approx(math.exp(float(whole)), rel=1e-9)

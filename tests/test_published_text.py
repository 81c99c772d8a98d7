"""The published DEQ-Transformer: its size, and all its stages at a reduced width."""

import dataclasses

import pytest
import torch

from cdeq import FitConfig, distill, record, teach
from cdeq.data.text import Corpus, Streams, Vocabulary
from cdeq.equilibrium.memory import Segment
from cdeq.models.text.deq_transformer import DEQTransformer
from cdeq.training.segments import CarriedMemory, full_memory
from cdeq_experiments.text_plans import SCALES
from checks import distances, picard_states
from deq_texts import WORDS

WIKITEXT_103 = 267_735
pytestmark = pytest.mark.slow


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
        model, store, fit=FitConfig(updates=30, learning_rate=5e-3), task_loss=model.loss
    )
    x = store[1].x
    assert x.memory[0].shape == (2, 6, 20)
    assert student(x, steps=2).shape == (2, 6, 20)
    star = store[1].endpoint
    ours = distances(student.trajectory(x, 2), star)
    theirs = distances(picard_states(model, x, 2), star)
    assert ours[1] < 0.6 * theirs[1]
    assert ours[2] < 0.5 * theirs[2]

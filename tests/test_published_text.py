"""The published DEQ-Transformer: its size, and all its stages at a reduced width."""

import dataclasses

import pytest
import torch

from cdeq import FitConfig, distill, record, teach
from cdeq.data.text import Corpus, Streams, Vocabulary
from cdeq.equilibrium.memory import Segment
from cdeq.training.segments import CarriedMemory, full_memory
from cdeq_experiments.configs.text import WIKITEXT_103
from checks import distances, picard_states
from deq_texts import WORDS

WIKITEXT_103_WORDS = 267_735
pytestmark = pytest.mark.slow


def reduced_teacher():
    sizes = {"width": 20, "heads": 2, "inner": 32, "memory": 6, "cutoffs": (10, 20), "divisor": 2}
    teacher = WIKITEXT_103.teacher
    return dataclasses.replace(teacher, arguments={**teacher.arguments, **sizes})


def corpus(count=150):
    words = Vocabulary(("<eos>", "<unk>", *(f"w{i}" for i in range(WORDS - 2))))
    tokens = torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(0))
    return Corpus("random", words, tokens, tokens[:40], tokens[:40])


def test_the_published_model_has_about_98_million_weights():
    with torch.device("meta"):
        model = WIKITEXT_103.teacher.build(vocabulary=WIKITEXT_103_WORDS)
    assert (model.config["heads"], model.config["keep"], model.config["direct"]) == (10, 1.0, False)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(98e6, rel=0.02)


def test_the_published_teacher_learns_and_is_distilled_at_a_reduced_width(tmp_path):
    teacher, known = reduced_teacher(), corpus()
    torch.manual_seed(0)
    model = teacher.build(vocabulary=len(known.vocabulary))
    assert model.config["keep"] == 1.0
    assert model.config["dropout"] == 0.05
    streams = Streams(known.train, 2, 6)
    assert len(streams) > 3
    before = {n: p.detach().clone() for n, p in model.named_parameters()}

    def left(memory):
        context = model.inject(Segment(streams.segment(0)[0], memory))
        return model.remember(model.start(context), context)

    carried = CarriedMemory(full_memory(left), len(streams))
    for config in (teacher.pretraining, teacher.teaching):
        once = dataclasses.replace(
            config, fit=dataclasses.replace(config.fit, updates=2, warmup_updates=0, log_every=1)
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

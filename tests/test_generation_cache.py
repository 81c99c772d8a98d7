"""Text with a cache: the same contexts, states and words as without it, for teacher and students."""

import math
from typing import ClassVar

import numpy as np
import pytest
import torch

from cdeq.data.text import Vocabulary
from cdeq.equilibrium.memory import Following, Segment
from cdeq.generation import (
    CachedReader,
    generate_text,
    student_reader,
    teacher_reader,
)
from cdeq.generation.drawing import exponential_noise, read_on
from cdeq.models.text.deq_transformer import DEQTransformer
from test_generation import LINES, language_model, student_of, text

MEMORY = 6
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)
"""Longer than the memory: read as six tokens, two, and the last one."""
RECIPES = [
    ("anchored", {}),
    ("anchored", {"injection": "student"}),
    ("anchored", {"history": "anderson", "window": 2}),
    ("corrected", {}),
    ("warm_start", {}),
    ("paper", {}),
    ("paper", {"history": "mlp"}),
]


def contexts_agree(found, expected) -> None:
    """To rounding; keys of distances may be there for longer texts, too."""
    count = expected.positions.shape[1]
    found = found._replace(positions=found.positions[:, -count:])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"cutoffs": (10, 20)}, {"direct": False}], ids=str)
@pytest.mark.parametrize("memory", [0, 1, 4, 7])
@pytest.mark.parametrize("batch", [1, 2])
def test_following_is_injecting(changes, memory, batch):
    """Segments shorter and longer than the memory, before and after it is full."""
    model = language_model(memory=memory, **changes).double()
    generator = torch.Generator().manual_seed(0)
    past, last = model.no_memory(batch), None
    with torch.no_grad():
        for length in (2, 1, 1, 3, 1, 9, 1, 1):
            tokens = torch.randint(40, (batch, length), generator=generator)
            x = Segment(tokens, past)
            context = model.inject(x)
            if last is not None:
                followed = model.follow(x, last)
                contexts_agree(followed, context)
                z = torch.randn(batch, length, 16, generator=generator, dtype=torch.float64)
                after = model.step(z, followed), model.step(z, context)
                torch.testing.assert_close(*after, rtol=1e-11, atol=1e-12)
            last = context if last is None else followed
            z = torch.randn(batch, length, 16, generator=generator, dtype=torch.float64)
            past = model.remember(z, last)


def log_probabilities(reader, model, tokens) -> torch.Tensor:
    """Of the next word after each of the given tokens (T, V), read one by one after the prompt."""
    scores, last = [], None
    with torch.no_grad():
        for part in (PROMPT[:MEMORY], PROMPT[MEMORY:], *([token] for token in tokens)):
            last = read_on(reader, model, torch.tensor(part), last)
            features = model.readout(last.state, last.context)[0, -1]
            scores.append(model.words.log_probabilities(features))
    return torch.stack(scores)


def check_same_text(cached, plain, model) -> None:
    """The same words, and the same probabilities of all words at every one of them."""
    assert isinstance(cached, CachedReader)
    assert not isinstance(plain, CachedReader)
    found, expected = (text(reader, model, PROMPT, tokens=12) for reader in (cached, plain))
    words = [one.token for one in found]
    assert words == [one.token for one in expected]
    assert [one.evaluations for one in found] == [one.evaluations for one in expected]
    likely = (log_probabilities(reader, model, words) for reader in (cached, plain))
    torch.testing.assert_close(*likely, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_teacher_writes_the_same_text_with_a_cache():
    model = language_model(memory=MEMORY, cutoffs=(10, 20))
    given = {"tol": 1e-5, "max_steps": 200}
    check_same_text(
        teacher_reader(model, **given), teacher_reader(model, **given, cache=False), model
    )


@pytest.mark.parametrize(("recipe", "changes"), RECIPES, ids=str)
@pytest.mark.parametrize("steps", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_student_writes_the_same_text_with_a_cache(recipe, changes, steps):
    student = student_of(language_model(memory=MEMORY), recipe, **changes)
    check_same_text(
        student_reader(student, steps), student_reader(student, steps, cache=False), student.teacher
    )


@pytest.mark.parametrize("recipe", ["corrected", "warm_start"])
def test_the_first_state_is_the_same_however_many_steps_follow(recipe):
    """One step has nothing to mix, and none of the mixing is done."""
    student = student_of(language_model().double(), recipe)
    prepared = student.prepare(torch.tensor([[3, 1, 4]]))
    with torch.no_grad():
        (_, one), (_, first, _) = student.rollout(prepared, 1), student.rollout(prepared, 2)
    torch.testing.assert_close(one, first, rtol=1e-12, atol=1e-12)


def test_a_reader_leaves_its_models_as_they_were():
    """Weights made for it are not found in the student or its teacher."""
    student = student_of(language_model(), "corrected")
    before = [set(vars(module)) for module in student.modules()]
    for reader in (student_reader(student, 1), teacher_reader(student.teacher)):
        text(reader, student.teacher)
    assert [set(vars(module)) for module in student.modules()] == before


class Watched(DEQTransformer):
    """Counts the tokens whose keys and values are made."""

    made: ClassVar[list[int]] = []

    def _keys_and_values(self, state, injected):
        self.made.append(state.shape[1])
        return super()._keys_and_values(state, injected)


def test_only_the_last_token_gets_new_keys_and_values():
    model = Watched(vocabulary=40, width=16, heads=2, inner=32, memory=MEMORY).eval()
    student = student_of(model, "anchored")
    for reader in (teacher_reader(model), student_reader(student, 2)):
        Watched.made.clear()
        text(reader, model, PROMPT, tokens=4)
        assert Watched.made == [0, MEMORY, 2, 1, 1, 1]
    Watched.made.clear()
    text(teacher_reader(model, cache=False), model, PROMPT, tokens=4)
    assert Watched.made == [0, *[MEMORY] * 5]


class Plain(DEQTransformer):
    """A model with memory that cannot follow."""

    follow = None


def test_a_model_that_cannot_follow_writes_all_the_same():
    config = {"vocabulary": 40, "width": 16, "heads": 2, "inner": 32, "memory": MEMORY}
    model = Plain(**config).eval()
    other = DEQTransformer(**config).eval()
    other.load_state_dict(model.state_dict())
    assert not isinstance(model, Following)
    assert not isinstance(student_reader(student_of(model, "warm_start"), 1), CachedReader)
    words = [
        [one.token for one in text(teacher_reader(m), m, PROMPT, tokens=4)] for m in (model, other)
    ]
    assert words[0] == words[1]


def test_text_in_one_call_with_and_without_a_cache():
    words = Vocabulary.of(LINES)
    student = student_of(language_model(vocabulary=len(words), memory=4), "anchored")
    for model in (student, student.teacher):
        written = [generate_text(model, words, "the cat", tokens=8, cache=c) for c in (True, False)]
        assert written[0] == written[1]


def test_the_noise_of_a_word_is_its_own():
    noise, other = (
        np.array([exponential_noise(word, key) for word in range(1000)]) for key in (7, 8)
    )
    assert not bool((other == noise).any())
    assert bool((noise > 0).all())
    assert abs(noise.mean() - 1) < 0.1
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.1
    # The first number that SplitMix64 draws from the seed 0.
    uniform = ((0xE220A8397B1DCDAF >> 11) + 0.5) / 2**53
    assert exponential_noise(1, 0) == pytest.approx(-math.log(uniform), rel=1e-15)

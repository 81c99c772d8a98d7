"""Text word by word: readers against the whole text at once, drawing, and words."""

from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cdeq import Recipe, Student
from cdeq.consistency.baking import fold_weights
from cdeq.data.text import END, UNKNOWN, Vocabulary
from cdeq.equilibrium.memory import Segment
from cdeq.generation import (
    DrawnToken,
    GeneratedText,
    GenerationError,
    draw_token,
    excluded_tokens,
    generate,
    generate_text,
    printable,
    prompt_tokens,
    student_reader,
    teacher_reader,
)
from cdeq.models.text.deq_transformer import DEQTransformer
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.solvers import Anderson, solve_model

LINES = [
    "the small cat sat on the mat and the dog ran in the garden",
    "a bird sang in a tree while rain fell on every roof of town",
    "the old man saw the bird and a cat under that tree at night",
    "one day she will go to sea with her brother if wind is fair",
]


def language_model(**changes) -> DEQTransformer:
    config = {"vocabulary": 40, "width": 16, "heads": 2, "inner": 32, "memory": 32}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return DEQTransformer(**{**config, "keep": 0.5, "direct": True, **changes}).eval()


def student_of(teacher: DEQTransformer, recipe: str, **changes) -> Student:
    """A student whose changes are random instead of trained: large enough that a mistake shows."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        student = Student.for_example(
            teacher, Recipe.from_name(recipe, **changes), torch.zeros(1, 4, dtype=torch.long)
        )
        with torch.no_grad():
            for weight in student.trainable().values():
                weight.add_(torch.randn_like(weight), alpha=0.03)
    return student.eval().requires_grad_(False)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(reader, model, prompt=(3, 1, 4, 1, 5), *, seed: int = 0, **options) -> list[DrawnToken]:
    options = {"tokens": 10, **options}
    return list(generate(reader, model, torch.tensor(prompt), generator=seeded(seed), **options))


# Reading token by token.


@pytest.mark.parametrize("cutoffs", [(), (10, 20)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_teacher_word_by_word_is_the_teacher_on_the_whole_text(cutoffs, temperature):
    model = language_model(cutoffs=cutoffs).double()
    prompt = (3, 1, 4, 1, 5)
    reader = teacher_reader(model, tol=1e-12, max_steps=200)
    drawn = text(reader, model, prompt, temperature=temperature)
    assert all(one.converged for one in drawn)

    tokens = torch.tensor([*prompt, *(one.token for one in drawn)])
    with torch.no_grad():
        context = model.inject(tokens[None, :-1])
        found = solve_model(model, context, Anderson(), tol=1e-12, max_steps=200)
        assert bool(found.converged.all())
        whole = model.words.log_probabilities(model.readout(found.state, context))[0]
    expected = whole[len(prompt) - 1 :].gather(1, tokens[len(prompt) :, None])[:, 0]
    one_by_one = torch.tensor([one.log_probability for one in drawn], dtype=torch.float64)
    assert (one_by_one - expected).abs().max() < 1e-8


def test_a_long_prompt_is_read_in_segments_as_long_as_the_memory():
    model = language_model(memory=4).double()
    prompt = torch.arange(10)
    lengths = []
    solved = teacher_reader(model, tol=1e-12, max_steps=200)

    def reader(x):
        lengths.append((x.tokens.shape[1], x.memory[0].shape[1]))
        return solved(x)

    drawn = text(reader, model, prompt.tolist(), tokens=2)
    assert lengths == [(4, 0), (4, 4), (1, 4), (1, 4), (1, 4)]

    memory = model.no_memory(1)
    with torch.no_grad():
        for tokens in ([0, 1, 2, 3], [4, 5, 6, 7], [8], [9]):
            context = model.inject(Segment(torch.tensor([tokens]), memory))
            z = solve_model(model, context, Anderson(), tol=1e-12, max_steps=200).state
            memory = model.remember(z, context)
        expected = model.words.log_probabilities(z)[0, -1, drawn[0].token]
    assert abs(float(expected) - drawn[0].log_probability) < 1e-8


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("anchored", {}),
        ("anchored", {"start": "teacher"}),
        ("anchored", {"history": "anderson", "window": 2}),
        ("anchored", {"injection": "student"}),
        ("anchored", {"schedule": "learned"}),
        ("paper", {}),
        ("paper", {"history": "mlp"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [1, 4])
def test_a_student_reads_as_its_rollout_does_with_its_own_memory(recipe, changes, steps):
    student = student_of(language_model().double(), recipe, **changes)
    model, reader = student.teacher, student_reader(student, steps)
    memory = own = model.no_memory(1)
    with torch.no_grad():
        for tokens in ([3, 1, 4], [1], [5]):
            read = reader(Segment(torch.tensor([tokens]), own))
            prepared = student.prepare(Segment(torch.tensor([tokens]), memory))
            *_, z = student.rollout(prepared, steps)
            assert read.evaluations == steps
            assert torch.allclose(read.state, z, rtol=1e-9, atol=1e-11)
            memory = model.remember(z, prepared.base)
            own = model.remember(read.state, read.context)


@pytest.mark.slow
def test_a_student_of_many_steps_writes_what_its_teacher_does():
    """Its clock ends at the teacher's own map."""
    student = student_of(language_model().double(), "anchored")
    solved = text(teacher_reader(student.teacher, tol=1e-12, max_steps=200), student.teacher)
    many = text(student_reader(student, 70), student.teacher)
    one = text(student_reader(student, 1), student.teacher)
    assert [w.token for w in many] == [w.token for w in solved]
    for a, b in zip(many, solved, strict=True):
        assert abs(a.log_probability - b.log_probability) < 1e-8
    assert abs(one[0].log_probability - solved[0].log_probability) > 1e-4


class Counting(DEQTransformer):
    lengths: ClassVar[list[int]] = []

    def step(self, z, context):
        self.lengths.append(z.shape[1])
        return super().step(z, context)


def test_a_new_word_costs_the_evaluations_that_are_reported_each_of_one_token():
    model = Counting(vocabulary=40, width=16, heads=2, inner=32, memory=32, keep=0.5, direct=True)
    student = student_of(model, "anchored")
    for reader in (teacher_reader(model), student_reader(student, 3)):
        Counting.lengths.clear()
        drawn = text(reader, model, (7,))
        assert set(Counting.lengths) == {1}
        assert len(Counting.lengths) == sum(one.evaluations for one in drawn)
        assert all(one.seconds > 0 for one in drawn)


def test_a_solve_that_runs_out_of_its_budget_is_told():
    model = language_model()
    assert not any(one.converged for one in text(teacher_reader(model, max_steps=1), model))
    assert all(one.converged for one in text(teacher_reader(model), model))


def test_folding_changes_nothing_but_the_time():
    model = language_model(dropout=0.5).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    plain = fold_weights(model)
    assert not any("parametrizations" in name for name, _ in plain.named_parameters())
    assert type(plain.qkv) is nn.Linear
    assert plain.words.vectors[0] is model.words.vectors[0]
    assert not plain.training
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.requires_grad for p in model.parameters())
    model.eval()
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        z = torch.randn(1, 6, 16, generator=seeded())
        expected = model.step(z, model.inject(tokens))
        assert torch.allclose(plain.step(z, plain.inject(tokens)), expected, rtol=1e-5, atol=1e-6)
        # Other weights go into the copy alone.
        name = "qkv.parametrizations.weight.original0"
        doubled = fold_weights(model, {name: 2 * before[name]})
        assert torch.allclose(doubled.qkv.weight, 2 * plain.qkv.weight, rtol=1e-5)
        assert torch.equal(model.get_parameter(name), before[name])


# Drawing.


@pytest.mark.slow
def test_words_are_drawn_as_often_as_they_are_likely():
    likely = 0.7 ** torch.arange(10.0)
    scores = (likely / likely.sum()).log()
    generator, count = seeded(), 4000
    options = {"temperature": 0.5, "top": 7, "excluded": (2,), "generator": generator}
    drawn = [draw_token(scores, **options) for _ in range(count)]
    found = torch.bincount(torch.tensor(drawn), minlength=10) / count
    expected = likely**2  # at a temperature of 1/2
    expected[[2, 8, 9]] = 0  # excluded, and not among the seven likeliest of the others
    expected /= expected.sum()
    deviation = (expected * (1 - expected) / count).sqrt()
    assert bool(((found - expected).abs() <= 5 * deviation).all())


@given(
    scores=st.lists(st.floats(-50, 0), min_size=2, max_size=12),
    top=st.integers(1, 15),
    temperature=st.sampled_from([0.0, 1e-300, 0.3, 1.0, 1e6]),
    seed=st.integers(0, 1000),
)
def test_only_the_likeliest_are_drawn_and_never_the_excluded(scores, top, temperature, seed):
    one = draw_token(
        torch.tensor(scores),
        temperature=temperature,
        top=top,
        excluded=(1,),
        generator=seeded(seed),
    )
    allowed = sorted((s for i, s in enumerate(scores) if i != 1), reverse=True)[:top]
    assert one != 1
    assert torch.tensor(scores)[one] >= torch.tensor(min(allowed))
    if temperature < 1e-200:
        assert torch.tensor(scores)[one] == torch.tensor(max(allowed))


def test_probabilities_that_are_no_numbers_are_refused():
    with pytest.raises(GenerationError, match="not numbers"):
        draw_token(
            torch.tensor([0.0, torch.nan]),
            temperature=1.0,
            top=1,
            excluded=(),
            generator=seeded(),
        )


@pytest.mark.slow
def test_the_seed_decides():
    model = language_model()
    reader = teacher_reader(model)

    def tokens(**options):
        return [one.token for one in text(reader, model, **options)]

    state = torch.random.get_rng_state()
    assert tokens(seed=0) == tokens(seed=0) != tokens(seed=1)
    assert tokens(seed=0, temperature=0.0) == tokens(seed=1, temperature=0.0)
    assert tokens(seed=0, temperature=0.0) == tokens(seed=1, top=1)
    first = tokens(tokens=1, temperature=0.0)[0]
    assert first not in tokens(temperature=2.0, excluded=(first,))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"top": 0}, "top must be at least 1"),
        ({"temperature": -0.5}, "temperature must be finite and not negative"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"prompt": ()}, "one token or more"),
        ({"excluded": range(40)}, "all words are excluded"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_refused(changes, message):
    model = language_model()
    with pytest.raises(ValueError, match=message):
        text(teacher_reader(model), model, **changes)


def test_a_student_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="steps must be at least 1"):
        student_reader(student_of(language_model(), "anchored"), 0)


# Words.


def test_prompts():
    words = Vocabulary.of(LINES)
    ids = words.ids

    def tokens(prompt):
        found, unknown = prompt_tokens(words, prompt)
        return found.tolist(), unknown

    assert tokens("") == tokens("  ") == ([ids[END]], ())
    assert tokens("the  cat") == ([ids["the"], ids["cat"]], ())
    assert tokens("the\ncat") == ([ids["the"], ids[END], ids["cat"]], ())
    assert tokens("cat\n") == ([ids["cat"], ids[END]], ())
    assert tokens("the zebra zebra emu") == ([ids["the"], *[ids[UNKNOWN]] * 3], ("zebra", "emu"))
    assert excluded_tokens(words) == (ids[UNKNOWN],)


def test_a_word_cannot_steer_the_terminal():
    assert (printable("cat"), printable(END), printable("naïve")) == ("cat", "\n", "naïve")
    assert printable("\x1b[31mred").isprintable()
    assert printable("\ud800").isprintable()


def test_what_a_text_took():
    drawn = [DrawnToken(t, -1.0, t, s, t < 3) for t, s in ((1, 0.5), (2, 0.1), (3, 0.2))]
    teacher = GeneratedText.of(None, drawn)
    assert teacher.seconds_per_token == 0.2
    assert teacher.tokens_per_second == 5
    assert teacher.evaluations_per_token == 2
    assert teacher.unconverged == 1
    other = GeneratedText.of(1, [DrawnToken(t, -1.0, 1, 0.05, True) for t in (1, 2, 4)])
    assert teacher.same_words(teacher) == 3
    assert other.same_words(teacher) == 2
    row = other.row(teacher, Vocabulary((END, "a", "b", "c", "d", UNKNOWN)))
    assert (row["method"], row["steps"], row["text"]) == ("student", 1, "a b d")
    assert row["times_faster"] == pytest.approx(4)


@pytest.mark.slow
def test_text_in_one_call():
    words = Vocabulary.of(LINES)
    model = language_model(vocabulary=len(words))
    student = student_of(model, "anchored")
    drawn = text(
        student_reader(student, 2), student.teacher, prompt_tokens(words, "the cat")[0].tolist(),
        excluded=excluded_tokens(words), tokens=20,
    )  # fmt: skip
    written = generate_text(student, words, "the cat", tokens=20)
    assert written == words.decode([one.token for one in drawn])
    assert generate_text(student, words, "the cat", tokens=20, seed=1) != written
    solved = generate_text(model, words, "the cat", tokens=20, temperature=0)
    many = generate_text(student, words, "the cat", tokens=20, temperature=0, steps=40)
    assert many == solved  # its clock ends at the teacher's own map


def test_a_model_without_memory_cannot_write():
    model = TransformerDEQ(vocabulary=12, width=16, heads=2, inner=32, length=8)
    with pytest.raises(GenerationError, match="a TransformerDEQ cannot write"):
        generate_text(model, Vocabulary.of(["a b"]))

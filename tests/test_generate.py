"""Text word by word: the mathematics against the whole text at once, and the command as a user runs it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cdeq import Student, cli, distill
from cdeq.consistency.recipes import Recipe
from cdeq.data.text import END, UNKNOWN, Streams, Vocabulary
from cdeq.equilibrium.memory import Segment
from cdeq.generation import (
    VOCABULARY,
    Generated,
    Writing,
    draw,
    folded,
    generate,
    load_text_student,
    never_drawn,
    prompt_tokens,
    shown,
    student_advance,
    teacher_advance,
)
from cdeq.models.text.deq_transformer import DEQTransformer
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.solvers import Anderson, solve_model
from cdeq.trajectories import record
from cdeq_experiments.options import ExperimentError

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


def text(advance, model, prompt=(3, 1, 4, 1, 5), *, seed: int = 0, **options) -> list[Generated]:
    options = {"tokens": 10, **options}
    return list(generate(advance, model, torch.tensor(prompt), generator=seeded(seed), **options))


# Reading token by token.


@pytest.mark.parametrize("cutoffs", [(), (10, 20)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_teacher_word_by_word_is_the_teacher_on_the_whole_text(cutoffs, temperature):
    model = language_model(cutoffs=cutoffs).double()
    prompt = (3, 1, 4, 1, 5)
    advance = teacher_advance(model, tol=1e-12, max_steps=200)
    drawn = text(advance, model, prompt, temperature=temperature)
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
    solved = teacher_advance(model, tol=1e-12, max_steps=200)

    def advance(x):
        lengths.append((x.tokens.shape[1], x.memory[0].shape[1]))
        return solved(x)

    drawn = text(advance, model, prompt.tolist(), tokens=2)
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
        ("anchored", {"start": "zero"}),
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
    model, advance = student.teacher, student_advance(student, steps)
    memory = own = model.no_memory(1)
    with torch.no_grad():
        for tokens in ([3, 1, 4], [1], [5]):
            read = advance(Segment(torch.tensor([tokens]), own))
            prepared = student.prepare(Segment(torch.tensor([tokens]), memory))
            *_, z = student.rollout(prepared, steps)
            assert read.evaluations == steps
            assert torch.allclose(read.state, z, rtol=1e-9, atol=1e-11)
            memory = model.remember(z, prepared.base)
            own = model.remember(read.state, read.context)


def test_a_student_of_many_steps_writes_what_its_teacher_does():
    """Its clock ends at the teacher's own map."""
    student = student_of(language_model().double(), "anchored")
    solved = text(teacher_advance(student.teacher, tol=1e-12, max_steps=200), student.teacher)
    many = text(student_advance(student, 70), student.teacher)
    one = text(student_advance(student, 1), student.teacher)
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
    for advance in (teacher_advance(model), student_advance(student, 3)):
        Counting.lengths.clear()
        drawn = text(advance, model, (7,))
        assert set(Counting.lengths) == {1}
        assert len(Counting.lengths) == sum(one.evaluations for one in drawn)
        assert all(one.seconds > 0 for one in drawn)


def test_a_solve_that_runs_out_of_its_budget_is_told():
    model = language_model()
    assert not any(one.converged for one in text(teacher_advance(model, max_steps=1), model))
    assert all(one.converged for one in text(teacher_advance(model), model))


def test_folding_changes_nothing_but_the_time():
    model = language_model(dropout=0.5).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    plain = folded(model)
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
        doubled = folded(model, {name: 2 * before[name]})
        assert torch.allclose(doubled.qkv.weight, 2 * plain.qkv.weight, rtol=1e-5)
        assert torch.equal(model.get_parameter(name), before[name])


# Drawing.


def test_words_are_drawn_as_often_as_they_are_likely():
    likely = 0.7 ** torch.arange(10.0)
    scores = (likely / likely.sum()).log()
    generator, count = seeded(), 4000
    options = {"temperature": 0.5, "top": 7, "excluded": (2,), "generator": generator}
    drawn = [draw(scores, **options) for _ in range(count)]
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
    one = draw(
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
    with pytest.raises(ExperimentError, match="not numbers"):
        draw(
            torch.tensor([0.0, torch.nan]),
            temperature=1.0,
            top=1,
            excluded=(),
            generator=seeded(),
        )


def test_the_seed_decides():
    model = language_model()
    advance = teacher_advance(model)

    def tokens(**options):
        return [one.token for one in text(advance, model, **options)]

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
        text(teacher_advance(model), model, **changes)


def test_a_student_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="steps must be at least 1"):
        student_advance(student_of(language_model(), "anchored"), 0)


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
    assert never_drawn(words) == (ids[UNKNOWN],)


def test_a_word_cannot_steer_the_terminal():
    assert (shown("cat"), shown(END), shown("naïve")) == ("cat", "\n", "naïve")
    assert shown("\x1b[31mred").isprintable()
    assert shown("\ud800").isprintable()


def test_what_a_text_took():
    drawn = [Generated(t, -1.0, t, s, t < 3) for t, s in ((1, 0.5), (2, 0.1), (3, 0.2))]
    teacher = Writing.of(None, drawn)
    assert teacher.seconds_per_token == 0.2
    assert teacher.tokens_per_second == 5
    assert teacher.evaluations_per_token == 2
    assert teacher.unconverged == 1
    other = Writing.of(1, [Generated(t, -1.0, 1, 0.05, True) for t in (1, 2, 4)])
    assert teacher.same_words(teacher) == 3
    assert other.same_words(teacher) == 2
    row = other.row(teacher, Vocabulary((END, "a", "b", "c", "d", UNKNOWN)))
    assert (row["method"], row["steps"], row["text"]) == ("student", 1, "a b d")
    assert row["times_faster"] == pytest.approx(4)


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A student distilled by a few updates, and its words, as `cdeq reproduce table1` keeps them."""
    made = tmp_path_factory.mktemp("generate")
    words = Vocabulary.of(LINES)
    model = language_model(vocabulary=len(words), memory=8).requires_grad_(False)
    streams = Streams(words.encode(LINES), batch=2, length=8)
    segments = [pair for pair in streams if pair[0].shape[1] == 8]
    store = record(model, segments, made / "store", mode="endpoint", carried=True)
    student = distill(model, store, fit=FitConfig(updates=5), task_loss=model.loss)
    student.save(made / "student")
    words.to_json(made / "student" / VOCABULARY)
    return made / "student"


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "cdeq.cli", "generate", *map(str, arguments)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def test_the_command_writes_texts_and_a_table(folder, tmp_path):
    arguments = (folder, "--prompt", "the zebra", "--tokens", 20, "--steps", 1, 3, "--threads", 1)
    done = subprocess.run(
        command(*arguments, "--json", "out/m.json"),
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "cdeq: not in the vocabulary, read as <unk>: zebra\n"
    shown_text, table = done.stdout.split("Median over the tokens")
    assert shown_text.count("the <unk> ") == shown_text.count(UNKNOWN) == 3
    for name in ("teacher", "student, 1 step", "student, 3 steps"):
        assert name in shown_text
        assert name in table
    found = json.loads((tmp_path / "out" / "m.json").read_text())
    assert found["command"].startswith("cdeq generate ")
    assert (found["prompt"], found["tokens"], found["seed"]) == ("the zebra", 20, 0)
    teacher, one, three = found["rows"]
    assert [row["steps"] for row in found["rows"]] == [None, 1, 3]
    assert (one["evaluations_per_token"], three["evaluations_per_token"]) == (1, 3)
    assert teacher["evaluations_per_token"] > 1
    assert teacher["times_faster"] == 1
    assert one["times_faster"] == pytest.approx(
        one["tokens_per_second"] / teacher["tokens_per_second"]
    )
    for row in found["rows"]:
        assert " ".join(row["text"].split()) in " ".join(shown_text.split())


def test_ctrl_c_leaves_what_was_written(folder):
    # A process that is started where SIGINT is ignored, as in the background of a shell, ignores it too.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command(folder, "--tokens", 10**7, "--prompt", "the cat"),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, handler)
    try:
        began = process.stdout.readline() + process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert began.startswith("teacher")
    assert began.endswith("the cat ")
    assert process.returncode == 130
    assert errors == "\ninterrupted\n"


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = cli.main(["generate", *map(str, arguments)])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_the_same_command_writes_the_same_and_another_seed_another(folder, capsys):
    def texts(*more):
        code, out, _ = run(capsys, folder, "--tokens", 10, "--steps", 1, *more)
        assert code == 0
        return "".join(line for line in out.split("Median")[0].splitlines() if "─" not in line)

    assert texts() == texts() != texts("--seed", 1)
    greedy = texts("--temperature", 0)
    assert greedy == texts("--temperature", 0, "--seed", 5) == texts("--top", 1)
    assert greedy != texts()


def test_the_teacher_alone(folder, capsys):
    code, out, _ = run(capsys, folder, "--tokens", 3, "--steps")
    assert code == 0
    assert "student" not in out


def test_a_tolerance_that_is_not_reached_is_told(folder, capsys):
    code, out, _ = run(capsys, folder, "--tokens", 3, "--steps", 1, "--tolerance", 1e-30)
    assert code == 0
    assert "At 3 of 3 tokens the teacher did not reach a residual of 1e-30." in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", 0), "tokens must be at least 1"),
        (("--steps", 1, 0), "steps must be at least 1"),
        (("--top", 0), "top must be at least 1"),
        (("--threads", 0), "threads must be at least 1"),
        (("--temperature", -1), "temperature must be finite and not negative"),
        (("--tolerance", 0), "tolerance must be above 0"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments, message, folder, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(capsys, folder, *arguments)
    assert stopped.value.code == 2
    found = capsys.readouterr()
    assert message in " ".join((found.out + found.err).replace("│", " ").split())


def spoilt(folder: Path, place: Path, how: str) -> Path:
    if how == "no folder":
        return place
    shutil.copytree(folder, place)
    vocabulary = place / VOCABULARY
    if how == "no words":
        vocabulary.unlink()
    elif how == "damaged words":
        vocabulary.write_text("{")
    elif how == "other words":
        Vocabulary.of(["a b c"]).to_json(vocabulary)
    elif how == "no student":
        (place / "config.json").unlink()
    else:
        model = TransformerDEQ(vocabulary=12, width=16, heads=2, inner=32, length=8)
        shutil.rmtree(place)
        student_of(model, "anchored").save(place)
    return place


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no folder", "there is no folder"),
        ("no words", "has no vocabulary.json"),
        ("damaged words", "is no vocabulary, or a damaged one"),
        ("other words", "belongs to another model"),
        ("no student", "not a saved student"),
        ("no memory", "a TransformerDEQ, cannot write: it has no memory or no words"),
    ],
)
def test_a_folder_to_write_from_is_checked(how, message, folder, tmp_path, capsys):
    code, out, errors = run(capsys, spoilt(folder, tmp_path / "spoilt", how))
    assert code == 1
    assert out == ""
    assert errors.startswith("cdeq: ")
    assert message in errors
    assert errors.count("\n") == 1


def test_a_kept_student_is_found_with_its_words(folder):
    student, teacher, vocabulary = load_text_student(folder)
    assert teacher is student.teacher
    assert isinstance(teacher, nn.Module)
    assert len(vocabulary) == teacher.words.vocabulary
    drawn = text(student_advance(student, 1), teacher, tokens=100, excluded=never_drawn(vocabulary))
    assert vocabulary.ids[UNKNOWN] not in [one.token for one in drawn]
    assert any(a.token != b.token for a, b in pairwise(drawn))


def test_the_options_of_the_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "--help"])
    assert stopped.value.code == 0
    found = capsys.readouterr().out
    listed = set(re.findall(r"--(\w+)", found)) - {"help"}
    drawing = {"prompt", "tokens", "temperature", "top", "seed"}
    assert listed == drawing | {"steps", "tolerance", "threads", "json"}
    assert "<unk>" in found

"""`cdeq generate` as a user runs it."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from cdeq import FitConfig, Recipe, cli, distill
from cdeq.data.text import UNKNOWN, Streams, Vocabulary
from cdeq.generation import VOCABULARY, excluded_tokens, load_text_student, student_reader
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.trajectories import record
from test_generation import LINES, language_model, student_of, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A student distilled by a few updates, and its words, as `cdeq reproduce table1` keeps them."""
    made = tmp_path_factory.mktemp("generate")
    words = Vocabulary.of(LINES)
    model = language_model(vocabulary=len(words), memory=8).requires_grad_(False)
    streams = Streams(words.encode(LINES), batch=2, length=8)
    segments = [pair for pair in streams if pair[0].shape[1] == 8]
    store = record(model, segments, made / "store", mode="endpoint", carried=True)
    recipe = Recipe.from_name("corrected", start_updates=5, correction_updates=5)
    student = distill(model, store, recipe=recipe, fit=FitConfig(updates=5), task_loss=model.loss)
    student.save(made / "student")
    words.to_json(made / "student" / VOCABULARY)
    return made / "student"


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "cdeq.cli", "generate", *map(str, arguments)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_same_command_writes_the_same_and_another_seed_another(folder, capsys):
    def texts(*more):
        code, out, _ = run(capsys, folder, "--tokens", 10, "--steps", 1, *more)
        assert code == 0
        return "".join(line for line in out.split("Median")[0].splitlines() if "─" not in line)

    assert texts() == texts() != texts("--seed", 1)
    greedy = texts("--temperature", 0)
    assert greedy == texts("--temperature", 0, "--seed", 5) == texts("--top", 1)
    assert greedy != texts()
    assert texts() == texts("--no-cache")


@pytest.mark.slow
def test_the_teacher_alone(folder, capsys):
    code, out, _ = run(capsys, folder, "--tokens", 3, "--steps")
    assert code == 0
    assert "student" not in out


@pytest.mark.slow
def test_a_tolerance_that_is_not_reached_is_told(folder, capsys):
    code, out, _ = run(capsys, folder, "--tokens", 3, "--steps", 1, "--tolerance", 1e-30)
    assert code == 0
    assert "At 3 of 3 tokens the teacher did not reach a residual of 1e-30." in out


@pytest.mark.slow
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
        ("no memory", "a TransformerDEQ cannot write: it has no memory or no words"),
    ],
)
def test_a_folder_to_write_from_is_checked(how, message, folder, tmp_path, capsys):
    code, out, errors = run(capsys, spoilt(folder, tmp_path / "spoilt", how))
    assert code == 1
    assert out == ""
    assert errors.startswith("cdeq: ")
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_a_kept_student_is_found_with_its_words(folder):
    student, teacher, vocabulary = load_text_student(folder)
    assert teacher is student.teacher
    assert isinstance(teacher, nn.Module)
    assert len(vocabulary) == teacher.words.vocabulary
    drawn = text(
        student_reader(student, 1), teacher, tokens=100, excluded=excluded_tokens(vocabulary)
    )
    assert vocabulary.ids[UNKNOWN] not in [one.token for one in drawn]
    assert any(a.token != b.token for a, b in pairwise(drawn))


def test_text_is_written_in_bfloat16(folder, tmp_path, capsys):
    rows = {}
    for precision in ("fp32", "bf16"):
        path = tmp_path / f"{precision}.json"
        given = ["generate", str(folder), "--tokens", "6", "--steps", "2", "--tolerance", "1e-5"]
        assert cli.main([*given, "--precision", precision, "--json", str(path)]) == 0
        found = json.loads(path.read_text())
        assert found["precision"] == precision
        rows[precision] = found["rows"]
    assert [len(row["text"].split()) for row in rows["bf16"]] == [6, 6]
    # A residual of a hundred-thousandth is there in single precision alone.
    assert rows["fp32"][0]["unconverged"] < rows["bf16"][0]["unconverged"] == 6


def test_the_options_of_the_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "--help"])
    assert stopped.value.code == 0
    found = capsys.readouterr().out
    listed = set(re.findall(r"--([a-z][\w-]*)", found)) - {"help"}
    drawing = {"prompt", "tokens", "temperature", "top", "seed"}
    computing = {"steps", "tolerance", "cache", "no-cache", "threads", "device", "precision"}
    assert listed == drawing | computing | {"json"}
    assert "<unk>" in found


@pytest.mark.slow
def test_the_benchmark_times_all_writers_with_and_without_the_cache(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    path = tmp_path / "new" / "generation.json"
    arguments = ["generation.py", str(folder), "--repeats", "1", "--tokens", "5"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--steps", "1", "--json", str(path)])
    importlib.import_module("generation").main()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["steps"], row["cache"]) for row in rows] == [
        *((None, False), (1, False), (None, True), (1, True))
    ]
    for row in rows:
        assert row["same_words_without_cache"] == row["words"] == 6
        assert row["times_teacher"] == pytest.approx(
            row["tokens_per_second"] / rows[0]["tokens_per_second"]
        )
    assert path.with_suffix(".md").read_text() in capsys.readouterr().out

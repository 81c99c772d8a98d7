"""Tables as a user makes them: all rows, scores that are those of the trained models, work that is not done again."""

import json
import sys

import pytest
import torch
from small import BY_KIND

from builders import options
from cdeq import cli
from cdeq.evaluation import (
    Results,
    find_text_equilibria,
    measure_text_quality,
    perplexity,
    solver_method,
)
from cdeq.evaluation.kept_states import KeptStates
from cdeq.solvers import Anderson, Picard, solve_model
from cdeq_experiments import entries, tables
from cdeq_experiments.configs.base import CORRECTED
from cdeq_experiments.suites import KINDS
from cdeq_experiments.teachers import with_settings

SEEDS = ("--seeds", "2")
SOLVERS = ("picard", "anderson", "broyden")
pytestmark = pytest.mark.slow


def results(place, name):
    return Results.from_json(place / "results" / "tiny" / f"{name}.json")


def kept_suite(place, kind):
    """The suite that made a table, with the runs that it left."""
    asked = options(place, runs=place / "runs" / "experiments")
    return KINDS[kind](config=BY_KIND[kind], options=asked, seeds=(0, 1))


def found_at(results):
    return {(row.method, row.seed, row.steps): row for row in results.rows}


def times_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


# Texts and images: one teacher, students for each seed.


@pytest.mark.parametrize(
    ("table", "kind", "seeds"), [("table1", "text", 2), ("table2", "images", 1)]
)
def test_all_rows_of_a_text_and_of_images(table, kind, seeds, reproduced):
    found = results(reproduced(table, "--seeds", str(seeds)), table)
    config = BY_KIND[kind]
    at = found_at(found)
    seeded = {"hyperdeq", *(name for name, one in config.students.items() if not one.once)}
    once = {*SOLVERS, "few_step", *config.others, *config.students} - seeded
    for k in config.counts.shown:
        assert {(name, 0, k) for name in once} <= set(at)
        assert {(name, seed, k) for name in seeded for seed in range(seeds)} <= set(at)
    lone = {*config.explicit, "solved"}
    assert {(name, 0, None) for name in lone} <= set(at)
    assert {row.method for row in found.rows} == once | seeded | lone
    for row in found.rows:
        assert row.metric is not None
        assert row.seconds is not None
        assert row.f_equivalents > 0
        assert (row.top5 is not None) == (kind == "images")
        assert (row.distance is None) == (row.method in {*lone, "few_step"})
        assert (row.train_seconds is None) == (row.method in {*SOLVERS, "solved"})
    solved, teacher = at["solved", 0, None], found.teachers[0]
    assert solved.metric == pytest.approx(teacher.metric, rel=0.01)
    assert solved.f_equivalents <= teacher.steps
    titles = [config.teacher.title, *(other.title for other in config.others.values())]
    assert [one.name for one in found.teachers] == titles
    assert all(one.train_seconds > 0 for one in found.teachers)
    assert found.page["counts"] == {config.title: list(config.counts.shown)}


def test_rows_are_made_alone_if_they_are_asked_for_by_name(reproduced):
    place = reproduced("table1", *SEEDS)
    whole = found_at(results(place, "table1"))
    reproduced("table1", "--methods", "picard", "few_step", "--out", "some")
    some = found_at(Results.from_json(place / "some" / "table1.json"))
    assert {method for method, _, _ in some} == {"picard", "few_step"}
    assert all(some[row].metric == whole[row].metric for row in some)


def test_scores_of_a_text_are_those_of_the_trained_models(reproduced):
    place = reproduced("table1", *SEEDS)
    found, suite = results(place, "table1"), kept_suite(place, "text")
    segments = list(suite.data.test())
    known, _ = find_text_equilibria(suite.teacher, segments, perplexity())
    assert found.teachers[0].metric == pytest.approx(known.metric, rel=1e-6)
    picard = solver_method(suite.teacher, Picard())
    scored = measure_text_quality(picard, suite.teacher, segments, known.states, perplexity(), (2,))
    row = found_at(found)["picard", 0, 2]
    assert row.metric == pytest.approx(scored[2].metric, rel=1e-6)
    assert row.distance == pytest.approx(scored[2].distance, rel=1e-4)


def test_scores_of_images_are_those_of_the_trained_models(reproduced):
    place = reproduced("table2", "--seeds", "1")
    found, suite = results(place, "table2"), kept_suite(place, "images")
    model, states = suite.teacher, KeptStates(suite.equilibria().run.folder, torch.device("cpu"))
    student, _ = suite.train_student(suite.config.students["anchored"], 0)
    right, near, total = dict.fromkeys(("teacher", "picard", "anchored", "top5"), 0), [], 0
    for number, (x, y) in enumerate(suite.data.test()):
        context = model.inject(x)
        star = solve_model(model, context, Anderson(), tol=1e-4, max_steps=60).state
        assert all(a.allclose(b, atol=1e-6) for a, b in zip(star, states[number], strict=True))
        z = model.step(model.step(model.start(context), context), context)
        outputs = {"teacher": model.readout(star, context), "picard": model.readout(z, context)}
        outputs["anchored"] = student(x, steps=2)
        for name, output in outputs.items():
            right[name] += int((output.argmax(1) == y).sum())
        top = outputs["picard"].topk(5).indices
        right["top5"] += int((top == y[:, None]).any(1).sum())
        total += len(y)
        gaps = torch.cat([(a - b).flatten(1) for a, b in zip(z, star, strict=True)], 1)
        sizes = torch.cat([b.flatten(1) for b in star], 1)
        near.append(gaps.norm(dim=1) / sizes.norm(dim=1))
    rows = found_at(found)
    assert found.teachers[0].metric == pytest.approx(right["teacher"] / total)
    assert rows["picard", 0, 2].metric == pytest.approx(right["picard"] / total)
    assert rows["picard", 0, 2].top5 == pytest.approx(right["top5"] / total)
    assert rows["picard", 0, 2].distance == pytest.approx(float(torch.cat(near).mean()), rel=1e-4)
    assert rows["anchored", 0, 2].metric == pytest.approx(right["anchored"] / total)


def test_text_is_generated_from_what_the_table_left(reproduced, tmp_path, capsys):
    folder = reproduced("table1", *SEEDS) / "runs" / "models" / "deq-transformer-steps"
    path = tmp_path / "speed.json"
    arguments = ["generate", str(folder), "--prompt", "w1 w2", "--tokens", "5", "--json", str(path)]
    assert cli.main(arguments) == 0
    assert "w1 w2" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["rows"]) == 3  # the teacher, and one and two steps


# Graphs: a teacher for each seed.


def test_all_rows_of_a_graph(reproduced):
    found, config = results(reproduced("table3", *SEEDS), "table3"), BY_KIND["graph"]
    steps = {}
    for row in found.rows:
        steps.setdefault((row.method, row.seed), []).append(row.steps)
    every, shown = list(range(1, 11)), [1, 2, 5, 10]
    methods = (*SOLVERS, "eignn", "mignn", "ignn_solver", "paper", "anchored", *CORRECTED)
    for seed in (0, 1):
        assert all(steps.pop((name, seed)) == every for name in methods)
        assert steps.pop(("few_step", seed)) == shown
        assert all(steps.pop((n, seed)) == [None] for n in ("eignn_closed", *config.explicit))
    assert not steps
    for row in found.rows:
        assert (row.distance is None) == (row.steps is None)
        assert row.seconds is not None
    assert [one.name for one in found.teachers] == ["IGNN", "EIGNN", "MIGNN"] * 2
    [first, second] = [one for one in found.teachers if one.name == "IGNN"]
    assert first.metric != second.metric or first.residual != second.residual
    closed = found_at(found)["eignn_closed", 0, None]
    assert closed.metric == pytest.approx(found.teachers[1].metric, abs=0.02)


def test_inductive_rows_are_of_unseen_nodes(reproduced):
    found = results(reproduced("inductive", "--seeds", "1"), "inductive")
    methods = ("picard", "anderson", "paper", "anchored", "anchored_parts", "anchored_samples")
    wanted = [(m, k) for m in (*methods, "anchored_whole") for k in (1, 2, 5, 10)]
    assert [(row.method, row.steps) for row in found.rows] == wanted
    assert found.teachers[0].metric is not None


def test_every_setting_of_a_teacher_has_its_rows(reproduced):
    place = reproduced("teachers", *SEEDS)
    found = results(place, "teachers")
    for title, kind, usual in (
        (BY_KIND["text"].title, "text", "DEQ-Transformer"),
        (BY_KIND["graph"].title, "graph", "IGNN"),
    ):
        config = with_settings(BY_KIND[kind])
        rows = [row for row in found.rows if row.dataset == title]
        names = [usual, *config.others]
        converged = [one.name for one in found.teachers if one.dataset == title]
        assert converged == names * (2 if kind == "graph" else 1)
        assert len(rows) == len(converged) * len(config.counts.solvers)
        assert {row.method for row in rows} == set(names)
        assert all(row.figures["validation score"] > 0 for row in rows)
    sizes = {row.method: row.parameters for row in found.rows}
    assert sizes["width 16"] > sizes["IGNN"]
    # The usual one is the teacher of Table 3, found and not trained again.
    runs = list((place / "runs" / "experiments").glob("few-nodes-teacher-*"))
    reproduced("table3", *SEEDS)
    assert list((place / "runs" / "experiments").glob("few-nodes-teacher-*")) == runs


# Work that was done.


@pytest.mark.parametrize("table", ["table1", "table3"])
def test_work_that_was_done_is_not_done_again(table, reproduced, monkeypatch, capsys):
    place = reproduced(table, *SEEDS)
    monkeypatch.chdir(place)
    kept = times_below(place / "runs" / "experiments")
    text = (place / "results" / "tiny" / f"{table}.json").read_text()
    for module, name in ((entries.Entry, "score"), (tables, "measure_rows")):
        monkeypatch.setattr(module, name, lambda *given: pytest.fail("done again"))
    assert cli.main(["reproduce", table, "--scale", "tiny", *SEEDS]) == 0
    assert times_below(place / "runs" / "experiments") == kept
    assert (place / "results" / "tiny" / f"{table}.json").read_text() == text
    capsys.readouterr()


def test_a_run_that_is_cut_short_has_pages_of_what_is_done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usual, seen = tables.measure_rows, []

    def cut(suite):
        seen.append(suite.teacher_seed)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return usual(suite)

    command = ["reproduce", "inductive", "--scale", "tiny", *SEEDS]
    monkeypatch.setattr(tables, "measure_rows", cut)
    assert cli.main(command) == 130
    half = results(tmp_path, "inductive")
    assert {row.seed for row in half.rows} == {0}
    assert cli.main(command) == 0
    whole = results(tmp_path, "inductive")
    assert seen == [0, 1, 1]
    assert whole.rows[: len(half.rows)] == half.rows


def test_a_seed_gives_the_same_numbers_again(reproduced, tmp_path, monkeypatch):
    place = reproduced("table3", *SEEDS)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", "table3", "--scale", "tiny", "--seeds", "1"]) == 0
    one = [row for row in results(place, "table3").rows if row.seed == 0]
    two = results(tmp_path, "table3").rows
    for field in ("method", "seed", "steps", "metric", "distance", "residual", "parameters"):
        assert [getattr(r, field) for r in one] == [getattr(r, field) for r in two]


# What is refused.


def assert_one_line(text, *words):
    assert text.startswith("cdeq: ")
    assert text.count("\n") == 1
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("table3", "--scale", "tiny", "--only", "nonsense"), ("nonsense", "few-nodes", "graph")),
        (("table1", "--scale", "tiny", "--only", "images"), ("images", "steps")),
        (("lambdas", "--scale", "tiny", "--only", "graph"), ("graph", "steps")),
        (("inductive", "--data-dir", "empty"), ("pubmed needs the file planetoid/", "--data-dir")),
        (("all", "--data-dir", "empty"), ("wikitext-2",)),
        (("all", "--only", "text"), ("name one",)),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *arguments]) == 1
    assert_one_line(capsys.readouterr().err, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--seeds", "--jobs", "--threads"])
def test_counts_below_one_are_refused(option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(["reproduce", "table3", option, "0"])
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert f"{option[2:]} must be at least 1" in " ".join((shown.out + shown.err).split())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_result_is_one_line(reproduced, monkeypatch, capsys):
    place = reproduced("teachers", *SEEDS)
    monkeypatch.chdir(place)
    damaged = next((place / "runs" / "experiments").glob("few-nodes-setting-*/result.json"))
    text = damaged.read_text()
    damaged.write_text("{")
    capsys.readouterr()
    assert cli.main(["reproduce", "teachers", "--scale", "tiny", *SEEDS]) == 1
    assert_one_line(capsys.readouterr().err, "damaged", str(damaged.parent.name))
    damaged.write_text(text)


def test_the_command_is_kept_with_the_results(reproduced, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = ["reproduce", "teachers", "--scale", "tiny", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["cdeq", *command])
    assert cli.main(command) == 0
    assert results(tmp_path, "teachers").command == "cdeq " + " ".join(command)

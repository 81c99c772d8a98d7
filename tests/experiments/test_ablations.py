"""Ablations and figures as a user makes them: students are shared, rows are those of the students."""

import os
from dataclasses import replace

import pytest
import torch
from small import suite

from builders import options
from cdeq import cli
from cdeq.evaluation import Results
from cdeq_experiments import entries, figures
from cdeq_experiments.ablations import ABLATIONS, REPORTED, SHORT
from cdeq_experiments.cli import Reproduce
from cdeq_experiments.entries import entries_of
from cdeq_experiments.suites import make_suites

BY_NAME = {ablation.name: ablation for ablation in ABLATIONS}


def results(place, name):
    return Results.from_json(place / "results" / "tiny" / f"{name}.json")


# Students are shared.


def test_ablations_share_the_students_they_have_in_common(tmp_path):
    found = set()
    for name in ("solvers", "history", "modules", "window", "time-map"):
        ablation = replace(BY_NAME[name], counts=SHORT)
        [made] = make_suites(ablation.configs("tiny"), options(tmp_path, only=("graph",)))
        [default] = [one for one in entries_of(made) if one.method == ablation.default]
        found.add(default.run.folder.name)
    assert len(found) == 1


def test_all_clocks_are_of_one_student(tmp_path):
    [made] = make_suites(BY_NAME["beta"].configs("tiny"), options(tmp_path))
    students = made.config.students.values()
    assert len({made.student_run(student, 0) for student in students}) == 1
    assert len({entry.run for entry in entries_of(made)}) == 4


@pytest.mark.slow
def test_a_clock_of_use_changes_the_student_and_not_its_weights(tmp_path):
    made = suite(options(tmp_path), "text")
    usual = made.config.students["paper"]
    students = {beta: made.train_student(replace(usual, clock=beta), 0)[0] for beta in (0.5, 0.95)}
    for beta, student in students.items():
        assert student.time_point(1) == student.time_point_at(1 - beta)
    a, b = (dict(student.named_parameters()) for student in students.values())
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_another_solver_is_another_recording(tmp_path):
    made = suite(options(tmp_path), "graph")
    stores = {solver: made.record("full", solver)[0] for solver in ("anderson", "picard")}
    assert stores["anderson"].folder != stores["picard"].folder
    teacher, context = made.teacher, made.teacher.inject(made.timed_input())
    z = teacher.step(teacher.step(teacher.start(context), context), context)
    assert torch.allclose(stores["picard"][0].state(2), z, atol=1e-6)


# As a user.


@pytest.mark.slow
def test_rows_of_an_ablation_are_those_of_its_students(reproduced):
    found = results(reproduced("solvers", "--seeds", "2", "--only", "graph"), "solvers")
    variants = {one["name"] for one in found.page["variants"]}
    assert {row.method for row in found.rows} == variants > {"picard trajectory"}
    for seed in (0, 1):
        rows = [r for r in found.rows if (r.method, r.seed) == ("picard trajectory", seed)]
        assert [row.steps for row in rows] == list(SHORT["graph"])
        assert all(row.metric is not None and row.train_seconds is not None for row in rows)
        # The seconds of the first seed stand for all.
        assert [row.steps for row in rows if row.seconds is not None] == [REPORTED["graph"]]
    assert len({row.seconds for row in found.rows if row.seconds is not None}) == len(variants)
    assert found.page["default"] == "anderson trajectory"
    assert found.page["reported"]["Few nodes"] == REPORTED["graph"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recipe", "beta"])
def test_an_ablation_has_all_its_variants(name, reproduced):
    only = ("--only", "graph") if name == "recipe" else ()
    found = results(reproduced(name, "--seeds", "1", *only), name)
    variants = [one["name"] for one in found.page["variants"]]
    assert list(dict.fromkeys(row.method for row in found.rows)) == variants
    assert len({row.metric for row in found.rows}) > 1


@pytest.mark.slow
def test_what_was_done_is_not_done_again(reproduced, monkeypatch):
    place = reproduced("beta", "--seeds", "1")
    monkeypatch.chdir(place)
    before = results(place, "beta")
    monkeypatch.setattr(entries.Entry, "score", lambda self: pytest.fail("scored anew"))
    assert cli.main(["reproduce", "beta", "--scale", "tiny", "--seeds", "1"]) == 0
    assert results(place, "beta") == before


@pytest.mark.slow
def test_residuals_fall_for_a_solver_and_are_measured_for_all(reproduced):
    found = results(reproduced("residuals", "--seeds", "1"), "residuals")
    learned = {"Steps": "hyperdeq", "digits": "hyperdeq", "Few nodes": "ignn_solver"}
    assert found.datasets == list(learned)
    for title, name in learned.items():
        rows = found.rows_of(title)
        for method in ("anderson", name, *figures.RECIPES):
            assert [r.steps for r in rows if r.method == method] == list(figures.STEPS)
        solver = [row for row in rows if row.method == "anderson"]
        assert solver[-1].residual < solver[0].residual
        assert solver[-1].distance < solver[0].distance


@pytest.mark.slow
def test_the_cost_of_students_is_that_of_their_training(reproduced):
    found = results(reproduced("cost", "--seeds", "1"), "cost")
    for title in found.datasets:
        rows = {row.method: row for row in found.rows_of(title)}
        assert list(rows) == list(figures.RECIPES)
        assert all(row.train_seconds > 0 for row in rows.values())
        assert rows["anchored"].parameters > found.teacher(title).parameters


@pytest.mark.slow
def test_certified_rows_have_evaluations_and_seconds(reproduced):
    found = results(reproduced("certified", "--seeds", "1"), "certified")
    for title in found.datasets:
        rows = {row.method: row for row in found.rows_of(title)}
        assert len(rows) == 2 * len(figures.TOLERANCES)
        for tol in ("0.01", "0.001", "0.0001"):
            assert rows[f"solver to {tol}"].seconds > 0
            assert rows[f"solver to {tol}"].figures["by the student"] == 0
            assert rows[f"certified to {tol}"].f_equivalents >= 1


@pytest.mark.slow
def test_overhead_knows_what_is_stored(tmp_path):
    made = suite(options(tmp_path), "graph", **for_figures("graph"))
    paper, anchored = (figures.overhead_of(made, name) for name in ("paper", "anchored"))
    assert (paper["points"], anchored["points"]) == (31, 1)
    assert paper["storage, MB per batch"] > anchored["storage, MB per batch"] > 0
    assert paper["generation, s per batch"] > 0


def for_figures(kind):
    from cdeq_experiments.configs import figure_configs

    [config] = figure_configs("tiny", (kind,))
    return {"recording": config.recording}


def test_seconds_of_an_update_are_those_of_the_log(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(
        '{"update": 0, "seconds": 1.0}\n{"update": 10, "seconds": 3.0}\n'
        '{"update": 20, "seconds": 6.0}\n{"update": 21, "seconds": 0.5}\n'
    )
    assert figures.update_seconds(log) == pytest.approx(0.25)


def test_jobs_of_the_tiny_scale_are_shared_by_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    wanted = {("all", "tiny", None): 3, ("all", "tiny", 1): 1, ("beta", "tiny", None): 1}
    wanted |= {("all", "small", None): 1, ("all", "small", 2): 2}
    for (experiment, scale, jobs), number in wanted.items():
        asked = Reproduce(experiment=experiment, scale=scale, jobs=jobs)
        assert asked.processes == number


@pytest.mark.slow
def test_everything_on_one_page(reproduced, capsys, monkeypatch):
    monkeypatch.chdir(reproduced("beta", "--seeds", "1"))
    assert cli.main(["report", "--results", "results/tiny"]) == 0
    assert capsys.readouterr().out.strip() == "results/tiny/report.html"


def test_a_folder_without_results_is_named(tmp_path, capsys):
    assert cli.main(["report", "--results", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err

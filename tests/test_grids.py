"""Ablations as data: every variant is a recipe, students are shared between grids, pages follow the rows."""

import dataclasses
import json
import os
import warnings
from itertools import pairwise

import pytest
import torch

from cdeq import cli
from cdeq.data.block_graphs import block_model
from cdeq.evaluation import SOLVERS
from cdeq.evaluation import Results, Row, TeacherResult
from cdeq_experiments import (
    figures,
    graph_tasks,
    grid_run,
    image_data,
    image_scales,
    text_plans,
)
from cdeq_experiments.graph_subject import GraphSubject
from cdeq_experiments.graph_tasks import GraphPlan
from cdeq_experiments.grid_page import claim, listing, matrix, told
from cdeq_experiments.grids import COUNTS, CURVE, GRIDS, KINDS, REPORTED
from cdeq_experiments.image_cells import ImageCell
from cdeq_experiments.options import ExperimentError, Options
from cdeq_experiments.reproduce import EXPERIMENTS, TABLE_COUNTS
from cdeq_experiments.subjects import student_config, trained_student
from cdeq_experiments.text_cells import TextCell
from test_image_experiments import PLAN as IMAGES
from test_image_experiments import few_digits
from test_text_experiments import PLAN as TEXT
from test_text_experiments import corpus

SUBJECTS = {"text": TextCell, "images": ImageCell, "graph": GraphSubject}
GRAPH = GraphPlan(
    name="few-nodes", title="Few nodes", updates=8, students=4, solvers=3, rivals=4, width=8
)


@pytest.fixture(autouse=True)
def _small_data(monkeypatch):
    small(monkeypatch)


def small(patch):
    """Data and plans on which everything takes a second."""
    patch.setitem(text_plans.EMBEDDED, "steps", corpus)
    patch.setattr(image_data, "digits_set", few_digits)
    patch.setitem(
        graph_tasks.EMBEDDED,
        "few-nodes",
        lambda seed: block_model(80, classes=3, degree=6.0, homophily=0.8, features=8, seed=seed),
    )
    patch.setitem(text_plans.SCALES, "tiny", TEXT)
    patch.setitem(image_scales.SCALES, "tiny", (IMAGES,))
    patch.setitem(graph_tasks.SCALES, "tiny", (GRAPH,))


def options(tmp_path, **fields):
    usual = {
        "scale": "tiny",
        "data": tmp_path / "no-data",
        "runs": tmp_path / "runs" / "cells",
        "out": tmp_path / "out",
        "seeds": 1,
    }
    return Options(**usual | fields)


# The grids themselves.


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_every_variant_is_a_recipe_of_its_own(grid):
    for kind in grid.kinds:
        variants = grid.variants(SUBJECTS[kind])
        names = [variant.name for variant in variants]
        assert len(set(names)) == len(names)
        assert grid.default in names
        chosen = {
            json.dumps([v.student.whole.to_dict(), v.student.solver, v.student.longer, v.decay])
            for v in variants
        }
        assert len(chosen) == len(variants)
        assert grid.reported[kind] in grid.counts[kind]
        if grid.axes:
            assert len({v.cell for v in variants}) == len(variants)


def test_the_grids_have_the_papers_sizes():
    def count(name):
        return len(GRIDS[name].variants(TextCell))

    sizes = {"lambdas": 12, "gamma-rho": 12, "beta": 4, "window": 4, "modules": 3, "time-map": 3}
    sizes |= {"solvers": 3, "history": 2}
    assert {name: count(name) for name in sizes} == sizes
    assert {"table1", "table2", "table3", "residuals", "cost", "overhead", "certified"} <= set(
        EXPERIMENTS
    )
    assert set(GRIDS) < set(EXPERIMENTS)
    assert set(KINDS) == set(REPORTED) == set(COUNTS) == set(CURVE)


def test_the_default_of_a_published_grid_is_the_published_recipe():
    paper = TextCell.students["paper"].whole
    for name, grid in GRIDS.items():
        [default] = [v for v in grid.variants(TextCell) if v.name == grid.default]
        wanted = TextCell.students["anchored"].whole if name == "recipe" else paper
        assert default.student.whole == wanted
        assert default.decay in (None, wanted.decay)
        assert default.student.solver == "anderson"


def test_each_step_of_the_recipe_changes_what_its_name_says():
    for subject in SUBJECTS.values():
        recipes = [v.student.whole for v in GRIDS["recipe"].variants(subject)]
        changed = [
            {k for k in a.to_dict() if a.to_dict()[k] != b.to_dict()[k]}
            for a, b in pairwise(recipes)
        ]
        assert "states" in changed[0]
        assert "boundary" in changed[1]
        assert changed[2] == {"backprop"}
        assert changed[3] == {"loss"}
        assert changed[4] == {"start"}
        assert recipes[0].name == "paper"
        assert recipes[-1] == subject.students["anchored"].whole


# Students are shared.


def test_grids_share_the_students_they_have_in_common(tmp_path):
    subject = GraphSubject(plan=GRAPH, options=options(tmp_path))
    found = {
        name: next(
            v.student for v in GRIDS[name].variants(subject) if v.name == GRIDS[name].default
        )
        for name in ("solvers", "history", "modules", "window", "time-map")
    }
    keys = {json.dumps(str(student_config(subject, plan, 0))) for plan in found.values()}
    assert len(keys) == 1


def test_a_longer_training_has_more_updates_and_nothing_else_changed(tmp_path):
    subject = TextCell(plan=TEXT, options=options(tmp_path))
    usual, twice, *_ = [
        student_config(subject, v.student, 0) for v in GRIDS["updates"].variants(subject)
    ]
    assert twice["fit"].updates == 2 * usual["fit"].updates
    assert dataclasses.replace(twice["fit"], updates=usual["fit"].updates) == usual["fit"]
    assert {k: v for k, v in twice.items() if k != "fit"} == {
        k: v for k, v in usual.items() if k != "fit"
    }


def test_another_solver_is_another_recording(tmp_path):
    subject = GraphSubject(plan=GRAPH, options=options(tmp_path))
    teacher, _ = subject.trained_teacher()
    stores = {
        solver: grid_run.recorded(subject, teacher, "full", solver)[0].folder
        for solver in ("anderson", "picard")
    }
    assert stores["anderson"] != stores["picard"]
    context = teacher.inject(subject.timed_input())
    z = teacher.step(teacher.step(teacher.start(context), context), context)
    picard, _ = grid_run.recorded(subject, teacher, "full", "picard")
    assert torch.allclose(picard[0].state(2), z, atol=1e-6)


def test_a_clock_of_use_changes_the_student_and_not_its_weights(tmp_path):
    cell = TextCell(plan=TEXT, options=options(tmp_path))
    teacher, _ = cell.trained_teacher()
    variants = {v.decay: v for v in GRIDS["beta"].variants(cell)}
    made = {}
    for decay in (0.5, 0.95):
        student, _ = trained_student(cell, teacher, variants[decay].student, 0)
        made[decay] = grid_run.as_used(student, variants[decay])
        assert made[decay].time_point(1) == made[decay].time_point_at(1 - decay)
    a, b = (dict(s.named_parameters()) for s in made.values())
    assert all(torch.equal(a[name], b[name]) for name in a)


# Pages.


def row(method, steps, metric, seed=0):
    return Row(
        dataset="Steps",
        seed=seed,
        method=method,
        steps=steps,
        metric=metric,
        distance=0.1,
        residual=None,
        seconds=0.2,
        f_equivalents=None,
        parameters=1,
    )


def results(rows):
    teacher = TeacherResult(
        dataset="Steps",
        name="DEQ",
        parameters=1,
        metric_name="perplexity",
        metric=100.0,
        higher_is_better=False,
        steps=9.0,
        residual=1e-4,
        train_seconds=1.0,
    )
    return Results(
        experiment="x",
        scale="tiny",
        commit="abc",
        command="cdeq",
        hardware="a machine",
        teachers=(teacher,),
        rows=tuple(rows),
    )


def test_a_table_of_two_fields_has_the_papers_figures_in_brackets():
    grid = GRIDS["lambdas"]
    variants = grid.variants(TextCell)
    rows = [row(v.name, 20, 100.0 + i) for i, v in enumerate(variants)]
    text = matrix(results(rows), grid, "text", "Steps", variants)
    assert "| lambda_2 \\ lambda_1 | 0 | 0.2 | 0.4 | 0.6 | 0.8 | 1 |" in text
    assert "| 0 | **100.0** (25.7) | 101.0 (25.6) |" in text
    assert "110.0 (25) | 111.0 (25.3) |" in text
    line = claim(results(rows), grid, "text", "Steps", variants, 20)
    assert "best is lambda_1 = 0, lambda_2 = 0 (100.0)" in line
    assert "lambda_1 = 0.8, lambda_2 = 0.05 is number 11 of 12 (110.0)" in line
    assert "in the paper best is lambda_1 = 0.8, lambda_2 = 0.05 (25), not as here" in line


def test_a_list_has_every_count_and_the_spread():
    grid = GRIDS["window"]
    variants = grid.variants(TextCell)
    rows = [
        row(v.name, k, 100.0 - i + seed, seed)
        for i, v in enumerate(variants)
        for k in (1, 2, 8)
        for seed in (0, 1)
    ]
    found = results(rows)
    text = listing(found, grid, "text", "Steps", variants)
    head, _, *body = text.splitlines()
    assert head.count("perplexity at") == 3
    assert body[0].startswith("| m = 1 | 100.5 ±0.71 |")
    assert body[-1].startswith(
        "| m = 7 | **97.50 ±0.71** | **97.50 ±0.71** | **97.50 ±0.71** (25.93) |"
    )
    line = claim(found, grid, "text", "Steps", variants, 8)
    assert "best is m = 7" in line
    assert "in the paper best is m = 7 (25.93), as here" in line


def test_sentences_are_about_the_papers_count_and_for_our_own_about_the_first_too():
    for name, counts in {
        "window": [8],
        "lambdas": [20],
        "recipe": [1, 8],
        "history": [1, 8],
    }.items():
        assert told(GRIDS[name], "text", GRIDS[name].variants(TextCell)) == counts


def test_choices_that_differ_by_a_hair_have_no_best():
    grid = GRIDS["window"]
    variants = grid.variants(TextCell)
    rows = [row(v.name, 8, 212.9 + 0.1 * i) for i, v in enumerate(variants)]
    line = claim(results(rows), grid, "text", "Steps", variants, 8)
    assert "all choices lie within 0.5% (212.9 to 213.2)" in line
    assert "here: best" not in line
    assert "in the paper best is m = 7 (25.93), not as here" in line


# As a user runs it.


def test_no_kind_of_data_but_those_of_the_grid(tmp_path):
    with pytest.raises(ExperimentError, match="on text alone"):
        grid_run.run_grid(GRIDS["lambdas"], options(tmp_path, only=("graph",)))
    with pytest.raises(ExperimentError, match="no kind of data 'music'"):
        grid_run.run_grid(GRIDS["window"], options(tmp_path, only=("music",)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Some experiments of each sort on small data; what they left."""
    place = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*recorded equilibria")
        small(patch)
        patch.chdir(place)
        for name, only in (
            ("solvers", ["--only", "graph"]),
            ("beta", []),
            ("recipe", ["--only", "graph"]),
        ):
            assert cli.main(["reproduce", name, "--scale", "tiny", "--seeds", "1", *only]) == 0
        for name in ("residuals", "cost", "certified"):
            assert cli.main(["reproduce", name, "--scale", "tiny", "--seeds", "1"]) == 0
        patch.setattr(figures, "_in_new_process", lambda work, *arguments: work(*arguments))
        assert cli.main(["reproduce", "overhead", "--scale", "tiny", "--seeds", "1"]) == 0
        assert cli.main(["report", "--results", "results/tiny"]) == 0
    return place / "results" / "tiny"


def test_every_figure_leaves_its_three_files(run):
    for name in ("solvers", "beta", "recipe", "residuals", "cost", "certified", "overhead"):
        found = Results.from_json(run / f"{name}.json")
        assert found.experiment == name
        page = (run / f"{name}.md").read_text()
        assert page.startswith("# ")
        assert "\n- " in page
        assert (run / f"{name}.png").stat().st_size > 5000
        assert name in (run / "report.html").read_text()


def test_rows_of_a_grid_are_those_of_its_students(run):
    found = Results.from_json(run / "solvers.json")
    assert {r.method for r in found.rows} == {f"{s} trajectory" for s in SOLVERS}
    rows = [r for r in found.rows_of("Few nodes") if r.method == "picard trajectory"]
    assert [r.steps for r in rows] == list(COUNTS["graph"])
    assert all(r.metric is not None and r.train_seconds is not None for r in rows)
    assert [r.steps for r in rows if r.seconds is not None] == [REPORTED["graph"]]


def test_residuals_fall_for_a_solver_and_are_measured_for_all(run):
    found = Results.from_json(run / "residuals.json")
    for title, learned in (
        ("Steps", "hyperdeq"),
        ("digits", "hyperdeq"),
        ("Few nodes", "ignn_solver"),
    ):
        curve = {
            method: [r.residual for r in found.rows_of(title) if r.method == method]
            for method in ("anderson", learned, "paper", "anchored")
        }
        assert all(len(values) == len(figures.STEPS) for values in curve.values())
        assert curve["anderson"][-1] < curve["anderson"][0]


def test_certified_rows_have_evaluations_and_seconds(run):
    found = Results.from_json(run / "certified.json")
    for title in found.datasets:
        rows = {r.method: r for r in found.rows_of(title)}
        assert len(rows) == 2 * len(figures.TOLERANCES)
        for tol in ("0.01", "0.001", "0.0001"):
            assert rows[f"solver to {tol}"].seconds > 0
            assert rows[f"certified to {tol}"].f_equivalents >= 1


def test_overhead_knows_what_is_stored(run):
    found = Results.from_json(run / "overhead.json")
    for title in found.datasets:
        rows = {r.method: r.figures for r in found.rows_of(title)}
        assert rows["paper"]["points"] == 31
        assert rows["anchored"]["points"] == 1
        assert rows["paper"]["storage, MB a batch"] > rows["anchored"]["storage, MB a batch"] > 0


def test_what_was_done_is_not_done_again(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run.parents[1])

    def refuse(*arguments, **fields):
        raise AssertionError("scored anew")

    monkeypatch.setattr(grid_run, "_scored_variant", refuse)
    before = Results.from_json(run / "beta.json")
    assert cli.main(["reproduce", "beta", "--scale", "tiny", "--seeds", "1"]) == 0
    after = Results.from_json(run / "beta.json")
    assert [r.metric for r in after.rows] == [r.metric for r in before.rows]


def test_the_command_knows_every_experiment(capsys):
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown.replace("\n", "") for name in EXPERIMENTS)
    assert set(TABLE_COUNTS) <= set(EXPERIMENTS)
    assert cli.main(["reproduce", "all", "--only", "text"]) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_all_refuses_before_it_begins_what_it_has_no_data_for(tmp_path, monkeypatch, capsys):
    def refuse(options):
        raise AssertionError("begun")

    for name in EXPERIMENTS:
        monkeypatch.setitem(EXPERIMENTS, name, refuse)
    assert cli.main(["reproduce", "all", "--scale", "small", "--data-dir", str(tmp_path)]) == 1
    assert "wikitext-2" in capsys.readouterr().err


def test_pieces_of_the_tiny_scale_are_shared_out_over_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    wanted = {("all", "tiny", None): 3, ("all", "tiny", 1): 1, ("beta", "tiny", None): 1}
    wanted |= {("all", "small", None): 1, ("all", "small", 2): 2}
    for (experiment, scale, jobs), number in wanted.items():
        asked = cli.Reproduce(experiment=experiment, scale=scale, jobs=jobs)
        assert cli.jobs_of(asked) == number


def test_a_folder_without_results_is_named(tmp_path, capsys):
    assert cli.main(["report", "--results", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_plans_are_plain_data():
    plan = TextCell.students["anchored"]
    assert dataclasses.asdict(plan)["recipe"] == "anchored"

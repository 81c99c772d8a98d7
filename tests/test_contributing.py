"""The walks of CONTRIBUTING.md: the files they name are there, and their code does what they say."""

import re
import textwrap
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import cdeq
from builders import options
from cdeq import solvers
from cdeq.equilibrium.states import relative_distance
from cdeq.evaluation import methods
from problems import PROBLEMS
from teachers import Tanh, inputs, untrained

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
WALKS = {part.splitlines()[0]: part for part in PAGE.split("\n## ")[1:]}
NEW = re.compile(r"\b(NAME|KIND)\b")


def code(walk):
    """The Python of a walk, without the indentation of its list."""
    return [textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", walk, re.DOTALL)]


def test_there_are_five_walks():
    assert list(WALKS) == [
        "Add a solver",
        "Add a teacher",
        "Add a field to the recipe",
        "Add an ablation",
        "Add a data set",
    ]


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_a_list_of_files_that_are_there(name):
    items = re.findall(r"^(\d)\. ", WALKS[name], re.MULTILINE)
    assert items == [str(number) for number in range(1, len(items) + 1)]
    named = re.findall(r"`((?:src|tests|docs|experiments)/[\w./-]*)`", WALKS[name], re.IGNORECASE)
    assert len(named) >= 5
    for path in named:
        place = ROOT / path.split(NEW.search(path)[0])[0] if NEW.search(path) else ROOT / path
        assert place.exists(), path


@pytest.mark.parametrize("name", WALKS)
def test_files_named_beside_another_are_there(name):
    for first, others in re.findall(r"`(\S+/)\w+\.py`((?:, | or |`\w+\.py`)+) beside", WALKS[name]):
        for other in re.findall(r"`(\w+\.py)`", others):
            assert (ROOT / first / other).exists(), other


def test_the_make_commands_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^    make ([\w-]+)", PAGE, re.MULTILINE)) <= set(targets)


# A solver.


@pytest.fixture
def toy(monkeypatch):
    """The walk's solver, registered as it says."""
    exec(code(WALKS["Add a solver"])[0], names := {"__name__": "toy"})
    monkeypatch.setitem(solvers.SOLVERS, "damped", names["Damped"])
    monkeypatch.setitem(methods.SOLVERS, "damped", names["Damped"]())
    return names["Damped"]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_solver_of_the_walk_solves(toy, problem):
    known = PROBLEMS[problem](torch.float64)
    given = {"tol": 1e-11, "max_steps": 400, "batched": known.batched}  # as tests/test_solvers.py
    assert solvers.solve(known.f, known.z0, toy(), **given).converged.all()
    first = solvers.solve(known.f, known.z0, toy(), max_steps=1, batched=known.batched).state
    assert float(relative_distance(first, known.f(known.z0), known.batched).max()) < 1e-14


def test_the_solver_of_the_walk_is_compared_with_the_others(toy):
    found = cdeq.evaluate(Tanh(), [inputs()], steps=(1, 3), repeats=1)
    assert {row.method for row in found.rows} == set(solvers.SOLVERS)


# A recipe field.


def test_every_field_is_described_and_checked():
    for name in {field.name for field in fields(cdeq.Recipe)} - {"name"}:
        assert f"`{name}`" in cdeq.Recipe.__doc__, name
        with pytest.raises(cdeq.RecipeError, match=name):
            cdeq.Recipe.from_name("paper", **{name: "nonsense"})


# An ablation and a data set, which need the experiments.


@pytest.fixture
def experiments():
    return pytest.importorskip("cdeq_experiments")


def test_the_ablation_of_the_walk_builds_its_students(experiments, tmp_path, monkeypatch):
    from cdeq_experiments import ablations, tables
    from cdeq_experiments.configs import figure_configs
    from cdeq_experiments.entries import entries_of
    from cdeq_experiments.suites import make_suites

    exec(code(WALKS["Add an ablation"])[0], names := dict(vars(ablations)))
    *before, ablation, depth = names["ABLATIONS"]
    assert tuple(before) == ablations.ABLATIONS
    monkeypatch.setitem(tables.NOTES, "ema", {"title": "Rate of the EMA", "notes": []})
    (config,) = ablation.configs("tiny")
    rates = {name: student.resolve().ema for name, student in config.students.items()}
    assert rates == {"ema = 0.9": 0.9, "ema = 0.95": 0.95, "ema = 0.99": 0.99}
    assert rates[ablation.default] == cdeq.Recipe.from_name("paper").ema
    for student in config.students.values():
        made = untrained(Tanh(), recipe=student.resolve())
        assert made(inputs()).shape == (6, 3)
    (suite,) = make_suites([config], options(tmp_path))
    entries = entries_of(suite)
    assert [entry.method for entry in entries] == list(rates)
    assert len({entry.run.folder for entry in entries}) == 3
    assert ablation.experiment().page("tiny")["default"] == ablation.default
    for config in depth.configs("tiny"):
        recipes = [student.resolve() for student in config.students.values()]
        assert [recipe.depth for recipe in recipes] == [2, 4, 6]
        (usual,) = {replace(recipe, depth=6) for recipe in recipes}
        [tables] = [c for c in figure_configs("tiny") if c.kind == config.kind]
        assert usual == recipes[2] == tables.students["corrected"].resolve()
        assert depth.default == "depth = 6"


def test_names_of_ablations_have_notes_and_a_command(experiments):
    from cdeq_experiments import ablations, cli, tables

    names = [ablation.name for ablation in ablations.ABLATIONS]
    assert set(names) <= set(tables.NOTES)
    assert all(f'"{name}"' in Path(cli.__file__).read_text() for name in names)


def test_an_ablation_without_notes_is_refused_before_it_trains(experiments, monkeypatch, capsys):
    from cdeq import cli
    from cdeq_experiments import tables

    monkeypatch.delitem(tables.NOTES, "beta")
    monkeypatch.setattr(tables.Experiment, "run", lambda *_: pytest.fail("it began"))
    for name in ("beta", "all"):
        assert cli.main(["reproduce", name, "--scale", "tiny"]) == 1
        assert "add [beta] to notes.toml" in capsys.readouterr().err


def test_the_data_set_of_the_walk_is_in_its_table(experiments, tmp_path, monkeypatch):
    from cdeq.data import digits_graph
    from cdeq_experiments import configs
    from cdeq_experiments.configs import graphs as graph_configs
    from cdeq_experiments.suites import graphs, make_suites

    exec(code(WALKS["Add a data set"])[0], names := dict(vars(graph_configs)))
    cora = names["CORA"]
    monkeypatch.setitem(graphs.EMBEDDED, "cora", digits_graph)  # files that tests do not have
    tiny = configs.SUITES["tiny"]
    monkeypatch.setitem(tiny, "graph", (*tiny["graph"], cora))
    found = configs.table_configs("graph", "tiny")
    assert found[-1] == cora
    (suite,) = make_suites(found, options(tmp_path, only=("cora",)))
    graph, _ = suite.data.batch_at(0)
    assert graph.features.shape[1] == suite.data.sizes["features"]
    assert suite.title == "Cora, seed 0"

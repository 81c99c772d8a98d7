"""The command line as a user runs it; the demo with a part of its updates, and whole before a release."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import cdeq as library
import small_demo
from cdeq import cli
from cdeq.consistency.recipes import RECIPES, RecipeError
from cdeq.consistency.saving import StudentFolderError
from cdeq.evaluation import SOLVERS, Results, ResultsError
from cdeq.generation import GenerationError
from cdeq.training import CheckpointError
from cdeq.trajectories import DamagedStore, StoreError

pytestmark = pytest.mark.skipif(
    not (find_spec("sklearn") and find_spec("matplotlib")), reason="needs the extra demo"
)


DEMO = ("demo", "--task", "graph", "--threads", "1")


@pytest.fixture(scope="module", params=["small", pytest.param("whole", marks=pytest.mark.release)])
def scale(request):
    return request.param


@pytest.fixture(scope="module")
def graph_demo(scale, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    program = ["-m", "cdeq.cli"] if scale == "whole" else [small_demo.__file__]
    return folder, subprocess.run(
        [sys.executable, *program, *DEMO],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
def test_demo_prints_one_table_and_writes_everything(graph_demo):
    folder, done = graph_demo
    assert done.returncode == 0, done.stderr
    for word in ("Picard", "Anderson", "Broyden", "paper", "corrected", "report.html"):
        assert word in done.stdout
    made = folder / "runs" / "demo-graph"
    results = Results.from_json(made / "results.json")
    assert {(r.method, r.steps) for r in results.rows} == {
        (m, k) for m in (*SOLVERS, *RECIPES) for k in (1, 2, 3, 5, 8, 12)
    }
    assert results.command == "cdeq demo --task graph --threads 1"
    assert (made / "report.html").read_text().startswith("<!doctype html>")
    assert list(made.glob("*.png"))
    assert list(made.glob("*.svg"))
    raw = json.loads((made / "results.json").read_text())
    assert "to a certified residual" in raw["findings"][-1]
    assert not (made / "figures").exists()


@pytest.mark.slow
def test_the_default_student_is_nearer_than_every_solver_and_never_drifts(graph_demo):
    folder, _ = graph_demo
    results = Results.from_json(folder / "runs" / "demo-graph" / "results.json")
    distance = {(r.method, r.steps): r.distance for r in results.rows}
    for k in (1, 2, 3, 5, 8):
        rivals = [distance[m, k] for m in (*SOLVERS, "paper", "warm_start", "anchored")]
        assert distance["corrected", k] < min(rivals)
    curve = [distance["corrected", k] for k in (1, 2, 3, 5, 8, 12)]
    assert curve == sorted(curve, reverse=True)


@pytest.mark.slow
def test_the_certified_solve_is_shown_and_kept(graph_demo):
    folder, done = graph_demo
    assert "to a certified residual of 0.001" in " ".join(done.stdout.split())
    made = folder / "runs" / "demo-graph"
    found = json.loads((made / "recipes.json").read_text())["certified"]["corrected"]
    assert found["solver_converged"] == found["student_converged"] == 1.0
    assert found["student_evaluations"] < found["solver_evaluations"]
    report = (made / "report.html").read_text()
    assert "to a certified residual of 0.001" in report
    assert (made / "certificate.png").stat().st_size > 5_000
    # The first of the plots.
    assert "bound (proven)" in report[report.index("<figure>") :].split("</figure>")[0]


@pytest.mark.slow
def test_the_recipes_are_kept_beside_the_results(scale, graph_demo):
    updates, taught = (500, 200) if scale == "whole" else (small_demo.STUDENTS, small_demo.TEACHER)
    made = graph_demo[0] / "runs" / "demo-graph"
    found = json.loads((made / "recipes.json").read_text())
    anchored = found["students"]["anchored"]
    assert anchored["changes"] == {"history": "anderson", "window": 5}
    assert anchored["training"]["updates"] == updates
    assert anchored["training"]["learning_rate"] == 0.01
    assert found["teacher"]["training"]["fit"]["updates"] == taught
    assert found["teacher"]["training"]["gradient"]["type"] == "Phantom"
    report = (made / "report.html").read_text()
    assert f"{updates} updates at a learning rate of 0.01" in report
    for words in ("window=5", "Paper student: recipe"):
        assert words in report


@pytest.mark.slow
def test_a_second_call_resumes_and_agrees(scale, graph_demo, monkeypatch):
    folder, _ = graph_demo
    for change in small_demo.CHANGES if scale == "small" else ():
        monkeypatch.setitem(*change)
    monkeypatch.chdir(folder)
    before = Results.from_json(folder / "runs" / "demo-graph" / "results.json")
    assert cli.main([*DEMO]) == 0
    after = Results.from_json(folder / "runs" / "demo-graph" / "results.json")
    assert [(r.metric, r.distance) for r in before.rows] == [
        (r.metric, r.distance) for r in after.rows
    ]
    # The teacher was not trained again: its time is that of the first call.
    assert after.teachers[0].train_seconds == before.teachers[0].train_seconds > 0.1


@pytest.mark.slow
def test_the_saved_student_can_be_used(graph_demo):
    import torch

    from cdeq import Student
    from cdeq.demo.tasks import graph

    student = Student.load(graph_demo[0] / "runs" / "demo-graph" / "student-anchored")
    x, _ = graph(0).test[0]
    solved = student.solve(x, tol=1e-3)
    assert bool(solved.converged.all())
    assert float(solved.residual) <= 1e-3
    assert student(x, steps=2).shape == torch.Size([1797, 10])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--task", "poetry"), "poetry"),
        (("dance",), "dance"),
        (("demo", "--seed", "x"), "seed"),
        (("demo", "--threads", "0"), "threads must be at least 1"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.out + shown.err


COMMANDS = {
    "demo": {"device", "precision", "task", "out", "seed", "threads"},
    "reproduce": {
        "device", "precision", "scale", "data-dir", "out", "runs", "seeds", "first-seed", "only", "jobs", "threads",
        "train-teachers", "no-train-teachers", "students-only", "no-students-only", "methods", "add", "no-add",
    },
    "report": {"results", "out"},
    "generate": {
        "prompt", "tokens", "steps", "tolerance", "temperature", "top", "seed", "cache", "no-cache",
        "threads", "json", "device", "precision",
    },
    "export": {"out", "steps", "check", "no-check", "certified", "no-certified"},
    "zoo": {"folder"},
}  # fmt: skip
"""All that can be typed; whoever changes it changes what others have in their scripts."""


def helped(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_the_commands_and_options_are_frozen(capsys):
    pytest.importorskip("cdeq_experiments.cli")
    listed = re.search(r"{([\w,]+)}", helped(capsys))
    assert listed is not None
    assert listed[1].split(",") == list(COMMANDS)
    for command, options in COMMANDS.items():
        shown = helped(capsys, command)
        found = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", shown)) - {"help"}
        assert found == options, command


def test_the_library_alone_says_what_reproduce_needs(monkeypatch, capsys):
    monkeypatch.setattr(cli, "EXPERIMENTS", "no_such_package")
    for command in ("reproduce", "report"):
        assert cli.main([command, "--scale", "tiny"]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err == (
            f"cdeq: `{command}` needs the experiments, which are not part of this package: "
            "`pip install ./experiments` in a checkout of the repository\n"
        )
    assert "{demo,generate,export,zoo}" in helped(capsys)


def test_the_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"cdeq {library.__version__}\n"


def test_without_a_command_there_is_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: cdeq" in shown
    assert "demo" in shown


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--version", "generate --help"])
def test_a_reader_who_leaves_is_no_error(arguments, tmp_path):
    program = shlex.join([sys.executable, "-m", "cdeq", *arguments.split()])
    done = subprocess.run(
        f"{program} | true", shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_a_pipe_that_closes_between_two_lines(monkeypatch, capfd):
    def talk(options):
        os.write(1, b"line\n")
        raise BrokenPipeError

    monkeypatch.setattr(cli, "demo", talk)
    saved = os.dup(1)
    try:
        assert cli.main(["demo"]) == cli.PIPE_CLOSED
    finally:
        os.dup2(saved, 1)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("it belongs to\nanother run"),
        StoreError("it belongs to another run"),
        DamagedStore("it belongs to another run"),
        RecipeError("it belongs to another run"),
        ResultsError("it belongs to another run"),
        StudentFolderError("it belongs to another run"),
        GenerationError("it belongs to another run"),
        ImportError("it belongs to another run"),
        OSError("it belongs to another run"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_known_errors_are_one_line(error, monkeypatch, capsys):
    def fail(options):
        raise error

    monkeypatch.setattr(cli, "demo", fail)
    assert cli.main(["demo"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "cdeq: it belongs to another run\n"
    assert shown.out == ""


def test_an_error_that_is_not_known_is_not_hidden(monkeypatch):
    def fail(options):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "demo", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_line(tmp_path, capsys):
    folder = tmp_path / "out" / "teacher"
    folder.mkdir(parents=True)
    (folder / "checkpoint.safetensors").write_bytes(b"not a checkpoint")
    assert cli.main(["demo", "--task", "graph", "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("cdeq: ")
    assert "damaged" in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_place_that_is_no_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--task", "graph", "--out", str(tmp_path / "file")]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("cdeq: ")
    assert "file" in shown


def test_another_seed_has_another_folder():
    assert cli.Demo().folder == Path("runs/demo-images")
    assert cli.Demo(task="text", seed=1).folder == Path("runs/demo-text-seed1")
    assert cli.Demo(seed=1, out=Path("here")).folder == Path("here")


@pytest.mark.parametrize(
    ("task", "module", "package"),
    [("text", "matplotlib", "matplotlib"), ("graph", "sklearn", "scikit-learn")],
)
def test_a_missing_extra_is_found_before_training(task, module, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("cdeq.demo.run.run_demo", lambda *a, **k: pytest.fail("training began"))
    assert cli.main(["demo", "--task", task]) == 1
    shown = capsys.readouterr().err
    assert package in shown
    assert "cdeq[demo]" in shown


@pytest.mark.parametrize(("arguments", "expected"), [((), []), (("--threads", "3"), [3])])
def test_threads_are_set_only_when_asked_for(arguments, expected, monkeypatch):
    asked = []

    class Stop(Exception):
        pass

    def stop(*arguments, **options):
        raise Stop

    monkeypatch.setattr("torch.set_num_threads", asked.append)
    monkeypatch.setattr("cdeq.demo.run.run_demo", stop)
    with pytest.raises(Stop):
        cli.main(["demo", "--task", "graph", *arguments])
    assert asked == expected

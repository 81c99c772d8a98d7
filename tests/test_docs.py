"""What the pages of docs/ say is so: their code runs, their links hold, their bounds bound."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from dataclasses import fields
from importlib.util import find_spec
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import brief
import cdeq
from cdeq.consistency.boundary import out_coefficient
from cdeq.consistency.clock import inference_fraction
from cdeq.training import CheckpointError
from teachers import Plain

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.stem for path in DOCS.glob("*.md"))


def page(name):
    return (DOCS / f"{name}.md").read_text()


def blocks(text, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def table_rows(text, header):
    """The cells of a table's rows, found by how its header begins."""
    lines = takewhile(lambda line: line.startswith("|"), text.split(header)[1].splitlines()[2:])
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def identifiers(rows):
    return [row[0].strip("`") for row in rows]


# The site.


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    made = (tmp_path / "api" / "consistency" / "index.html").read_text()
    assert "Distil a teacher into a student" in made


@pytest.mark.parametrize("name", PAGES)
def test_files_that_the_pages_name_are_there(name):
    for path in re.findall(r"(?:src|docs|examples|tests|bench|results)/[\w./-]*\w", page(name)):
        place = re.sub(r"^results/(small|tiny|paper)/(\w+)$", r"results/\1", path)
        assert (ROOT / place).exists(), path


def test_every_name_has_its_place_in_the_api():
    """All names of `import cdeq` are on the first page, each folder of the library has a page, and so has the zoo."""
    text = (DOCS / "api" / "index.md").read_text()
    named = dict(re.findall(r"\[`(\w+)`\]\[cdeq\.([\w.]+)\]", text))
    assert set(named) == set(cdeq.__all__)
    folders = {path.parent.name for path in (ROOT / "src" / "cdeq").glob("*/__init__.py")}
    assert folders - {"demo"} | {"zoo"} == {path.stem for path in (DOCS / "api").glob("*.md")} - {
        "index"
    }


# The words.

UNUSUAL = re.compile(
    r"\bonce an? (?:input|sample|batch|step|segment|epoch|update|run)\b"
    r"|\b(?:numbers|seconds|images|tokens|rows|labels|batches|bytes|MB|s|masks?) an? "
    r"(?:sample|batch|second|step|token|class|epoch|branch|segment)\b"
    r"|by the letter|by a hair|\brestless\b|\bbut once\b|\bhears\b",
    re.IGNORECASE,
)
"""Turns of phrase that a reader of today stumbles over: write `for each input`, `per second`, `exactly`, `barely`."""


def prose():
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")
    yield from DOCS.rglob("*.md")
    for folder in ("src", "experiments", "bench", "examples"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in PROSE)


PROSE = {".py", ".toml", ".j2", ".html", ".json"}


@pytest.mark.slow
def test_the_words_are_those_of_today():
    for path in prose():
        found = UNUSUAL.search(re.sub(r"[\s#]+", " ", path.read_text()))
        assert found is None, f"{path.relative_to(ROOT)}: {found[0]!r}"


# Getting started.


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = table_rows(page("getting-started"), "| extra |")
    assert set(identifiers(rows)) == set(project["optional-dependencies"])


@pytest.mark.slow
def test_getting_started_runs_as_written(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    with torch.random.fork_rng():
        first, *others = blocks(page("getting-started"))
        exec(first, names)
        request.getfixturevalue("brief_stages")  # for the other students, which are not looked at
        for block in others:
            exec(block, names)
    assert names["accuracy"] > 0.85
    first, *_, last = names["distances"]
    assert last < 0.1 < first
    result = names["result"]
    assert result.converged.float().mean() > 0.95
    assert result.steps.float().mean() < names["solution"].steps.float().mean()
    assert {row.method for row in names["results"].rows} >= {"corrected", "anderson"}
    assert names["again"].calibrated == ()  # the default recipe has no clock to choose
    assert names["again"].certificate.confidence == 0.95
    bounded = names["bounded"]
    assert bounded.converged.float().mean() > 0.95
    assert bounded.bound[bounded.converged].max() <= 1e-2
    x = names["x"]
    calibrated = cdeq.Student.load("digits-student")
    assert torch.equal(calibrated(x), names["again"](x))
    assert (tmp_path / "runs" / "digits" / "log.jsonl").exists()
    with pytest.raises(CheckpointError):  # as the page says of another seed
        cdeq.distill(
            names["teacher"],
            names["batches"][:2],
            fit=cdeq.FitConfig(updates=20),
            folder="runs/digits",
            seed=1,
        )


# Bring your own.


def test_the_page_is_the_example():
    example = (ROOT / "examples" / "bring_your_own_torchdeq.py").read_text()
    section = page("bring-your-own").split("## Plain functions")[0]
    shown = "\n".join(blocks(section))
    assert [*filter(None, shown.splitlines())] == [*filter(None, example.splitlines())]


@pytest.mark.slow
def test_bring_your_own_runs_as_written(tmp_path, monkeypatch, capsys, request):
    with warnings.catch_warnings():
        # torchdeq's docstrings hold escapes that Python 3.12 warns about when it first compiles them.
        warnings.filterwarnings("ignore", "invalid escape sequence", SyntaxWarning)
        pytest.importorskip("torchdeq")
    monkeypatch.chdir(tmp_path)
    text = page("bring-your-own")
    section = text.split("## Plain functions")[0]
    names = {"__name__": "page"}
    with torch.random.fork_rng():
        for block in blocks(section):
            exec(block, names)
        printed = capsys.readouterr().out
        for steps, _, ours, _, plain in names["rows"]:
            assert ours < plain, steps
        assert bool(names["result"].converged.all())
        assert names["spent"] < names["alone"]
        (shown,) = blocks(section, "text")
        assert re.sub(r"[\d.]+", "", printed).split() == re.sub(r"[\d.]+", "", shown).split()
        ours = {f"{row[2]:8.4f}" for row in names["rows"]}
        for was, now in zip(numbers(shown), numbers(printed), strict=True):
            # Other processors round otherwise, and a training makes more of it.
            trained = f"{now:8.4f}" in ours
            assert now == pytest.approx(was, rel=0.4 if trained else 0.1), (was, now)

        request.getfixturevalue("brief_stages")  # the others need no figures
        for block in blocks(text)[len(blocks(section)) :]:
            exec(block, names)
            with torch.no_grad():
                logits = names["student"](names["x"], steps=2)
            assert names["accuracy"](logits) > 0.8
    assert torch.equal(names["again"](names["x"]), names["student"](names["x"]))


def numbers(text):
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", text)]


# Reproducing and the layout, which need the experiments.


def test_every_experiment_is_explained():
    registry = pytest.importorskip("cdeq_experiments.registry")
    from cdeq_experiments.ablations import ABLATIONS

    text = page("reproducing")
    tables, figures = table_rows(text, "| ID | of the paper |"), table_rows(text, "| ID | in the")
    scales = table_rows(text, "| ID | `--scale tiny` |")
    assert identifiers(tables) == identifiers(scales)
    assert identifiers(tables + figures) == list(registry.EXPERIMENTS)
    for name, *_, counts in tables:
        shown = registry.EXPERIMENTS[name.strip("`")].page("small")["counts"].values()
        told = [tuple(map(int, re.findall(r"\d+", part))) for part in counts.split(";")]
        assert told == list(dict.fromkeys(map(tuple, shown))), name
    kinds = {name.strip("`"): tuple(on.split(", ")) for name, _, _, on in figures}
    for ablation in ABLATIONS:
        assert kinds[ablation.name] == tuple(ablation.counts), ablation.name


def test_the_options_that_the_page_names_exist():
    cli = pytest.importorskip("cdeq_experiments.cli")
    known = {field.name.replace("_", "-") for field in fields(cli.Reproduce)} | {
        "nproc-per-node",
        "results",
    }
    assert set(re.findall(r"--([a-z][a-z-]+)", page("reproducing"))) <= known


def test_every_file_of_the_experiments_has_its_place_in_the_layout():
    section = page("layout").split("## The experiments")[1]
    named = re.findall(r"`([\w./*]+)`", "".join(row[0] for row in table_rows(section, "| file")))
    place = ROOT / "experiments" / "cdeq_experiments"
    found = [path for pattern in named for path in place.glob(pattern) if path.is_file()]
    files = {
        path
        for path in place.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.parent.name != "templates"
    }
    assert {path for path in found if "__pycache__" not in path.parts} == files - {
        place / "__init__.py"
    }


# Scaling out.


def commands():
    """The commands of the page, as lists of words."""
    lines = re.findall(r"^    (.*distill_with_torchrun.*)$", page("scaling-out"), re.MULTILINE)
    return [shlex.split(line) for line in lines]


SHORT = ("--updates", "6", "--teacher-updates", "6")


def in_this_process(monkeypatch, *arguments):
    """The script as the page's command without torchrun starts it."""
    script = str(ROOT / "examples" / "distill_with_torchrun.py")
    monkeypatch.setattr(sys, "argv", [script, *arguments, *SHORT])
    with torch.random.fork_rng():
        runpy.run_path(script, run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.release)])
def test_the_script_trains_on_two_processes_as_on_one(whole, tmp_path, monkeypatch, request):
    """Briefly without the corrections, which rounding decides then: test_two_processes.py has them in double."""
    monkeypatch.chdir(tmp_path)
    together, alone, _ = commands()
    assert together[:2] == ["OMP_NUM_THREADS=1", "torchrun"]
    assert alone[0] == "python"
    at = next(i for i, word in enumerate(together) if word.endswith(".py"))
    script = [str(ROOT / together[at]), *together[at + 1 :], *SHORT]
    if not whole:
        request.getfixturevalue("brief_stages")
        script = [brief.__file__, *script]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *together[2:at], *script],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("saved to runs/two/student") == 1
    in_this_process(monkeypatch, *alone[2:])
    for training, rel in {"teacher": 1e-2, "distil/start": 1e-4, "distil": 1e-2}.items():
        one, two = (last_line(Path("runs") / run / training) for run in ("one", "two"))
        assert training == "distil/start" or one["update"] == two["update"] == 5
        if whole or training != "distil":
            assert two["loss"] == pytest.approx(one["loss"], rel=rel)
    # The folder of two processes is finished: one process finds it so, and makes the same student.
    saved = Path("runs/two/student/student.safetensors")
    before = saved.read_bytes()
    in_this_process(monkeypatch, "--folder", "runs/two")
    assert saved.read_bytes() == before


def last_line(folder):
    return json.loads((folder / "log.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
def test_the_calls_of_the_page_run_in_one_process_too(tmp_path, monkeypatch, brief_stages):
    usual, short = cdeq.distill, cdeq.FitConfig(updates=3)
    monkeypatch.setattr(cdeq, "distill", lambda *a, **k: usual(*a, fit=short, **k))
    (block,) = blocks(page("scaling-out"))
    teacher = Affine(contraction(0.5))
    exec(block, {"cdeq": cdeq, "teacher": teacher, "batches": [INPUTS], "folder": tmp_path})
    again = cdeq.Student.load(tmp_path / "student", teacher=Affine(contraction(0.5)))
    assert again(INPUTS).shape == INPUTS.shape


def test_the_command_for_several_machines_is_one_that_torchrun_reads():
    from torch.distributed.run import get_args_parser

    *_, words = commands()
    assert words[0] == "torchrun"
    read = get_args_parser().parse_args(words[1:])
    assert (read.nnodes, read.nproc_per_node, read.rdzv_backend) == ("2", "8", "c10d")
    assert read.rdzv_endpoint == "HOST:29500"
    assert read.training_script.endswith("distill_with_torchrun.py")


# The proof of docs/method.md, on linear maps in double precision.


class Affine(Plain):
    """z = W z + b + x."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(weight.new_zeros(len(weight)))

    def step(self, z, context):
        return z @ self.weight.T + self.bias + context

    def equilibrium(self, x):
        """(I - W)^-1 (b + x)."""
        eye = torch.eye(len(self.weight), dtype=x.dtype)
        return torch.linalg.solve(eye - self.weight, (self.bias + x).T).T


def contraction(q, size=4, seed=0):
    """q times an orthogonal matrix: every vector shrinks by q exactly."""
    g = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=g, dtype=torch.float64)
    return q * torch.linalg.qr(matrix)[0]


def changed_student(weight, x, recipe, *, bias_only=False, seed=1):
    """A student of the affine map with random changes of its weights."""
    student = cdeq.Student.for_example(Affine(weight), recipe, x)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, change in zip(student.deltas.names, student.deltas.changes, strict=True):
            change.change.copy_(torch.randn(change.change.shape, generator=g, dtype=x.dtype) * 0.5)
            if bias_only and name == "weight":
                change.change.zero_()
    return student.eval().requires_grad_(False)


def anchored(**changes):
    return cdeq.Recipe.from_name("anchored", start="teacher", **changes)


INPUTS = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
rates = st.floats(0.05, 0.9)


def share(j, gamma, decay):
    """c_j, as the clock and the boundary of the package give it."""
    return out_coefficient(inference_fraction(j, decay), gamma=gamma, eps=0.0, end=1.0)


def convolution(q, r, steps):
    """The sum of q^(J-1-j) r^j over j < J."""
    return steps * q ** (steps - 1) if q == r else (q**steps - r**steps) / (q - r)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(q=rates, decay=rates, gamma=st.floats(0.3, 4.0), equal=st.booleans())
def test_the_bounds_hold_at_every_step_and_the_limit_is_the_equilibrium(q, decay, gamma, equal):
    decay = q if equal else decay
    student = changed_student(contraction(q), INPUTS, anchored(gamma=gamma, decay=decay))
    states = student.trajectory(INPUTS, 500)
    star = student.teacher.equilibrium(INPUTS)
    errors = torch.stack([(z - star).norm(dim=1) for z in states])  # (J + 1, B)
    delta = dict(zip(student.deltas.names, student.deltas(), strict=True))
    pulls = torch.stack([(z @ delta["weight"].T + delta["bias"]).norm(dim=1) for z in states])
    largest, rounding = pulls.max(dim=0).values, 1e-12
    for j in range(60):
        c = share(j, gamma, decay)
        assert c <= max(1.0, gamma) * decay**j + rounding
        assert (errors[j + 1] <= q * errors[j] + c * pulls[j] + rounding).all(), j
        known = max(1.0, gamma) * convolution(q, decay, j + 1)
        assert (errors[j + 1] <= q ** (j + 1) * errors[0] + largest * known + rounding).all(), j
    assert pulls.min() > 1e-3  # the changed weights do pull away
    assert errors[-1].max() < 1e-10


@pytest.mark.parametrize(("q", "decay"), [(0.8, 0.5), (0.3, 0.6), (0.5, 0.5)])
def test_the_rate_is_attained(q, decay):
    """In one dimension, with a changed bias alone, the bound is the error itself."""
    weight, x = torch.full((1, 1), q, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    student = changed_student(weight, x, anchored(decay=decay), bias_only=True)
    change = abs(float(student.deltas()[student.deltas.names.index("bias")]))
    for steps, z in enumerate(student.trajectory(x, 15)):
        assert float(z.abs()) == pytest.approx(change * convolution(q, decay, steps), rel=1e-9)


def test_the_boundary_on_the_state_stops_where_it_is():
    weight, recipe = contraction(0.7), cdeq.Recipe.from_name("paper")
    student = changed_student(weight, INPUTS, recipe)
    states = student.trajectory(INPUTS, 260)
    star = student.teacher.equilibrium(INPUTS)
    left = (states[-1] - star).norm(dim=1) / star.norm(dim=1)
    assert torch.equal(states[-1], states[-2])
    assert left.min() > 0.05
    shares = [share(j, recipe.gamma, recipe.decay) for j in range(100)]
    moves = [(b - a).norm(dim=1) for a, b in pairwise(states[:101])]
    far = torch.stack([move / c for move, c in zip(moves, shares, strict=True)]).max(dim=0).values
    for k in (10, 40):
        most = recipe.gamma * far * recipe.decay**k / (1 - recipe.decay)
        assert ((states[-1] - states[k]).norm(dim=1) <= most).all()
    same = changed_student(weight, INPUTS, anchored())
    assert ((same.trajectory(INPUTS, 260)[-1] - star).norm(dim=1) < 1e-10).all()


def test_every_clock_runs_out():
    student = changed_student(contraction(0.7), INPUTS, anchored())
    student.calibrated = (0.0, 0.2, 0.2)
    learned = changed_student(contraction(0.7), INPUTS, anchored(schedule="learned"))
    for one in (student, learned):
        strengths = [float(one.time_point(j).strength) for j in range(60)]
        assert strengths[0] == 1.0
        assert strengths == sorted(strengths, reverse=True)
        assert strengths[-1] == 0.0

"""The package as others install it: the wheel alone, in an environment of its own, away from the repository."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import cdeq

pytest.importorskip("build")
ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.release
FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")


def run(*words: object, cwd: Path) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built through the sdist, as `make wheel` does it, from a copy: a build leaves files behind."""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    # Without isolation nothing is downloaded: setuptools is installed here.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ".", cwd=source)
    assert len(list((source / "dist").glob("*.tar.gz"))) == 1
    (found,) = (source / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Python of an environment with the wheel alone; what it depends on is that of the tests."""
    folder = tmp_path_factory.mktemp("user")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    made = folder / "venv" / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", made, "install", "--quiet"),
        *("--no-deps", "--no-index", wheel),
        cwd=folder,
    )
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # A path in a .pth is searched last, and editable packages in it are not followed.
    (site / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return made


@pytest.mark.slow
def test_the_wheel_has_the_package_its_types_and_its_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    version = cdeq.__version__
    assert wheel.name == f"cdeq-{version}-py3-none-any.whl"
    for name in (
        "cdeq/py.typed",
        "cdeq/evaluation/report.html",
        "cdeq/export.py",
        f"cdeq-{version}.dist-info/licenses/LICENSE",
    ):
        assert name in names
    assert not [name for name in names if name.startswith(("tests", "cdeq_experiments"))]


def test_the_version_has_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert f"version: {cdeq.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == (
        cdeq.__version__
    )


FIVE_LINES = """
import torch
from torch import nn

class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.eye(6))
        self.head = nn.Linear(6, 3)
    def inject(self, x):
        return x
    def start(self, context):
        return torch.zeros_like(context)
    def step(self, z, context):
        return torch.tanh(z @ self.weight + context)
    def readout(self, z, context):
        return self.head(z)

torch.manual_seed(0)
teacher, x = Teacher(), torch.randn(8, 6)
loader = [torch.randn(8, 6) for _ in range(2)]
import cdeq
usual, recipe = cdeq.distill, cdeq.Recipe.from_name("corrected", start_updates=5, correction_updates=5)
cdeq.distill = lambda *a: usual(*a, recipe=recipe, fit=cdeq.FitConfig(updates=5))
exec(open("five.py").read())
assert bool(result.converged.all()) and logits.shape == (8, 3)
print(cdeq.__file__, cdeq.__version__)
"""


@pytest.mark.slow
def test_the_five_lines_run_with_the_wheel_alone(python, tmp_path):
    readme = (ROOT / "README.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", readme, re.S) if "distill(" in b)
    (tmp_path / "five.py").write_text(block)
    place, version = run(python, "-c", FIVE_LINES, cwd=tmp_path).split()
    assert Path(place).is_relative_to(python.parents[1])
    assert version == cdeq.__version__
    assert (tmp_path / "student" / "config.json").is_file()
    assert run(python.with_name("cdeq"), "--version", cwd=tmp_path) == f"cdeq {version}\n"


REDUCED = """
import sys
from dataclasses import replace
from cdeq import FitConfig, cli
from cdeq.demo import tasks

def graph(seed):
    task, few = tasks.graph(seed), FitConfig(updates=3)
    students = {name: replace(student, fit=few) for name, student in task.students.items()}
    for name, fields in (
        ("warm_start", ["start_updates"]),
        ("corrected", ["start_updates", "correction_updates"]),
    ):
        students[name] = replace(students[name], changes=dict.fromkeys(fields, 3))
    return replace(task, teach=replace(task.teach, fit=few), students=students)

tasks.DEMO_TASKS["graph"] = graph
sys.exit(cli.main(["demo", "--task", "graph", "--threads", "1"]))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_demo_runs_with_the_wheel_alone(python, tmp_path):
    """A few updates in place of hundreds."""
    shown = run(python, "-W", "ignore", "-c", REDUCED, cwd=tmp_path)
    assert "report.html" in shown
    assert (tmp_path / "runs" / "demo-graph" / "student-corrected" / "config.json").is_file()


USER = """
import cdeq

def steps(student: cdeq.Student, x: object, tol: {kind}) -> int:
    return student.solve(x, tol=tol).evaluations
"""


@pytest.mark.slow
def test_a_user_has_the_types(python, tmp_path):
    pytest.importorskip("mypy")
    config = tmp_path / "mypy.ini"
    # The types of torch take longer to read than all the rest.
    config.write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    for kind in ("float", "str"):
        (tmp_path / f"user_{kind}.py").write_text(USER.format(kind=kind))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--python-executable",
            python,
            "user_float.py",
            "user_str.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "", "MYPYPATH": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = [line for line in done.stdout.splitlines() if "error" in line and "Found" not in line]
    assert len(found) == 1, done.stdout
    assert found[0].startswith("user_str.py:5: error: ")
    assert '"str"; expected "float"' in found[0]

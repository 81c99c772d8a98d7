"""Folders import only from those before them; the library knows nothing of the experiments beside it."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cdeq

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "cdeq"
EXPERIMENTS = ROOT / "experiments" / "cdeq_experiments"
PAGE = (ROOT / "docs" / "layout.md").read_text()
ORDER = (
    "files",
    "labels",
    "hub",
    "equilibrium",
    "placement",
    "export",
    "solvers",
    "gradients",
    "data",
    "models",
    "training",
    "trajectories",
    "consistency",
    "zoo",
    "evaluation",
    "generation",
    "demo",
    "cli",
    "__main__",
)
"""Folders and modules of the library; each imports only from those before it."""
HEAVY = (
    "matplotlib",
    "pandas",
    "sklearn",
    "jinja2",
    "torch_geometric",
    "datasets",
    "huggingface_hub",
    "PIL",
)
"""What `import cdeq` leaves to those who need it."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> list[tuple[str, str]]:
    """The modules that a file imports, and the name it imports from each, if any."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return found


def place_of(path: Path) -> str:
    """The folder of a file, or the module itself if it lies at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_everything_has_its_place_in_the_order():
    found = {place_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert found == set(ORDER)


def test_the_page_lists_the_folders_in_this_order():
    folders = [name for name in ORDER if (PACKAGE / name).is_dir()]
    assert re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE) == folders


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name_of)
def test_a_folder_imports_only_what_stands_before_it(path):
    modules = [module.split(".") for module, _ in imported(path)]
    assert "cdeq_experiments" not in {parts[0] for parts in modules}
    if path == PACKAGE / "__init__.py":
        return
    used = {parts[1] for parts in modules if parts[0] == "cdeq" and len(parts) > 1}
    assert used <= set(ORDER[: ORDER.index(place_of(path)) + 1])


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.rglob("*.py")), ids=name_of)
def test_the_experiments_use_only_public_names(path):
    for module, name in imported(path):
        if module.split(".")[0] == "cdeq":
            assert not [part for part in (*module.split("."), name) if part.startswith("_")]


def test_no_public_name_hides_a_module():
    found = [module.name for module in pkgutil.walk_packages(cdeq.__path__, "cdeq.")]
    modules = {name: importlib.import_module(name) for name in found if "__main__" not in name}
    assert "cdeq.evaluation.comparison" in modules
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        assert getattr(sys.modules[parent], own) is module, name


@pytest.mark.slow
def test_importing_the_library_is_light():
    code = (
        f"import sys, cdeq; heavy = set({HEAVY}) & set(sys.modules); assert not heavy, heavy; "
        "assert 'cdeq.evaluation' not in sys.modules; cdeq.evaluate; "
        f"heavy = set({HEAVY}) & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'evaluat'"):
        cdeq.evaluat  # noqa: B018


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name_of)
def test_only_the_command_line_prints_seeds_and_chooses_threads(path):
    tree = ast.parse(path.read_text())
    forked = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        and any("fork_rng" in ast.unparse(item.context_expr) for item in node.items)
        for inner in ast.walk(node)
    ]
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node not in forked
    ]
    if path.name != "cli.py":
        assert not {"print", "torch.manual_seed", "torch.set_num_threads"} & set(calls)


def test_the_page_names_every_optional_attribute():
    named = {
        name.rstrip("()") for name in re.findall(r"^\| `(\w+(?:\(\))?)` \|", PAGE, re.MULTILINE)
    }
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    read = set(re.findall(r'getattr\((?:model|teacher|module), "(\w+)"', source))
    assert read <= named
    assert named == {
        "batched",
        "causal",
        "fading",
        "start_network",
        "correction_network",
        "config",
        "project",
        "contraction",
        "select",
    }  # and memory, which has a protocol

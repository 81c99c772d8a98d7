"""Folders import only from those before them, as docs/layout.md says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "cdeq"
ORDER = re.findall(r"^\| `(\w+)/` \|", (ROOT / "docs" / "layout.md").read_text(), re.MULTILINE)


def imported_folders(path: Path) -> set[str]:
    """Folders of cdeq that a file imports from."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    parts = [name.split(".") for name in names if name.startswith("cdeq.")]
    return {part[1] for part in parts}


def test_the_page_lists_every_folder():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert set(ORDER) == folders


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.glob("*/**/*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_a_folder_imports_only_what_stands_before_it(path):
    own = path.relative_to(PACKAGE).parts[0]
    allowed = {*ORDER[: ORDER.index(own) + 1], "files"}
    assert imported_folders(path) <= allowed


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
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
    page = (ROOT / "docs" / "layout.md").read_text()
    named = {
        name.rstrip("()") for name in re.findall(r"^\| `(\w+(?:\(\))?)` \|", page, re.MULTILINE)
    }
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    read = set(re.findall(r'getattr\((?:model|teacher|module), "(\w+)"', source))
    assert read <= named
    assert named == {
        "batched",
        "start_network",
        "config",
        "project",
    }  # and memory, which has a protocol

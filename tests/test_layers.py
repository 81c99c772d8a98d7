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

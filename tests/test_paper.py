"""docs/paper.md leads from each equation and algorithm of the paper to code that is there."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "paper.md").read_text()
SOURCE = ROOT.parent / "shared" / "paper" / "cdeq.tex"

EQUATIONS = (
    "eq:deq_fixed_point",
    "eq:fp_ode",
    "eq:AA",
    None,
    "eq:cm_definition",
    "eq:tau_rk",
    "eq:AA_step_in_CM",
    "eq:G_phi",
    "eq:loss_global",
    "eq:loss_local",
    "eq:loss_total",
    None,
    "eq:traj_aug",
    None,
)
"""The numbered equations in the order of the paper's source; None for one without a label."""
ALGORITHMS = ("alg:multistep_aa", "alg:training", "alg:AA", "alg:traj_aug_sampling")
OTHERS = (
    "eq:root-finding",
    "eq:ema",
    "appendix:time",
    "app:task_loss",
    "tab:mapping_function_ablation",
    "tab:aa_module_ablations",
)
LABELS = {*filter(None, EQUATIONS), *ALGORITHMS, *OTHERS}
CITATION = re.compile(r"\b(?:eq|alg|tab|app|appendix):[\w-]*\w")


def rows_of(heading):
    """The cells of each row of the table below a heading, without its first two lines."""
    table = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def named_code():
    """(file, name) of everything that the page names behind a file, up to the end of the clause."""
    return [
        (file, name)
        for file, clause in re.findall(r"`(src/[\w/]+\.py)`: ([^;|)\n]*)", PAGE)
        for name in re.findall(r"`(\w{2,}(?:\.\w+)?)`", clause)
    ]


@pytest.mark.parametrize(("file", "name"), named_code())
def test_what_the_page_names_is_in_the_file_it_names(file, name):
    module = importlib.import_module(
        file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    )
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)
    assert Path(inspect.getsourcefile(inspect.unwrap(found))) == Path(module.__file__)


@pytest.mark.parametrize(
    ("heading", "labels"), [("The numbered equations", EQUATIONS), ("The algorithms", ALGORITHMS)]
)
def test_each_numbered_equation_and_algorithm_has_its_row_in_order(heading, labels):
    rows = rows_of(heading)
    assert [int(row[0]) for row in rows] == list(range(1, len(labels) + 1))
    for row, label in zip(rows, labels, strict=True):
        assert row[1].startswith("(no label)" if label is None else f"`{label}`")
        assert "`src/cdeq/" in row[3]


def test_the_page_names_enough():
    assert len(named_code()) >= 30
    assert len(EQUATIONS) == 14


def test_docstrings_and_the_page_cite_known_labels_only():
    texts = {"docs/paper.md": PAGE}
    for folder in ("src/cdeq", "experiments/cdeq_experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            texts[str(path.relative_to(ROOT))] = path.read_text()
    wrong = {
        name: unknown
        for name, text in texts.items()
        if (unknown := sorted({*CITATION.findall(text)} - LABELS))
    }
    assert not wrong
    numbered = r"paper, (Eqs?\. ?\d|Algorithm \d|Table \d)"
    assert not [name for name, text in texts.items() if re.search(numbered, text)]


def test_every_equation_and_algorithm_is_cited_in_the_code():
    cited = set()
    for path in (ROOT / "src" / "cdeq").rglob("*.py"):
        cited |= {*CITATION.findall(path.read_text())}
    assert {*filter(None, EQUATIONS), *ALGORITHMS} <= cited


def test_the_labels_are_those_of_the_papers_source():
    if not SOURCE.is_file():
        pytest.skip("the paper's source is not beside the repository")
    text = SOURCE.read_text()
    environments = re.findall(r"\\begin\{equation\}(.*?)\\end\{equation\}", text, re.DOTALL)
    found = [re.search(r"\\label\{([^}]*)\}", body) for body in environments]
    assert [match and match[1] for match in found] == list(EQUATIONS)
    algorithms = re.findall(r"\\begin\{algorithm\*?\}.*?\\label\{([^}]*)\}", text, re.DOTALL)
    assert algorithms == list(ALGORITHMS)
    assert {*re.findall(r"\\label\{([^}]*)\}", text)} >= LABELS

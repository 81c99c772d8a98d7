"""Figures in pages are those of results/, and the paper's stand beside the right ones."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cdeq.evaluation import Results
from cdeq.evaluation import STYLES
from cdeq_experiments.fill import filled, root_of
from cdeq_experiments.page_figures import PLACES
from cdeq_experiments.paper_table import brackets_note, paper_table
from cdeq_experiments.published import TABLES, published_beside

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_figures_of_a_page_are_those_of_the_results(page):
    text = page.read_text()
    assert filled(text, RESULTS) == text


def test_an_old_figure_is_replaced_in_its_sentence_and_in_its_block():
    line = "by <!-- points below on CIFAR-10 -->9.99<!-- end of points below on CIFAR-10 --> points"
    found = filled(line, RESULTS)
    assert re.fullmatch(r"by <!--.*?-->\d\.\d\d<!--.*?--> points", found)
    assert "9.99" not in found
    page = "# Title\n\n<!-- graphs -->\nold\n<!-- end of graphs -->\nrest\n"
    found = filled(page, RESULTS)
    assert "old" not in found
    assert found.startswith("# Title\n\n<!-- graphs -->\n| graph |")
    assert found.endswith("<!-- end of graphs -->\nrest\n")
    assert filled(found, RESULTS) == found


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("<!-- graphs -->\nno end", "begin and end"),
        ("<!-- end of graphs -->", "begin and end"),
        ("<!-- nonsense -->\n<!-- end of nonsense -->", "no figures are called 'nonsense'"),
    ],
)
def test_a_place_that_cannot_be_filled_is_refused(page, words):
    with pytest.raises(ValueError, match=words):
        filled(page, RESULTS)


def test_the_command_fills_pages(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").symlink_to(RESULTS)
    page = tmp_path / "docs" / "page.md"
    page.write_text("<!-- words -->\n<!-- end of words -->\n")
    done = subprocess.run(
        [sys.executable, "-m", "cdeq_experiments.fill", str(page)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "WikiText-2" in page.read_text()
    assert root_of(page) == tmp_path


def test_every_place_of_a_finished_experiment_has_figures():
    for name, figures in PLACES.items():
        experiment = name.removeprefix("tables of ")
        if experiment == name or (RESULTS / "small" / f"{experiment}.md").exists():
            assert figures(RESULTS).strip()


# The paper's own figures.


def test_the_published_rows_are_methods_that_have_a_style():
    for tables in TABLES.values():
        for table in tables:
            assert {method for method, _ in table.rows} <= set(STYLES)


def test_a_table_has_the_papers_figure_where_it_belongs():
    found = Results.from_json(RESULTS / "small" / "table1.json")
    lines = paper_table(found, "WikiText-2", (1, 2, 8)).splitlines()
    [row] = [line for line in lines if line.startswith("| Paper | ") and " | 8 | " in line]
    assert "(26.43) |" in row
    assert "(0.37) |" in row
    [ours] = [line for line in lines if line.startswith("| Anchored | ") and " | 8 | " in line]
    assert "(" not in ours
    assert "WikiText-103 beside WikiText-2" in brackets_note(found)[0]


def test_data_past_the_papers_have_no_brackets():
    found = Results.from_json(RESULTS / "small" / "table3.json")
    assert published_beside(found, "PubMed").data == "ogbn-arxiv"
    assert published_beside(found, "Coauthor Physics") is None
    assert "(" not in paper_table(found, "Coauthor Physics", (1, 2))
    other = Results.from_json(RESULTS / "small" / "inductive.json")
    assert published_beside(other, "PubMed") is None
    assert brackets_note(other) == []


def test_results_on_disk_are_whole():
    for path in sorted((RESULTS / "small").glob("*.json")):
        found = Results.from_json(path)
        assert found.experiment == path.stem
        assert found.command in path.with_suffix(".md").read_text()
        assert found.commit in path.with_suffix(".md").read_text()
        assert not any("dirty" in commit for commit in found.commit.split(" and "))
        assert path.with_suffix(".png").stat().st_size > 5000
        assert json.loads(path.read_text())["scale"] == "small"

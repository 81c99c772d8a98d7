"""Numbers in pages are those of results/."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
from test_pages import ablation_results, table_results

from cdeq.evaluation import Results
from cdeq_experiments.pages import write_pages
from cdeq_experiments.pages.fill import filled, main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of results with what the tests ask for."""
    place = tmp_path_factory.mktemp("root") / "results"
    graph = table_results("PubMed", methods=("picard", "ignn_solver", "paper"), experiment="table3")
    text = table_results("WikiText-2", methods=("picard", "hyperdeq", "paper"), experiment="table1")
    images = table_results(methods=("picard", "hyperdeq", "paper"))
    for found in (images, graph, text, ablation_results(["m = 1", "m = 7"], counts=(1, 8))):
        write_pages(replace(found, scale="small"), place / "small")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_pages_are_up_to_date(page):
    assert filled(page.read_text(), ROOT / "results") == page.read_text()


def value(folder, expression):
    """What an expression gives, within a sentence."""
    found = filled(f"by <!-- fill: {expression} -->old<!-- end --> points", folder)
    return re.fullmatch(r"by <!-- fill: .* -->(.*)<!-- end --> points", found, re.DOTALL)[1]


@pytest.mark.slow
def test_a_number_in_a_sentence(folder):
    share = 'at("table2", "CIFAR-10", "paper", 1).metric'
    assert value(folder, f'"%.1f" % (100 * {share})') == "62.5"
    assert value(folder, 'teacher("table2", "CIFAR-10").metric') == "0.8"
    assert value(folder, 'at("table2", "CIFAR-10", "alexnet").metric') == "0.57"


@pytest.mark.slow
def test_findings_and_tables(folder):
    assert value(folder, 'findings("window")').startswith("\n- **WikiText-2.** With 8 evaluations ")
    tables = value(folder, 'tables("window")')
    assert tables.startswith("\nWikiText-2\n\n|  | perplexity at 1 |")
    assert "(25.93)" in tables
    assert "\nCIFAR-10: gap closed\n\n| evaluations | 1 | 8 |" in value(folder, 'tables("table2")')


@pytest.mark.slow
def test_the_summary_has_a_row_for_each_data_set(folder):
    table_1, table_2 = (
        value(folder, f'summary("picard", "learned solver", "paper"{paper})').splitlines()
        for paper in ("", ", paper=true")
    )
    assert table_1[1].startswith(
        "|  | converged | Picard, 1 | Learned solver, 1 | Paper, 1 | Picard, 2 |"
    )
    assert [line.split(" | ")[0] for line in table_1[3:]] == [
        "| WikiText-2",
        "| CIFAR-10",
        "| PubMed",
    ]
    assert "| 52.5 ±0.7% | 57.5 ±0.7% | **62.5 ±0.7%** | 54.5 ±0.7% |" in table_1[4]
    assert "| **62.5 ±0.7%** (47.12) |" in table_2[4]
    assert table_2[5].startswith("| PubMed (ogbn-arxiv) | 80.0% accuracy after 20 |")


def test_filling_again_changes_nothing(folder):
    page = '# Title\n\n<!-- fill: findings("window") -->\nold\n<!-- end -->\n<!-- a remark -->\n'
    once = filled(page, folder)
    assert "old" not in once
    assert once.endswith("<!-- end -->\n<!-- a remark -->\n")
    assert filled(once, folder) == once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "error"),
    [
        ('<!-- fill: findings("window") -->\nno end', ValueError),
        ("<!-- end -->", ValueError),
        ('<!-- fill: findings("a") --><!-- fill: findings("b") --><!-- end -->', ValueError),
        ("<!-- fill: nonsense() --><!-- end -->", jinja2.UndefinedError),
        ('<!-- fill: findings("absent") --><!-- end -->', FileNotFoundError),
        ('<!-- fill: at("table2", "CIFAR-10", "paper", 3).metric --><!-- end -->', KeyError),
    ],
)
def test_a_place_that_cannot_be_filled_is_refused(folder, page, error):
    with pytest.raises(error):
        filled(page, folder)


@pytest.mark.slow
def test_the_command_fills_pages(folder):
    page = folder.parent / "page.md"
    page.write_text('<!-- fill: findings("window") --><!-- end -->\n')
    command = [sys.executable, "-m", "cdeq_experiments.pages.fill", str(page)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WikiText-2" in page.read_text()


@pytest.mark.slow
def test_the_readme_has_its_picture_drawn_and_results_are_rendered_again(tmp_path):
    pictured = table_results("Tiny-ImageNet (40 classes)", methods=("picard", "hyperdeq", "paper"))
    results, page = tmp_path / "results" / "small", tmp_path / "README.md"
    for found in (pictured, ablation_results(["m = 1", "m = 7"], counts=(1, 8))):
        write_pages(replace(found, scale="small"), results)
    page.write_text("# Title\n")
    (tmp_path / "docs").mkdir()
    (results / "window.md").write_text("old")
    main([str(page), str(results)])
    assert (tmp_path / "docs" / "picture.png").stat().st_size > 5000
    assert (results / "window.md").read_text().startswith("# An ablation")


def test_results_on_disk_are_whole():
    for path in sorted((ROOT / "results" / "small").glob("*.json")):
        found = Results.from_json(path)
        page = path.with_suffix(".md").read_text()
        assert (found.experiment, found.scale) == (path.stem, "small")
        assert all(line in page for line in (found.command, found.commit, *found.findings))
        assert "dirty" not in found.commit
        assert path.with_suffix(".png").stat().st_size > 5000

"""Pages of results: tables in Markdown, the files that are written, the terminal, plots."""

import io
from dataclasses import replace

import matplotlib
import pytest
from markdown_it import MarkdownIt
from matplotlib.image import imread
from rich.console import Console

from builders import results, row, teacher_result
from cdeq.evaluation import Results
from cdeq_experiments.pages import show, write_pages
from cdeq_experiments.pages.frame import with_published
from cdeq_experiments.pages.plots import draw_picture
from cdeq_experiments.pages.tables import tables

MODELS = ("picard", "anchored", "paper")
HOSTILE = "<b>*x*</b> | `y` [z](javascript:alert(1))"


def table_results(dataset="CIFAR-10", methods=MODELS, **fields):
    """Table 2 on one data set: two seeds of each method at 1, 2 and 8 evaluations, and two explicit models."""
    rows = [
        row(
            method,
            k,
            0.5 + 0.02 * k + 0.05 * i + 0.01 * seed,
            dataset=dataset,
            distance=0.5 / k / (i + 1),
            seed=seed,
            f_equivalents=k + 0.3,
        )
        for i, method in enumerate(methods)
        for k in (1, 2, 8)
        for seed in (0, 1)
    ]
    rows += [row("alexnet", None, 0.57, dataset=dataset), row("hrnet", None, 0.6, dataset=dataset)]
    page = {
        "layout": "table",
        "title": "Table 2",
        "notes": ["A note."],
        "counts": {dataset: [1, 8]},
    }
    return results(*rows, **({"experiment": "table2", "page": page} | fields))


def ablation_results(names, counts=(8,), reported=8, axes=None, experiment="window"):
    rows = [
        row(name, k, 200.0 + i + k, dataset="WikiText-2", distance=0.1 + i / 100)
        for i, name in enumerate(names)
        for k in counts
    ]
    variants = []
    for name in names:
        fields = dict(part.split(" = ") for part in name.split(", "))
        down, across = axes or (None, None)
        variants.append({"name": name, "row": fields.get(down), "column": fields.get(across)})
    page = {
        "layout": "ablation",
        "title": "An ablation",
        "default": names[0],
        "axes": axes,
        "variants": variants,
        "counts": {"WikiText-2": list(counts)},
        "reported": {"WikiText-2": reported},
    }
    teacher = teacher_result(
        "WikiText-2", metric_name="perplexity", metric=195.0, higher_is_better=False
    )
    return results(*rows, teachers=[teacher], experiment=experiment, page=page)


def figure_results(layout):
    """Results of the layouts that are neither a table nor an ablation."""
    both = ("paper", "anchored")
    rows = {
        "residuals": [row(m, k, None, residual=0.5**k) for m in both for k in (1, 2, 3)],
        "cost": [
            row(m, None, None, train_seconds=s) for m, s in (("paper", 1.0), ("anchored", None))
        ],
        "overhead": [row(m, None, None, figures={"storage, MB": 3.0, "points": 1.0}) for m in both],
        "certified": [
            row(f"{who} to {tol}", None, None, f_equivalents=5.0, figures={"by the student": 0.5})
            for who in ("solver", "certified")
            for tol in ("0.1", "0.01")
        ],
        "teachers": [row("IGNN", k, 0.5, figures={"validation score": 0.7}) for k in (1, 2)],
    }[layout]
    page = {"layout": layout, "title": "A figure", "counts": {"Blocks": [1, 2]}}
    teacher = teacher_result(name="IGNN")
    return results(*rows, teachers=[teacher], experiment=layout, page=page)


FIGURES = ("residuals", "cost", "overhead", "certified", "teachers")


def by_caption(found, dataset):
    return {table.caption: table for table in tables(found)[dataset]}


# Tables.


def test_a_table_for_each_quantity_with_the_counts_shown():
    found = by_caption(with_published(table_results()), "CIFAR-10")
    accuracy = found["Accuracy"]
    assert accuracy.head == ["evaluations", "1", "8"]
    assert accuracy.rows == [
        ["Picard", "52.5 ±0.7%", "66.5 ±0.7%"],
        ["Anchored", "57.5 ±0.7%", "71.5 ±0.7%"],
        ["Paper", "**62.5 ±0.7%** (47.12)", "**76.5 ±0.7%** (74.04)"],
    ]
    assert found["Distance to the equilibrium"].rows[-1] == ["Paper", "**0.167**", "**0.0208**"]
    assert found["Time of one batch"].rows[-1] == ["Paper", "100 ms (0.52)", "100 ms (0.87)"]
    assert found["Without a number of evaluations"].rows == [
        ["AlexNet", "57.0% (57)", "100 ms (0.75)"],
        ["HRNet", "**60.0%** (76.8)", "100 ms (1.64)"],
    ]
    assert found["Gap closed"].rows[0] == ["Picard", "0%", "51%"]
    assert "Top-5 accuracy" not in found


def test_a_method_that_diverged_has_dashes():
    found = results(
        *(row(m, 1, s) for m, s in (("picard", 0.5), ("paper", None), ("anchored", 0.6))),
        page={"layout": "table", "counts": {"Blocks": [1]}},
    )
    rows = by_caption(found, "Blocks")["Accuracy"].rows
    assert rows == [["Picard", "50.0%"], ["Anchored", "**60.0%**"]]


def test_an_ablation_is_a_list_with_the_papers_number_at_its_count():
    found = ablation_results(["m = 1", "m = 7"], counts=(1, 2, 8))
    [table] = tables(with_published(found))["WikiText-2"]
    assert table.head[1:4] == ["perplexity at 1", "perplexity at 2", "perplexity at 8"]
    assert table.head[4:] == ["distance at 1", "distance at 8", "time at 8"]
    assert table.rows[1][1:4] == ["202.0", "203.0", "209.0 (25.93)"]
    assert table.rows[0][4:] == ["**0.100**", "**0.100**", "100 ms (0.37)"]


def test_two_fields_are_a_grid():
    names = [f"gamma = {g}, rho = {r}" for r in ("0.05", "0.1") for g in ("0.5", "1")]
    found = ablation_results(names, axes=["rho", "gamma"], experiment="gamma-rho")
    [table] = tables(with_published(found))["WikiText-2"]
    assert table.caption == "Perplexity at 8 evaluations"
    assert table.head == ["rho \\ gamma", "0.5", "1"]
    assert table.rows == [
        ["0.05", "**208.0** (93.57)", "209.0 (35.29)"],
        ["0.1", "210.0 (89.08)", "211.0 (34.24)"],
    ]


@pytest.mark.parametrize("layout", FIGURES)
def test_the_other_layouts_have_a_table_each(layout):
    [table] = tables(figure_results(layout))["Blocks"]
    assert {len(cells) for cells in table.rows} == {len(table.head)}


def test_shares_of_training_stand_beside_the_papers():
    found = figure_results("cost")
    rows = [replace(r, dataset="CIFAR-10") for r in found.rows]
    found = replace(found, rows=tuple(rows), teachers=(teacher_result("CIFAR-10"),))
    [table] = tables(with_published(found))["CIFAR-10"]
    assert table.rows[1:] == [["Paper", "1 s", "33.3% (7.8)"], ["Anchored", "–", "–"]]


# Files.


ALL = {
    "table": table_results(),
    "list": ablation_results(["m = 1", "m = 7"], counts=(1, 2, 8)),
    "dots": ablation_results(["beta = 0.5", "beta = 0.9"], experiment="beta"),
    "grid": ablation_results(["a = 1, b = 1", "a = 1, b = 2"], axes=["a", "b"]),
    **{layout: figure_results(layout) for layout in FIGURES},
}


@pytest.mark.slow
@pytest.mark.parametrize("found", ALL.values(), ids=ALL)
def test_three_files_are_written(found, tmp_path):
    settings = dict(matplotlib.rcParams)
    paths = write_pages(found, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == [found.experiment + s for s in (".json", ".md", ".png")]
    assert dict(matplotlib.rcParams) == settings
    kept = Results.from_json(paths[0])
    assert kept == replace(with_published(found), findings=kept.findings)
    page = paths[1].read_text()
    assert page.startswith(f"# {found.page['title']}\n\n")
    assert all(f"\n- {line}\n" in page for line in kept.findings)
    assert bool(kept.findings) == (found.page["layout"] not in ("cost", "overhead", "teachers"))
    assert f"`{found.command}` at commit {found.commit}." in page
    assert f"]({found.experiment}.png)" in page
    assert "cpu a processor" in page
    assert page.endswith("\n")
    assert "\n\n\n" not in page
    picture = imread(paths[2])
    assert picture.shape[1] > 500
    assert picture.std() > 0.01  # something is drawn


@pytest.mark.slow
@pytest.mark.parametrize("found", ALL.values(), ids=ALL)
def test_every_table_of_a_page_is_one(found, tmp_path):
    page = write_pages(found, tmp_path)[1].read_text()
    html = MarkdownIt("commonmark").enable("table").render(page)
    expected = sum(map(len, tables(found).values()))
    assert html.count("<table>") == expected
    for line in page.splitlines():
        assert not line.startswith("|") or line.endswith("|")


@pytest.mark.slow
def test_what_the_paper_reports_is_explained_where_it_is_shown(tmp_path):
    page = write_pages(table_results(), tmp_path)[1].read_text()
    assert "(ImageNet for CIFAR-10;" in page
    assert "± is the standard deviation over seeds, 2 at most." in page
    page = write_pages(table_results("Blocks"), tmp_path)[1].read_text()
    assert "In brackets" not in page


@pytest.mark.slow
def test_a_page_of_several_runs_says_which_seconds_it_has(tmp_path):
    found = table_results()
    assert "several runs" not in write_pages(found, tmp_path)[1].read_text()
    found = replace(found, command="cdeq reproduce table2 and cdeq reproduce table2 --add")
    assert "Put together from several runs" in write_pages(found, tmp_path)[1].read_text()


@pytest.mark.slow
def test_results_of_earlier_code_are_marked(tmp_path):
    found = table_results()
    assert "Carried over" not in write_pages(found, tmp_path)[1].read_text()
    found = replace(found, page=found.page | {"carried_over": True})
    assert "Carried over" in write_pages(found, tmp_path)[1].read_text()


@pytest.mark.slow
def test_a_run_in_which_everything_diverged_can_still_be_written(tmp_path):
    rows = (row("picard", 1, None), row("anchored", 1, None))
    page = {"layout": "table", "title": "T", "counts": {"Blocks": [1]}}
    paths = write_pages(results(*rows, teachers=[teacher_result(metric=None)], page=page), tmp_path)
    assert all(path.stat().st_size for path in paths)


@pytest.mark.slow
def test_names_with_marks_stay_names(tmp_path):
    page = write_pages(table_results(HOSTILE), tmp_path)[1].read_text()
    html = MarkdownIt("commonmark").enable("table").render(page)
    assert "&lt;b&gt;*x*&lt;/b&gt;" in html
    assert "<b>" not in html
    assert 'href="' not in html


# The terminal and the README's picture.


def shown(found):
    console = Console(file=io.StringIO(), width=120)
    show(console, found)
    return console.file.getvalue()


def test_a_table_is_shown_as_a_table():
    text = shown(table_results())
    assert "table2 · CIFAR-10" in text
    assert "62.5 ±0.7%" in text
    assert "0.0208" in text
    assert "54.5" not in text  # at 2, which the page does not show


def test_of_all_others_the_findings_are_shown():
    text = shown(ALL["list"])
    assert "WikiText-2. With 8 evaluations one seed cannot tell" in text
    assert "*" not in text


def test_what_has_no_findings_is_shown_as_it_is():
    assert "of the teacher's" in shown(ALL["cost"])


@pytest.mark.slow
def test_the_picture(tmp_path):
    path = draw_picture(table_results(), "CIFAR-10", tmp_path / "picture.png")
    assert imread(path).shape[:2] == (570, 1080)

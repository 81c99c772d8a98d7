"""Tables, plots, findings and the page of a comparison, on results made up by hand."""

import dataclasses
import io
import math
import re
import sys
from html.parser import HTMLParser

import pytest
from rich.console import Console

from builders import results, row, teacher_result
from cdeq.evaluation import (
    curves,
    plot_results,
    results_table,
    seconds_text,
    small_text,
    style,
)
from cdeq.evaluation.findings import findings
from cdeq.evaluation.page import write_page
from cdeq.evaluation.plot import spread_out

STEPS = (1, 2, 3, 5, 8, 12)

# Made up, not measured. method: (metrics, distances, seconds per step, cost beside steps)
SYNTHETIC_ACCURACY = {
    "picard": ([0.40, 0.48, 0.60, 0.75, 0.86, 0.93], [0.95, 0.85, 0.76, 0.53, 0.34, 0.23], 4, 0),
    "anderson": ([0.40, 0.51, 0.66, 0.82, 0.92, 0.961], [0.95, 0.83, 0.7, 0.4, 0.2, 0.05], 5, 0),
    "broyden": (
        [0.40, 0.45, 0.55, math.nan, 0.80, 0.91],
        [0.95, 0.9, 0.8, math.nan, 0.4, 0.3],
        7,
        0,
    ),
    "paper": ([0.86, 0.91, 0.92, 0.92, 0.90, 0.88], [0.42, 0.35, 0.34, 0.36, 0.40, 0.42], 4.5, 0),
    "anchored": (
        [0.94, 0.961, 0.962, 0.963, 0.963, 0.963],
        [0.3, 0.24, 0.21, 0.18, 0.14, 0.1],
        4.2,
        0.8,
    ),
}
SYNTHETIC_PERPLEXITY = {
    "picard": ([90.0, 70.0, 50.0, 31.0, 25.1, 24.3], [0.95, 0.8, 0.6, 0.3, 0.1, 0.04], 4, 0),
    "paper": ([60.0, 75.0, 80.0, 90.0, 120.0, 400.0], [0.9, 0.91, 0.92, 0.93, 0.94, 0.95], 5, 0),
    "anchored": ([40.0, 30.0, 27.0, 25.0, 24.1, 24.0], [0.5, 0.4, 0.3, 0.2, 0.12, 0.06], 4, 0),
}


def synthetic_rows(dataset, made_up, seed=0, shift=0.0):
    return [
        row(
            method,
            k,
            metrics[i] + shift,
            dataset=dataset,
            seed=seed,
            distance=distances[i],
            residual=distances[i] / 3,
            seconds=1e-3 * (each * k + 0.9),
            f_equivalents=k + extra,
        )
        for method, (metrics, distances, each, extra) in made_up.items()
        for i, k in enumerate(STEPS)
    ]


DIGITS = teacher_result("digits", name="conv DEQ", metric=0.963, steps=24)
PROSE = dataclasses.replace(
    DIGITS, dataset="prose", metric_name="perplexity", metric=24.0, higher_is_better=False
)
ROWS = (
    *synthetic_rows("digits", SYNTHETIC_ACCURACY),
    row("gcn", None, 0.951, dataset="digits"),
    *synthetic_rows("prose", SYNTHETIC_PERPLEXITY),
)


def synthetic_results(*, rows=ROWS, teachers=(DIGITS, PROSE), **fields):
    return results(*rows, teachers=teachers, **({"experiment": "Synthetic example"} | fields))


RESULTS = synthetic_results()


def one(lines, *words):
    """The only finding with all these words."""
    (found,) = [line for line in lines if all(word in line for word in words)]
    return found


# findings


def test_findings_of_a_student_that_wins():
    lines = findings(RESULTS, "digits")
    assert lines[0] == (
        "The Anchored student reaches 96.1% accuracy with 2 evaluations (with its start, the cost "
        "of 2.8); Anderson has 51.0%; the converged teacher has 96.3% after 24."
    )
    assert one(lines, "comes within 1%", "Anchored") == (
        "The Anchored student comes within 1% of the teacher's accuracy with 2 evaluations, "
        "9.3 ms per batch; the fastest solver, Anderson, with 12, 60.9 ms: 6.5 times the student's."
    )
    assert not [line for line in lines if "Anchored" in line and "worse" in line]


def test_findings_of_a_student_that_loses():
    lines = findings(RESULTS, "digits")
    assert one(lines, "Paper student does not come within 1%", "Anderson does with 12 evaluations")
    assert one(lines, "Paper", "nearest", "at 3 (distance 0.340)", "worse (0.420 at 12)")

    lines = findings(RESULTS, "prose")
    assert lines[1] == (
        "The Paper student reaches perplexity 75.00 with 2 evaluations; Picard is ahead there, "
        "with 70.00; the converged teacher has 24.00 after 24."
    )
    assert one(lines, "Paper student does not come", "with up to 12 evaluations.")
    assert one(lines, "Paper", "nearest", "at 1 (distance 0.900)", "worse (0.950 at 12)")


def test_findings_with_lower_is_better():
    lines = findings(RESULTS, "prose")
    assert lines[0].startswith(
        "The Anchored student reaches perplexity 30.00 with 2 evaluations; Pic"
    )
    assert one(lines, "comes within 1%", "8 evaluations", "no solver does")


def test_the_default_recipe_comes_first():
    rows = [
        dataclasses.replace(row, method="corrected")
        for row in RESULTS.rows
        if row.method == "paper"
    ]
    lines = findings(dataclasses.replace(RESULTS, rows=(*RESULTS.rows, *rows)), "prose")
    told = [line.split()[1] for line in lines if "with 2 evaluations" in line]
    assert told == ["Corrected", "Anchored", "Paper"]


def changed(method="anchored", steps=None, **fields):
    """RESULTS with some rows changed."""
    rows = [
        dataclasses.replace(row, **fields)
        if row.method == method and steps in (None, row.steps)
        else row
        for row in RESULTS.rows
    ]
    return dataclasses.replace(RESULTS, rows=rows)


def test_slower_than_the_solver_is_said():
    lines = findings(changed(seconds=10.0), "digits")
    assert "0.0061 times the student's" in one(lines, "comes within 1%", "Anchored")


def test_leaving_the_teacher_again_is_said():
    lines = findings(changed(steps=12, metric=0.5), "digits")
    assert "It does not stay there: 50.0% at 12." in one(lines, "comes within", "Anchored")


def test_cautions():
    teacher = dataclasses.replace(RESULTS.teachers[0], metric=0.90, residual=0.2)
    lines = findings(synthetic_results(teachers=(teacher, RESULTS.teachers[1])), "digits")
    assert one(lines, "better before it converges", "Anderson at 12 steps: 96.1%, converged: 90.0%")
    assert one(lines, "residual is 0.200", "not at an equilibrium")
    assert one(lines, "One seed only")


def test_a_student_that_diverged():
    results = changed("paper", metric=math.nan, distance=math.nan)
    assert one(findings(results, "digits"), "Paper student gave no finite accuracy")


def test_findings_without_students_rows_or_scores():
    for rows in ([], [r for r in RESULTS.rows if r.method == "gcn"]):
        assert isinstance(findings(synthetic_results(rows=rows), "digits"), list)
    teachers = [dataclasses.replace(teacher, metric=None) for teacher in RESULTS.teachers]
    rows = [dataclasses.replace(row, metric=None) for row in RESULTS.rows]
    lines = findings(synthetic_results(teachers=teachers, rows=rows), "digits")
    assert not [line for line in lines if "accuracy" in line]
    assert one(lines, "Paper", "nearest")


# tables


@pytest.mark.parametrize("seeds", [1, 3])
def test_table_fits_a_terminal(seeds):
    rows = [
        row
        for seed in range(seeds)
        for row in synthetic_rows("digits", SYNTHETIC_ACCURACY, seed, 0.001 * seed)
    ]
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(results_table(synthetic_results(rows=rows), "digits"))
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 110
    for word in ("Anchored", "distance", "conv DEQ, converged: 96.3% accuracy", "24 steps"):
        assert word in text
    assert ("96.2 ±0.1%" in text) == (seeds == 3)


def test_results_show_themselves_as_a_table():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(RESULTS.table("prose"))
    text = console.export_text()
    assert "…" not in text
    assert "Synthetic example · prose" in text
    console.print(RESULTS.table())
    assert "Synthetic example · digits" in console.export_text()


def test_quantities_and_counts_can_be_chosen():
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(results_table(RESULTS, "digits", ("metric", "f_equivalents"), (1, 2)))
    text = console.export_text()
    assert "cost in steps" in text
    assert "2.8" in text
    assert "residual" not in text.split("steps", 2)[2]
    assert "96.3%" not in text.split("explicit")[1]  # only at 5 steps and more


def test_a_diverged_seed_is_not_averaged_away():
    row = next(r for r in RESULTS.rows if r.method == "anchored")
    other = dataclasses.replace(row, seed=1, metric=math.nan)
    points = curves(synthetic_results(rows=[row, other]), "digits")["anchored"]
    assert points[0].metric is None
    assert points[0].seeds == 2


def test_unknown_method_has_a_style():
    assert style("something new").name == "something new"
    assert style("something new") == style("something new")
    assert style("something new", explicit=True).kind == "explicit"


def test_numbers_are_short():
    assert [small_text(x) for x in (0.2941, 0.0085, 3.14e-5, 123.4, 0, None)] == [
        "0.294", "0.00850", "3.1e-05", "123", "0", "–",
    ]  # fmt: skip
    assert [seconds_text(x) for x in (8.5e-4, 0.01234, 0.5, 1.25, 840, None)] == [
        "850 µs", "12.3 ms", "500 ms", "1.25 s", "14 min", "–",
    ]  # fmt: skip


# plots


def test_labels_are_spread_out():
    places = spread_out([0.1, 0.11, 0.12, 0.5], 0.1)
    assert places == pytest.approx([0.01, 0.11, 0.21, 0.5])
    assert spread_out([0.98, 0.99, 1.0], 0.1) == pytest.approx([0.8, 0.9, 1.0])
    assert spread_out([0.0, 0.0, 0.15], 0.1) == pytest.approx([0.0, 0.1, 0.2])
    assert spread_out([], 0.1) == []


@pytest.mark.slow
def test_plots_write_files_and_leave_settings_alone(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    paths = plot_results(RESULTS, "digits", tmp_path / "plots")
    assert dict(matplotlib.rcParams) == before
    assert {path.suffix for path in paths} == {".png", ".svg"}
    assert len(paths) == len(set(paths)) == 13
    assert all(path.stat().st_size > 1000 for path in paths)


def test_missing_matplotlib_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"cdeq\[demo\]"):
        plot_results(RESULTS, "digits", tmp_path)
    text = write_page(RESULTS, tmp_path / "report.html").read_text()
    assert "No plots" in text


@pytest.mark.slow
@pytest.mark.parametrize("rows", [[], RESULTS.rows[:1], RESULTS.rows[30:31]])
def test_plots_of_almost_nothing(tmp_path, rows):
    pytest.importorskip("matplotlib")
    results = synthetic_results(rows=rows)
    assert len(plot_results(results, "digits", tmp_path, formats=["svg"])) == 6


# the page


class Page(HTMLParser):
    """Checks that tags nest and keeps the cells of every table row."""

    def __init__(self):
        super().__init__()
        self.open, self.rows, self.tags, self.ids = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("page")
    evil = "<script>alert('&')</script>"
    rename = {"digits": evil, "prose": "prose"}
    results = synthetic_results(
        experiment=f"Example {evil}",
        command="cdeq demo --name '<b>'",
        hardware={evil: evil},
        teachers=[dataclasses.replace(t, dataset=rename[t.dataset]) for t in RESULTS.teachers],
        rows=[dataclasses.replace(r, dataset=rename[r.dataset]) for r in RESULTS.rows]
        + [dataclasses.replace(RESULTS.rows[0], dataset=evil, method=evil)],
    )
    return write_page(results, folder / "report.html", notes=[evil]).read_text(encoding="utf-8")


@pytest.mark.slow
def test_page_is_self_contained(page):
    assert not re.search(r"https?://", page)
    assert not re.search(r"(src|href)=\"(?!#|data:)", page)
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page


@pytest.mark.slow
def test_page_is_escaped_and_well_formed(page):
    parsed = Page()
    parsed.feed(page)
    parsed.close()
    assert parsed.open == []
    assert "script" not in parsed.tags
    assert "b" in parsed.tags  # the best values; not the one in the command
    assert "--name &#39;&lt;b&gt;&#39;" in page
    assert parsed.tags.count("svg") == 12
    assert len(parsed.ids) == len(set(parsed.ids))


@pytest.mark.slow
def test_page_has_every_row(page):
    parsed = Page()
    parsed.feed(page)
    for one in RESULTS.rows:
        name, steps = style(one.method).name, "–" if one.steps is None else str(one.steps)
        assert any(
            cells[0] == name and cells[1] == steps and cells[4] == small_text(one.distance)
            for cells in parsed.rows
            if len(cells) == 9
        ), one


@pytest.mark.slow
def test_page_takes_drawn_plots(tmp_path):
    pytest.importorskip("matplotlib")
    plots = {"digits": plot_results(RESULTS, "digits", tmp_path)}
    text = write_page(RESULTS, tmp_path / "a.html", plots=plots).read_text(encoding="utf-8")
    assert text.count("<svg") == 6


def test_findings_that_are_known_are_shown(tmp_path):
    results = synthetic_results(
        teachers=RESULTS.teachers[:1], rows=RESULTS.rows[:31], findings=("What <we> found.",)
    )
    text = write_page(results, tmp_path / "a.html", plots={}).read_text(encoding="utf-8")
    assert "What &lt;we&gt; found." in text
    assert "One seed only" not in text

"""Tables laid out as the paper's, on results written by hand."""

import dataclasses
import math

import pytest

from cdeq.evaluation import Results, Row, TeacherResult
from cdeq_experiments.paper_table import gap_closed, nearest_methods, paper_table, write_table
from cdeq_experiments.table3 import claims

IGNN = TeacherResult(
    dataset="Blocks",
    name="IGNN",
    parameters=1200,
    metric_name="accuracy",
    metric=0.8,
    higher_is_better=True,
    steps=20,
    residual=1e-4,
    train_seconds=3.0,
)


def row(method, steps, metric, distance=None, *, seed=0, dataset="Blocks"):
    return Row(
        dataset=dataset,
        seed=seed,
        method=method,
        steps=steps,
        metric=metric,
        distance=distance,
        residual=None if distance is None else distance / 2,
        seconds=0.01 * (steps or 1),
        f_equivalents=None if steps is None else steps + 0.3,
        parameters=1200,
    )


def results(*rows, teachers=(IGNN,)):
    return Results(
        experiment="nodes",
        scale="tiny",
        commit="abc",
        command="cdeq reproduce table3",
        hardware={"cpu": "a processor", "cores": 2},
        teachers=teachers,
        rows=rows,
    )


TYPICAL = (
    row("picard", 1, 0.5, 0.9),
    row("picard", 2, 0.6, 0.8),
    row("anderson", 1, 0.5, 0.9),
    row("anderson", 2, 0.7, 0.5),
    row("anchored", 1, 0.77, 0.2),
    row("anchored", 2, 0.83, 0.6),
    row("gcn", None, 0.79),
    row("gat", None, 0.81),
)


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows_of(table):
    """The data cells of a Markdown table by (model, evaluations)."""
    return {(cells[0], cells[2]): cells for cells in map(cells_of, table.splitlines()[2:])}


# The share of the gap.


@pytest.mark.parametrize(
    ("method", "steps", "expected"),
    [
        ("picard", 1, 0.0),
        ("picard", 2, 1 / 3),
        ("anderson", 2, 2 / 3),
        ("anchored", 1, 0.9),
        ("anchored", 2, 1.1),
    ],
)
def test_the_gap_closed_by_hand(method, steps, expected):
    assert gap_closed(results(*TYPICAL), "Blocks", method, steps) == pytest.approx(expected)


def test_a_method_worse_than_one_step_closes_less_than_nothing():
    found = results(row("picard", 1, 0.5, 0.9), row("paper", 1, 0.35, 0.9))
    assert gap_closed(found, "Blocks", "paper", 1) == pytest.approx(-0.5)


@pytest.mark.parametrize(("name", "share"), [("error", 0.75), ("perplexity", math.log(2, 3))])
def test_a_metric_that_falls_has_its_gap_too(name, share):
    falling = dataclasses.replace(IGNN, metric_name=name, metric=20.0, higher_is_better=False)
    found = results(row("picard", 1, 60.0, 0.9), row("anchored", 1, 30.0, 0.2), teachers=(falling,))
    assert gap_closed(found, "Blocks", "anchored", 1) == pytest.approx(share)


def test_the_gap_is_between_means_over_seeds():
    teachers = (
        dataclasses.replace(IGNN, metric=0.7),
        dataclasses.replace(IGNN, metric=0.9),
    )
    rows = [
        row("picard", 1, 0.4, 0.9),
        row("picard", 1, 0.6, 0.9, seed=1),
        row("anchored", 1, 0.6, 0.2),
        row("anchored", 1, 0.7, 0.2, seed=1),
    ]
    found = results(*rows, teachers=teachers)
    assert gap_closed(found, "Blocks", "anchored", 1) == pytest.approx(0.15 / 0.3)


@pytest.mark.parametrize(
    "rows",
    [
        (row("picard", 1, 0.8, 0.9), row("anchored", 1, 0.7, 0.2)),  # no gap to close
        (row("anchored", 1, 0.7, 0.2),),  # not known where one step is
        (row("picard", 2, 0.6, 0.9), row("anchored", 1, 0.7, 0.2)),
        (row("picard", 1, 0.5, 0.9), row("anchored", 2, 0.7, 0.2)),  # not at this count
        (row("picard", 1, 0.5, 0.9),),
        (row("picard", 1, None, None), row("anchored", 1, 0.7, 0.2)),  # diverged
        (row("picard", 1, 0.5, 0.9), row("anchored", 1, float("nan"), None)),
    ],
)
def test_no_gap_is_made_up(rows):
    assert gap_closed(results(*rows), "Blocks", "anchored", 1) is None


def test_a_teacher_that_diverged_leaves_no_gap():
    found = results(*TYPICAL, teachers=(dataclasses.replace(IGNN, metric=None),))
    assert gap_closed(found, "Blocks", "anchored", 1) is None


# The table.


def test_every_line_has_as_many_cells():
    lines = paper_table(results(*TYPICAL), "Blocks", (1, 2)).splitlines()
    assert len(lines) == 2 + len(TYPICAL)
    assert {line.count("|") for line in lines} == {9}
    assert all(line.startswith("|") and line.endswith("|") for line in lines)
    assert set(lines[1]) <= set("|-:")
    assert all(all(cells_of(line)) for line in lines)  # an empty cell would hide a fault


def test_explicit_models_come_first_with_dashes():
    table = paper_table(results(*TYPICAL), "Blocks", (1, 2))
    data = [cells_of(line) for line in table.splitlines()[2:]]
    assert [cells[2] for cells in data] == ["–"] * 2 + ["1"] * 3 + ["2"] * 3
    for cells in data[:2]:
        assert [cells[i] for i in (2, 4, 6, 7)] == ["–"] * 4
        assert cells[5] == "10 ms"


def test_only_the_counts_asked_for_are_shown():
    table = paper_table(results(*TYPICAL), "Blocks", (2,))
    assert {cells[2] for cells in map(cells_of, table.splitlines()[2:])} == {"–", "2"}


def test_the_best_of_a_block_is_bold():
    found = rows_of(paper_table(results(*TYPICAL), "Blocks", (1, 2)))
    bold = {
        (model, steps, place)
        for (model, steps), cells in found.items()
        for place in (3, 4)
        if cells[place].startswith("**")
    }
    assert bold == {
        ("GAT", "–", 3),
        ("Anchored", "1", 3),
        ("Anchored", "1", 4),
        ("Anchored", "2", 3),
        ("Anderson", "2", 4),
    }
    assert found["Anchored", "1"][3] == "**77.0%**"
    assert found["Anchored", "1"][7] == "90%"
    assert found["Anchored", "1"][6] == "1.3"


def test_the_best_of_a_falling_metric_is_the_lowest():
    falling = dataclasses.replace(
        IGNN, metric_name="perplexity", metric=20.0, higher_is_better=False
    )
    rows = (row("picard", 1, 60.0, 0.9), row("anchored", 1, 30.0, 0.2))
    found = rows_of(paper_table(results(*rows, teachers=(falling,)), "Blocks", (1,)))
    assert found["Anchored", "1"][3].startswith("**")
    assert not found["Picard", "1"][3].startswith("**")


def test_a_method_that_diverged_has_dashes_and_is_never_best():
    rows = (row("picard", 1, 0.5, 0.9), row("paper", 1, float("nan"), float("inf")))
    found = rows_of(paper_table(results(*rows), "Blocks", (1,)))
    assert [found["Paper", "1"][i] for i in (3, 4, 7)] == ["–"] * 3
    assert found["Picard", "1"][3] == "**50.0%**"


def test_the_spread_over_seeds_is_shown():
    rows = [
        row("picard", 1, metric, distance, seed=seed)
        for seed, (metric, distance) in enumerate([(0.5, 0.8), (0.6, 0.9), (0.7, 1.0)])
    ]
    found = rows_of(paper_table(results(*rows), "Blocks", (1,)))
    assert found["Picard", "1"][3] == "**60.0 ±10.0%**"
    assert found["Picard", "1"][4] == "**0.900**"
    assert "±" not in paper_table(results(rows[0]), "Blocks", (1,))


# Which is nearest.


def test_the_nearest_at_each_count():
    names = ("picard", "anderson", "anchored")
    assert nearest_methods(results(*TYPICAL), "Blocks", names) == {1: "anchored", 2: "anderson"}
    assert nearest_methods(results(*TYPICAL), "Blocks", ("picard",)) == {1: "picard", 2: "picard"}
    assert nearest_methods(results(*TYPICAL), "Blocks", ("gcn", "absent")) == {}


def test_a_diverged_method_is_not_the_nearest():
    rows = (row("picard", 1, 0.5, 0.9), row("paper", 1, None, None))
    assert nearest_methods(results(*rows), "Blocks", ("paper", "picard")) == {1: "picard"}


def test_an_exact_equilibrium_is_the_nearest():
    rows = (row("picard", 1, 0.5, 0.9), row("anchored", 1, 0.8, 0.0))
    assert nearest_methods(results(*rows), "Blocks", ("picard", "anchored")) == {1: "anchored"}


# What is claimed.


def test_claims_say_who_is_lost_to_and_where():
    rows = (
        *TYPICAL,
        row("eignn", 1, 0.78, 0.3),
        row("eignn", 2, 0.82, 0.7),
        row("mignn", 5, 0.99, 0.1),
        row("anchored", 5, 0.8, 0.05),
    )
    (line,) = claims(results(*rows))
    assert line.startswith("- Blocks, Anchored: closes 90.0% and 110.0% of the gap at 1 and 2 ")
    assert "less accurate than EIGNN at 1, MIGNN at 5;" in line
    assert line.endswith("not the nearest to the equilibrium at 2.")


def test_claims_say_when_nothing_is_lost():
    rows = (
        row("picard", 1, 0.5, 0.9),
        row("picard", 2, 0.6, 0.8),
        row("anchored", 1, 0.5, 0.2),  # as accurate is not less accurate
        row("anchored", 2, 0.8, 0.1),
    )
    (line,) = claims(results(*rows))
    assert "none of the other implicit models is more accurate" in line
    assert line.endswith("nearest to the equilibrium at every count up to 2.")


def test_each_recipe_and_data_set_has_its_claim():
    other = dataclasses.replace(IGNN, dataset="Digits")
    rows = (*TYPICAL, row("paper", 1, 0.4, 0.95))
    rows += tuple(dataclasses.replace(r, dataset="Digits") for r in rows)
    lines = claims(results(*rows, teachers=(IGNN, other)))
    assert sorted(line.partition(":")[0] for line in lines) == [
        "- Blocks, Anchored",
        "- Blocks, Paper",
        "- Digits, Anchored",
        "- Digits, Paper",
    ]
    paper = next(line for line in lines if line.startswith("- Blocks, Paper"))
    assert "closes -33.3% and – of the gap" in paper
    assert "less accurate than Picard at 1, Anderson at 1" in paper


def test_explicit_models_are_no_part_of_the_claims():
    (line,) = claims(results(*TYPICAL))
    assert "GAT" not in line
    assert "GCN" not in line


def test_claims_name_a_few_step_model_that_is_more_accurate():
    (line,) = claims(results(*TYPICAL, row("few_step", 1, 0.79, 0.7)))
    assert "less accurate than Few-step at 1" in line


def test_a_student_that_diverged_is_not_said_to_be_the_most_accurate():
    rows = [row("picard", k, 0.5, 0.9) for k in (1, 2, 5)]
    rows += [row("paper", k, None, None) for k in (1, 2, 5)]
    (line,) = claims(results(*rows))
    assert "none of the other implicit models is more accurate" not in line


def test_claims_where_everything_diverged():
    (line,) = claims(results(row("picard", 1, None, None), row("paper", 1, None, None)))
    assert "nearest to the equilibrium at every count" not in line


def test_no_student_no_claim():
    assert claims(results(row("picard", 1, 0.5, 0.9))) == []


# The files.


def test_three_files_are_written(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    eignn = dataclasses.replace(IGNN, name="EIGNN", metric=0.75)
    made = results(*TYPICAL, teachers=(IGNN, eignn))
    folder = tmp_path / "new" / "results"
    paths = write_table(
        made, folder, title="Table 3", shown=(1, 2), notes=("A note.",), claims=("- A claim.",)
    )
    assert [path.name for path in paths] == ["nodes.json", "nodes.md", "nodes.png"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(p.name for p in paths)
    assert Results.from_json(paths[0]) == made
    page = paths[1].read_text()
    for words in (
        "# Table 3",
        "`cdeq reproduce table3` at commit abc;",
        "- A claim.",
        "## Blocks (1 seed)",
        "- IGNN, converged: 80.0% accuracy",
        "- EIGNN, converged: 75.0% accuracy",
        "- A note.",
        "cpu a processor, cores 2",
    ):
        assert words in page
    assert paper_table(made, "Blocks", (1, 2)) in page
    assert image.imread(paths[2]).ndim == 3


def test_the_figure_has_a_row_of_panels_a_data_set(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    other = dataclasses.replace(IGNN, dataset="Digits")
    more = tuple(dataclasses.replace(r, dataset="Digits") for r in TYPICAL)
    one = write_table(results(*TYPICAL), tmp_path / "one", title="", shown=(1, 2))[2]
    two = write_table(
        results(*TYPICAL, *more, teachers=(IGNN, other)), tmp_path / "two", title="", shown=(1, 2)
    )[2]
    heights = [image.imread(path).shape[0] for path in (one, two)]
    widths = [image.imread(path).shape[1] for path in (one, two)]
    assert heights[1] - heights[0] == pytest.approx(3.4 * 130, abs=2)
    assert widths[0] == widths[1]
    assert image.imread(two).std() > 0.01  # something is drawn


def test_a_run_in_which_everything_diverged_can_still_be_written(tmp_path):
    pytest.importorskip("matplotlib")
    rows = (row("picard", 1, None, None), row("anchored", 1, None, None))
    made = results(*rows, teachers=(dataclasses.replace(IGNN, metric=None),))
    paths = write_table(made, tmp_path, title="", shown=(1,))
    assert all(path.stat().st_size for path in paths)

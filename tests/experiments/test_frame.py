"""Results as a frame: means and spreads over seeds, the gap closed, who is best."""

import math

import pytest

from builders import results, row, teacher_result
from cdeq_experiments.pages.frame import at, frame

TYPICAL = (
    row("picard", 1, 0.5, distance=0.9),
    row("picard", 2, 0.6, distance=0.8),
    row("anderson", 1, 0.5, distance=0.9),
    row("anderson", 2, 0.7, distance=0.5),
    row("anchored", 1, 0.77, distance=0.2),
    row("anchored", 2, 0.83, distance=0.6),
    row("gcn", None, 0.79),
    row("gat", None, 0.81),
)


def found(*rows, **fields):
    return frame(results(*rows, **fields))


def only(frame, method, steps=None):
    return at(frame, "Blocks", method, steps)


def test_numbers_are_means_over_seeds_and_the_spread_is_their_standard_deviation():
    rows = [row("picard", 1, m, seed=s, distance=m) for s, m in enumerate((0.5, 0.6, 0.7))]
    one = only(found(*rows), "picard", 1)
    assert one.metric == pytest.approx(0.6)
    assert one.spread == pytest.approx(0.1)
    assert one.distance == pytest.approx(0.6)
    assert math.isnan(only(found(rows[0]), "picard", 1).spread)


def test_a_seed_that_diverged_is_not_averaged_away():
    one = only(found(row("paper", 1, 0.5), row("paper", 1, None, seed=1)), "paper", 1)
    assert math.isnan(one.metric)
    assert math.isnan(one.spread)


def test_further_measurements_are_means_too():
    rows = [
        row("paper", None, None, seed=s, figures={"points": p}) for s, p in ((0, 1.0), (1, 3.0))
    ]
    assert only(found(*rows), "paper").figures == {"points": 2.0}


def test_rows_keep_their_order_and_explicit_models_have_no_count():
    frame = found(*TYPICAL)
    assert list(frame["method"].unique()) == ["picard", "anderson", "anchored", "gcn", "gat"]
    assert list(frame.loc[frame["explicit"], "name"]) == ["GCN", "GAT"]
    assert frame.loc[frame["explicit"], "steps"].isna().all()
    assert len(found()) == 0


# The share of the gap.


@pytest.mark.parametrize(
    ("method", "steps", "share"),
    [
        ("picard", 1, 0.0),
        ("picard", 2, 1 / 3),
        ("anderson", 2, 2 / 3),
        ("anchored", 1, 0.9),
        ("anchored", 2, 1.1),
    ],
)
def test_the_gap_closed_by_hand(method, steps, share):
    assert only(found(*TYPICAL), method, steps).gap_closed == pytest.approx(share)


def test_a_method_worse_than_one_step_closes_less_than_nothing():
    frame = found(row("picard", 1, 0.5), row("paper", 1, 0.35))
    assert only(frame, "paper", 1).gap_closed == pytest.approx(-0.5)


@pytest.mark.parametrize(("name", "share"), [("error", 0.75), ("perplexity", math.log(2, 3))])
def test_a_perplexity_counts_by_its_logarithm(name, share):
    teacher = teacher_result(metric_name=name, metric=20.0, higher_is_better=False)
    frame = found(row("picard", 1, 60.0), row("anchored", 1, 30.0), teachers=[teacher])
    assert only(frame, "anchored", 1).gap_closed == pytest.approx(share)


def test_the_gap_is_between_means_over_seeds():
    rows = [row("picard", 1, 0.4), row("picard", 1, 0.6, seed=1)]
    rows += [row("anchored", 1, 0.6), row("anchored", 1, 0.7, seed=1)]
    frame = found(*rows, teachers=[teacher_result(metric=0.7), teacher_result(metric=0.9)])
    assert only(frame, "anchored", 1).gap_closed == pytest.approx(0.15 / 0.3)


@pytest.mark.parametrize(
    "rows",
    [
        (row("picard", 1, 0.8), row("anchored", 1, 0.7)),  # no gap to close
        (row("anchored", 1, 0.7),),  # not known where one step is
        (row("picard", 2, 0.6), row("anchored", 1, 0.7)),
        (row("picard", 1, None), row("anchored", 1, 0.7)),  # diverged
        (row("picard", 1, 0.5), row("anchored", 1, float("nan"))),
    ],
)
def test_no_gap_is_made_up(rows):
    assert math.isnan(only(found(*rows), "anchored", 1).gap_closed)


# Who is best.


def best(frame, mark="best"):
    return {
        (m, None if math.isnan(k) else k)
        for m, k in frame.loc[frame[mark], ["method", "steps"]].values
    }


def test_the_best_metric_and_the_smallest_distance_of_each_count():
    frame = found(*TYPICAL)
    assert best(frame) == {("anchored", 1), ("anchored", 2), ("gat", None)}
    assert best(frame, "nearest") == {("anchored", 1), ("anderson", 2)}


def test_the_best_of_a_falling_metric_is_the_lowest():
    teacher = teacher_result(metric_name="perplexity", metric=20.0, higher_is_better=False)
    frame = found(row("picard", 1, 60.0), row("anchored", 1, 30.0), teachers=[teacher])
    assert best(frame) == {("anchored", 1)}


def test_what_is_written_alike_is_equally_good():
    frame = found(row("picard", 1, 0.7001), row("anchored", 1, 0.7004), row("paper", 1, 0.69))
    assert best(frame) == {("picard", 1), ("anchored", 1)}


def test_nobody_is_best_alone_or_after_diverging():
    assert best(found(row("picard", 1, 0.5))) == set()
    rows = (row("picard", 1, 0.5), row("anchored", 1, 0.6), row("paper", 1, None))
    assert best(found(*rows)) == {("anchored", 1)}


def test_distances_to_another_equilibrium_are_not_compared():
    page = {"same_equilibrium": ["picard", "anchored"]}
    rows = [
        row(m, 1, 0.5, distance=d) for m, d in (("picard", 0.9), ("anchored", 0.4), ("eignn", 0.1))
    ]
    assert best(found(*rows, page=page), "nearest") == {("anchored", 1)}


def test_data_sets_do_not_compete():
    rows = [
        row(m, 1, v, dataset=d)
        for d, s in (("A", 0), ("B", 0.1))
        for m, v in (("picard", s), ("paper", 0.05))
    ]
    frame = found(*rows)
    marked = frame[frame["best"]]
    assert list(zip(marked["dataset"], marked["method"], strict=True)) == [
        ("A", "paper"),
        ("B", "picard"),
    ]


def test_the_solver_run_to_its_tolerance_is_no_explicit_model():
    frame = found(row("solved", None, 0.9), row("gcn", None, 0.7), row("gat", None, 0.6))
    assert best(frame) == {("gcn", None)}


def test_a_row_that_is_not_there_is_named():
    with pytest.raises(KeyError, match="0 rows for 'paper' at 3 evaluations on 'Blocks'"):
        at(found(*TYPICAL), "Blocks", "paper", 3)

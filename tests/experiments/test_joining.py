"""Results of several runs on one page."""

import pytest

from builders import results, row, teacher_result
from cdeq import cli
from cdeq.evaluation import Results, ResultsError
from cdeq_experiments.pages import join, read_page


def timed(method, steps, metric, seconds, **fields):
    return row(method, steps, metric, seconds=seconds, **fields)


OLD = results(
    timed("picard", 1, 0.5, 1.0),
    timed("paper", 1, 0.7, 2.0, f_equivalents=1.5),
    timed("gcn", None, 0.8, 0.5),
    commit="a and b",
    command="one",
)


def values(found, *fields):
    return {
        (r.method, r.seed, r.steps): tuple(getattr(r, field) for field in fields)
        for r in found.rows
    }


def test_a_further_seed_has_the_seconds_of_the_method():
    new = results(timed("paper", 1, 0.6, 9.0, seed=1, f_equivalents=7.0), commit="b and c")
    found = values(join(OLD, new), "metric", "seconds", "f_equivalents")
    assert found["paper", 1, 1] == (0.6, 2.0, 1.5)
    assert found["paper", 0, 1] == (0.7, 2.0, 1.5)
    assert len(found) == 4


def test_a_method_that_was_not_timed_with_the_others_has_no_seconds():
    found = values(join(OLD, results(timed("gat", None, 0.9, 9.0))), "metric", "seconds")
    assert found["gat", 0, None] == (0.9, None)
    assert found["gcn", 0, None] == (0.8, 0.5)


def test_a_new_row_replaces_the_one_in_its_place():
    found = values(join(OLD, results(timed("paper", 1, 0.9, 9.0))), "metric", "seconds")
    assert found["paper", 0, 1] == (0.9, 2.0)
    assert len(found) == 3


def test_a_data_set_that_is_measured_anew_keeps_nothing():
    new = results(
        *(timed(r.method, r.steps, 0.1, 5.0) for r in OLD.rows),
        teachers=[teacher_result(metric=0.3)],
    )
    found = join(OLD, new)
    assert {r.seconds for r in found.rows} == {5.0}
    assert [t.metric for t in found.teachers] == [0.3]


def test_data_sets_stand_in_the_order_of_the_page():
    new = results(
        timed("picard", 1, 0.4, 3.0, dataset="Cora"), page={"counts": {"Cora": [1], "Blocks": [1]}}
    )
    found = join(OLD, new)
    assert found.datasets == ["Cora", "Blocks"]
    assert [r.seconds for r in found.rows_of("Cora")] == [3.0]
    assert len(found.rows_of("Blocks")) == 3


def test_teachers_of_other_seeds_stand_beside_each_other():
    new = results(
        timed("paper", 1, 0.6, 9.0, seed=1), teachers=[teacher_result(metric=0.6, seed=1)]
    )
    assert [t.seed for t in join(OLD, new).teachers] == [0, 1]
    assert join(OLD, new).teacher("Blocks").metric == pytest.approx(0.7)
    # The same teacher, measured on another machine, is not a second one.
    again = results(timed("paper", 1, 0.6, 9.0), teachers=[teacher_result(metric=0.79)])
    assert [t.metric for t in join(OLD, again).teachers] == [0.8]


def test_commits_and_commands_are_named_once():
    found = join(OLD, results(timed("gat", None, 0.9, 9.0), commit="b and c", command="two"))
    assert (found.commit, found.command) == ("a and b and c", "one and two")


def test_a_page_of_another_experiment_is_refused(tmp_path):
    assert read_page(tmp_path, "table3", "tiny") is None
    OLD.to_json(tmp_path / "table3.json")
    assert read_page(tmp_path, "table3", "tiny") == OLD
    with pytest.raises(ResultsError, match="table3 at the scale tiny, not table3 at small"):
        read_page(tmp_path, "table3", "small")


@pytest.mark.slow
def test_seeds_are_added_one_at_a_time(reproduced, monkeypatch, tmp_path, capsys):
    both = reproduced("solvers", "--seeds", "2", "--only", "graph")
    monkeypatch.chdir(both)
    whole = Results.from_json(both / "results" / "tiny" / "solvers.json")
    command = ["reproduce", "solvers", "--scale", "tiny", "--only", "graph", "--seeds", "1"]
    command += ["--out", str(tmp_path)]
    assert cli.main(command) == 0
    assert cli.main([*command, "--first-seed", "1", "--add"]) == 0
    found = Results.from_json(tmp_path / "solvers.json")
    assert values(found, "metric", "distance") == values(whole, "metric", "distance")
    assert {r.seconds is None for r in found.rows} == {r.seconds is None for r in whole.rows}
    assert len(found.teachers) == len(whole.teachers)
    capsys.readouterr()


def test_bad_requests_are_named_before_any_work(tmp_path, capsys):
    (tmp_path / "beta.json").write_text("{")
    command = ["reproduce", "beta", "--scale", "tiny", "--out", str(tmp_path), "--runs"]
    assert cli.main([*command, str(tmp_path / "runs"), "--add"]) == 1
    assert "beta.json: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    with pytest.raises(SystemExit):
        cli.main([*command, str(tmp_path / "runs"), "--first-seed", "-1"])
    shown = capsys.readouterr()
    assert "first_seed must be at least 0" in shown.out + shown.err

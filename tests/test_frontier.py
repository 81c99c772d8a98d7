"""Where to spend a given time: what `bench/frontier.py` compares, eager and exported."""

import sys

import pytest
import torch

import builders
from cdeq.solvers import Anderson, Picard, solve_model
from teachers import Tanh, inputs, untrained


def test_the_frontier_of_a_table_compares_what_can_be_had_at_the_same_time(
    bench, tmp_path, monkeypatch, capsys
):
    """Corrected has its first answer at 1.5; at 2 the best other is Anderson, of another equilibrium is `few_step`."""
    found = [("picard", 1, 1.0, 0.5), ("picard", 2, 2.0, 0.2), ("picard", 3, 3.0, 0.1)]
    found += [("anderson", 1, 1.1, 0.4), ("anderson", 2, 2.0, 0.06), ("few_step", 1, 1.0, 1e-9)]
    found += [("corrected", 1, 1.5, 0.12), ("corrected", 2, 2.5, 0.01)]
    rows = [builders.row(name, k, seconds=t, distance=d) for name, k, t, d in found]
    same = {"same_equilibrium": ["picard", "anderson", "corrected"]}
    builders.results(*rows, page=same).to_json(tmp_path / "table.json")
    arguments = ["frontier.py", "--tasks", "--tables", str(tmp_path / "table.json")]
    arguments += ["--json", str(tmp_path / "frontier.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    bench("frontier").main()
    page = (tmp_path / "frontier.md").read_text()
    assert "| corrected | – | 0.12 (1) | **0.01 (2)** |" in page
    assert "From the time of 1.5 evaluations of Picard on, corrected is at worst 2.00 times" in page
    assert "(anderson, in the time of 2.0)" in page
    assert "few_step" not in page
    assert (tmp_path / "frontier.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("solver", "history"),
    [(Picard(), {}), (Anderson(window=5, ridge=1e-6), {"history": "anderson", "window": 5})],
)
def test_a_student_that_learns_nothing_goes_the_way_of_its_solver(bench, solver, history):
    teacher, x = Tanh(), inputs()
    student = bench("frontier").plain_student(teacher, x, **history)
    states = []
    context = teacher.inject(x)
    solve_model(
        teacher, context, solver, tol=0, max_steps=6, callback=lambda k, z: states.append(z)
    )
    for found, expected in zip(student.trajectory(x, 6), states, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_every_method_is_timed_as_a_file_at_every_count(bench, monkeypatch):
    frontier = bench("frontier")
    monkeypatch.setattr(frontier, "COUNTS", (0, 1, 3))
    x, teacher = inputs(), Tanh()
    students = {"picard": frontier.plain_student(teacher, x), "anchored": untrained(teacher)}
    seconds = frontier.exported_seconds(students, x, repeats=2, threads=1)
    assert set(seconds) == {(name, count) for name in students for count in (1, 3)}
    assert all(spent > 0 for spent in seconds.values())

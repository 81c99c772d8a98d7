"""Certified solving, the plan for it, and calibration."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from cdeq.consistency import calibration
from cdeq.consistency.calibration import STRENGTHS
from cdeq.consistency.certify import certified_solve, plan_handover, planned_steps
from cdeq.equilibrium.states import StateLayout, relative_distance, relative_residual
from cdeq.solvers import Anderson, Picard, solve_model
from checks import equilibrium
from teachers import Linear, Pair, Ring, Tanh, batches, inputs, randomized, untrained

KINDS = [Tanh, Pair, Ring]
by_residual = partial(certified_solve, measure="residual")


def make(kind=Tanh, name="anchored", noise=0.1, norm=0.9, dtype=torch.float32, **changes):
    student = untrained(kind(norm=norm).to(dtype), inputs(dtype=dtype), name, **changes)
    return randomized(student, noise).requires_grad_(False)


def true_residual(student, x, state):
    teacher = student.teacher
    layout = StateLayout.of(state, student.batched)
    image = teacher.step(state, teacher.inject(x))
    return relative_residual(layout.flatten(state), layout.flatten(image))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["paper", "anchored", "corrected"])
@pytest.mark.parametrize("tol", [0.5, 1e-2, 1e-5])
@pytest.mark.parametrize("max_steps", [1, 4, 60])
def test_the_certificate_is_true(kind, name, tol, max_steps):
    x, student = inputs(), make(kind, name)
    result = student.solve(x, tol=tol, max_steps=max_steps, measure="residual")
    torch.testing.assert_close(
        result.residual, true_residual(student, x, result.state), rtol=1e-3, atol=1e-6
    )
    assert torch.equal(result.converged, result.residual <= tol)
    assert (result.steps <= max_steps).all()
    assert result.evaluations <= max_steps
    assert result.evaluations == int(result.steps.max())
    finished = torch.tensor([who is not None for who in result.finished_by])
    assert torch.equal(finished, result.converged)
    context = student.teacher.inject(x)
    expected = student.teacher.readout(result.state, context)
    torch.testing.assert_close(result.output, expected)
    assert len(result.finished_by) == (1 if kind is Ring else 6)
    if max_steps == 60:
        assert result.converged.all()


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("max_steps", [1, 2, 9, 50])
@pytest.mark.parametrize("tol", [10.0, 1e-4])
def test_every_evaluation_is_counted(ahead, max_steps, tol):
    x, student = inputs(), make()
    student.teacher.calls = 0
    result = by_residual(student, x, tol=tol, max_steps=max_steps, student_steps=ahead)
    assert result.evaluations == student.teacher.calls
    assert result.evaluations <= max_steps
    if tol == 10.0:  # the student's steps and the check
        assert result.evaluations == min(ahead, max_steps - 1) + 1


def test_the_student_finishes_when_it_is_good_enough():
    x, student = inputs(), make(noise=0.0, norm=0.3, start="teacher")
    result = by_residual(student, x, tol=1e-2, student_steps=8)
    assert result.finished_by == ["student"] * 6
    assert result.steps.tolist() == [9] * 6
    # The state is the student's own: the check measured it and went no further.
    torch.testing.assert_close(result.state, student.trajectory(x, 8)[8])


def test_the_solver_finishes_what_the_student_leaves():
    x, student = inputs(), make(noise=0.0)
    result = by_residual(student, x, tol=1e-5, student_steps=1)
    assert result.finished_by == ["solver"] * 6
    assert result.converged.all()
    star = equilibrium(student.teacher, x)
    assert (relative_distance(result.state, star) < 1e-3).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_student_gets_credit_for_what_it_brought_below_the_tolerance_alone(kind):
    x, student = inputs(), make(kind)
    residual = true_residual(student, x, student.trajectory(x, 2)[2])
    for share in (0.2, 0.5, 0.9, 1.1, 2.0):  # at 0.9 the solver needs a step or two more
        tol = share * float(residual.median())
        result = by_residual(student, x, tol=tol, student_steps=2, max_steps=60)
        expected = ["student" if r <= tol else "solver" for r in residual.tolist()]
        assert result.finished_by == expected


def test_the_check_is_the_solvers_first_step():
    x, student = inputs(), make()
    z = student.trajectory(x, 2)[2]
    context = student.teacher.inject(x)
    expected = solve_model(
        student.teacher, context, Anderson(), z0=z, tol=1e-5, max_steps=48, measured_only=True
    )
    result = by_residual(student, x, tol=1e-5, student_steps=2)
    assert torch.equal(result.steps, expected.steps + 2)
    assert torch.equal(result.state, expected.state)


def test_no_one_finishes_when_the_budget_is_too_small():
    x, student = inputs(), make()
    result = by_residual(student, x, tol=1e-6, max_steps=3, student_steps=1)
    assert result.finished_by == [None] * 6
    assert not result.converged.any()
    assert result.evaluations == 3
    assert (result.residual > 1e-6).all()


def test_samples_are_told_apart():
    x = inputs(6).clone()
    student = make(Linear, noise=0.0, start="teacher")
    x[:3] = 0  # whose equilibrium is the start
    result = by_residual(student, x, tol=1e-4, max_steps=40, student_steps=1)
    assert result.finished_by == ["student"] * 3 + ["solver"] * 3
    assert result.steps[:3].tolist() == [2, 2, 2]
    assert (result.steps[3:] > 2).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_student_that_is_not_finite_falls_back_to_the_solver(kind, bad):
    x, student = inputs(), make(kind)
    student.start_network.networks[0].outer.linear.bias.fill_(bad)
    result = by_residual(student, x, tol=1e-4, student_steps=0)
    assert result.converged.all()
    assert set(result.finished_by) == {"solver"}
    plain = solve_model(student.teacher, student.teacher.inject(x), Anderson(), tol=1e-4)
    assert torch.equal(result.steps, plain.steps)


def test_one_bad_sample_does_not_spoil_the_others():
    x, student = inputs(), make()
    good = by_residual(student, x, tol=1e-4, student_steps=1)
    begin = student.begin

    def spoiled(prepared):
        z = begin(prepared).clone()
        z[2] = math.nan
        return z

    student.begin = spoiled
    result = by_residual(student, x, tol=1e-4, student_steps=1)
    assert result.converged.all()
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(result.state[others], good.state[others], rtol=1e-4, atol=1e-5)


def test_another_solver_may_finish():
    x, student = inputs(), make()
    fast = by_residual(student, x, tol=1e-5, max_steps=200)
    slow = by_residual(student, x, tol=1e-5, max_steps=200, solver=Picard())
    assert slow.converged.all()
    assert slow.evaluations > fast.evaluations


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"tol": 0.0}, "tol"), ({"tol": math.nan}, "tol"), ({"max_steps": 0}, "max_steps")],
)
def test_wrong_arguments_are_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        make().solve(inputs(), **wrong)
    with pytest.raises(ValueError, match="student_steps"):
        certified_solve(make(), inputs(), student_steps=-1)


# The plan


def test_the_plan_is_the_cheapest_number_of_student_steps():
    student, data = make(noise=0.05), [inputs(seed=3), inputs(seed=4)]
    plan = plan_handover(student, data, tolerances=(0.3, 1e-3), most=4, max_steps=60)
    for tol, chosen in plan.items():
        cost = [
            sum(
                float(
                    by_residual(student, x, tol=tol, max_steps=60, student_steps=s)
                    .steps.float()
                    .mean()
                )
                for x in data
            )
            for s in range(5)
        ]
        assert cost[chosen] == min(cost)
        assert chosen == cost.index(min(cost))


def test_the_plan_for_the_nearest_tolerance_is_followed():
    assert planned_steps({}, 1e-3) == 2
    plan = {1e-1: 1, 1e-3: 4}
    assert [planned_steps(plan, tol) for tol in (1.0, 0.02, 0.005, 1e-9)] == [1, 1, 4, 4]
    x, student = inputs(), make()
    student.plan = {1e-3: 5}
    assert by_residual(student, x, tol=1e9).evaluations == 6
    student.plan = {}
    assert by_residual(student, x, tol=1e9).evaluations == 3


def test_corrections_are_planned_only_where_they_save_evaluations():
    x = inputs(seed=3)
    for student in (make(Linear, "corrected", noise=0.0), make(Linear, "corrected", noise=0.5)):
        block = student.correction.blocks[0]
        exact = torch.linalg.inv(torch.eye(8) - student.teacher.weight) - torch.eye(8)
        helps = not block.leave.linear.weight.any()
        if helps:
            block.set_linear(exact)
        student.plan = plan_handover(student, [x])
        assert student.corrects_solves == helps
        assert student.plan == ({} if helps else dict.fromkeys((1e-1, 1e-2, 1e-3, 1e-4), 0))
        result = by_residual(student, x, tol=1e-4, max_steps=100)
        assert set(result.finished_by) == ({"student"} if helps else {"solver"})
        plain = by_residual(student, x, tol=1e-4, max_steps=100, solver=Anderson())
        assert helps == bool(result.steps.sum() < plain.steps.sum())


# Calibration


def mean_log_distance(student, data, steps):
    total = 0.0
    for x, *_ in data:
        star = equilibrium(student.teacher, x, tol=1e-4, max_steps=100)
        for z in student.trajectory(x, steps)[1:]:
            total += float(relative_distance(z, star, student.batched).log().mean())
    return total


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["paper", "anchored"])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("decay", [0.3, 0.9])
def test_calibration_never_makes_it_worse(monkeypatch, kind, name, noise, decay):
    monkeypatch.setattr(calibration, "plan_handover", lambda student, inputs: {0.5: 1})
    student, data = make(kind, name, noise, decay=decay), batches(2)
    before = mean_log_distance(student, data, 4)
    clock = student.calibrate(data, steps=4, confidence=None)
    after = mean_log_distance(student, data, 4)
    assert after <= before + 1e-3
    assert student.calibrated == clock
    assert len(clock) == 4
    assert all(0 <= a <= b <= 1 for a, b in pairwise(clock))
    assert student.plan == {0.5: 1}
    # Past the calibrated steps the clock goes on, and still not backwards.
    times = [student.time_point(j).time for j in range(12)]
    assert all(a <= b for a, b in pairwise(times))
    assert [student.time_point(j).time for j in range(4)] == pytest.approx(list(clock))


@pytest.mark.parametrize("name", ["corrected", "warm_start"])
def test_steps_under_the_teachers_own_weights_have_no_clock_to_choose(name):
    x, student = inputs(), make(name=name)
    before = student.trajectory(x, 4)
    assert student.calibrate(batches(2), steps=4, confidence=None) == ()
    assert student.calibrated == ()
    # Nor steps to take ahead: every residual is measured on the way. These random corrections save nothing.
    assert set(student.plan.values()) == ({0} if name == "corrected" else set())
    assert not student.corrects_solves
    torch.testing.assert_close(student.trajectory(x, 4), before, rtol=0, atol=0)


def test_calibration_of_harmful_changes_switches_them_off():
    student, data = make(noise=2.0, start="teacher"), batches(2)
    before = mean_log_distance(student, data, 5)
    clock = student.calibrate(data, steps=5, confidence=None)
    assert mean_log_distance(student, data, 5) < before - 1
    assert clock[-1] == 1.0
    assert set(student.plan) == {1e-1, 1e-2, 1e-3, 1e-4}


def test_calibration_passes_over_time_points_that_are_not_finite():
    student = make(Linear, noise=0.0, start="teacher")
    student.deltas.changes[0].change.fill_(1e38)  # overflows unless it is switched off
    clock = student.calibrate(batches(1), steps=3, confidence=None)
    assert clock[1] == 1.0
    assert all(torch.isfinite(z).all() for z in student.trajectory(inputs(), 3))


def test_calibration_needs_data_and_keeps_the_old_clock_without():
    student = make()
    student.calibrated = (0.0, 0.5)
    with pytest.raises(ValueError, match="at least one batch"):
        student.calibrate([])
    assert student.calibrated == (0.0, 0.5)
    clock = student.calibrate(batches(3), steps=2, max_batches=1, confidence=None)
    other = student.calibrate(batches(1), steps=2, confidence=None)
    assert clock == other
    assert {1.0, 0.0} < set(STRENGTHS)


def test_a_solution_shows_itself_in_a_line():
    x = inputs()
    shown = repr(untrained(Tanh(), x).solve(x, tol=1e-3))
    assert shown.startswith(f"CertifiedSolution({len(x)} samples: {len(x)} converged")
    assert "\n" not in shown

"""A student as a solver: warm starts, inside a model that is trained, and what its own solves do."""

import pytest
import torch

import cdeq
from cdeq.equilibrium.states import relative_distance
from cdeq.solvers import Anderson, solve_model
from checks import numbers
from teachers import Tanh, inputs, students

# Warm starts


@pytest.mark.parametrize("name", ["corrected", "warm_start", "anchored"])
def test_a_state_of_a_similar_input_is_a_better_start(name):
    student, x = students(name=name), inputs(8)
    frame = student.solve(x, tol=1e-5, measure="residual", max_steps=200)
    after = x + 1e-3 * inputs(8, seed=3)
    warm = student.solve(after, tol=1e-4, z0=frame.state, max_steps=200, measure="residual")
    cold = student.solve(after, tol=1e-4, max_steps=200, measure="residual")
    assert warm.converged.all()
    assert warm.steps.float().mean() < cold.steps.float().mean()
    states = student.trajectory(after, 2, z0=frame.state)
    assert torch.equal(states[0], frame.state)
    torch.testing.assert_close(
        student(after, steps=2, z0=frame.state),
        student.teacher.readout(states[-1], student.teacher.inject(after)),
    )


def test_a_start_that_is_no_state_is_refused():
    student, x = students(), inputs(4)
    for call in (
        student.solve,
        lambda x, z0: student(x, z0=z0),
        lambda x, z0: student.trajectory(x, 1, z0),
    ):
        with pytest.raises(
            ValueError, match=r"z0 must be a state like the teacher's start, \[\(4, 8\)\]"
        ):
            call(x, z0=torch.zeros(4, 7))


# A student inside


@pytest.mark.parametrize("name", ["corrected", "warm_start"])
def test_gradients_through_a_student_are_those_of_the_model(name):
    student = students(Tanh, name).double()
    model = Tanh(norm=0.85, seed=3).double()  # not the one that was distilled
    x = numbers(6, 5)
    found = []
    for solver in (student.as_solver(), Anderson()):
        context = model.inject(x)
        solution = cdeq.solve_with_gradient(
            model,
            context,
            solver=solver,
            gradient=cdeq.Implicit(tol=1e-12, max_steps=300),
            tol=1e-12,
            max_steps=300,
        )
        assert solution.converged.all()
        loss = model.readout(solution.state, context).square().mean()
        found.append(torch.autograd.grad(loss, [model.weight, model.injection, model.head]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_a_model_can_be_trained_with_a_student_inside():
    student, model = students(Tanh), Tanh(seed=3)
    config = cdeq.TeachConfig(fit=cdeq.FitConfig(updates=3), solver=student.as_solver())
    before = model.weight.detach().clone()
    cdeq.teach(model, [(inputs(), torch.randint(3, (6,)))], config)
    assert not torch.equal(model.weight, before)


def test_what_is_no_solver_says_so():
    with pytest.raises(ValueError, match="a student of the recipe 'anchored' is no solver"):
        students(name="anchored").as_solver()
    with pytest.raises(ValueError, match="a student solves a model in a context"):
        cdeq.solve(lambda z: 0.5 * z, torch.zeros(2, 3), students().as_solver())
    with pytest.raises(ValueError, match="student_steps"):
        students().solve(inputs(), student_steps=2)


# The student as a solver


@pytest.mark.parametrize("name", ["corrected", "warm_start"])
def test_a_solve_passes_through_the_states_of_the_rollout(name):
    student, x = students(name=name), inputs()
    states = []
    solve_model(
        student.teacher,
        student.teacher.inject(x),
        student.as_solver(),
        tol=0.0,
        max_steps=6,
        callback=lambda k, z: states.append(z),
    )
    for ours, theirs in zip(states, student.trajectory(x, 6), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_harmful_correction_is_dropped_and_the_solver_finishes():
    student, x = students(norm=0.9), inputs()
    student.correction.blocks[0].set_linear(-60.0 * torch.eye(8))
    result = student.solve(x, tol=1e-4, max_steps=100, measure="residual")
    assert result.converged.all()
    assert result.finished_by == ["solver"] * 6
    good = students(noise=0.0, norm=0.9)
    exact = torch.linalg.inv(torch.eye(8) - good.teacher.weight) - torch.eye(8)
    good.correction.blocks[0].set_linear(exact)
    result = good.solve(x, tol=1e-4)
    assert result.finished_by == ["student"] * 6
    assert result.evaluations == 2  # Newton's step, and its residual
    assert (relative_distance(result.state, good.teacher.equilibrium(x)) < 1e-4).all()


def test_a_start_alone_tells_no_distance_and_corrections_do():
    x = inputs()
    for name, known in (("corrected", True), ("warm_start", False)):
        result = students(name=name).solve(x, max_steps=1)
        assert result.error.isfinite().all() == known


def test_every_evaluation_of_a_solve_is_counted():
    student, x = students(), inputs()
    student.teacher.calls = 0
    result = student.solve(x, tol=1e-3, max_steps=100)
    assert result.evaluations == student.teacher.calls == int(result.steps.max())
    assert result.history.shape == (result.evaluations, 6, 3)


def test_a_sample_that_stops_sooner_has_spent_fewer_seconds():
    student, x = students(), inputs()
    x[0] = 0.0  # its start is not far off
    result = student.solve(x, tol=1e-3, max_steps=100)
    steps, seconds = result.steps, result.sample_seconds
    assert len(set(steps.tolist())) > 1
    for i in range(6):
        for j in range(6):
            assert (steps[i] < steps[j]) == (seconds[i] < seconds[j])
    assert 0 < seconds.min() <= seconds.max() <= result.seconds

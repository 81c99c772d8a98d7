"""The student against literal transcriptions of its algorithms, and what it costs."""

import copy
import itertools

import pytest
import torch
from torch import nn

from cdeq.consistency.recipes import Recipe
from cdeq.consistency.student import Student
from cdeq.equilibrium import from_functions
from cdeq.solvers import Picard
from checks import equilibrium, same_tensors, solver_states
from teachers import (
    Linear,
    Normed,
    Offering,
    Pair,
    Ring,
    Tanh,
    Tied,
    Weightless,
    inputs,
    randomized,
    untrained,
)

KINDS = [Tanh, Pair, Ring, Tied, Offering]


def changes_of(student):
    return dict(zip(student.deltas.names, (d.detach() for d in student.deltas()), strict=True))


# Cost


@pytest.mark.parametrize("name", ["paper", "anchored"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("history", ["anderson", "mlp", "gru", "none"])
def test_a_step_is_one_call_of_the_teachers_step(name, kind, history):
    x = inputs()
    require_one_call_for_each_step(untrained(kind(), x, name, history=history), x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", [0.1, 5.0])  # the safeguard costs nothing either
def test_a_corrected_step_is_one_call_of_the_teachers_step(kind, noise):
    x = inputs()
    student = randomized(untrained(kind(), x, "corrected"), noise).eval()
    require_one_call_for_each_step(student, x)
    require_one_call_for_each_step(student.requires_grad_(False), x)


def require_one_call_for_each_step(student, x):
    for steps in range(6):
        student.teacher.calls = 0
        student(x, steps=steps)
        assert student.teacher.calls == steps
        student.teacher.calls = 0
        assert len(student.trajectory(x, steps)) == steps + 1
        assert student.teacher.calls == steps


def test_the_output_is_the_readout_of_the_trajectory():
    x = inputs()
    student = randomized(untrained(Pair(), x, "anchored"))
    states = student.trajectory(x, 5)
    for j, z in enumerate(states):
        expected = student.teacher.readout(z, student.teacher.inject(x))
        torch.testing.assert_close(student(x, steps=j), expected)
    torch.testing.assert_close(student(x), student(x, steps=2))


def test_negative_steps_are_refused():
    x = inputs()
    with pytest.raises(ValueError, match="steps must be a whole number, 0 or more, not -1"):
        untrained(Tanh(), x, "paper")(x, steps=-1)


# Before training


@pytest.mark.parametrize("kind", KINDS)
def test_untrained_and_anchored_it_is_picard(kind):
    teacher, x = kind(), inputs()
    student = untrained(teacher, x, "anchored", start="teacher").requires_grad_(False)
    ours, theirs = student.trajectory(x, 9), solver_states(teacher, x, 9, Picard())
    # A solver keeps a tuple's tensors as views of one, which may round otherwise.
    assert kind is Pair or same_tensors(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_untrained_the_papers_first_step_is_the_teachers(kind):
    teacher, x = kind(), inputs()
    student = untrained(teacher, x, "paper")
    context = teacher.inject(x)
    expected = teacher.step(teacher.start(context), context)
    torch.testing.assert_close(student.trajectory(x, 1)[1], expected)


# Literal transcriptions, in double precision


@pytest.mark.parametrize(("mixing", "eps", "end"), [(1.0, 0.0, 1.0), (0.7, 0.2, 1.5)])
def test_paper_is_algorithm_1(mixing, eps, end):
    teacher, x = Tanh().double(), inputs(dtype=torch.float64)
    student = randomized(untrained(teacher, x, "paper", mixing=mixing, eps=eps, end=end), 0.2)
    student.history.ridge = 0.0
    delta, head = changes_of(student), student.time_heads[0].linear.linear
    with torch.no_grad():
        W, U = teacher.weight + delta["weight"], teacher.injection + delta["injection"]

        def h(z, t):
            f = torch.tanh(z @ W.T + x @ U.T)
            clock = torch.full((len(x), 1), t, dtype=torch.float64)
            return torch.cat([f, clock], dim=1) @ head.weight.T + head.bias

        def c_skip(t):
            return ((t - eps) / (end - eps)) ** 2

        t = [eps + (1 - 0.9**j) * (end - eps) for j in range(6)]
        z = [torch.zeros(6, 8, dtype=torch.float64)]
        P = mixing * h(z[0], t[0]) + (1 - mixing) * z[0]
        z.append(c_skip(t[0]) * z[0] + (1 - c_skip(t[0])) * P)
        for j in range(1, 6):
            h1, h0 = h(z[j], t[j]), h(z[j - 1], t[j - 1])
            r1, r0 = h1 - z[j], h0 - z[j - 1]
            a = ((r0 * (r0 - r1)).sum(1) / (r1 - r0).square().sum(1))[:, None]
            P = mixing * (a * h1 + (1 - a) * h0) + (1 - mixing) * (a * z[j] + (1 - a) * z[j - 1])
            z.append(c_skip(t[j]) * z[j] + (1 - c_skip(t[j])) * P)
        torch.testing.assert_close(student.trajectory(x, 6), z, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(student(x, steps=6), z[6] @ teacher.head.T)


@pytest.mark.parametrize("gamma", [1.0, 2.0])
@pytest.mark.parametrize("start", ["teacher", "learned"])
@pytest.mark.parametrize("schedule", ["fixed", "learned"])
def test_anchored_is_theta_plus_c_delta(gamma, start, schedule):
    teacher, x = Tanh().double(), inputs(dtype=torch.float64)
    changes = {"gamma": gamma, "start": start, "schedule": schedule, "decay": 0.65, "depth": 8}
    student = untrained(teacher, x, "anchored", injection="student", **changes)
    student = randomized(student, 0.3)
    delta = changes_of(student)
    with torch.no_grad():
        z = torch.zeros(6, 8, dtype=torch.float64)
        if start == "learned":
            z = z + student.start_network(teacher.inject(x), z)
        rest = 1.0
        for j, ours in enumerate(student.trajectory(x, 12)):
            # Learned rates are kept in single precision.
            close = {"rtol": 1e-9, "atol": 1e-11} if schedule == "fixed" else {}
            torch.testing.assert_close(ours, z, **{"rtol": 1e-5, "atol": 1e-6} | close)
            c = 1 - (1 - rest) ** gamma
            W = teacher.weight + c * delta["weight"]
            U = teacher.injection + c * delta["injection"]
            z = torch.tanh(z @ W.T + x @ U.T)
            rest *= 0.65 if schedule == "fixed" else float(student.rates[min(j, 7)].sigmoid())


def test_contexts_that_are_not_linear_in_the_weights_are_mixed_as_such():
    class Curved(Tanh):
        def inject(self, x):
            return torch.sin(x @ self.injection.T)

    teacher, x = Curved(), inputs()
    student = randomized(
        untrained(teacher, x, "anchored", start="teacher", injection="student"), 0.5
    )
    delta = changes_of(student)
    z = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        base, changed = teacher.inject(x), torch.sin(x @ (teacher.injection + delta["injection"]).T)
        point = student.time_point_at(0.7)
        W = teacher.weight + 0.3 * delta["weight"]
        expected = torch.tanh(z @ W.T + 0.7 * base + 0.3 * changed)
        torch.testing.assert_close(student.evaluate(z, point, student.prepare(x)), expected)


# The promise of anchored weights


def test_the_error_obeys_its_bound():
    teacher, x = Linear(norm=0.8).double(), inputs(dtype=torch.float64)
    student = randomized(
        untrained(teacher, x, "anchored", start="teacher", injection="student"), 1.0
    )
    delta, star = changes_of(student), teacher.equilibrium(x)
    with torch.no_grad():
        states = student.trajectory(x, 40)
        errors = [(z - star).norm(dim=1) for z in states]
        push = [(z @ delta["weight"].T + x @ delta["injection"].T).norm(dim=1) for z in states]
        B = torch.stack(push).amax(dim=0)
        for j in range(40):
            c = student.time_point(j).strength
            assert (errors[j + 1] <= 0.8 * errors[j] + c * B + 1e-9).all()
        assert (errors[1] > errors[0]).any()  # the deltas do harm, at first


@pytest.mark.parametrize("kind", [Linear, Tanh, Ring])
@pytest.mark.parametrize("gamma", [1.0, 3.0])
def test_it_converges_to_the_teachers_equilibrium_whatever_it_learned(kind, gamma):
    teacher, x = kind(norm=0.7).double(), inputs(dtype=torch.float64)
    student = randomized(untrained(teacher, x, "anchored", gamma=gamma, decay=0.65), 1.0)
    star = equilibrium(teacher, x, tol=1e-12)
    with torch.no_grad():
        states = student.trajectory(x, 45)
        errors = [float((states[j] - star).norm() / star.norm()) for j in (1, 16, 30, 45)]
    assert errors[0] > 0.05
    assert all(late < 0.1 * early for early, late in itertools.pairwise(errors))
    assert errors[-1] < 1e-8


def test_a_state_boundary_stops_moving():
    x = inputs()
    student = randomized(untrained(Tanh(), x, "paper"))
    states = student.trajectory(x, 400)
    assert same_tensors(states[-1], states[-2])


# The learned schedule


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_a_learned_schedule_starts_as_the_fixed_one(gamma):
    x = inputs()
    learned = untrained(Tanh(), x, "anchored", schedule="learned", gamma=gamma, depth=4)
    fixed = untrained(Tanh(), x, "anchored", gamma=gamma, depth=4)
    for j in range(12):
        ours, theirs = learned.time_point(j), fixed.time_point(j)
        strength = torch.as_tensor(ours.strength).detach().item()
        assert ours.time == pytest.approx(theirs.time, abs=1e-6)
        assert strength == pytest.approx(theirs.strength, abs=1e-6)
        with torch.no_grad():
            still = learned.time_point(j)
        assert isinstance(still.strength, float)
        assert still.strength == pytest.approx(strength, abs=1e-6)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_a_learned_schedule_is_monotone_and_can_be_learned(gamma):
    x = inputs()
    student = untrained(Tanh(), x, "anchored", schedule="learned", gamma=gamma, depth=4)
    randomized(student, 2.0)
    with torch.no_grad():
        strengths = [student.time_point(j).strength for j in range(60)]
    assert strengths[0] == 1
    assert all(a > b or b == 0 for a, b in itertools.pairwise(strengths))
    student.zero_grad()
    student(x, steps=4).square().sum().backward()
    assert torch.isfinite(student.rates.grad).all()
    assert student.rates.grad[:3].all()


# The teacher


def test_only_the_weights_of_the_step_are_changed():
    x = inputs()
    student = untrained(Tanh(), x, "anchored", injection="student")
    assert student.shapes.weights == ("weight", "injection")
    assert not any("head" in name for name in student.trainable())
    assert not any(name.startswith("methods") for name in student.trainable())


@pytest.mark.parametrize("name", ["paper", "anchored"])
@pytest.mark.parametrize("training", [True, False])
def test_the_users_teacher_is_left_alone(name, training):
    class Fussy(Tanh):
        """Its injection keeps running statistics while it is in training mode."""

        def __init__(self):
            super().__init__()
            self.norm_in = nn.BatchNorm1d(5)

        def inject(self, x):
            return self.norm_in(x) @ self.injection.T

    x = inputs()
    teacher = Fussy().train(training)
    teacher.head.requires_grad_(False)
    before = copy.deepcopy(teacher.state_dict())
    student = untrained(teacher, x, name)
    randomized(student.train())
    student(x, steps=3).sum().backward()
    for model in (teacher, student.teacher):
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert teacher.training is training
    assert teacher.norm_in.training is training
    assert [n for n, p in teacher.named_parameters() if not p.requires_grad] == ["head"]
    assert all(p.grad is None for p in teacher.parameters())
    assert not student.teacher.training
    assert not student.teacher.norm_in.training
    assert not any(p.requires_grad for p in student.teacher.parameters())


def test_teachers_without_weights_are_refused():
    x, recipe = inputs(), Recipe.from_name("anchored")
    with pytest.raises(TypeError, match=r"must be an nn\.Module, and Weightless is none: wrap"):
        Student.for_example(Weightless(), recipe, x)
    with pytest.raises(
        TypeError, match="changes the teacher's weights, and the teacher has no par"
    ):
        Student.for_example(from_functions(lambda z, c: 0.5 * z + c), recipe, x)
    with pytest.raises(TypeError, match="it has no inject, start, step, readout"):
        Student.for_example(nn.Linear(2, 2), recipe, x)


def test_a_step_without_weights_is_refused():
    class Idle(Tanh):
        def inject(self, x):
            return x

        def step(self, z, context):
            return 0.5 * z + context

    with pytest.raises(ValueError, match="no weight of the teacher takes part in its step"):
        untrained(Idle(width=5), inputs(), "anchored")


@pytest.mark.parametrize("name", ["paper", "anchored"])
@pytest.mark.parametrize("history", ["anderson", "mlp", "gru", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(name, history, dtype):
    """A student is made of a teacher in single or double precision, and may then be used in another."""
    made = torch.promote_types(dtype, torch.float32)
    student = untrained(Tanh().to(made), inputs(dtype=made), name, history=history)
    out = randomized(student).to(dtype)(inputs(dtype=dtype), steps=3)
    assert out.dtype == dtype
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", ["paper", "anchored"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_teachers_in_half_precision_are_refused(name, dtype):
    with pytest.raises(ValueError, match=rf"states are of {dtype}: .*\(teacher\.float\(\)\)"):
        untrained(Tanh().to(dtype), inputs(dtype=dtype), name)


def test_steps_can_be_differentiated_to_every_weight():
    x = inputs()
    student = randomized(untrained(Pair(), x, "paper", history="gru"))
    student(x, steps=3).sum().backward()
    missing = [n for n, p in student.trainable().items() if p.grad is None or not p.grad.any()]
    # The second tensor's head and memory reach the output through the first.
    assert missing == []


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("boundary", ["weights", "state"])
def test_inference_in_ring_buffers_equals_the_differentiable_rollout(window, boundary):
    changes = {"boundary": boundary, "history": "anderson", "window": window, "start": "teacher"}
    teacher, x = Tanh().double(), inputs(dtype=torch.float64)
    student = randomized(untrained(teacher, x, "anchored", **changes), 0.05)
    with torch.no_grad():
        fast = student.trajectory(x, 6)
    tracked = student.trajectory(x, 6)
    assert tracked[-1].requires_grad
    torch.testing.assert_close(fast, [z.detach() for z in tracked], rtol=1e-6, atol=1e-8)


def test_the_teachers_injection_alone_is_computed_once_and_left_as_it_is():
    class Counting(Tanh):
        injections = 0

        def inject(self, x):
            self.injections += 1
            return super().inject(x)

    teacher, x = Counting(), inputs()
    student = randomized(
        untrained(teacher, x, "anchored", start="teacher", injection="teacher"), 0.5
    )
    assert student.shapes.weights == ("weight",)
    student.teacher.injections = 0
    with torch.no_grad():
        z = student.trajectory(x, 2)[2]
        assert student.teacher.injections == 1
        first = torch.tanh(teacher.inject(x))
        W = teacher.weight + student.recipe.decay * changes_of(student)["weight"]
        torch.testing.assert_close(z, torch.tanh(first @ W.T + teacher.inject(x)))
    both = untrained(teacher, x, "anchored", start="teacher", injection="student")
    both.teacher.injections = 0
    both(x, steps=1)
    assert both.teacher.injections == 2


# Put to use


@pytest.mark.parametrize("kind", [Tanh, Pair, Ring, Normed])
@pytest.mark.parametrize("recipe", ["paper", "anchored", "corrected", "warm_start"])
@pytest.mark.parametrize("injection", ["teacher", "student"])
def test_a_baked_student_takes_the_same_steps(kind, recipe, injection):
    x, leap = inputs(), {} if recipe in ("paper", "anchored") else {"leap": 1}
    student = untrained(kind(), x, recipe, injection=injection, **leap)
    student = randomized(student).eval().requires_grad_(False)
    expected = student.trajectory(x, 3)
    for steps in (1, 3):
        z, context = student.baked(steps).state(x)
        torch.testing.assert_close(z, expected[steps], rtol=1e-5, atol=1e-6)
        assert same_tensors(context, student.teacher.inject(x))


def test_a_baked_student_is_a_snapshot():
    x, student = inputs(), randomized(untrained(Normed()))
    baked = student.baked(2)
    before, _ = baked.state(x)
    randomized(student, seed=6)
    assert same_tensors(baked.state(x)[0], before)
    assert not torch.allclose(student.trajectory(x, 2)[2], before)
    with pytest.raises(ValueError, match="steps must be at least 1, not 0"):
        student.baked(0)


def test_a_student_with_other_parts_shares_the_teacher():
    x, student = inputs(), randomized(untrained(Tanh(), schedule="learned", depth=3))
    other = randomized(untrained(Tanh(), schedule="learned", depth=3), seed=6)
    joined = student.with_parts(other.own_parts())
    assert joined.methods is student.methods
    assert same_tensors(joined.trajectory(x, 3), other.trajectory(x, 3))
    assert not torch.allclose(student(x, steps=3), joined(x, steps=3))

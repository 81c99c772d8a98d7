"""What a student makes of its last evaluations."""

import copy
import pickle

import pytest
import torch

from cdeq.consistency.history import (
    AndersonHistory,
    GRUHistory,
    MLPHistory,
    NoHistory,
    RunningAnderson,
)
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.student import Student
from cdeq.equilibrium.states import map_state
from cdeq.solvers import Anderson, solve_model
from checks import same_tensors
from teachers import Pair, Ring, Tanh, inputs, randomized


def evaluations(count, shape=(4, 6), dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    make = lambda: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return [(make(), make()) for _ in range(count)]


@pytest.mark.parametrize("mixing", [1.0, 0.3])
def test_two_points_have_the_papers_closed_form(mixing):
    (z0, h0), (z1, h1) = past = evaluations(2)
    r0, r1 = h0 - z0, h1 - z1
    # argmin over alpha of |alpha r1 + (1 - alpha) r0|^2
    alpha = (r0 * (r0 - r1)).sum(1) / (r1 - r0).square().sum(1)
    alpha = alpha[:, None]
    expected = mixing * (alpha * h1 + (1 - alpha) * h0) + (1 - mixing) * (
        alpha * z1 + (1 - alpha) * z0
    )
    found = AndersonHistory(len(past) - 1, mixing, batched=True, ridge=0.0).predict(past)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    with_ridge = AndersonHistory(len(past) - 1, mixing, batched=True).predict(past)
    torch.testing.assert_close(with_ridge, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(with_ridge, expected)


@pytest.mark.parametrize("window", [3, 5, 7])
@pytest.mark.parametrize("mixing", [1.0, 0.7])
def test_longer_windows_against_least_squares(window, mixing):
    past = evaluations(window + 1, (4, 20))
    found = AndersonHistory(len(past) - 1, mixing, batched=True, ridge=0.0).predict(past)
    for b in range(4):
        z = torch.stack([z[b] for z, _ in past])
        h = torch.stack([h[b] for _, h in past])
        r = h - z
        # alpha_0 = 1 - sum of the others turns the constraint into a free problem.
        rest = torch.linalg.lstsq((r[1:] - r[0]).T, -r[0][:, None]).solution.squeeze(1)
        alpha = torch.cat([1 - rest.sum(keepdim=True, dim=0), rest])
        expected = alpha @ (mixing * h + (1 - mixing) * z)
        torch.testing.assert_close(found[b], expected, rtol=1e-9, atol=1e-11)


def test_one_evaluation_is_a_damped_step():
    [(z, h)] = past = evaluations(1)
    assert AndersonHistory(1, 1.0, batched=True).predict(past) is h
    torch.testing.assert_close(
        AndersonHistory(1, 0.3, batched=True).predict(past), 0.3 * h + 0.7 * z
    )
    assert NoHistory()(z, h, None) == (h, None)


def test_an_unbatched_state_is_one_sample():
    past = evaluations(2, (4, 6))
    (z0, h0), (z1, h1) = past
    r0, r1 = h0 - z0, h1 - z1
    alpha = (r0 * (r0 - r1)).sum() / (r1 - r0).square().sum()
    found = AndersonHistory(1, 1.0, batched=False, ridge=0.0).predict(past)
    torch.testing.assert_close(found, alpha * h1 + (1 - alpha) * h0)
    per_sample = AndersonHistory(1, 1.0, batched=True, ridge=0.0).predict(past)
    assert not torch.allclose(found, per_sample)


def test_no_gradient_through_the_weights():
    past = [(z, h.requires_grad_()) for z, h in evaluations(2)]
    (z0, h0), (z1, h1) = past
    out = AndersonHistory(1, 1.0, batched=True, ridge=0.0).predict(past)
    seen = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    g0, g1 = torch.autograd.grad((out * seen).sum(), (h0, h1))
    with torch.no_grad():
        r0, r1 = h0 - z0, h1 - z1
        alpha = ((r0 * (r0 - r1)).sum(1) / (r1 - r0).square().sum(1))[:, None]
    torch.testing.assert_close(g1, alpha * seen)  # no term of d alpha / d h
    torch.testing.assert_close(g0, (1 - alpha) * seen)


def test_a_window_forgets_the_oldest_evaluation():
    history, memory = AndersonHistory(2, 1.0, batched=True), None
    past = evaluations(5)
    for z, h in past:
        found, memory = history(z, h, memory)
    assert memory == past[-3:]
    assert torch.equal(found, history.predict(past[-3:]))


@pytest.mark.parametrize("window", [1, 3, 5, 7])
@pytest.mark.parametrize("kind", [Tanh, Pair, Ring])
@pytest.mark.parametrize("mixing", [1.0, 0.6])
def test_an_untrained_student_with_anderson_is_the_anderson_solver(window, kind, mixing):
    teacher, x = kind(norm=0.9).double(), inputs(dtype=torch.float64)
    recipe = Recipe.from_name(
        "anchored", start="teacher", history="anderson", window=window, mixing=mixing
    )
    student = Student.for_example(teacher, recipe, x)
    student.history.ridge = 1e-8  # the solver's
    states = []
    solve_model(
        teacher,
        teacher.inject(x),
        Anderson(window=window, mixing=mixing),
        tol=0.0,
        max_steps=7,
        callback=lambda k, z: states.append(z),
    )
    with torch.no_grad():
        for ours, theirs in zip(student.trajectory(x, 7), states, strict=True):
            map_state(
                lambda a, b: torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7), ours, theirs
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mixing", [1.0, 0.6])
def test_half_precision_is_mixed_in_single(dtype, mixing):
    """Near the equilibrium, where residuals are small beside the states, as along one rollout."""
    g = torch.Generator().manual_seed(0)
    star = torch.randn(4, 50, generator=g)
    past = []
    for scale in (0.1, 0.05, 0.02):
        z = star + scale * torch.randn(4, 50, generator=g)
        past.append((z.to(dtype), (z + 0.5 * (star - z)).to(dtype)))
    history = AndersonHistory(2, mixing, batched=True)
    running, kept, ring = RunningAnderson(history, 2, star), None, None
    for i, (z, h) in enumerate(past):
        mixed, kept = history(z, h, kept)
        other, ring = running(z, h, ring)
        exact = history.predict([(a.double(), b.double()) for a, b in past[: i + 1]])
        assert mixed.dtype == other.dtype == dtype
        # Rounded once, at the end: within the rounding of the exact answer.
        close = {"rtol": 1.01 * torch.finfo(dtype).eps / 2, "atol": 2e-5}
        torch.testing.assert_close(mixed.double(), exact, **close)
        torch.testing.assert_close(other.double(), exact, **close)


MODULES = {"mlp": MLPHistory, "gru": GRUHistory}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 6), 1), ((2, 5, 6), 2), ((2, 6, 3, 3), 1), ((2, 6, 5), 1)]
)
@pytest.mark.parametrize("count", [1, 2])
def test_learned_histories_start_as_the_evaluation_and_then_change(name, shape, axis, count):
    torch.manual_seed(0)
    module = MODULES[name]((6,), (axis,))
    past = evaluations(count, shape, torch.float32)
    assert torch.equal(module.predict(past), past[-1][1])
    randomized(module)
    changed = module.predict(past)
    assert changed.shape == shape
    assert not torch.allclose(changed, past[-1][1])


@pytest.mark.parametrize("name", MODULES)
def test_learned_histories_see_the_older_evaluation(name):
    torch.manual_seed(0)
    module = randomized(MODULES[name]((6,), (1,)))
    old, new = evaluations(2, dtype=torch.float32)
    other = evaluations(1, dtype=torch.float32, seed=9)[0]
    assert not torch.allclose(module.predict([old, new]), module.predict([other, new]))
    # At the first step the only evaluation stands for both.
    torch.testing.assert_close(module.predict([new]), module.predict([new, new]))


@pytest.mark.parametrize("features", [6, 11])
def test_the_mlp_has_the_papers_widths(features):
    module = MLPHistory((features,), (1,))
    shapes = [layer[0].linear.weight.shape for layer in (module.inner, module.outer)]
    assert shapes == [(2 * features, 4 * features), (features, 2 * features)]


def test_the_mlp_is_its_equation():
    torch.manual_seed(0)
    module = randomized(MLPHistory((6,), (1,)))
    (z0, h0), (z1, h1) = past = evaluations(2, dtype=torch.float32)
    inner, outer = module.inner[0].linear, module.outer[0].linear
    hidden = torch.nn.functional.gelu(inner(torch.cat([h1, h0, z1, z0], dim=1)))
    torch.testing.assert_close(module.predict(past), h1 + outer(hidden))


@pytest.mark.parametrize("name", MODULES)
def test_learned_histories_of_tuple_states(name):
    torch.manual_seed(0)
    module = MODULES[name]((6, 3), (1, 2))
    first, second = evaluations(2, (4, 6), torch.float32), evaluations(2, (4, 5, 3), torch.float32)
    past = [((a, c), (b, d)) for (a, b), (c, d) in zip(first, second, strict=True)]
    same = module.predict(past)
    assert isinstance(same, tuple)
    assert all(torch.equal(a, b) for a, b in zip(same, past[-1][1], strict=True))
    randomized(module)
    for part, h in zip(module.predict(past), past[-1][1], strict=True):
        assert part.shape == h.shape
        assert not torch.allclose(part, h)


# What rollouts leave to each other


def mixing_student(name="corrected", kind=Pair):
    x = inputs()
    recipe = Recipe.from_name(name)
    return randomized(Student.for_example(kind(), recipe, x), 0.05).eval().requires_grad_(False), x


def kept_at(student):
    return [ring.residuals.data_ptr() for _, ring in student.history.spare.kept]


@pytest.mark.parametrize("name", ["corrected", "warm_start"])
@pytest.mark.parametrize("kind", [Tanh, Pair, Ring])
@torch.no_grad()
def test_rollouts_share_no_buffers_while_they_run(name, kind):
    student, x = mixing_student(name, kind)
    other = x + 1
    alone = [copy.deepcopy(student).trajectory(given, 8) for given in (x, other)]
    first, second = (student.rollout(student.prepare(given), 8) for given in (x, other))
    in_turns = list(zip(first, second, strict=True))
    assert same_tensors([a for a, _ in in_turns], alone[0])
    assert same_tensors([b for _, b in in_turns], alone[1])
    # In what they leave behind nothing of theirs is found again, and no state of theirs is written over.
    assert same_tensors(student.trajectory(x, 8), alone[0])
    assert same_tensors([a for a, _ in in_turns], alone[0])


@torch.no_grad()
def test_the_next_rollout_has_the_buffers_of_the_last():
    student, x = mixing_student()
    assert kept_at(student) == []
    list(student.rollout(student.prepare(x), 3))
    [kept] = kept_at(student)
    rollout = student.rollout(student.prepare(x), 8)
    next(rollout), next(rollout)
    assert kept_at(student) == []  # they are in use
    rollout.close()  # before its end
    assert kept_at(student) == [kept]
    student(x[:2], steps=3)  # of another size: the old ones are let go
    assert kept_at(student) != [kept]
    assert len(kept_at(student)) == 1
    for twin in (copy.deepcopy(student), pickle.loads(pickle.dumps(student.history))):
        assert getattr(twin, "history", twin).spare.kept == []


def test_buffers_made_for_inference_are_not_written_to_outside_of_it():
    student, x = mixing_student()
    with torch.inference_mode():
        inside = student(x, steps=4)
    with torch.no_grad():
        outside = student(x, steps=4)
    with torch.inference_mode():
        again = student(x, steps=4)
    assert torch.equal(inside, outside)
    assert torch.equal(again, outside)

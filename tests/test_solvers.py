"""The solve loop and its three solvers, on problems whose answer is known."""

import dataclasses
import inspect

import pytest
import torch

from cdeq import Student, distill, record
from cdeq.consistency.certify import certified_solve
from cdeq.equilibrium.states import map_state, relative_distance, tensors_of
from cdeq.gradients import solve_with_gradient
from cdeq.solvers import SOLVERS, Anderson, Broyden, Picard, solve, solve_model
from cdeq.solvers.anderson import PIECE, anderson_weights
from cdeq.solvers.base import MAX_STEPS, TOL
from checks import numbers, same_tensors
from problems import PROBLEMS, Counting, Spoiled, diverging, drifting, tanh

# dtype: (tolerance asked of the solver, distance allowed from the fixed point)
PRECISION = {
    torch.float64: (1e-11, 1e-9),
    torch.float32: (1e-5, 2e-4),
    torch.bfloat16: (2e-2, 0.15),
}
ALL = [Picard(), Anderson(), Broyden()]
MORE = [*ALL, Picard(mixing=0.6), Anderson(window=1), Anderson(mixing=0.7), Broyden(memory=3)]


def everything(f, z0, solver, **options):
    """The solution, and all states the callback saw."""
    seen = []

    def callback(k, z):
        assert k == len(seen)
        seen.append(map_state(torch.clone, z))

    return solve(f, z0, solver, callback=callback, **options), seen


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("solver", MORE, ids=repr)
@pytest.mark.parametrize("name", PROBLEMS)
def test_finds_the_fixed_point(name, solver, dtype):
    problem, (tol, distance) = PROBLEMS[name](dtype), PRECISION[dtype]
    if solver == Picard() and not problem.picard:
        pytest.skip("plain iteration oscillates here")
    solution = solve(problem.f, problem.z0, solver, tol=tol, max_steps=400, batched=problem.batched)
    assert solution.converged.all()
    assert solution.measured.all()
    assert (solution.residual <= tol).all()
    assert (relative_distance(solution.state, problem.solution, problem.batched) < distance).all()
    for z, start in zip(tensors_of(solution.state), tensors_of(problem.z0), strict=True):
        assert z.dtype == dtype
        assert z.shape == start.shape


@pytest.mark.parametrize("solver", ALL, ids=repr)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("budget", [1, 2, 7])
def test_counts_and_callback_are_exact(name, solver, budget):
    problem = PROBLEMS[name](torch.float64)
    f = Counting(problem.f)
    solution, seen = everything(
        f, problem.z0, solver, tol=0, max_steps=budget, batched=problem.batched
    )
    assert f.calls == solution.evaluations == len(solution.history) <= budget
    assert solution.steps.max() == f.calls
    # z_0 ... z_K: all that f was given, and the newest, which f was not.
    assert len(seen) == f.calls + 1
    assert same_tensors(f.arguments, seen[:-1])


@pytest.mark.parametrize("solver", ALL, ids=repr)
def test_one_step_is_one_evaluation_of_the_map(solver):
    problem = tanh(torch.float64)
    solution = solve(problem.f, problem.z0, solver, max_steps=1)
    torch.testing.assert_close(solution.state, problem.f(problem.z0), rtol=0, atol=1e-15)
    assert not solution.measured.any()
    assert not solution.converged.any()
    assert solution.residual.tolist() == [1, 1, 1]


@pytest.mark.parametrize("solver", ALL, ids=repr)
def test_converged_state_is_the_one_that_was_measured(solver):
    problem = tanh(torch.float64)
    f = Counting(problem.f)
    solution = solve(f, problem.z0, solver, tol=1e-6)
    for i, k in enumerate(solution.steps.tolist()):
        assert torch.equal(solution.state[i], f.arguments[k - 1][i])
        torch.testing.assert_close(solution.residual[i], solution.history[k - 1, i])
        assert (solution.history[: k - 1, i] > 1e-6).all()
        assert (solution.history[k - 1 :, i] == solution.residual[i]).all()


@pytest.mark.parametrize("solver", MORE, ids=repr)
def test_samples_do_not_know_of_each_other(solver):
    problem = tanh(torch.float64)
    together = solve(problem.f, problem.z0, solver, tol=1e-8, max_steps=200)
    assert len(set(together.steps.tolist())) > 1
    for i in range(3):

        def alone(z, i=i):
            return problem.f(z.expand(3, -1, -1))[i : i + 1]

        single = solve(alone, problem.z0[i : i + 1], solver, tol=1e-8, max_steps=200)
        assert single.steps == together.steps[i]
        torch.testing.assert_close(single.state[0], together.state[i], rtol=0, atol=1e-10)
        torch.testing.assert_close(
            single.history[:, 0], together.history[: single.evaluations, i], rtol=1e-3, atol=0
        )


@pytest.mark.parametrize("solver", ALL, ids=repr)
@pytest.mark.parametrize("since", [0, 1, 3])
def test_nan_in_one_sample_leaves_the_others_alone(solver, since):
    problem = tanh(torch.float64)
    clean = solve(problem.f, problem.z0, solver, tol=1e-8, max_steps=200)
    f = Spoiled(problem.f, [1], since)
    spoiled, seen = everything(f, problem.z0, solver, tol=1e-8, max_steps=200)
    assert spoiled.converged.tolist() == [True, False, True]
    assert spoiled.steps[1] == since + 1
    assert spoiled.state.isfinite().all()
    assert all(z.isfinite().all() for z in seen)
    others = [0, 2]
    assert torch.equal(spoiled.steps[others], clean.steps[others])
    torch.testing.assert_close(spoiled.state[others], clean.state[others], rtol=0, atol=1e-14)
    # The spoiled sample is left at the best state measured: that before the spoiled evaluation.
    if since == 0:
        assert torch.equal(spoiled.state[1], problem.z0[1])
        assert spoiled.residual[1] == torch.inf
    else:
        best = int(clean.history[:since, 1].argmin())
        assert torch.equal(spoiled.state[1], seen[best][1])
        assert spoiled.residual[1] == clean.history[best, 1]


@pytest.mark.parametrize("solver", ALL, ids=repr)
def test_nan_in_all_samples_stops_at_once(solver):
    problem = tanh(torch.float32)
    f = Spoiled(problem.f, [0, 1, 2], 2)
    solution, seen = everything(f, problem.z0, solver)
    assert f.calls == solution.evaluations == 3
    assert len(seen) == 4
    assert not solution.converged.any()
    assert solution.state.isfinite().all()


@pytest.mark.parametrize("solver", MORE, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_divergence_is_reported_with_the_best_state(solver, dtype):
    z0 = torch.tensor([[0.5, 1.0], [2.0, -3.0]], dtype=dtype)
    f = Counting(diverging)
    solution, seen = everything(f, z0, solver, max_steps=60)
    assert not solution.converged.any()
    assert solution.state.isfinite().all()
    assert all(z.isfinite().all() for z in seen)
    if solution.measured.all():
        assert torch.equal(solution.residual, solution.history.nan_to_num(torch.inf).amin(dim=0))


def test_oscillation_returns_the_best_state_measured():
    problem = PROBLEMS["rotation"](torch.float64)
    solution, seen = everything(problem.f, problem.z0, Picard(), max_steps=10)
    assert not solution.converged.any()
    best = solution.history.argmin(dim=0)
    for i, k in enumerate(best.tolist()):
        if solution.measured[i]:
            assert torch.equal(solution.state[i], seen[k][i])
        assert solution.residual[i] == solution.history[k, i]


@pytest.mark.parametrize("solver", MORE, ids=repr)
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_identical_residuals_raise_nothing(solver, dtype):
    solution, seen = everything(
        drifting, torch.zeros(2, 3, dtype=dtype), solver, tol=0, max_steps=12
    )
    assert all(z.isfinite().all() for z in seen)
    # Where it converges it has gone so far that z + 1 rounds to z.
    assert torch.equal(solution.converged, (drifting(solution.state) == solution.state).all(dim=1))
    if dtype == torch.float64:
        assert not solution.converged.any()
        assert solution.evaluations == 12


@pytest.mark.parametrize("solver", MORE, ids=repr)
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_a_sample_at_its_fixed_point_waits_for_the_others(solver, dtype):
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=dtype)
    tol = PRECISION[dtype][0]
    solution = solve(lambda z: 0.5 * z + x, torch.zeros_like(x), solver, tol=tol, max_steps=100)
    assert solution.converged.all()
    assert solution.steps[0] == 1 < solution.steps[1]
    assert solution.state[0].tolist() == [0, 0]
    assert solution.residual[0] == 0


@pytest.mark.parametrize("solver", ALL, ids=repr)
def test_an_empty_batch_is_solved(solver):
    solution = solve(torch.tanh, torch.zeros(0, 3), solver)
    assert solution.state.shape == (0, 3)
    assert solution.evaluations == 1


@pytest.mark.parametrize("solver", ALL, ids=repr)
def test_no_gradient_is_recorded(solver):
    weight = torch.full((3,), 0.5, requires_grad=True)
    solution = solve(lambda z: weight * z + 1, torch.zeros(2, 3), solver)
    assert solution.converged.all()
    assert not solution.state.requires_grad


@pytest.mark.parametrize("solver", ALL, ids=repr)
def test_the_state_keeps_its_dtype_when_the_map_answers_in_another(solver):
    solution = solve(lambda z: (0.5 * z + 1).bfloat16(), torch.zeros(2, 3), solver, tol=1e-2)
    assert solution.state.dtype == torch.float32
    assert solution.converged.all()


def flat_tanh():
    """The first sample of the problem on vectors: its map, and its start."""
    problem = tanh(torch.float64)

    def f(z):
        return problem.f(z.view(1, 5, 6).expand(3, -1, -1))[0].flatten()

    return f, problem.z0[0].flatten()


# Anderson


def anderson_by_least_squares(f, z0, window, mixing, steps):
    """The definition, by unconstrained least squares in differences from the newest residual."""
    zs, images = [z0], []
    for k in range(steps):
        images.append(f(zs[k]))
        recent = range(max(0, k - window), k + 1)
        r = torch.stack([images[i] - zs[i] for i in recent], dim=1)  # (D, n)
        differences = r[:, :-1] - r[:, -1:]
        gamma = torch.linalg.lstsq(differences, -r[:, -1]).solution if k else r.new_zeros(0)
        alpha = torch.cat([gamma, 1 - gamma.sum(dim=0, keepdim=True)])
        mixed = [mixing * images[i] + (1 - mixing) * zs[i] for i in recent]
        zs.append(torch.stack(mixed, dim=1) @ alpha)
    return zs


@pytest.mark.parametrize("window", [1, 3, 5])
@pytest.mark.parametrize("mixing", [1.0, 0.6])
def test_anderson_solves_its_least_squares_problem(window, mixing):
    f, z0 = flat_tanh()
    solver = Anderson(window=window, mixing=mixing, ridge=0)
    _, seen = everything(f, z0, solver, tol=0, max_steps=10, batched=False)
    expected = anderson_by_least_squares(f, z0, window, mixing, steps=10)
    torch.testing.assert_close(torch.stack(seen), torch.stack(expected), rtol=0, atol=1e-8)


def test_anderson_weights_minimise_and_sum_to_one():
    r = numbers(4, 3, 8)
    r[:, 1] *= 1e-4  # residuals of very different sizes
    alpha = anderson_weights(r @ r.mT, 0.0)
    torch.testing.assert_close(alpha.sum(dim=1), torch.ones(4, dtype=torch.float64))
    mixed = (alpha[:, None] @ r).squeeze(1)
    # At the constrained minimum the mixed residual is orthogonal to all differences of residuals.
    slopes = torch.einsum("bd,bnd->bn", mixed, r - r[:, :1])
    assert slopes.abs().max() < 1e-12


@pytest.mark.parametrize("batch", [1, 3])
def test_products_of_long_residuals_keep_their_digits(batch):
    """All of one sign, so that a running sum in single precision forgets what is small beside it."""
    long = torch.rand(batch, 4, 20 * PIECE + 7, generator=torch.Generator().manual_seed(0))
    found = Anderson().products(long[:, 1], long)
    exact = long.double() @ long[:, 1, :, None].double()
    torch.testing.assert_close(found.double(), exact.mT, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e12])
def test_the_ridge_is_relative(scale):
    r = numbers(2, 4, 9)
    expected = anderson_weights(r @ r.mT, 1e-2)
    torch.testing.assert_close(anderson_weights((scale * r) @ (scale * r).mT, 1e-2), expected)
    assert (anderson_weights(r @ r.mT, 0.0) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("ridge", [0.0, 1e-8])
def test_weights_of_singular_gram_matrices_are_finite(ridge):
    r = numbers(4, 3, 8)
    r[0, 1] = r[0, 2] = r[0, 0]  # identical
    r[1] = 0
    r[2, 1] = 0
    alpha = anderson_weights(r @ r.mT, ridge)
    assert alpha.isfinite().all()
    torch.testing.assert_close(alpha.sum(dim=1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(alpha[2], torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))


# Broyden


def dense_broyden(f, z0, memory, steps):
    """Broyden's first method as in the textbooks: a dense Jacobian of g(z) = f(z) - z, from -I."""
    z, identity = z0, torch.eye(len(z0), dtype=z0.dtype)
    g, jacobian, zs = f(z) - z, -identity, [z0]
    for k in range(1, steps + 1):
        s = -torch.linalg.solve(jacobian, g)
        z = z + s
        zs.append(z)
        y = f(z) - z - g
        g = g + y
        restart = k % memory == 0
        jacobian = -identity if restart else jacobian + torch.outer(y - jacobian @ s, s) / (s @ s)
    return zs


@pytest.mark.parametrize("memory", [1, 4, 20])
def test_broyden_is_the_textbook_method(memory):
    f, z0 = flat_tanh()
    _, seen = everything(f, z0, Broyden(memory=memory), tol=0, max_steps=12, batched=False)
    expected = dense_broyden(f, z0, memory, steps=12)
    torch.testing.assert_close(torch.stack(seen), torch.stack(expected), rtol=0, atol=1e-9)


def test_broyden_survives_a_vanishing_denominator():
    # f(z) = z + 1 makes the textbook denominator exactly zero.
    solution, seen = everything(drifting, torch.zeros(1, 2), Broyden(), tol=0, max_steps=5)
    assert all(z.isfinite().all() for z in seen)
    assert not solution.converged.any()


# Options


@pytest.mark.parametrize(
    ("one", "other", "differs_from"),
    [
        (Picard(), Picard(mixing=0.5), 1),
        (Anderson(), Anderson(mixing=0.5), 1),
        (Anderson(), Anderson(ridge=0.1), 2),
        (Anderson(window=1), Anderson(window=2), 3),
        (Anderson(window=2), Anderson(window=5), 4),
        (Broyden(memory=2), Broyden(memory=3), 3),
        (Broyden(memory=3), Broyden(memory=8), 4),
    ],
)
def test_options_change_the_iterates_from_the_step_they_should(one, other, differs_from):
    problem = tanh(torch.float64)
    _, a = everything(problem.f, problem.z0, one, tol=0, max_steps=8)
    _, b = everything(problem.f, problem.z0, other, tol=0, max_steps=8)
    for k, (za, zb) in enumerate(zip(a, b, strict=True)):
        assert torch.allclose(za, zb, rtol=0, atol=1e-9) == (k < differs_from), k


@pytest.mark.parametrize(
    "function",
    [solve, solve_model, solve_with_gradient, record, distill, Student.solve, certified_solve],
)
def test_one_solver_one_tolerance_and_one_budget_serve_all(function):
    known = inspect.signature(function).parameters
    assert known["solver"].default is None
    # Distillation takes as many as the equilibria it learns from need.
    assert known["max_steps"].default == (None if function is distill else MAX_STEPS)
    # Recording takes it from what it records: all the states of a budget, or an equilibrium.
    assert known["tol"].default == (None if function is record else TOL)


def test_without_a_solver_it_is_andersons():
    problem = tanh(torch.float64)
    ours, theirs = (solve(problem.f, problem.z0, solver) for solver in (None, Anderson()))
    assert torch.equal(ours.state, theirs.state)
    assert ours.evaluations == theirs.evaluations


def test_acceleration_needs_fewer_steps():
    problem = PROBLEMS["symmetric_linear"](torch.float64)
    steps = {
        name: solve(problem.f, problem.z0, kind(), tol=1e-6, max_steps=200).evaluations
        for name, kind in SOLVERS.items()
    }
    assert max(steps["anderson"], steps["broyden"]) < 0.6 * steps["picard"]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Picard(mixing=0), "mixing"),
        (lambda: Picard(mixing=1.5), "mixing"),
        (lambda: Anderson(mixing=float("nan")), "mixing"),
        (lambda: Anderson(mixing=-0.5), "mixing"),
        (lambda: Anderson(window=0), "window"),
        (lambda: Anderson(ridge=-1e-8), "ridge"),
        (lambda: Anderson(ridge=float("inf")), "ridge"),
        (lambda: Broyden(memory=0), "memory"),
    ],
)
def test_bad_options_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize("solver", ALL, ids=repr)
def test_solvers_are_frozen(solver):
    assert solver == type(solver)()
    for field in dataclasses.fields(solver):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(solver, field.name, 1)


@pytest.mark.parametrize(
    ("f", "z0", "options", "words"),
    [
        (torch.tanh, torch.zeros(2, 3), {"max_steps": 0}, "max_steps"),
        (torch.tanh, torch.zeros(2, 3), {"tol": -1.0}, "tol"),
        (torch.tanh, torch.zeros(2, 3), {"tol": float("nan")}, "tol"),
        (torch.tanh, torch.tensor([[0.0], [torch.nan]]), {}, "z0 must be finite"),
        (torch.tanh, torch.tensor([[torch.inf]]), {}, "z0 must be finite"),
        (lambda z: z[:, :1], torch.zeros(2, 3), {}, r"f must return.*\(2, 3\).*\(2, 1\)"),
        (lambda z: z.T, torch.zeros(2, 3), {}, r"f must return.*\(2, 3\).*\(3, 2\)"),
        (lambda z: (z,), torch.zeros(2, 3), {}, "f must return"),
        (lambda z: z[0], (torch.zeros(2, 3),), {}, "f must return"),
    ],
)
def test_bad_input_is_refused(f, z0, options, words):
    with pytest.raises(ValueError, match=words):
        solve(f, z0, Picard(), **options)

"""Samples that are done cost nothing: the results are those of the whole batch."""

import pytest
import torch

import cdeq
from cdeq.equilibrium.rows import rows_of_context
from cdeq.equilibrium.states import tensors_of
from cdeq.solvers import Anderson, Broyden, Picard, solve_model
from checks import numbers
from teachers import Pair, Plain, Tanh, randomized, untrained

BATCH = 32


class Rates(Plain):
    """z = q z + x with a rate q for each sample, in the context; counts the rows that it was evaluated on."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def inject(self, x):
        return {"x": x[:, 1:], "rate": x[:, 0]}

    def start(self, context):
        return torch.zeros_like(context["x"])

    def step(self, z, context):
        self.rows.append(len(z))
        return context["rate"][:, None] * torch.tanh(z) + context["x"]


def mixed(hard=0.1, size=BATCH, dtype=torch.float64):
    """Inputs of which a tenth needs many evaluations."""
    x = numbers(size, 7, dtype=dtype)
    x[:, 0] = 0.2
    x[: max(1, int(hard * size)), 0] = 0.97
    x[:, 1:] *= 0.1
    return x


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Anderson(window=2), Broyden()])
@pytest.mark.parametrize("measure", ["residual", "error"])
def test_results_are_those_of_the_whole_batch(solver, measure):
    model, context = Rates(), Rates().inject(mixed())
    given = {"tol": 1e-6, "max_steps": 400, "measure": measure}
    whole = solve_model(model, context, solver, compact=False, **given)
    assert set(model.rows) == {BATCH}
    model.rows.clear()
    parts = solve_model(model, context, solver, **given)
    assert min(model.rows[:-1]) < BATCH // 2
    torch.testing.assert_close(parts.state, whole.state, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(parts.residual, whole.residual, rtol=1e-4, atol=1e-12)
    torch.testing.assert_close(parts.history, whole.history, rtol=1e-4, atol=1e-12)
    assert torch.equal(parts.steps, whole.steps)
    assert torch.equal(parts.converged, whole.converged)
    assert parts.evaluations == whole.evaluations


def test_a_student_leaves_out_what_is_done():
    x = mixed(dtype=torch.float32)
    student = randomized(untrained(Rates(), x, "corrected"), 0.05).eval().requires_grad_(False)
    rows = student.teacher.rows
    rows.clear()
    result = student.solve(x, tol=1e-4, max_steps=200)
    assert min(rows) < BATCH // 2
    alone = student.solve(x[:3], tol=1e-4, max_steps=200)
    torch.testing.assert_close(result.state[:3], alone.state, rtol=1e-3, atol=1e-4)


def test_tuples_of_tensors_are_cut_too():
    model = Pair().double()
    x = numbers(BATCH, 5)
    x[: BATCH // 2] *= 1e-9
    found = [
        solve_model(model, model.inject(x), tol=1e-9, compact=compact) for compact in (True, False)
    ]
    for ours, theirs in zip(*(tensors_of(one.state) for one in found), strict=True):
        torch.testing.assert_close(ours, theirs)


class Table(Rates):
    """Its context has a table that is as long as the batch by chance, and belongs to no sample."""

    def inject(self, x):
        return {**super().inject(x), "table": torch.linspace(0, 1, BATCH, dtype=x.dtype)}

    def step(self, z, context):
        return super().step(z, context) + 0.1 * context["table"].mean()


class Coupled(Rates):
    """Its samples are not independent."""

    def step(self, z, context):
        return super().step(z, context) + 0.1 * z.mean(dim=0)


@pytest.mark.parametrize("kind", [Table, Coupled])
def test_in_doubt_nothing_is_left_out(kind):
    model = kind()
    context = model.inject(mixed())
    whole = solve_model(model, context, tol=1e-6, max_steps=300, compact=False)
    model.rows.clear()
    found = solve_model(model, context, tol=1e-6, max_steps=300)
    assert sorted(set(model.rows)) == [1, BATCH]  # one trial
    assert model.rows.count(1) == 1
    assert torch.equal(found.state, whole.state)


def test_a_teacher_may_select_by_itself():
    class Selecting(Table):
        def select(self, context, rows):
            return {**context, "x": context["x"][rows], "rate": context["rate"][rows]}

    model = Selecting()
    context = model.inject(mixed())
    whole = solve_model(model, context, tol=1e-6, max_steps=300, compact=False)
    found = solve_model(model, context, tol=1e-6, max_steps=300)
    assert min(model.rows[:-1]) < BATCH // 2
    torch.testing.assert_close(found.state, whole.state, rtol=1e-8, atol=1e-10)
    part = rows_of_context(model, context, torch.tensor([2]), BATCH)
    assert len(part["table"]) == BATCH


def test_small_batches_and_callbacks_see_everything():
    model = Rates()
    solve_model(model, model.inject(mixed(size=8)), tol=1e-6, max_steps=300)
    assert set(model.rows) == {8}
    model.rows.clear()
    seen = []
    solve_model(
        model, model.inject(mixed()), tol=1e-6, max_steps=300, callback=lambda k, z: seen.append(z)
    )
    assert set(model.rows) == {BATCH}
    assert all(len(z) == BATCH for z in seen)


def test_gradients_pass_through_a_solve_that_left_samples_out():
    model = Tanh(norm=0.9).double()
    x = numbers(BATCH, 5)
    x[: BATCH // 2] *= 1e-9
    gradients = []
    for solver in (Anderson(), Picard()):
        context = model.inject(x)
        found = cdeq.solve_with_gradient(
            model,
            context,
            solver=solver,
            gradient=cdeq.Implicit(tol=1e-12),
            tol=1e-10,
            max_steps=400,
        )
        loss = model.readout(found.state, context).square().sum()
        gradients.append(torch.autograd.grad(loss, [model.weight, model.injection]))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)

"""The four-method contract and models made of plain functions."""

import pytest
import torch
from torch import nn

from cdeq.equilibrium.contract import (
    EquilibriumModel,
    check_contract,
    from_functions,
    is_batched,
)
from cdeq.solvers import Anderson, solve_model


def test_check_contract_names_what_is_missing():
    class Half:
        step = None  # there, but not a method

        def inject(self, x):
            return x

        def start(self, context):
            return context

    with pytest.raises(TypeError, match=r"Half.*no step, readout"):
        check_contract(Half())


def test_from_functions_is_an_equilibrium_model():
    model = from_functions(lambda z, x: 0.5 * z + x)
    check_contract(model)
    assert isinstance(model, EquilibriumModel)
    assert is_batched(model)
    assert not is_batched(from_functions(lambda z, x: z, batched=False))


def test_defaults_start_at_zero_like_the_context_and_read_the_state():
    model = from_functions(lambda z, x: 0.5 * z + x)
    x = torch.randn(3, 4)
    context = model.inject(x)
    assert context is x
    assert torch.equal(model.start(context), torch.zeros(3, 4))
    z = solve_model(model, context, Anderson(), tol=1e-6).state
    torch.testing.assert_close(model.readout(z, context), 2 * x)


def test_a_tuple_context_gives_a_tuple_start():
    model = from_functions(lambda z, x: z)
    start = model.start((torch.ones(2, 1), torch.ones(2, 3)))
    assert [tuple(t.shape) for t in start] == [(2, 1), (2, 3)]


def test_every_function_is_used_and_modules_are_registered():
    cell, encoder, head = nn.Linear(4, 4), nn.Linear(2, 4), nn.Linear(4, 3)
    model = from_functions(
        lambda z, x: torch.tanh(0.1 * cell(z) + x),
        start=lambda context: torch.ones_like(context),
        inject=encoder,
        readout=head,
    )
    assert {id(p) for p in model.parameters()} == {
        id(p) for m in (encoder, head) for p in m.parameters()
    }
    context = model.inject(torch.randn(5, 2))
    assert context.shape == (5, 4)
    assert torch.equal(model.start(context), torch.ones(5, 4))
    z = model.step(model.start(context), context)
    assert torch.equal(model.readout(z, context), head(z))


def test_solve_model_starts_where_told():
    model = from_functions(lambda z, x: 0.5 * z + x)
    x = torch.randn(3, 4)
    assert solve_model(model, x, Anderson()).evaluations > 1
    solution = solve_model(model, x, Anderson(), z0=2 * x)
    assert solution.evaluations == 1
    assert torch.equal(solution.state, 2 * x)


def test_solve_model_takes_an_unbatched_model_as_one_sample():
    model = from_functions(lambda z, x: 0.5 * z + x, batched=False)
    solution = solve_model(model, torch.randn(3, 4), Anderson())
    assert solution.converged.shape == (1,)

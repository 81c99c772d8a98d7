"""What many tests compute or compare: random numbers, equilibria, distances, gradients, logs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdeq.data.sparse import csr_from_entries
from cdeq.equilibrium.states import relative_distance
from cdeq.gradients import Implicit, Unrolled, solve_with_gradient
from cdeq.models import MODELS
from cdeq.solvers import Anderson, solve_model


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random numbers, the same for each dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def csr(dense: Tensor) -> Tensor:
    """The matrix in CSR layout, without its zeros."""
    rows, columns = dense.nonzero(as_tuple=True)
    return csr_from_entries(rows, columns, dense[rows, columns], tuple(dense.shape))


def same_tensors(ours: Any, theirs: Any) -> bool:
    """Whether two nests of tensors are equal to the bit, in the same containers, of the same dtypes."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, Mapping):
        return list(ours) == list(theirs) and all(same_tensors(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same_tensors, ours, theirs))
    return ours is theirs


def tensor_bytes(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Each tensor as its bytes: where -0 is not 0, and NaN is itself."""
    return {
        name: t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, t in tensors.items()
    }


@torch.no_grad()
def equilibrium(model: Any, x: Any, *, tol: float = 1e-6, max_steps: int = 400) -> Any:
    """The state to which Anderson's method converges for the input `x`."""
    solution = solve_model(model, model.inject(x), Anderson(), tol=tol, max_steps=max_steps)
    assert bool(solution.converged.all())
    return solution.state


@torch.no_grad()
def solver_states(model: Any, x: Any, steps: int, solver: Any, z: Any = None) -> list[Any]:
    """z_0 ... z_steps of a solver that starts at `z`, or where the model starts."""
    states: list[Any] = []
    solve_model(
        model,
        model.inject(x),
        solver,
        z0=z,
        tol=0.0,
        max_steps=steps,
        callback=lambda k, state: states.append(state),
    )
    return states


@torch.no_grad()
def picard_states(model: Any, x: Any, steps: int, z: Any = None) -> list[Any]:
    """z_0 ... z_steps by calling the model's step, in its own dtype."""
    context = model.inject(x)
    states = [model.start(context) if z is None else z]
    for _ in range(steps):
        states.append(model.step(states[-1], context))
    return states


def distances(states: Iterable[Any], star: Any, batched: bool = True) -> list[float]:
    """The relative distance of each state to the equilibrium, averaged over samples."""
    return [relative_distance(z, star, batched).mean().item() for z in states]


def require_copies(model: Any, x: Any) -> None:
    """A deep copy, and a model of the same config given the same weights, answer alike, and share no weight."""
    before = answer_after(model, x, 3)
    rebuilt = MODELS[type(model).__name__](**json.loads(json.dumps(model.config)))
    rebuilt = rebuilt.to(next(model.parameters()).dtype).train(model.training)
    assert rebuilt.config == model.config
    assert not torch.allclose(answer_after(rebuilt, x, 3), before)
    rebuilt.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), rebuilt):
        assert torch.equal(answer_after(other, x, 3), before)
        with torch.no_grad():
            for weight in other.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
        assert not torch.allclose(answer_after(other, x, 3), before)
    assert torch.equal(answer_after(model, x, 3), before)


@torch.no_grad()
def answer_after(model: Any, x: Any, steps: int) -> Tensor:
    """The readout after this many steps of the model itself."""
    return model.readout(picard_states(model, x, steps)[-1], model.inject(x))


def require_gradients(module: nn.Module) -> None:
    """Every weight of the module has a finite gradient that is not all zero."""
    for name, weight in module.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.isfinite().all()), name
        assert bool(weight.grad.any()), name


def require_implicit_gradients(
    model: Any,
    x: Any,
    loss: Callable[[Tensor], Tensor],
    *,
    unrolled: int,
    tolerance: float,
    least: float,
) -> None:
    """Implicit gradients of the loss of the output are those of many unrolled steps.

    For each weight to within `tolerance`, relative to its gradient, whose largest number is at least `least`.
    """
    found = []
    for gradient in (Implicit(tol=1e-13, max_steps=400), Unrolled(steps=unrolled)):
        context = model.inject(x)
        solution = solve_with_gradient(
            model, context, solver=Anderson(), gradient=gradient, tol=1e-13, max_steps=400
        )
        value = loss(model.readout(solution.state, context))
        found.append(torch.autograd.grad(value, list(model.parameters())))
    for (name, _), ours, expected in zip(model.named_parameters(), *found, strict=True):
        assert expected.abs().max() > least, name
        assert (ours - expected).norm() < tolerance * expected.norm(), name


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The entries of a training's log, without the seconds, which are never the same."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def as_it_is(z: Tensor, f: Tensor, out: tuple[Tensor, Tensor]) -> None:
    """No correction, for the safeguard."""
    out[0].copy_(f - z)
    out[1].copy_(f)

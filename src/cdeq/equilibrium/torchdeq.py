"""Models written on torchdeq, unchanged, as equilibrium models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from cdeq.equilibrium.contract import Input
from cdeq.equilibrium.states import State
from cdeq.equilibrium.trees import map_leaves


def from_torchdeq(
    model: nn.Module,
    deq: str | None = None,
    *,
    output: Callable[[Any], Tensor] | None = None,
    batched: bool = True,
) -> TorchDEQModel:
    """The equilibrium model inside `model`, whose forward calls a torchdeq DEQ once.

    `deq` names that DEQ among the model's modules where there are several. `output` picks the
    tensor out of what forward returns, where it returns more than one. The weights are the model's
    own, shared, unless torchdeq normalises them: that is folded into plain weights, on a copy.

    Meant for eval mode: in training, variational dropout would draw another mask for the readout,
    which runs forward a second time. One adapter serves one thread at a time.
    """
    torchdeq = _import_torchdeq()
    name = _find_deq(model, deq, torchdeq.core.DEQBase)
    if any(hasattr(m, "_deq_norm") for m in model.modules()):
        model = _fold_norm(model, torchdeq.norm.remove_norm)
    return TorchDEQModel(model, name, output, batched)


@dataclass(frozen=True)
class CapturedContext:
    """What a model handed to torchdeq for one input.

    `template` is the function itself and `tensors` are those it closes over (the injected input),
    held apart so that they can be replaced: `dataclasses.replace(context, tensors=...)` is the
    context with, for example, the mean of two injections. `owner` is the model whose weights the function
    reads.
    """

    x: Input
    start: State
    tensors: tuple[Tensor, ...]
    template: Callable[..., Any]
    owner: nn.Module

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The map z -> f(z) of this context, on `tensors`."""
        tensors = iter(self.tensors)
        return _map_tensors(lambda _: next(tensors), self.template)


class TorchDEQModel(nn.Module):
    """The four methods of a torchdeq model; see `from_torchdeq`. A call is a call of the model."""

    def __init__(
        self,
        model: nn.Module,
        deq: str,
        output: Callable[[Any], Tensor] | None,
        batched: bool,
    ):
        super().__init__()
        self.model = model
        self.deq_name = deq
        self.output = output
        self.batched = batched

    def forward(self, x: Input) -> Tensor:
        result = self.model(*x) if isinstance(x, tuple) else self.model(x)
        return result if self.output is None else self.output(result)

    def inject(self, x: Input) -> CapturedContext:
        """Runs forward up to the DEQ. A tuple is taken for forward's positional arguments."""
        captured: list[tuple[Callable[..., Any], Any]] = []

        def capture(func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            captured.append((func, _initial_state(*args, **kwargs)))
            raise _Stop

        try:
            with self._intercept(capture):
                self.forward(x)
        except _Stop:
            pass
        else:
            raise RuntimeError(f"the model's forward did not call its DEQ, '{self.deq_name}'")
        ((function, z0),) = captured
        start = z0 if isinstance(z0, Tensor) else tuple(z0)
        return CapturedContext(x, start, _tensors_in(function), function, self.model)

    def start(self, context: CapturedContext) -> State:
        return context.start

    def step(self, z: State, context: CapturedContext) -> State:
        if context.owner is not self.model:
            raise ValueError(
                "this context belongs to another copy of the model and would run with its weights; "
                "make one with this copy's own inject"
            )
        return context.function(z) if isinstance(z, Tensor) else tuple(context.function(*z))

    def readout(self, z: State, context: CapturedContext) -> Tensor:
        """Runs forward with the DEQ answering `z`; it reports no solver statistics."""
        calls: list[None] = []

        def answer(func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
            calls.append(None)
            if len(calls) > 1:
                raise RuntimeError(
                    f"forward calls its DEQ, '{self.deq_name}', more than once; "
                    "an input may have one equilibrium"
                )
            return [z if isinstance(z, Tensor) else list(z)], _no_statistics()

        with self._intercept(answer):
            return self.forward(context.x)

    @contextmanager
    def _intercept(self, forward: Callable[..., Any]) -> Iterator[None]:
        """The DEQ answers with `forward` inside, and as before outside, whatever happens."""
        attributes = self.model.get_submodule(self.deq_name).__dict__
        before = attributes.get("forward")
        attributes["forward"] = forward
        try:
            yield
        finally:
            del attributes["forward"]
            if before is not None:
                attributes["forward"] = before


class _Stop(BaseException):
    """Leaves a forward at its DEQ. Not an Exception, so that no model's own handler can hold it."""


def _import_torchdeq() -> Any:
    try:
        import torchdeq
        import torchdeq.core
        import torchdeq.norm
    except ImportError as error:
        raise ImportError(
            "from_torchdeq adapts models written on torchdeq, which is not installed: "
            "pip install torchdeq"
        ) from error
    return torchdeq


def _no_statistics() -> Any:
    from torchdeq.solver.stat import SolverStat

    return SolverStat()  # torchdeq's own mark for unknown: -1 everywhere


def _find_deq(model: nn.Module, name: str | None, kind: type) -> str:
    names = [n for n, module in model.named_modules() if isinstance(module, kind)]
    if not names:
        raise ValueError(f"{type(model).__name__} has no torchdeq DEQ among its modules")
    if name is None and len(names) > 1:
        raise ValueError(f"which DEQ is it? Name one of {', '.join(names)} as `deq`")
    if name is not None and name not in names:
        raise ValueError(f"'{name}' is not a torchdeq DEQ of the model; it has {', '.join(names)}")
    return names[0] if name is None else name


def _initial_state(
    z_init: Any = None, *_: Any, z_star: Any = None, **__: Any
) -> Tensor | list[Tensor] | tuple[Tensor, ...]:
    """The initial state, by whichever name torchdeq's classes give it."""
    return z_star if z_init is None else z_init


def _fold_norm(model: nn.Module, remove_norm: Callable[[nn.Module], None]) -> nn.Module:
    """A copy of the model with torchdeq's weight or spectral norm folded into plain weights."""
    # The normalised weights have a graph, which deepcopy refuses; the copy makes its own.
    derived = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
    folded = copy.deepcopy(model, {id(t): t.detach().clone() for t in derived})
    normed = [m for m in folded.modules() if hasattr(m, "_deq_norm")]
    before = [({n for n, _ in _own(m)}, any(p.requires_grad for _, p in _own(m))) for m in normed]
    remove_norm(folded)
    for module, (names, trainable) in zip(normed, before, strict=True):
        for name, parameter in _own(module):
            if name not in names:  # folded just now
                parameter.requires_grad_(trainable)
    return folded


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False)


def _tensors_in(value: Any) -> tuple[Tensor, ...]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(note, value)
    return tuple(found)


def _map_tensors(
    function: Callable[[Tensor], Tensor], value: Any, mapped: dict[int, Any] | None = None
) -> Any:
    """`value` with the tensors in it replaced: in trees, closures, defaults and partials.

    `mapped` holds what was met before, for functions that close over themselves.
    """
    known = {} if mapped is None else mapped
    recurse = partial(_map_tensors, function, mapped=known)

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if id(leaf) in known:
            return known[id(leaf)]
        if isinstance(leaf, partial):
            parts = recurse((leaf.func, leaf.args, leaf.keywords))
            return partial(parts[0], *parts[1], **parts[2])
        if isinstance(leaf, FunctionType):
            return _map_function(recurse, leaf, known)
        return leaf

    return map_leaves(replace, value)


def _map_function(
    recurse: Callable[[Any], Any], function: FunctionType, mapped: dict[int, Any]
) -> FunctionType:
    if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
        return function
    cells = tuple(CellType() for _ in function.__closure__ or ())
    result = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, cells or None
    )
    mapped[id(function)] = result  # before its cells are filled: one of them may hold the function
    for old, new in zip(function.__closure__ or (), cells, strict=True):
        try:
            content = old.cell_contents
        except ValueError:  # a name not yet assigned
            continue
        new.cell_contents = recurse(content)
    result.__defaults__ = recurse(function.__defaults__)
    result.__kwdefaults__ = recurse(function.__kwdefaults__)
    return result

"""Plain modules as files that run without their Python: ONNX, and torch's own `.pt2`.

Inputs are tensors with names; where a module takes a tree of tensors, its parts. Files are whole or absent.
"""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdeq.equilibrium.trees import map_leaves, named_tensors
from cdeq.files import atomic_write_all

Axes = dict[str, dict[int, str]]
"""For each input the axes whose size is open, and their names."""


class ExportError(ValueError):
    """What cannot be exported, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A module to be written: `arguments` of its forward, trees of tensors by name, and the names of its `outputs`."""

    module: nn.Module
    arguments: dict[str, Any]
    axes: Axes
    outputs: tuple[str, ...]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors of the arguments by name, in order."""
        found: dict[str, Tensor] = {}
        for name, tree in self.arguments.items():
            found |= named_tensors(tree, name)
        return found


HOLE = object()
"""Where a tensor goes in a tree."""


class Flat(nn.Module):
    """A module that takes trees, as one that takes their tensors."""

    def __init__(self, module: nn.Module, trees: list[Any]):
        super().__init__()
        self.module = module
        self.trees = [map_leaves(lambda x: HOLE if isinstance(x, Tensor) else x, t) for t in trees]

    def forward(self, *tensors: Tensor) -> Any:
        left = iter(tensors)
        return self.module(
            *(map_leaves(lambda x: next(left) if x is HOLE else x, tree) for tree in self.trees)
        )


def write_programs(programs: dict[Path, Program]) -> None:
    """Write each program in the format of its file's suffix: all files, or none if one cannot be made."""
    contents = {}
    for path, program in programs.items():
        contents[path] = writer_for(path)(program)
    atomic_write_all(contents)


def writer_for(path: Path) -> Callable[[Program], bytes]:
    """What makes the bytes of a file with this suffix; refuses others, and packages that are missing."""
    if path.suffix not in WRITERS:
        raise ExportError(f"{path} must end in one of {', '.join(WRITERS)}, which says the format")
    if not hasattr(torch.export.Dim, "DYNAMIC"):
        raise ExportError(f"export needs torch 2.6 or newer; this is {torch.__version__}")
    if path.suffix == ".onnx":
        for package in ("onnx", "onnxscript"):
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise ImportError(
                    f"export to ONNX needs {package} ({error}): pip install 'cdeq[export]'"
                ) from error
    return WRITERS[path.suffix]


def traced(program: Program) -> torch.export.ExportedProgram:
    """The program as a graph of torch's operators."""
    for name, tensor in (*program.inputs.items(), *program.module.state_dict().items()):
        if tensor.layout != torch.strided:
            raise ExportError(
                f"{name} is a sparse matrix, which neither ONNX nor torch.export can hold: only that of a "
                "cdeq.data.Graph is written as its edges; others run in torch, see student.baked"
            )
    flat = Flat(program.module, list(program.arguments.values())).eval()
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple(dict.fromkeys(program.axes.get(name, {}), dynamic) for name in program.inputs)
    try:
        with torch.no_grad(), quiet():
            return torch.export.export(
                flat, tuple(program.inputs.values()), dynamic_shapes=(shapes,), strict=False
            )
    except Exception as error:
        raise ExportError(f"the teacher's code cannot be traced: {first_line(error)}") from error


def pt2_bytes(program: Program) -> bytes:
    """As `torch.export.load` reads it; the names of inputs and outputs are in `names.txt`."""
    file = io.BytesIO()
    graph = traced(program)
    names = {"names.txt": f"{' '.join(program.inputs)}\n{' '.join(program.outputs)}\n"}
    with quiet():
        torch.export.save(graph, file, extra_files=names)
    return file.getvalue()


def onnx_bytes(program: Program) -> bytes:
    """One file with its weights."""
    graph = traced(program)
    names = tuple(program.axes.get(name, {}) for name in program.inputs)
    try:
        with torch.no_grad(), quiet():
            found = torch.onnx.export(
                graph,
                input_names=list(program.inputs),
                output_names=list(program.outputs),
                dynamic_shapes=(names,),
                dynamo=True,
                verbose=False,
            )
            return sums_before_norms(found.model_proto).SerializeToString()  # type: ignore[union-attr]
    except Exception as error:
        raise ExportError(f"this cannot be written as ONNX: {first_line(error)}") from error


def sums_before_norms(model: Any) -> Any:
    """Addition before a layer norm as ONNX's Sum, which is the same for two tensors.

    onnxruntime would join an Add and the norm to one operation that takes many times longer than both on a CPU.
    """
    made_by = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        before = made_by.get(node.input[0]) if node.op_type == "LayerNormalization" else None
        if before is not None and before.op_type == "Add":
            before.op_type = "Sum"
    return model


WRITERS: dict[str, Callable[[Program], bytes]] = {".onnx": onnx_bytes, ".pt2": pt2_bytes}


def first_line(error: Exception) -> str:
    """What an error says, without the pages of advice after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch's exporters say to their own developers."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)

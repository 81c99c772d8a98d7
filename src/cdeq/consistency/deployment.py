"""A student written to a file: which of its inputs' sizes stay open, and the graphs that are written.

Sizes that stay open: the number of samples, and for a causal model the length of a text and of its memory. What of a
context changes with them is found by trying two sizes. Shapes: B samples, L tokens, M tokens of memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cdeq.consistency.unrolling import TeacherStep, UnrolledStudent
from cdeq.data.graphs import Graph, normalised_adjacency
from cdeq.equilibrium.contract import Input
from cdeq.equilibrium.memory import Remembering, Segment
from cdeq.equilibrium.trees import map_leaves, named_tensors, tensors_in
from cdeq.export import Axes, ExportError, Program, first_line, write_programs, writer_for

if TYPE_CHECKING:
    from cdeq.consistency.student import Student

STEP = ".step"
"""What stands before the suffix of the file with the teacher's step."""


def export_student(
    student: Student,
    path: str | Path,
    x: Input,
    steps: int,
    *,
    check: bool = True,
    certified: bool = False,
) -> list[Path]:
    """Write the student's first `steps` steps, and for `certified` the teacher's step; see `Student.export`."""
    path = Path(path)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ExportError(f"steps must be a whole number, 1 or more, not {steps!r}")
    writer_for(path)
    first, axes = opened(student, x)
    module = UnrolledStudent(student, steps, check=check, certified=certified)
    found = _answered(module, first)
    whole = Program(
        module=module,
        arguments={_argument(first): first},
        axes=axes,
        outputs=_checked_names(found),
    )
    programs = {path: whole}
    if certified:
        programs[path.with_suffix(STEP + path.suffix)] = _teacher_step(module, first, axes)
    write_programs(programs)
    return list(programs)


def _answered(module: UnrolledStudent, x: Input) -> dict[str, Tensor]:
    """The outputs for an input; refuses one that the student cannot take."""
    try:
        with torch.no_grad():
            return module.named(x)
    except Exception as error:
        raise ExportError(f"the student does not answer this input: {first_line(error)}") from error


def opened(student: Student, x: Input) -> tuple[Input, Axes]:
    """An input like `x` in sizes that torch does not take for constants, and the axes that stay open."""
    teacher: Any = student.teacher
    if isinstance(teacher, Remembering):
        tokens, memory = x if isinstance(x, Segment) else Segment(x)
        x = Segment(tokens, tuple(memory) or teacher.no_memory(tokens.shape[0]))
    if isinstance(x, Graph):
        x = x.as_dense_tensors()
    tensors = named_tensors(x, _argument(x))
    if not tensors:
        raise ExportError(f"an input of tensors is needed, not a {type(x).__name__}")
    axes: Axes = {}
    if student.batched:
        batch = len(tensors_in(x)[0])
        axes = {name: {0: "batch"} for name, t in tensors.items() if t.shape[:1] == (batch,)}
    if getattr(teacher, "causal", False):
        for name, tensor in tensors.items():
            if tensor.ndim > 1:
                axes[name][1] = "memory" if name.startswith("memory") else "length"
    if isinstance(x, Graph):
        axes = {name: {0: "nodes" if name == "features" else "edges"} for name in tensors}
    return _with_sizes(x, axes, _sizes(tensors, axes)), axes


def _argument(x: Input) -> str:
    """The name of an input that is one tensor; the parts of others have names of their own."""
    return "x" if isinstance(x, Tensor) else ""


def _sizes(tensors: dict[str, Tensor], axes: Axes) -> dict[str, int]:
    """Sizes to trace with: all different, none 0 or 1, which torch takes for constants; a text no longer than given.

    A graph gets one more node and one more edge.
    """
    given = {k: tensors[name].shape[axis] for name in axes for axis, k in axes[name].items()}
    length = given.get("length", 0)
    usual = {"batch": 3, "length": length if length > 5 else 7, "memory": 5}
    return {kind: usual.get(kind, size + 1) for kind, size in given.items()}


def _with_sizes(x: Input, axes: Axes, sizes: dict[str, int]) -> Input:
    """The input with its open axes repeated, or cut, to these sizes; where there was nothing, zeros."""
    resized = {}
    for name, tensor in named_tensors(x, _argument(x)).items():
        for axis, size in ((i, sizes[kind]) for i, kind in axes.get(name, {}).items()):
            if tensor.shape[axis] == 0:
                tensor = tensor.new_zeros(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
            else:
                places = torch.arange(size, device=tensor.device) % tensor.shape[axis]
                tensor = tensor.index_select(axis, places)
        resized[name] = tensor
    left = iter(resized.values())
    return map_leaves(lambda leaf: next(left) if isinstance(leaf, Tensor) else leaf, x)


def _teacher_step(module: UnrolledStudent, x: Input, axes: Axes) -> Program:
    """The teacher's step from a state and a context that the student's graph gave."""
    teacher: Any = module.student.teacher
    sizes = _sizes(named_tensors(x, _argument(x)), axes)
    step = TeacherStep(module, remembers=isinstance(x, Segment))
    with torch.no_grad():
        contexts = [
            teacher.inject(_with_sizes(x, axes, {kind: n - less for kind, n in sizes.items()}))
            for less in (0, 1)
        ]
        states = [teacher.start(context) for context in contexts]
        found = step.named(states[0], contexts[0])
    names = {n: kind for kind, n in sizes.items()}
    open_axes: Axes = {}
    for name, pair in (("state", states), ("context", contexts)):
        ours, theirs = (named_tensors(tree, name) for tree in pair)
        for part, tensor in ours.items():
            open_axes[part] = {
                i: names.get(n, f"{part}_{i}")
                for i, n in enumerate(tensor.shape)
                if n != theirs[part].shape[i]
            }
    return Program(
        module=step,
        arguments={"state": states[0], "context": contexts[0]},
        axes=open_axes,
        outputs=_checked_names(found),
    )


def _checked_names(found: dict[str, Tensor]) -> tuple[str, ...]:
    """The names of the outputs; refuses what is no tensor."""
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise ExportError(f"{name} must be a tensor, not a {type(value).__name__}")
    return tuple(found)


def described_input(x: Input) -> dict[str, Any] | None:
    """Shape and dtype of an input that is one tensor, of a segment's tokens, or of a graph's features; else None."""
    if isinstance(x, Graph):
        return {"graph": x.features.shape[1], "dtype": _name(x.adjacency.dtype)}
    tensor = x.tokens if isinstance(x, Segment) else x
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return None
    return {"shape": list(tensor.shape), "dtype": _name(tensor.dtype)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ready_to_compute(student: Student) -> Student:
    """A student stored in half precision, as those of the zoo, put in single; others as they are."""
    half = (torch.float16, torch.bfloat16)
    return student.float() if any(p.dtype in half for p in student.parameters()) else student


def example_of(student: Student) -> Input:
    """Zeros like the input that the student was made from; for a graph two nodes that are joined."""
    if student.example is None:
        raise ExportError(
            "the student keeps no example of its input, because that is no single tensor, or because an earlier "
            "version saved it: export it in Python, student.export(path, x, steps=2)"
        )
    dtype = getattr(torch, student.example["dtype"])
    if "graph" not in student.example:
        return torch.zeros(student.example["shape"], dtype=dtype)
    pair = normalised_adjacency(torch.tensor([[0], [1]]), 2).to(dtype)
    return Graph(pair, torch.zeros(2, student.example["graph"], dtype=dtype))

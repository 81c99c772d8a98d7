"""A student on disk: config.json, teacher.safetensors, student.safetensors; no pickle, no foreign code."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from cdeq.consistency.recipes import Recipe
from cdeq.consistency.start import PointwiseStart
from cdeq.files import atomic_write_bytes, atomic_write_text

if TYPE_CHECKING:
    from cdeq.consistency.student import Student

FORMAT = 1


class StudentFolderError(Exception):
    """A student's folder that cannot be read, with the file and the reason."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and persistent buffers by name, tied weights once."""
    persistent = set(model.state_dict())
    named = [*model.named_parameters(), *(b for b in model.named_buffers() if b[0] in persistent)]
    return {name: tensor.detach().contiguous() for name, tensor in named}


def fill_model(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Copy tensors into a model, refusing any difference of names or shapes."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    expected = set(model_tensors(model))
    if expected != set(tensors):
        odd = ", ".join(sorted(expected ^ set(tensors))[:5])
        raise StudentFolderError(
            f"{source} does not fit {type(model).__name__}: unmatched names {odd}"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            if own[name].shape != tensor.shape:
                raise StudentFolderError(
                    f"{source}: {name} has shape {tuple(tensor.shape)}, the model {tuple(own[name].shape)}"
                )
            own[name].copy_(tensor)


def save_student(student: Student, folder: Path) -> None:
    """Write the folder; config.json last, so that a folder that has one is whole."""
    teacher = student.methods.model
    start = student.start_network
    offered = getattr(teacher, "start_network", None) is not None
    config = {
        "format": FORMAT,
        "recipe": student.recipe.to_dict(),
        "form": asdict(student.form),
        "teacher": {"class": _path_of(teacher), "config": _config_of(teacher)},
        "start_network": None
        if start is None
        else {
            "from_teacher": offered and not isinstance(start, PointwiseStart),
            "class": _path_of(start),
            "config": _config_of(start),
        },
        "calibrated": list(student.calibrated),
        "plan": [[tol, steps] for tol, steps in student.plan.items()],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    own = {n: t for n, t in model_tensors(student).items() if not n.startswith("methods.")}
    atomic_write_bytes(folder / "teacher.safetensors", save(model_tensors(teacher)))
    atomic_write_bytes(folder / "student.safetensors", save(own))
    atomic_write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def load_student(cls: type[Student], folder: Path, teacher: nn.Module | type | None) -> Student:
    """Read the folder that `save_student` wrote."""
    from cdeq.consistency.student import Form

    config = _read_config(folder / "config.json")
    recipe, form = Recipe.from_dict(config["recipe"]), config["form"]
    if not isinstance(teacher, nn.Module):
        teacher = _build(config["teacher"], teacher, "teacher")
    fill_model(
        teacher, _read_tensors(folder / "teacher.safetensors"), folder / "teacher.safetensors"
    )
    start = config["start_network"]
    network: nn.Module | None = None
    if start is not None:
        offered: Any = getattr(teacher, "start_network", None)
        network = offered() if start["from_teacher"] else _build(start, None, "start network")
    shape = Form(
        features=tuple(form["features"]), axes=tuple(form["axes"]), weights=tuple(form["weights"])
    )
    student = cls(teacher, recipe, shape, network)
    student.calibrated = tuple(config["calibrated"])
    student.plan = {float(tol): int(steps) for tol, steps in config["plan"]}
    path = folder / "student.safetensors"
    tensors = {f"methods.model.{n}": t for n, t in model_tensors(teacher).items()}
    fill_model(student, {**tensors, **_read_tensors(path)}, path)
    return student


def _path_of(module: nn.Module) -> str:
    return f"{type(module).__module__}:{type(module).__qualname__}"


def _config_of(module: nn.Module) -> dict[str, Any] | None:
    """What the class is built from: its `config`, a dict of keyword arguments, if it keeps one."""
    config = getattr(module, "config", None)
    return dict(config) if isinstance(config, dict) else None


def _build(entry: dict[str, Any], given: type | None, what: str) -> nn.Module:
    """The module from its class and recorded arguments. Only cdeq's own classes are imported by name."""
    path = entry["class"]
    if given is None:
        module_name, _, qualname = path.partition(":")
        if module_name.partition(".")[0] == "cdeq":
            module = importlib.import_module(module_name)
        elif module_name in sys.modules:
            module = sys.modules[module_name]
        else:
            raise StudentFolderError(
                f"the {what} is a {path}: import it first, or pass its class or an instance as `teacher`"
            )
        found: Any = module
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise StudentFolderError(f"the {what}'s class {path} is not there")
        given = found
    if entry["config"] is None:
        raise StudentFolderError(
            f"the {what} {path} keeps no `config` of its arguments: pass an instance as `teacher`"
        )
    return given(**entry["config"])


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise StudentFolderError(
            f"{path} is missing: not a saved student, or one cut short"
        ) from None
    except json.JSONDecodeError as error:
        raise StudentFolderError(f"{path} is not valid JSON: {error}") from None
    if config.get("format") != FORMAT:
        raise StudentFolderError(
            f"{path} has format {config.get('format')}; this version reads {FORMAT}"
        )
    return config


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise StudentFolderError(f"{path} is missing") from None
    except SafetensorError as error:
        raise StudentFolderError(f"{path} is damaged: {error}") from None

"""A student on disk: config.json, teacher.safetensors, student.safetensors; no pickle, no foreign code."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from cdeq.consistency.recipes import Recipe
from cdeq.files import atomic_write_bytes, atomic_write_text, remove_leftovers

if TYPE_CHECKING:
    from cdeq.consistency.student import Student

FORMAT = 1


class StudentFolderError(Exception):
    """A student's folder that cannot be read, with the file and the reason."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and persistent buffers by name, tied weights once."""
    persistent = set(model.state_dict())
    named = [*model.named_parameters(), *(b for b in model.named_buffers() if b[0] in persistent)]
    # Copies: safetensors refuses two views of one memory.
    return {n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in named}


def fill_model(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Copy tensors into a model, in their dtypes, refusing any difference of names or shapes."""
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
            if own[name].dtype != tensor.dtype:
                own[name].data = own[name].data.to(tensor.dtype)
            own[name].copy_(tensor)


def save_student(student: Student, folder: Path) -> None:
    """Write the folder; config.json last, so that a folder that has one is whole."""
    teacher = student.methods.model
    start = student.start_network
    config: dict[str, Any] = {
        "format": FORMAT,
        "recipe": student.recipe.to_dict(),
        "form": asdict(student.form),
        "teacher": {"class": _path_of(teacher), "config": _config_of(teacher)},
        "start_network": None
        if start is None
        else {
            "from_teacher": _config_of(start) is None and hasattr(teacher, "start_network"),
            "class": _path_of(start),
            "config": _config_of(start),
        },
        "calibrated": list(student.calibrated),
        "plan": [[tol, steps] for tol, steps in student.plan.items()],
        "sha256": {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    (folder / "config.json").unlink(missing_ok=True)
    own = {n: t for n, t in model_tensors(student).items() if not n.startswith("methods.")}
    files = {"teacher.safetensors": model_tensors(teacher), "student.safetensors": own}
    for name, tensors in files.items():
        content = save(tensors)
        atomic_write_bytes(folder / name, content)
        config["sha256"][name] = hashlib.sha256(content).hexdigest()
    atomic_write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def load_student(cls: type[Student], folder: Path, teacher: nn.Module | type | None) -> Student:
    """Read the folder that `save_student` wrote, ready for use: frozen, in evaluation mode."""
    config = _read_config(folder / "config.json")
    try:
        student = _rebuilt(cls, folder, config, teacher)
    except (KeyError, TypeError, ValueError, AttributeError, ImportError) as error:
        raise StudentFolderError(
            f"{folder / 'config.json'} does not describe a student that can be built: "
            f"{type(error).__name__}: {error}"
        ) from error
    return student.eval().requires_grad_(False)


def _rebuilt(
    cls: type[Student], folder: Path, config: dict[str, Any], teacher: nn.Module | type | None
) -> Student:
    from cdeq.consistency.student import Form

    digests = config["sha256"]
    recipe, form = Recipe.from_dict(config["recipe"]), config["form"]
    if not isinstance(teacher, nn.Module):
        teacher = _build(config["teacher"], teacher, "teacher")
    path = folder / "teacher.safetensors"
    fill_model(teacher, _read_tensors(path, digests[path.name]), path)
    start = config["start_network"]
    network: nn.Module | None = None
    if start is not None:
        offered: Any = getattr(teacher, "start_network", None)
        network = offered() if start["from_teacher"] else _build(start, None, "start network")
        if start["from_teacher"] and _path_of(network) != start["class"]:
            raise StudentFolderError(
                f"the start network is a {start['class']}, the teacher offers a {_path_of(network)}; "
                "one of your own needs a `config`, a dict of its arguments"
            )
    shape = Form(
        features=tuple(form["features"]), axes=tuple(form["axes"]), weights=tuple(form["weights"])
    )
    student = cls(teacher, recipe, shape, network)
    student.calibrated = tuple(config["calibrated"])
    student.plan = {float(tol): int(steps) for tol, steps in config["plan"]}
    path = folder / "student.safetensors"
    tensors = {f"methods.model.{n}": t for n, t in model_tensors(teacher).items()}
    fill_model(student, {**tensors, **_read_tensors(path, digests[path.name])}, path)
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
        advice = (
            "pass an instance as `teacher`" if what == "teacher" else "give it one, and save again"
        )
        raise StudentFolderError(f"the {what} {path} keeps no `config` of its arguments: {advice}")
    return given(**entry["config"])


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise StudentFolderError(
            f"{path} is missing: not a saved student, or one cut short"
        ) from None
    except ValueError as error:
        raise StudentFolderError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise StudentFolderError(f"{path} is not a student's description")
    if config.get("format") != FORMAT:
        raise StudentFolderError(
            f"{path} has format {config.get('format')}; this version reads {FORMAT}"
        )
    return config


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise StudentFolderError(f"{path} is missing") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise StudentFolderError(f"{path} is damaged: it is not the file that was saved")
    try:
        return load(content)
    except SafetensorError as error:
        raise StudentFolderError(f"{path} is damaged: {error}") from None

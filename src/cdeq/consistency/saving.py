"""A student on disk: config.json, teacher.safetensors, student.safetensors; no pickle, no foreign code.

config.json names the two files of weights and their checksums, and is replaced last. A file that it names is
never written over: beside it, new weights get a name of their own. So at every instant the folder holds the
old student or the new one, whole.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from cdeq.consistency.certificate import Certificate
from cdeq.consistency.copying import copy_of, plain_tensors
from cdeq.consistency.parts import TeacherShapes
from cdeq.consistency.recipes import Recipe
from cdeq.files import atomic_write_bytes, atomic_write_text, remove_leftovers
from cdeq.trajectories.sparse import dense_pieces, from_pieces

if TYPE_CHECKING:
    from cdeq.consistency.student import Student

FORMAT = 3
PARTS = ("teacher", "student")
NETWORKS = (("start_network", "start_network"), ("correction_network", "correction"))
"""A teacher's offer of a network, and what a student calls it."""
DIGITS = 12  # of a checksum, in a file's name


class StudentFolderError(Exception):
    """A student's folder that cannot be read, with the file and the reason."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights, persistent buffers and plain tensors by name, tied weights once, sparse matrices in pieces."""
    persistent = set(model.state_dict())
    named = [
        *model.named_parameters(),
        *(b for b in model.named_buffers() if b[0] in persistent),
        *plain_tensors(model).items(),  # a state_dict leaves them out, and outputs would shift
    ]
    found: dict[str, Tensor] = {}
    for name, tensor in named:
        for piece, dense in _pieces(name, tensor.detach()).items():
            # Copies: safetensors refuses two views of one memory.
            found[piece] = dense.clone(memory_format=torch.contiguous_format)
    return found


def _pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor by its name, or a sparse one as `name.shape`, `name.values` and its indices."""
    if tensor.layout == torch.strided:
        return {name: tensor}
    if tensor.layout not in (torch.sparse_csr, torch.sparse_coo):
        raise StudentFolderError(
            f"{name} is a {tensor.layout} tensor, which cannot be saved: keep it as CSR or COO, or, if "
            "the model builds it itself, register it with persistent=False"
        )
    pieces = {"shape": torch.tensor(tensor.shape), **dense_pieces(tensor)}
    return {f"{name}.{piece}": dense for piece, dense in pieces.items()}


def fill_model(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Copy tensors into a model, in their dtypes, refusing any difference of names or shapes."""
    own = {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
        **plain_tensors(model),
    }
    expected = set(model_tensors(model))
    if expected != set(tensors):
        odd = ", ".join(sorted(expected ^ set(tensors))[:5])
        raise StudentFolderError(
            f"{source} does not fit {type(model).__name__}: unmatched names {odd}"
        )
    left = dict(tensors)
    with torch.no_grad():
        for name, mine in own.items():
            if mine.layout != torch.strided:
                pieces = {p: left.pop(p) for p in _pieces(name, mine) if p in left}
                if pieces:  # none, if the model does not save it
                    _fill_sparse(model, name, mine, pieces, source)
        for name, tensor in left.items():
            _require_shape(name, tensor.shape, own[name].shape, source)
            if own[name].dtype != tensor.dtype:
                own[name].data = own[name].data.to(tensor.dtype)
            own[name].copy_(tensor)


def _fill_sparse(
    model: nn.Module, name: str, mine: Tensor, pieces: dict[str, Tensor], source: Path
) -> None:
    """Put a new sparse matrix, which may have another number of entries, wherever the old one is."""
    parts = {piece.removeprefix(f"{name}."): t.to(mine.device) for piece, t in pieces.items()}
    shape = torch.Size(parts.pop("shape").tolist())
    _require_shape(name, shape, mine.shape, source)
    try:
        tensor = from_pieces(mine.layout, parts, shape)
    except ValueError as error:
        raise StudentFolderError(f"{source}: {name} is damaged: {error}") from None
    for module in model.modules():
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for key, value in [*buffers, *vars(module).items()]:
            if value is mine:
                setattr(module, key, tensor)


def _require_shape(name: str, saved: torch.Size, own: torch.Size, source: Path) -> None:
    if saved != own:
        raise StudentFolderError(
            f"{source}: {name} has shape {tuple(saved)}, the model {tuple(own)}"
        )


def save_student(student: Student, folder: Path) -> None:
    """Write the folder, or replace the student in it as a whole."""
    teacher = student.methods.model
    config: dict[str, Any] = {
        "format": FORMAT,
        "recipe": student.recipe.to_dict(),
        "shapes": asdict(student.shapes),
        "teacher": {"class": _path_of(teacher), "config": _config_of(teacher)},
        **{
            name: _described(name, getattr(student, attribute), teacher)
            for name, attribute in NETWORKS
        },
        "calibrated": list(student.calibrated),
        "example": student.example,
        "plan": [[tol, steps] for tol, steps in student.plan.items()],
        "certificate": None if student.certificate is None else student.certificate.to_dict(),
        "sha256": {},
    }
    own = {n: t for n, t in model_tensors(student).items() if not n.startswith("methods.")}
    before, files = _named_files(folder), dict[str, bytes]()
    for part, tensors in zip(PARTS, (model_tensors(teacher), own), strict=True):
        content = save(tensors)
        digest = hashlib.sha256(content).hexdigest()
        name = f"{part}.safetensors"
        if before.get(name, digest) != digest:
            name = f"{part}-{digest[:DIGITS]}.safetensors"
        files[name], config["sha256"][name] = content, digest
    description = json.dumps(config, indent=2) + "\n"

    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        atomic_write_bytes(folder / name, content)
    atomic_write_text(folder / "config.json", description)
    _tidy(folder, set(files))


def _is_file_of(part: str, name: str) -> bool:
    return re.fullmatch(rf"{part}(-[0-9a-f]{{{DIGITS}}})?\.safetensors", name) is not None


def _named_files(folder: Path) -> dict[str, str]:
    """The files that the student in a folder is made of, with their checksums; none if there is no student."""
    try:
        named = _read_config(folder / "config.json")["sha256"]
    except (StudentFolderError, KeyError):
        return {}
    return named if isinstance(named, dict) else {}


def _tidy(folder: Path, kept: set[str]) -> None:
    """Delete the weights of earlier students and what interrupted saves left; nothing that is not ours."""
    for path in list(folder.iterdir()):
        if path.name not in kept and any(_is_file_of(part, path.name) for part in PARTS):
            path.unlink(missing_ok=True)
    marked = "-" + "[0-9a-f]" * DIGITS
    for pattern in ("config.json", *(f"{p}{m}.safetensors" for p in PARTS for m in ("", marked))):
        remove_leftovers(folder, pattern)


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
    recipe, shapes = Recipe.from_dict(config["recipe"]), config["shapes"]
    if isinstance(teacher, nn.Module):
        teacher = copy_of(teacher)  # the caller's own stays as it is
    else:
        teacher = _build(config["teacher"], teacher, "teacher")
    path, tensors = _read_part("teacher", folder, config)
    fill_model(teacher, tensors, path)
    networks = [_network(name, config.get(name), teacher) for name, _ in NETWORKS]
    known = TeacherShapes(**{name: tuple(value) for name, value in shapes.items()})
    student = cls(teacher, recipe, known, *networks)
    student.calibrated = tuple(config["calibrated"])
    student.plan = {float(tol): int(steps) for tol, steps in config["plan"]}
    if (certificate := config.get("certificate")) is not None:
        student.certificate = Certificate.from_dict(certificate)
    student.example = config.get("example")
    path, tensors = _read_part("student", folder, config)
    tensors |= {f"methods.model.{n}": t for n, t in model_tensors(teacher).items()}
    fill_model(student, tensors, path)
    return student


def _described(name: str, network: nn.Module | None, teacher: nn.Module) -> dict[str, Any] | None:
    """How a network of the student's is built again: by the teacher's offer, or from its class and config."""
    if network is None:
        return None
    config = _config_of(network)
    if config is None and not _is_offered(name, network, teacher):
        raise StudentFolderError(
            f"the student's {name}, a {type(network).__name__}, could not be loaded again: give it a `config`, a dict "
            "of its constructor's arguments"
        )
    return {"from_teacher": config is None, "class": _path_of(network), "config": config}


def _is_offered(name: str, network: nn.Module, teacher: nn.Module) -> bool:
    """Whether the teacher offers a network of this class."""
    if not hasattr(teacher, name):
        return False
    with torch.random.fork_rng(devices=[]):  # building one draws its weights
        return type(getattr(teacher, name)()) is type(network)


def _network(name: str, entry: dict[str, Any] | None, teacher: nn.Module) -> nn.Module | None:
    """A network of the student's, untrained."""
    if entry is None:
        return None
    if not entry["from_teacher"]:
        return _build(entry, None, name)
    network = getattr(teacher, name)()
    if _path_of(network) != entry["class"]:
        raise StudentFolderError(
            f"the {name} is a {entry['class']}, the teacher offers a {_path_of(network)}; "
            "one of your own needs a `config`, a dict of its arguments"
        )
    return network


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
            raise StudentFolderError(f"the {what} is a {path}: import it first; or {_advice(what)}")
        found: Any = module
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise StudentFolderError(f"the {what}'s class {path} is not there: {_advice(what)}")
        given = found
    if entry["config"] is None:
        advice = (
            "pass an instance as `teacher=`" if what == "teacher" else "give it one, and save again"
        )
        raise StudentFolderError(f"the {what} {path} keeps no `config` of its arguments: {advice}")
    return given(**entry["config"])


def _advice(what: str) -> str:
    """How to load what cannot be found by its name: for example a class of a script or a notebook."""
    if what == "teacher":
        return "pass its class or an instance as `teacher=`"
    return "define it there again before loading"


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


def _read_part(part: str, folder: Path, config: dict[str, Any]) -> tuple[Path, dict[str, Tensor]]:
    """The file of weights that config.json names for the teacher or the student, and its tensors."""
    digests = config["sha256"]
    name = next((n for n in digests if _is_file_of(part, n)), f"{part}.safetensors")
    path, digest = folder / name, digests[name]
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise StudentFolderError(f"{path} is missing") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise StudentFolderError(f"{path} is damaged: it is not the file that was saved")
    try:
        return path, load(content)
    except SafetensorError as error:
        raise StudentFolderError(f"{path} is damaged: {error}") from None

"""Students for others: a saved folder with a model card, on disk or on the Hugging Face hub."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from cdeq.consistency.saving import NETWORKS, StudentFolderError, load_student, save_student
from cdeq.files import atomic_write_text
from cdeq.hub import fetch_folder, push_folder

if TYPE_CHECKING:
    from cdeq.consistency.student import Student

README, CARD = "README.md", "card.json"
OURS = (
    "<!-- Written by cdeq, and again at the next save. Delete this line to keep your own text. -->"
)


def share_student(student: Student, folder: Path, name: str | None = None) -> None:
    """Save a student with its model card; `name`: that by which others will load it, default the folder's path."""
    save_student(student, folder)
    if student.card is not None:
        atomic_write_text(folder / CARD, json.dumps(student.card, indent=1) + "\n")
    readme = folder / README
    if not readme.exists() or OURS in readme.read_text(encoding="utf-8"):
        atomic_write_text(readme, model_card(student, name or str(folder)))


def push_student(student: Student, repo_id: str, **options: Any) -> str:
    """Upload a student as one commit. It is saved first: one that cannot be saved makes no repository."""
    if repo_id.count("/") != 1:
        raise ValueError(f"a repository is named 'owner/name', not {repo_id!r}")
    with tempfile.TemporaryDirectory(prefix="cdeq-") as place:
        share_student(student, Path(place), repo_id)
        return push_folder(Path(place), repo_id, **options)


def fetch_student(
    cls: type[Student], source: str | Path, teacher: nn.Module | type | None, **where: Any
) -> Student:
    """A student of somebody else's, from a folder or a repository; only cdeq's classes are built by their name."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = fetch_folder(str(source), **where)
    elif where.get("revision") is not None:
        raise ValueError(f"{folder} is a folder: only a repository has a revision")
    _require_our_classes(str(source), folder, teacher)
    student = load_student(cls, folder, teacher)
    student.card = _read_json(folder / CARD)
    return student


def _require_our_classes(source: str, folder: Path, teacher: nn.Module | type | None) -> None:
    """Refuse classes that are not cdeq's: to build one is to run code that a stranger has chosen."""
    config = _read_json(folder / "config.json") or {}
    if teacher is None and (path := _foreign_class(config.get("teacher"))):
        raise StudentFolderError(
            f"{source} has a teacher {path}, which is not a class of cdeq: if you trust it, "
            "pass the class or an instance as `teacher=`"
        )
    for name, _ in NETWORKS:
        entry = config.get(name)
        offered = isinstance(entry, dict) and entry.get("from_teacher")
        if not offered and (path := _foreign_class(entry)):
            raise StudentFolderError(
                f"{source} has a {name} {path}, which is not a class of cdeq: if you trust it, "
                "import it and use `Student.load` on a downloaded folder"
            )


def _foreign_class(entry: Any) -> str | None:
    """The path of a class that is not cdeq's own; None if it is, or if there is none."""
    if not isinstance(entry, dict):
        return None  # absent, or refused by `load_student`
    path = str(entry.get("class"))
    module, _, name = path.partition(":")
    # No dots in the name: `cdeq.models:nn.Linear` is not ours.
    ours = module.startswith("cdeq.") and name.isidentifier() and not module.endswith("__main__")
    return None if ours else path


def _read_json(path: Path) -> dict[str, Any] | None:
    """A table in JSON; None if it is not there or damaged, which `load_student` says better."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# The model card.


def model_card(student: Student, name: str) -> str:
    """README.md in the hub's form: what the student is, how to load it, how it was made and how good it is."""
    card = student.card or {}
    title = f"{card.get('title', type(student.teacher).__name__)}, distilled by cdeq"
    sections = [
        "---\nlibrary_name: cdeq\ntags:\n- cdeq\n- deep-equilibrium-model\n- distillation\n---",
        OURS,
        f"# {title}",
        "A deep equilibrium model, and a student of it that comes near its equilibrium in one or two evaluations. "
        "The residual of an answer can be measured, and the teacher inside finishes the solve where it is too large.",
        "```python\nfrom cdeq import Student\n\n"
        f'student = Student.from_pretrained("{name}"{_teacher_argument(student.teacher)})\n'
        "output = student(x, steps=2)\n"
        "result = student.solve(x, tol=1e-3)  # result.output, result.residual, result.converged\n```",
        "## What it is",
        _table(("", ""), _facts(student, card)),
        *_scores(card),
    ]
    return "\n\n".join(sections) + "\n"


def _teacher_argument(teacher: Any) -> str:
    """What `from_pretrained` must be given: nothing for a class of cdeq's, the class, or an instance to fill."""
    kind = type(teacher)
    if getattr(teacher, "config", None) is None:
        return f", teacher={kind.__name__}(...)"
    return "" if kind.__module__.startswith("cdeq.") else f", teacher={kind.__name__}"


def _facts(student: Student, card: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    teacher, whole = student.methods.model, sum(p.numel() for p in student.parameters())
    inside = sum(p.numel() for p in teacher.parameters())
    yield "teacher", f"`{type(teacher).__module__}:{type(teacher).__qualname__}`"
    yield "parameters", f"{inside:,} of the teacher, {whole - inside:,} of the student"
    yield "recipe", f"`{student.recipe.name}`"
    for field in ("data", "licence", "command", "commit"):
        if card.get(field):
            yield field, str(card[field])


def _scores(card: Mapping[str, Any]) -> Iterator[str]:
    """What a card of the zoo knows; nothing without one."""
    metric, rows = card.get("metric"), card.get("student")
    if not (metric and rows):
        return
    yield "## How good it is"
    better = "higher" if card.get("higher_is_better") else "lower"
    yield f"On the test data; {better} is better. Distance: to the teacher's equilibrium, relative."
    cells = [[f"student, {r['steps']:g} steps", r.get("score"), r.get("distance")] for r in rows]
    cells.append([f"teacher, converged ({card['steps']:.1f} steps)", card["score"], 0.0])
    yield _table(("", metric, "distance"), cells)


def _table(head: Any, rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"

"""What a measurement depends on beside its settings: commit, command, machine and memory."""

from __future__ import annotations

import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from cdeq.evaluation.plain import json_text
from cdeq.files import atomic_write_text

FOLDERS = ("--out", "--runs", "--data-dir")
"""Options that say where things are."""
AND = " and "


def provenance(parts: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """The commit, command and hardware of this process, which every measurement is kept with.

    For a result that is made from `parts`, their commits and commands come first.
    """
    found = list(parts)
    return {
        "commit": joined([*(part["commit"] for part in found), current_commit()]),
        "command": joined([*(part["command"] for part in found), current_command()]),
        "hardware": current_hardware(),
    }


def joined(names: Iterable[str]) -> str:
    """The commits, or the commands, that made a result in several runs, each once; some may be joined already."""
    return AND.join(dict.fromkeys(one for name in names for one in name.split(AND)))


def write_measurements(
    path: str | os.PathLike[str], rows: list[dict[str, Any]], **about: Any
) -> Path:
    """Write the rows of a benchmark with the command, commit and hardware that they depend on."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json_text({**provenance(), **about, "rows": rows}))
    return path


def current_commit(folder: str | os.PathLike[str] | None = None) -> str:
    """The commit checked out in `folder`, "-dirty" if tracked files changed, or "unknown".

    Without a folder, the commit of cdeq's own source; its version, if it is installed as a package.
    """
    if folder is None:
        here = Path(__file__)
        return _commit(here.parent, here.name) or f"cdeq {version('cdeq')}"
    return _commit(folder) or "unknown"


def _commit(folder: str | os.PathLike[str], tracked: str = ".") -> str | None:
    """The commit, if git knows the folder and the file there."""
    try:
        if not _git(folder, "ls-files", tracked):
            return None
        commit = _git(folder, "rev-parse", "--verify", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(folder: str | os.PathLike[str], *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def current_command(argv: Sequence[str] | None = None) -> str:
    """The command line as a person would type it: `cdeq demo --task images`.

    Without the folders of this machine, on which no measured value depends.
    """
    program, *arguments = sys.argv if argv is None else argv
    path = Path(program)
    if path.name in ("__main__.py", "cli.py") and path.parent.name == "cdeq":
        head = ["cdeq"]
    elif path.suffix == ".py":
        head = ["python", path.name]
    else:
        head = [path.name or "python"]
    kept = [
        argument
        for before, argument in pairwise(["", *arguments])
        if not {argument.partition("=")[0], before} & set(FOLDERS)
    ]
    return shlex.join([*head, *kept])


def current_hardware() -> dict[str, Any]:
    """The machine and how loaded it is now: what seconds depend on."""
    load = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "load_average": load,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpus"] = torch.cuda.device_count()
    return found


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def _memory_gb() -> float | None:
    with suppress(AttributeError, ValueError, OSError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return None


def peak_megabytes() -> float:
    """The most memory that this process has held since it began, or since `begin_peak`.

    Linux's ru_maxrss of a new process is at least what its parent held: there the process's own mark is read.
    """
    own = _status_megabytes("VmHWM")
    if own is not None:
        return own
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def begin_peak() -> float:
    """What this process holds now; its peak counts from here on, where the system can forget an earlier one."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status_megabytes("VmRSS") or peak_megabytes()


def _status_megabytes(field: str) -> float | None:
    """A field of Linux's /proc/self/status; None elsewhere."""
    with suppress(OSError):
        found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) / 1024 if found else None
    return None

"""Make the page of this folder: a student, exported, and everything that runs it in one HTML file.

    npm ci --prefix web --ignore-scripts
    python web/build.py [--student runs/demo-images/student-corrected] [--out web/dist]

Browsers load no files and no modules for a page that is opened from disk. So all that the page needs is part of it:
the models and the WebAssembly of onnxruntime-web, compressed and in base64.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock
from torch import Tensor

from cdeq import cli
from cdeq.data import digits_images
from cdeq.demo.run import distil_student, train_teacher
from cdeq.demo.task import Task
from cdeq.demo.tasks import DEMO_TASKS
from cdeq.evaluation.environment import current_commit
from cdeq.files import atomic_write_text

HERE = Path(__file__).parent
RUNTIME = HERE / "node_modules" / "onnxruntime-web"
SCRIPTS = ("reduction.js", "models.js", "elements.js", "chart.js", "testset.js", "page.js")
DEMO = Path("runs/demo-images")
RECIPE = "corrected"
STEPS = (1, 2, 3, 4)
"""Each count of steps is a graph of its own, as an application would use it."""
TOLERANCE, LIMIT = 1e-3, 40
"""The residual at which the teacher's iteration ends, and its evaluations at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--student", type=Path, default=DEMO / f"student-{RECIPE}")
    parser.add_argument("--out", type=Path, default=HERE / "dist")
    options = parser.parse_args()
    runtime = runtime_files(RUNTIME)  # before minutes of training
    if not options.student.exists():
        if options.student.parent != DEMO:
            raise SystemExit(f"{options.student} is missing; without --student one is made")
        distil(options.student, DEMO_TASKS["images"](0))
    page = options.out / "index.html"
    options.out.mkdir(parents=True, exist_ok=True)
    atomic_write_text(page, bundled(exported(options.student), runtime, settings()))
    print(f"wrote {page}, {page.stat().st_size / 1e6:.1f} MB: open it in a browser")


def distil(folder: Path, task: Task) -> None:
    """A demo's teacher and one student, where `cdeq demo` keeps them: it finds them done."""
    home = folder.parent
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / ".lock"):  # a demo that runs there at the same time waits
        teacher, _ = train_teacher(task, home / "teacher", 0, progress=True)
        student = distil_student(task, teacher, RECIPE, home / f"distil-{RECIPE}", 0, progress=True)
        student.save(folder)


def exported(student: Path) -> dict[str, bytes]:
    """The ONNX files: the student's first steps for each count, and the teacher's step, by name.

    The graph of one step also gives the context, with which the teacher's iteration begins.
    """
    with TemporaryDirectory() as folder:
        for steps in STEPS:
            words = ["export", str(student), f"--steps={steps}"]
            words += [f"--out={folder}/student-{steps}.onnx"]
            if cli.main(words + ["--certified"] * (steps == 1)):
                raise SystemExit(f"{student} could not be exported")
        (Path(folder) / "student-1.step.onnx").rename(Path(folder) / "teacher-step.onnx")
        return {path.stem: path.read_bytes() for path in sorted(Path(folder).glob("*.onnx"))}


def runtime_files(package: Path) -> dict[str, bytes]:
    """onnxruntime-web for one thread: its script, and what that loads."""
    names = {
        "script": "ort.wasm.min.js",
        "wasm-module": "ort-wasm-simd-threaded.mjs",
        "wasm": "ort-wasm-simd-threaded.wasm",
    }
    try:
        return {name: (package / "dist" / file).read_bytes() for name, file in names.items()}
    except OSError as error:
        raise SystemExit(
            f"onnxruntime-web is missing ({error}): run `npm ci --prefix web --ignore-scripts`"
        ) from None


def settings() -> dict[str, Any]:
    """What the page must know of the data: how pixels become input, how much ink a digit has, the test digits."""
    splits = digits_images()
    paper, full = splits.train.x.min().item(), splits.train.x.max().item()

    def counts(x: Tensor) -> Tensor:
        """Pixels (N, 64) as in the UCI data: 0 is paper, 16 is ink."""
        return ((x.flatten(1) - paper) / (full - paper) * 16).round().byte()

    return {
        "steps": STEPS,
        "tolerance": TOLERANCE,
        "limit": LIMIT,
        "ink": round(counts(splits.train.x).sum(1).double().mean().item()),
        "paper": paper,
        "full": full,
        "pixels": base64.b64encode(counts(splits.test.x).numpy().tobytes()).decode(),
        "labels": splits.test.y.tolist(),
        "commit": current_commit(),
    }


def bundled(models: dict[str, bytes], runtime: dict[str, bytes], about: dict[str, Any]) -> str:
    """The page, in which each `<!-- build: name -->` of index.html gives way to what it names."""
    own = [source(name) for name in SCRIPTS]
    library = runtime["script"].decode().split("//# sourceMappingURL")[0]
    files = models | {name: runtime[name] for name in ("wasm-module", "wasm")}
    parts = {
        "style": element("style", source("style.css")),
        "settings": element('script type="application/json" id="settings"', json.dumps(about)),
        "scripts": "\n".join(element("script", text) for text in (library, *own)),
        "files": "\n".join(
            element(f'script type="text/plain" id="file-{name}"', packed(content))
            for name, content in files.items()
        ),
    }
    page = source("index.html")
    for name, text in parts.items():
        mark = f"<!-- build: {name} -->"
        if page.count(mark) != 1:
            raise SystemExit(f"index.html must have one {mark}")
        page = page.replace(mark, text)
    return page


def source(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def element(start: str, text: str) -> str:
    """An element of the page with raw text, which must not end it early."""
    name = start.split()[0]
    if f"</{name}" in text.lower() or "<!--" in text:
        raise SystemExit(
            f"a {name} of the page contains </{name} or <!--, which would cut it short"
        )
    return f"<{start}>{text}</{name}>"


def packed(content: bytes) -> str:
    """gzip, without the time of day, in base64."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()


if __name__ == "__main__":
    main()

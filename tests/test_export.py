"""Students as files: the same numbers from ONNX and from .pt2, for any batch; refusals in one line; whole files."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cdeq import ExportError, Student, cli, export
from cdeq.consistency.deployment import example_of
from cdeq.equilibrium.trees import named_tensors
from cdeq.models.graph.ignn import IGNN
from deployed import BATCHES, MODELS, student_of
from graphs import FEATURES, random_graph
from teachers import Tanh, inputs, randomized, untrained

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROOT = Path(__file__).parents[1]
COVER = [
    ("images", "corrected", 2),
    ("channels", "corrected", 2),
    ("mdeq", "paper", 2),
    ("text", "warm_start", 4),
    ("memory", "anchored", 1),
]
"""Every model, recipe and number of steps; test_unrolled.py has all of them together for what is written here."""


def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(one, given):
    names = [output.name for output in one.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, one.run(names, given)), strict=True))


def arrays(x):
    named = named_tensors(x, "x" if isinstance(x, torch.Tensor) else "")
    return {name: tensor.numpy() for name, tensor in named.items()}


def close(ours, theirs):
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= 1e-5


@pytest.mark.release
@pytest.mark.parametrize(("name", "recipe", "steps"), COVER)
def test_onnx_gives_the_numbers_of_the_student(name, recipe, steps, tmp_path):
    student = student_of(name, recipe)
    student.export(tmp_path / "student.onnx", MODELS[name].x(1), steps=steps)
    one = session(tmp_path / "student.onnx")
    for batch in BATCHES:
        x = MODELS[name].x(batch)
        found = run(one, arrays(x))
        close(found["output"], student(x, steps=steps))
        close(found["residual"], student.unrolled(steps).named(x)["residual"])


@pytest.mark.release
@pytest.mark.parametrize(("name", "recipe", "steps"), [("text", "corrected", 2)])
def test_pt2_gives_the_numbers_of_the_student(name, recipe, steps, tmp_path):
    student = student_of(name, recipe)
    student.export(tmp_path / "student.pt2", MODELS[name].x(1), steps=steps)
    names = {"names.txt": ""}
    program = torch.export.load(tmp_path / "student.pt2", extra_files=names).module()
    given, outputs = (line.split() for line in names["names.txt"].splitlines())
    assert outputs[:2] == ["output", "residual"]
    for batch in BATCHES:
        x = MODELS[name].x(batch)
        tensors = named_tensors(x, "x" if isinstance(x, torch.Tensor) else "")
        assert list(tensors) == given
        close(program(*tensors.values())[0], student(x, steps=steps))


def test_many_channels_leave_the_number_of_samples_open(tmp_path):
    student = student_of("channels", "corrected")
    student.export(tmp_path / "student.pt2", MODELS["channels"].x(1), steps=1, check=False)
    program = torch.export.load(tmp_path / "student.pt2").module()
    for batch in BATCHES:
        x = MODELS["channels"].x(batch)
        close(program(x)[0], student(x, steps=1))


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """A student of two tensors and its teacher's step, in files."""
    path = tmp_path_factory.mktemp("certified") / "student.onnx"
    student = student_of("Pair", "anchored")
    return student, student.export(path, inputs(1), steps=1, certified=True)


@pytest.mark.slow
def test_names_and_open_sizes(certified):
    _, (path, step) = certified
    assert step == path.with_name("student.step.onnx")
    one, two = session(path), session(step)
    assert [(i.name, i.shape) for i in one.get_inputs()] == [("x", ["batch", 5])]
    assert [o.name for o in one.get_outputs()] == [
        *("output", "residual", "state_0", "state_1", "next_state_0", "next_state_1"),
        *("context_u", "context_v"),
    ]
    assert {i.name: i.shape for i in two.get_inputs()} == {
        "state_0": ["batch", 8],
        "state_1": ["batch", 2],
        "context_u": ["batch", 8],
        "context_v": ["batch", 2],
    }


@pytest.mark.slow
def test_the_example_finishes_a_solve_without_torch(certified, tmp_path):
    student, (path, _) = certified
    x = inputs(7)
    np.save(tmp_path / "x.npy", x.numpy())
    code = (
        "import runpy, sys; sys.argv[0] = sys.argv.pop(1); runpy.run_path(sys.argv[0], run_name='__main__'); "
        "assert 'torch' not in sys.modules"
    )
    words = [path, "--tol", "1e-5", "--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy"]
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT / "examples" / "serve_onnx.py", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "7 of 7 samples within 1e-05" in done.stdout
    solved = student.solve(x, tol=1e-6)
    torch.testing.assert_close(
        torch.from_numpy(np.load(tmp_path / "y.npy")), solved.output, rtol=0, atol=1e-3
    )
    (tmp_path / "half.onnx").write_bytes(path.read_bytes()[:-500])
    for name, message in (("half.onnx", "is damaged or no ONNX file"), ("no.onnx", "is missing")):
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / "serve_onnx.py", tmp_path / name],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert message in done.stderr


@pytest.mark.release
def test_the_teachers_step_of_a_text_model_takes_any_lengths(tmp_path):
    student = student_of("memory", "warm_start")
    files = student.export(tmp_path / "s.pt2", MODELS["memory"].x(1), steps=1, certified=True)
    one, step = (torch.export.load(path).module() for path in files)
    for batch in BATCHES:
        x = MODELS["memory"].x(batch)
        outputs = student.unrolled(1).named(x)
        found = one(x.tokens, *x.memory)
        state, after, *context = found[len(outputs) :]
        close(found[0], outputs["output"])
        again = step(state, *context)
        close(again[0], outputs["output"])
        close(again[1], outputs["residual"])
        close(again[-1], after)


@pytest.mark.slow
def test_other_weights_are_another_file(tmp_path):
    student, x = student_of("Tanh", "anchored"), inputs()
    programs = []
    for name in ("before.pt2", "after.pt2"):
        student.export(tmp_path / name, x, steps=1)
        programs.append(torch.export.load(tmp_path / name).module())
        close(programs[-1](x)[0], student(x, steps=1))
        randomized(student.own_parts().requires_grad_(True), seed=6).requires_grad_(False)
    before, after = (program(x)[0] for program in programs)
    assert not torch.allclose(before, after, atol=1e-2)


# What cannot be


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_a_number_of_steps_that_cannot_be(steps, tmp_path):
    with pytest.raises(ExportError, match="steps must be a whole number, 1 or more, not"):
        student_of("Tanh", "anchored").export(tmp_path / "s.onnx", inputs(), steps=steps)
    assert not list(tmp_path.iterdir())


def test_a_suffix_that_says_nothing(tmp_path):
    with pytest.raises(ExportError, match=r"s\.bin must end in one of \.onnx, \.pt2"):
        student_of("Tanh", "anchored").export(tmp_path / "s.bin", inputs())


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"export to ONNX needs {package} .*cdeq\[export\]"):
        student_of("Tanh", "anchored").export(tmp_path / "s.onnx", inputs())


def test_a_sparse_graph_is_refused(tmp_path):
    graph = random_graph(dtype=torch.float32)
    student = untrained(IGNN(features=FEATURES, width=4), graph).eval()
    for name in ("s.onnx", "s.pt2"):
        with pytest.raises(ExportError, match="adjacency is a sparse matrix"):
            student.export(tmp_path / name, graph)
    assert not list(tmp_path.iterdir())


class Asking(Tanh):
    """A map that looks at its data."""

    def step(self, z, context):
        return super().step(z, context) if float(z.sum()) < 1e9 else z


@pytest.mark.slow
def test_a_teacher_that_looks_at_its_data_is_refused(tmp_path):
    student = untrained(Asking()).eval()
    with pytest.raises(ExportError, match="the teacher's code cannot be traced: ") as refused:
        student.export(tmp_path / "s.pt2", inputs())
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_files_as_they_were(tmp_path, monkeypatch):
    path, step = tmp_path / "s.pt2", tmp_path / "s.step.pt2"
    path.write_bytes(b"old")
    step.write_bytes(b"older")
    usual, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        usual(descriptor)

    monkeypatch.setattr(export, "WRITERS", {".pt2": lambda program: b"new"})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        student_of("Tanh", "anchored").export(path, inputs(), certified=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        "s.pt2": b"old",
        "s.step.pt2": b"older",
    }


# The command


def test_a_saved_student_knows_its_input(tmp_path):
    for name in ("images", "memory"):
        student = student_of(name, "anchored")
        student.save(tmp_path / name)
        again = Student.load(tmp_path / name)
        assert again.example == student.example
        x = MODELS[name].x(3)
        tokens = x if isinstance(x, torch.Tensor) else x.tokens
        zeros = example_of(again)
        assert (zeros.shape, zeros.dtype) == (tokens.shape, tokens.dtype)


def test_the_command_writes_what_the_method_writes(tmp_path, monkeypatch, capsys):
    student_of("images", "corrected").save(tmp_path / "student")
    written = {}
    monkeypatch.setattr(
        "cdeq.consistency.deployment.write_programs",
        lambda programs: [
            path.write_bytes(b"x" * 100_000) and written.update({path.name: program})
            for path, program in programs.items()
        ],
    )
    out = tmp_path / "made.onnx"
    command = ["export", str(tmp_path / "student"), "--steps", "3", "--out", str(out)]
    assert cli.main([*command, "--certified"]) == 0
    assert list(written) == ["made.onnx", "made.step.onnx"]
    assert len(written["made.onnx"].module.points) == 3
    assert capsys.readouterr().out.count("0.1 MB") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "0"), "steps must be a whole number, 1 or more, not 0"),
        (("--out", "student.txt"), "student.txt must end in one of .onnx, .pt2"),
    ],
)
def test_the_command_refuses_in_one_line(words, message, tmp_path, capsys):
    student_of("images", "corrected").save(tmp_path / "student")
    assert cli.main(["export", str(tmp_path / "student"), *words]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("cdeq: ")
    assert message in shown
    assert shown.count("\n") == 1


def test_a_student_without_an_example_says_what_to_do(tmp_path, capsys):
    student = student_of("images", "corrected")
    student.example = None
    student.save(tmp_path / "student")
    assert cli.main(["export", str(tmp_path / "student")]) == 1
    assert "student.export(path, x, steps=2)" in capsys.readouterr().err


def test_the_page_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export, "WRITERS", {".pt2": lambda program: b"new"})
    page = (ROOT / "docs" / "deploying.md").read_text()
    names = {"student": student_of("Tanh", "corrected"), "x": inputs(), "torch": torch}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert (tmp_path / "student.pt2").read_bytes() == b"new"
    torch.testing.assert_close(names["output"], names["student"](inputs(), steps=2))

"""Students as files: the same numbers from ONNX and from .pt2, for any batch; refusals in one line; whole files."""

import errno
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from cdeq import ExportError, Student, cli, export
from cdeq.consistency.branchless import eliminated_weights
from cdeq.consistency.deployment import example_of
from cdeq.data import Graph
from deployed import BATCHES, MODELS, STEPS, named_inputs, student_of
from graphs import FEATURES, random_graph
from teachers import Tanh, inputs, randomized, untrained

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
if not hasattr(torch.export.Dim, "DYNAMIC"):
    pytest.skip("export needs torch 2.6 or newer", allow_module_level=True)
onnxruntime = pytest.importorskip("onnxruntime")
if find_spec("onnxscript") is None:  # whose import takes a second
    pytest.skip("needs onnxscript", allow_module_level=True)

ROOT = Path(__file__).parents[1]
SERVE = ROOT / "examples" / "serve_onnx.py"
COVER = [
    *((name, "corrected", steps) for name in MODELS for steps in STEPS),
    *(("mdeq", "paper", 2), ("text", "warm_start", 4), ("memory", "anchored", 1)),
]
"""Every model and number of steps, every recipe; test_unrolled.py has all three together, of what is written here."""


def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(one, given):
    names = [output.name for output in one.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, one.run(names, given)), strict=True))


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
        found = run(one, {name: tensor.numpy() for name, tensor in named_inputs(x).items()})
        close(found["output"], student(x, steps=steps))
        close(found["residual"], student.unrolled(steps).named(x)["residual"])


@pytest.mark.release
@pytest.mark.parametrize(("name", "recipe", "steps"), COVER)
def test_pt2_gives_the_numbers_of_the_student(name, recipe, steps, tmp_path):
    student = student_of(name, recipe)
    student.export(tmp_path / "student.pt2", MODELS[name].x(1), steps=steps)
    names = {"names.txt": ""}
    program = torch.export.load(tmp_path / "student.pt2", extra_files=names).module()
    given, outputs = (line.split() for line in names["names.txt"].splitlines())
    assert outputs[:2] == ["output", "residual"]
    for batch in BATCHES:
        x = MODELS[name].x(batch)
        tensors = named_inputs(x)
        assert list(tensors) == given
        close(program(*tensors.values())[0], student(x, steps=steps))


@pytest.mark.slow
def test_many_channels_leave_the_number_of_samples_open(tmp_path):
    student = student_of("channels", "corrected")
    student.export(tmp_path / "student.pt2", MODELS["channels"].x(1), steps=1, check=False)
    program = torch.export.load(tmp_path / "student.pt2").module()
    for batch in BATCHES:
        x = MODELS["channels"].x(batch)
        close(program(x)[0], student(x, steps=1))


@pytest.mark.slow
def test_a_text_that_is_longer_than_the_file_knows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("cdeq.consistency.unrolling.MOST_TOKENS", 12)
    student, x = student_of("memory", "corrected"), MODELS["memory"].x(1)
    (path,) = student.export(tmp_path / "student.onnx", x, steps=1, check=False)
    one = session(path)
    longest, longer = (torch.arange(n)[None] % 10 for n in (12, 13))
    empty = {name: part[:, :0].numpy() for name, part in named_inputs(x).items() if "me" in name}
    found = run(one, {"tokens": longest.numpy()} | empty)
    close(found["output"], student(longest, steps=1))
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail):
        one.run(None, {"tokens": longer.numpy()} | empty)


class Weights(torch.nn.Module):
    """The mixing weights of two evaluations, from their products."""

    def forward(self, products):
        a, b, c = products.unbind(dim=-1)
        return torch.stack(eliminated_weights([[a], [b, c]], 1e-6), dim=-1)


@pytest.mark.slow
def test_residuals_that_are_zero_are_mixed_in_the_file_too():
    products = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [2.0, 1.0, 3.0]])
    program = export.Program(
        module=Weights(), arguments={"x": products}, axes={"x": {0: "batch"}}, outputs=("alpha",)
    )
    found = run(session(export.onnx_bytes(program)), {"x": products.numpy()})["alpha"]
    torch.testing.assert_close(found, Weights()(products))
    torch.testing.assert_close(found[0], torch.full((2,), 0.5, dtype=torch.float64))


def test_no_layer_norm_can_be_joined_with_the_addition_before_it():
    """onnxruntime has a slow operation for both together."""
    onnx = pytest.importorskip("onnx")
    nodes = [
        onnx.helper.make_node("Add", ["a", "b"], ["c"]),
        onnx.helper.make_node("LayerNormalization", ["c", "scale"], ["d"]),
        onnx.helper.make_node("Add", ["d", "b"], ["e"]),
    ]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "graph", [], []))
    found = [node.op_type for node in export.sums_before_norms(model).graph.node]
    assert found == ["Sum", "LayerNormalization", "Add"]


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
        [sys.executable, "-c", code, SERVE, *map(str, words)],
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
            [sys.executable, SERVE, tmp_path / name], capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert message in done.stderr


@pytest.mark.slow
def test_a_file_cut_anywhere_is_one_line(certified, tmp_path):
    opened, cut = runpy.run_path(str(SERVE))["opened"], tmp_path / "cut.onnx"
    for path in certified[1]:
        whole = path.read_bytes()
        opened(path)
        for share in (0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1):
            cut.write_bytes(whole[: int(share * (len(whole) - 1))])
            with pytest.raises(SystemExit, match="is damaged or no ONNX file: export it") as found:
                opened(cut)
            assert "\n" not in str(found.value)


@pytest.mark.slow
def test_an_answer_that_cannot_be_written_is_one_line(tmp_path):
    written = runpy.run_path(str(SERVE))["written"]
    (tmp_path / "y.npy").mkdir()
    with pytest.raises(SystemExit, match=r"y\.npy cannot be written: Is a directory"):
        written(tmp_path / "y.npy", np.zeros(3))
    assert [path.name for path in tmp_path.iterdir()] == ["y.npy"]


@pytest.mark.release
def test_the_example_finishes_a_solve_on_a_graph(tmp_path):
    serve, student = runpy.run_path(str(SERVE)), student_of("graph", "corrected")
    files = student.export(tmp_path / "s.onnx", MODELS["graph"].x(1), steps=1, certified=True)
    one, step = map(session, files)
    for batch in BATCHES:
        x = MODELS["graph"].x(batch)
        given = {name: tensor.numpy() for name, tensor in named_inputs(x).items()}
        best, spent = serve["finish"](step, serve["run"](one, given), 1e-6)
        assert spent > 2
        assert best["residual"] <= 1e-6
        close(torch.from_numpy(best["output"]), student.solve(x, tol=1e-7).output)


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


class OwnMatrix(Tanh):
    """A map with a sparse matrix of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("matrix", torch.eye(8).to_sparse_csr())

    def step(self, z, context):
        return super().step((self.matrix @ z.T).T, context)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_matrix_that_is_no_graph_is_refused(tmp_path):
    student = untrained(OwnMatrix()).eval()
    for name in ("s.onnx", "s.pt2"):
        with pytest.raises(ExportError, match=r"matrix is a sparse matrix, which neither"):
            student.export(tmp_path / name, inputs())
    assert not list(tmp_path.iterdir())


def test_edges_are_the_adjacency():
    graph = random_graph()
    edges = graph.as_dense_tensors().adjacency
    expected = graph.adjacency.to_dense() @ graph.features
    torch.testing.assert_close(edges @ graph.features, expected)


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
    student_of("graph", "corrected").save(tmp_path / "graph")
    pair = example_of(Student.load(tmp_path / "graph"))
    assert isinstance(pair, Graph)
    assert pair.features.shape == (2, FEATURES)


@pytest.fixture
def written(monkeypatch):
    """By the names of files what would be written to them."""
    found = {}
    monkeypatch.setattr(
        "cdeq.consistency.deployment.write_programs",
        lambda programs: [
            path.write_bytes(b"x" * 100_000) and found.update({path.name: program})
            for path, program in programs.items()
        ],
    )
    return found


def test_the_command_writes_what_the_method_writes(tmp_path, written, capsys):
    student_of("images", "corrected").save(tmp_path / "student")
    out = tmp_path / "made.onnx"
    command = ["export", str(tmp_path / "student"), "--steps", "3", "--out", str(out)]
    assert cli.main([*command, "--certified"]) == 0
    assert list(written) == ["made.onnx", "made.step.onnx"]
    assert len(written["made.onnx"].module.points) == 3
    assert capsys.readouterr().out.count("0.1 MB") == 2


def test_what_is_stored_in_half_precision_is_written_in_single(tmp_path, written):
    student_of("images", "corrected").half().save(tmp_path / "student")
    assert cli.main(["export", str(tmp_path / "student"), "--out", str(tmp_path / "s.onnx")]) == 0
    program = written["s.onnx"]
    tensors = (*program.inputs.values(), *program.module.state_dict().values())
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}


def test_an_input_that_the_student_cannot_take_is_one_line(tmp_path):
    student = student_of("images", "corrected")
    with pytest.raises(ExportError, match=r"^the student does not answer this input: ") as refused:
        student.export(tmp_path / "s.onnx", torch.zeros(1, 5, 8, 8))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


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

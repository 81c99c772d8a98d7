"""Serve an exported student with onnxruntime and numpy alone; finish the solve where its residual is too large.

    cdeq export runs/demo-images/student-corrected --steps 2 --certified --out student.onnx
    python examples/serve_onnx.py student.onnx --tol 1e-3 [--input x.npy] [--output logits.npy]

The student's graph gives the output, the residual, the state, f of it and the context. The graph of the teacher's step,
student.step.onnx, goes on from there under Anderson's method. Shapes: B samples, D numbers of a state, n evaluations.
"""

import argparse
import os
from pathlib import Path

import numpy as np

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before the import
import onnxruntime


def opened(path):
    """A session that computes on one thread; a file that cannot be read is one line."""
    if not Path(path).is_file():
        raise SystemExit(f"{path} is missing: write it with `cdeq export ... --certified`")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has no common class of errors
        reason = str(error).splitlines()[0]
        raise SystemExit(f"{path} is damaged or no ONNX file: export it again ({reason})") from None


def run(session, inputs):
    """Outputs by name."""
    wanted = {one.name for one in session.get_inputs()}
    names = [one.name for one in session.get_outputs()]
    given = {name: value for name, value in inputs.items() if name in wanted}
    return dict(zip(names, session.run(names, given), strict=True))


def mixed(images, residuals, ridge=1e-7):
    """sum_i alpha_i f(z_i), (B, D), alpha minimising |sum_i alpha_i r_i| with sum_i alpha_i = 1."""
    r = np.stack(residuals, axis=1).astype(np.float64)  # (B, n, D)
    gram = r @ r.transpose(0, 2, 1)
    n = gram.shape[1]
    gram[:, range(n), range(n)] = np.maximum(gram[:, range(n), range(n)] * (1 + ridge), 1e-280)
    alpha = np.linalg.solve(gram, np.ones((len(gram), n, 1)))[:, :, 0]
    alpha /= alpha.sum(axis=1, keepdims=True)
    return np.einsum("bn,bnd->bd", alpha, np.stack(images, axis=1)).astype(images[0].dtype)


def finish(step, found, tol, max_steps=50, window=5):
    """The best answer of each sample, its residual, and how many evaluations were spent on getting there."""
    states = [name for name in found if name.startswith("state")]
    if not states:
        raise SystemExit("the student gives no state to go on from: export it with --certified")
    context = {name: value for name, value in found.items() if name.startswith("context")}
    kept = [name for name in found if name in ("output", "residual") or "memory" in name]
    best = {name: found[name] for name in kept if name not in context}
    shapes = [found[name].shape for name in states]
    cuts = np.cumsum([int(np.prod(shape[1:])) for shape in shapes])[:-1]
    images, residuals, spent = [], [], 0
    while (best["residual"] > tol).any() and spent < max_steps:
        size = len(best["residual"])
        z, f = (
            np.concatenate([found[prefix + name].reshape(size, -1) for name in states], axis=1)
            for prefix in ("", "next_")
        )
        images, residuals = [*images[-window:], f], [*residuals[-window:], f - z]
        parts = np.split(mixed(images, residuals), cuts, axis=1)
        new = {
            name: part.reshape(shape)
            for name, part, shape in zip(states, parts, shapes, strict=True)
        }
        found = new | run(step, new | context)
        better = found["residual"] < best["residual"]  # not where it is NaN
        for name, before in best.items():  # of a graph, whose nodes are one sample, all or nothing
            places = better.reshape(-1, *[1] * (before.ndim - 1))
            best[name] = np.where(places, found[name], before)
        spent += 1
    return best, spent


def random_inputs(session, samples):
    """Numbers for every input, zeros for tokens, in its shape; an open length is 8."""
    rng, found = np.random.default_rng(0), {}
    for one in session.get_inputs():
        sizes = {"batch": samples, "memory": 0}
        shape = [n if isinstance(n, int) else sizes.get(n, 8) for n in one.shape]
        numbers = rng.standard_normal(shape).astype(np.float32)
        found[one.name] = np.zeros(shape, np.int64) if "int64" in one.type else numbers
    return found


def written(path, array):
    """A .npy file, whole or absent."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            np.save(file, array)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SystemExit(f"{path} cannot be written: {error.strerror}") from None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("student", type=Path)
    parser.add_argument("--tol", type=float, default=1e-3)
    parser.add_argument("--input", type=Path, help="a .npy file; without it random numbers")
    parser.add_argument("--output", type=Path, help="write the output to this .npy file")
    parser.add_argument("--samples", type=int, default=4, help="of random numbers")
    options = parser.parse_args()
    student = opened(options.student)
    step = opened(options.student.with_suffix(".step.onnx"))
    inputs = random_inputs(student, options.samples)
    if options.input is not None:
        inputs[student.get_inputs()[0].name] = np.load(options.input)
    found = run(student, inputs)
    print(f"student: largest residual {found['residual'].max():.1e}")
    best, spent = finish(step, found, options.tol)
    done = int((best["residual"] <= options.tol).sum())
    print(
        f"teacher: {spent} more evaluations, {done} of {len(best['residual'])} samples within "
        f"{options.tol:g}, largest residual {best['residual'].max():.1e}"
    )
    if options.output is not None:
        written(options.output, best["output"])


if __name__ == "__main__":
    main()

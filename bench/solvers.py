"""Our solvers beside torchdeq 0.1.0: seconds to a relative residual of 1e-4 on the same maps.

    python bench/solvers.py [--threads 1] [--repeats 15] [--json FILE]

Both run interleaved in one process, on the same tensors, with at most 50 steps (torchdeq's default).
The median of the repeats is reported, and the residual of each answer is measured afterwards.
On a busy machine the ratio of CPU time says more than that of wall time (with one thread).
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torchdeq.solver.anderson import anderson_solver
from torchdeq.solver.broyden import broyden_solver

from cdeq.solvers import Anderson, Broyden, solve
from common import Measurement, Options

TOL, MAX_STEPS = 1e-4, 50
TARGETS = {"anderson": 0.7, "broyden": 0.5}
Map = Callable[[Any], Any]  # Tensor -> Tensor


def contraction(size: int, factor: float) -> Tensor:
    """A random symmetric matrix of spectral norm `factor`: its eigenvalues fill [-factor, factor]."""
    w = torch.randn(size, size)
    w = w + w.T
    return factor * w / torch.linalg.matrix_norm(w, 2)


def small_map() -> tuple[Map, Tensor, bool]:
    """tanh(W z + x): 32 samples of 64 numbers."""
    w, x = contraction(64, 0.95), 0.3 * torch.randn(32, 64)
    return lambda z: torch.tanh(z @ w + x), torch.zeros(32, 64), True


def dense_map() -> tuple[Map, Tensor, bool]:
    """tanh(W z + x) + V z for each token, 16 texts of 64 tokens of 128 numbers: light for its size."""
    w, v, x = contraction(128, 0.8), contraction(128, 0.15), 0.3 * torch.randn(16, 64, 128)
    return lambda z: torch.tanh(z @ w + x) + z @ v, torch.zeros(16, 64, 128), True


def transformer_map() -> tuple[Map, Tensor, bool]:
    """One causal transformer block with injection: 16 texts of 64 tokens of 128 numbers, 4 heads."""
    d, heads = 128, 4
    w = [torch.randn(a, b) / a**0.5 for a, b in ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))]
    x = torch.randn(16, 64, d)

    def step(z: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (z @ w[0]).chunk(3, dim=2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = functional.layer_norm(x + z + 0.5 * mixed.transpose(1, 2).flatten(2) @ w[1], (d,))
        return functional.layer_norm(h + 0.5 * functional.gelu(h @ w[2]) @ w[3], (d,))

    return step, torch.zeros(16, 64, d), True


def graph_map() -> tuple[Map, Tensor, bool]:
    """relu(A z W) + b, 20000 nodes of 32 numbers, as one sample; a small world, 10 neighbours of each node."""
    n, d = 20_000, 32
    near = torch.arange(n).repeat(4)
    i = torch.cat([near, torch.randint(n, (n,))])
    j = torch.cat([(near + torch.randint(1, 20, near.shape)) % n, torch.randint(n, (n,))])
    loops = torch.arange(n)
    index = torch.stack([torch.cat([i, j, loops]), torch.cat([j, i, loops])])
    degree = torch.bincount(index[0], minlength=n).float()
    values = (degree[index[0]] * degree[index[1]]).rsqrt()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is called a beta feature
        adjacency = torch.sparse_coo_tensor(index, values, (n, n)).coalesce().to_sparse_csr()
    w = 0.85 * torch.eye(d) + contraction(d, 0.1)
    b = torch.randn(n, d)
    return lambda z: torch.relu(adjacency @ (z @ w)) + b, torch.zeros(n, d), False


MAPS = {"small": small_map, "dense": dense_map, "transformer": transformer_map, "graph": graph_map}


def contestants(f: Map, z0: Tensor, batched: bool) -> dict[str, dict[str, Callable[[], tuple]]]:
    """Per method, ours and torchdeq's: a call that returns the state and nothing to be measured yet."""
    # torchdeq takes the first axis for samples: a graph goes in as one row.
    start = z0 if batched else z0.reshape(1, -1)

    def theirs(solver: Callable, **options: Any) -> Callable[[], tuple]:
        def run() -> tuple:
            g = lambda z: f(z.view_as(z0)).view_as(start)  # noqa: E731
            z, _, info = solver(g, start, stop_mode="rel", tol=TOL, max_iter=MAX_STEPS, **options)
            return z.view_as(z0), int(info["nstep"].max())

        return run

    def ours(solver: Any) -> Callable[[], tuple]:
        def run() -> tuple:
            s = solve(f, z0, solver, tol=TOL, max_steps=MAX_STEPS, batched=batched)
            return s.state, s.evaluations

        return run

    return {
        "anderson": {"cdeq": ours(Anderson(window=5)), "torchdeq": theirs(anderson_solver)},
        "broyden": {"cdeq": ours(Broyden()), "torchdeq": theirs(broyden_solver)},
    }


def count_calls(build: Callable[[Map], Callable[[], tuple]], f: Map) -> int:
    """Evaluations of f in one solve, counted by the map itself."""
    calls = 0

    def counting(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return f(z)

    build(counting)()
    return calls


def residual(f: Map, z: Tensor, batched: bool) -> float:
    """The largest |f(z) - z| / |z| of the batch."""
    rows = (f(z) - z, z) if batched else (f(z)[None] - z[None], z[None])
    top, bottom = (t.flatten(1).norm(dim=1) for t in rows)
    return float((top / bottom).max())


def live_megabytes(run: Callable[[], tuple]) -> float:
    """Peak of live torch memory: the allocator's own events, temporaries inside kernels included."""
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler announces itself there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    os.dup2(stderr, 2)
    results: Any = prof.profiler.kineto_results
    stack, sizes = list(results.experimental_event_tree()), []
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == "[memory]":
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for _, size in sorted(sizes):
        live += size
        peak = max(peak, live)
    return peak / 2**20


def measure(f: Map, z0: Tensor, batched: bool, repeats: int) -> list[dict[str, Any]]:
    runs = contestants(f, z0, batched)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    map_times: list[float] = []
    state = runs["broyden"]["cdeq"]()[0]
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        f(state)
        map_times.append(time.perf_counter() - begin)
        for method, sides in runs.items():
            for side, run in sides.items():
                wall, cpu = time.perf_counter(), time.process_time()
                run()
                spent = (time.perf_counter() - wall, time.process_time() - cpu)
                times.setdefault((method, side), []).append(spent)
    step_seconds = statistics.median(map_times[1:])

    rows = []
    for method, sides in runs.items():
        row: dict[str, Any] = {"method": method, "step_seconds": step_seconds}
        for side, run in sides.items():
            build = lambda g, m=method, s=side: contestants(g, z0, batched)[m][s]  # noqa: E731
            walls, cpus = zip(*times[method, side][1:], strict=True)  # the first one warms up
            row[side] = {
                "seconds": statistics.median(walls),
                "cpu_seconds": statistics.median(cpus),
                "evaluations": count_calls(build, f),
                "residual": residual(f, run()[0], batched),
                "peak_megabytes": live_megabytes(run),
            }
        row["ratio"] = row["cdeq"]["seconds"] / row["torchdeq"]["seconds"]
        row["cpu_ratio"] = row["cdeq"]["cpu_seconds"] / row["torchdeq"]["cpu_seconds"]
        per_step = row["torchdeq"]["evaluations"] / row["cdeq"]["evaluations"]
        row["ratio_per_step"] = row["ratio"] * per_step
        row["memory_ratio"] = row["cdeq"]["peak_megabytes"] / row["torchdeq"]["peak_megabytes"]
        row["target"] = TARGETS[method]
        rows.append(row)
    return rows


def _colour(text: str, good: bool) -> str:
    return f"[{'green' if good else 'red'}]{text}[/]"


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"to a relative residual of {TOL:g}; cdeq / torchdeq")
    table.add_column("map")
    table.add_column("method")
    names = ("ms", "ratio", "CPU", "per step", "target", "steps", "residual", "peak MB", "map ms")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        a, b = row["cdeq"], row["torchdeq"]
        table.add_row(
            row["map"],
            row["method"],
            f"{a['seconds'] * 1e3:.1f} / {b['seconds'] * 1e3:.1f}",
            _colour(f"{row['ratio']:.2f}", row["ratio"] <= row["target"]),
            f"{row['cpu_ratio']:.2f}",
            f"{row['ratio_per_step']:.2f}",
            f"{row['target']}",
            f"{a['evaluations']} / {b['evaluations']}",
            " / ".join(_colour(f"{v:.1e}", v <= TOL) for v in (a["residual"], b["residual"])),
            f"{a['peak_megabytes']:.2f} / {b['peak_megabytes']:.2f}",
            f"{row['step_seconds'] * 1e3:.2f}",
        )
    console.print(table)


@torch.no_grad()
def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    measurement, rows = Measurement(options), []
    for name, build in MAPS.items():
        torch.manual_seed(0)
        f, z0, batched = build()
        rows += [{"map": name, **row} for row in measure(f, z0, batched, options.repeats)]
    console = Console(width=150)
    show(rows, console)
    console.print("ratio: wall time; CPU: CPU time; per step: wall time divided by evaluations.")
    console.print(f"A ratio in red misses its target, a residual in red misses {TOL:g}.")
    measurement.finish(rows, tol=TOL)


if __name__ == "__main__":
    main()

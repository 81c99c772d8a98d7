"""Recording: run a teacher's solver over a loader once, and keep what it passes through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdeq.equilibrium.contract import EquilibriumModel, check_contract, is_batched
from cdeq.equilibrium.memory import Memory, Segment, require_memory
from cdeq.equilibrium.states import map_state
from cdeq.placement import Placement, Precision, beside, in_single
from cdeq.solvers.anderson import Anderson
from cdeq.solvers.base import MAX_STEPS, TOL, Solver
from cdeq.training.log import Progress, shown_progress
from cdeq.training.parallel import gathered, is_main_process, on_main_process, process_rank
from cdeq.trajectories.capture import CAPTURES, Settings
from cdeq.trajectories.fingerprint import solver_fingerprint, teacher_fingerprint
from cdeq.trajectories.manifest import Manifest, ShardNote, UnsolvedBatch
from cdeq.trajectories.nesting import check_loader, flatten_batch, split_batch
from cdeq.trajectories.shards import ShardWriter, begin_recording, finish_recording
from cdeq.trajectories.store import DTYPES, TrajectoryStore

TOLERANCES = {"full": 0.0, "endpoint": TOL}


def record(
    model: EquilibriumModel,
    loader: Iterable[Any],
    folder: str | Path,
    *,
    solver: Solver | None = None,
    max_steps: int = MAX_STEPS,
    tol: float | None = None,
    mode: str = "full",
    dtype: torch.dtype = torch.float32,
    batches_per_shard: int = 8,
    max_batches: int | None = None,
    carried: bool = False,
    device: str | torch.device | None = None,
    precision: Precision = "fp32",
    progress: bool | Progress | None = None,
) -> TrajectoryStore:
    """Solve for every batch of `loader` and store the trajectories (paper, eq:fp_ode) in `folder`.

    `loader`: an iterable of batches. A tuple or list of exactly two elements is (x, y), of exactly
        one is (x,), anything else is x itself: a tensor or a tuple, list or dict of them, nested.
    `mode`: "full" keeps the states z_0 ... z_K, K = `max_steps`, and z* = z_K (paper, alg:traj_aug_sampling);
        "endpoint" keeps z* alone, solved to `tol`.
    `tol`: unless given, 0 for "full", which spends the budget, and the usual tolerance for "endpoint".
    `dtype`: of the stored states; the solve runs in the model's own.
    `carried`: the batches are consecutive segments of long texts, tokens (B, L), for a model with memory; each is
        recorded as a `Segment` with the memory that the equilibrium of the one before it leaves.
    `device`: where to solve, if not where the model is; the model is moved there. `precision`: "bf16" or "fp16" for
        products inside the model in half precision; states and residuals stay in single. A residual then falls to
        about a hundredth, and no further.
    `progress`: True draws a bar; or a function `(done, total, metrics)` called after each batch, `total` None if the
        loader has no length.

    Shards are written whole, with a note beside each until the manifest lists them all: a kill at any
    instant leaves a folder that the same call completes, to the same bytes. It then reads the finished
    shards' batches from the loader again, to see that they are the same, so their order must not
    change. A complete folder is returned as it is, the loader unread; `TrajectoryStore.check` compares
    the data too.
    Under torchrun every process makes this same call, with the same batches, and solves for its own share
    of the shards, in a folder that all of them see; the store is the one that a single process makes.
    Of a sequence a process reads only its own batches, of another loader all. With `carried` the first
    process records alone. Another number of processes may finish what some began.
    A sample whose residual is not finite is refused (UnsolvedBatch); one that merely has not converged
    is kept, and counted by `TrajectoryStore.unconverged`.
    One recording at a time writes a folder. Writing a shard takes three times its size in memory.
    """
    check_contract(model)
    check_loader(loader)
    placement = Placement.of(model, device, precision)
    solver = solver or Anderson()
    if mode not in CAPTURES:
        raise ValueError(f"mode is one of {', '.join(CAPTURES)}, not {mode!r}")
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype is one of {', '.join(DTYPES)}, not {dtype}")
    tol = TOLERANCES[mode] if tol is None else tol
    counts = {"max_steps": max_steps, "batches_per_shard": batches_per_shard}
    for name, number in (counts | {"max_batches": max_batches}).items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    dtype_name = str(dtype).removeprefix("torch.")
    manifest = Manifest(
        mode=mode,
        dtype=dtype_name,
        steps=max_steps if mode == "full" else 0,
        batched=is_batched(model),
        batches_per_shard=batches_per_shard,
        max_batches=max_batches,
        fingerprint={
            "teacher": teacher_fingerprint(model),
            "solver": solver_fingerprint(solver, max_steps, tol),
            "dtype": dtype_name,
            "data": [],
            **({"memory": "carried"} if carried else {}),
            **({"precision": precision} if precision != "fp32" else {}),
        },
    )
    if carried:
        require_memory(model)
    folder = Path(folder)
    found, finished = on_main_process(lambda: begin_recording(folder, manifest))
    gathered(lambda: found.require_same(manifest, folder))  # the teacher of each process
    if not found.complete:
        settings = Settings(solver=solver, max_steps=max_steps, tol=tol, dtype=dtype)
        # A memory passes from each batch to the next: one process records, and the others wait.
        rank, world = process_rank() if not carried else (process_rank()[0], 1)
        writer = ShardWriter(folder, manifest, finished, rank, world)

        def write() -> dict[int, ShardNote]:
            if rank >= world:
                return {}
            shown = progress if is_main_process() else None
            with _evaluating(model), torch.no_grad(), placement.computing():
                memory = _memory_left(model, writer) if carried else None
                with shown_progress(shown, "record") as show:
                    return _fill(writer, model, loader, settings, memory, show)

        notes = {number: note for part in gathered(write) for number, note in part.items()}
        on_main_process(lambda: finish_recording(folder, manifest, notes))
    return TrajectoryStore.open(folder)


def _fill(
    writer: ShardWriter,
    model: EquilibriumModel,
    loader: Iterable[Any],
    settings: Settings,
    memory: Memory | None,
    progress: Progress | None,
) -> dict[int, ShardNote]:
    """Pass over the batches of this process's shards: check those of finished ones, solve the others.

    `memory`: what the batches of the finished shards leave for the next one; None without memory.
    """
    capture = CAPTURES[writer.manifest.mode]
    limit = writer.manifest.max_batches
    total = _length(loader, limit)
    for index, batch in _own_batches(loader, limit, writer):
        x, y = split_batch(batch)
        structure, tensors = flatten_batch(x, y)
        if not writer.is_finished(index):
            kept_structure, kept_tensors = structure, tensors
            if memory is not None:
                _require_tokens(x, index)
                x = Segment(x, memory or require_memory(model).no_memory(len(x)))
                kept_structure, kept_tensors = flatten_batch(x, y)
            context = model.inject(beside(model, x))
            captured = capture(model, context, settings)
            _require_finite(captured.tensors["residual"], index)
            if memory is not None:
                # As it is stored: a resumed run has no other.
                rounded = map_state(lambda t: t.to(settings.dtype).to(t.dtype), captured.endpoint)
                memory = require_memory(model).remember(rounded, context)
            state = {"tuple": captured.is_tuple, "tensors": len(captured.tensors) - 2}
            # Copies, since a loader may reuse its memory, and safetensors refuses two views of one.
            inputs = {n: t.to("cpu", copy=True).contiguous() for n, t in kept_tensors.items()}
            writer.keep(index, {**kept_structure, "state": state}, inputs | captured.tensors)
        writer.count(index, structure, tensors)
        if progress is not None:
            progress(index + 1, total, {})
    return writer.close()


def _own_batches(
    loader: Iterable[Any], limit: int | None, writer: ShardWriter
) -> Iterator[tuple[int, Any]]:
    """The batches of this process's shards with their numbers; of a sequence the others are not even read."""
    if isinstance(loader, Sequence):
        indexes = filter(writer.owns, range(len(loader))[:limit])
        return ((index, loader[index]) for index in indexes)
    return (pair for pair in enumerate(islice(loader, limit)) if writer.owns(pair[0]))


def _memory_left(model: EquilibriumModel, writer: ShardWriter) -> Memory:
    """What the last batch of the finished shards leaves behind; nothing where there is none."""
    notes = [writer.finished[number] for number in sorted(writer.finished)]
    if not notes:
        return ()
    finished = TrajectoryStore(writer.folder, writer.manifest.with_shards(notes), verify=True)
    last = finished[len(finished) - 1]
    context = model.inject(beside(model, last.x))
    # In the model's own precision, which may be other than the store's.
    own = in_single(model.start(context))
    z = map_state(lambda kept, own: kept.to(own), last.endpoint, own)
    return require_memory(model).remember(z, context)


def _require_tokens(x: Any, index: int) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(
            f"batch {index}: with carried=True an input is a tensor of tokens (B, L), to which record adds the "
            f"memory, not a {type(x).__name__}"
        )


def _require_finite(residual: Tensor, index: int) -> None:
    unsolved = (~residual.isfinite()).nonzero().flatten().tolist()
    if unsolved:
        raise UnsolvedBatch(
            f"batch {index}: the teacher's residual is not finite for {len(unsolved)} of "
            f"{len(residual)} samples, the first of them number {unsolved[0]}. It has no equilibrium "
            "there to learn from: look for NaN or infinity in its weights and in this input"
        )


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode, with every submodule's own mode restored afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [module.training for module in modules]
    try:
        if modules:
            model.eval()
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def _length(loader: Iterable[Any], limit: int | None) -> int | None:
    try:
        length = len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
    return length if limit is None else min(length, limit)

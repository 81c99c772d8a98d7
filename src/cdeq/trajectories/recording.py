"""Recording: run a teacher's solver over a loader once, and keep what it passes through."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from cdeq.equilibrium.contract import EquilibriumModel, check_contract, is_batched
from cdeq.equilibrium.memory import Memory, Segment, require_memory
from cdeq.equilibrium.states import map_state
from cdeq.files import atomic_write_bytes, remove_leftovers
from cdeq.placement import Placement, Precision, beside, in_single
from cdeq.solvers.anderson import Anderson
from cdeq.solvers.base import MAX_STEPS, TOL, Solver
from cdeq.training.log import Progress, shown_progress
from cdeq.trajectories.capture import CAPTURES, Settings
from cdeq.trajectories.fingerprint import BatchDigest, solver_fingerprint, teacher_fingerprint
from cdeq.trajectories.manifest import (
    MANIFEST,
    Manifest,
    Shard,
    UnsolvedBatch,
    require_same_data,
    shard_name,
)
from cdeq.trajectories.nesting import check_loader, flatten_batch, split_batch
from cdeq.trajectories.store import DTYPES, TrajectoryStore, batch_key

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

    Shards are written whole, and the manifest after each: a kill at any instant leaves a folder
    that the same call completes, to the same bytes. It then reads the finished shards' batches from
    the loader again, to see that they are the same, so their order must not change. A complete
    folder is returned as it is, the loader unread; `TrajectoryStore.check` compares the data too.
    A sample whose residual is not finite is refused (UnsolvedBatch); one that merely has not converged
    is kept, and counted by `TrajectoryStore.unconverged`.
    One process at a time writes a folder. Writing a shard takes three times its size in memory.
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
    manifest = _begin(Path(folder), manifest)
    if not manifest.complete:
        settings = Settings(solver=solver, max_steps=max_steps, tol=tol, dtype=dtype)
        with _evaluating(model), torch.no_grad(), placement.computing():
            writer = _Writer(Path(folder), manifest)
            memory = _memory_left(model, writer) if carried else None
            with shown_progress(progress, "record") as show:
                _fill(writer, model, loader, settings, memory, show)
    return TrajectoryStore.open(folder)


def _begin(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest to go on from: the folder's own if it has one."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        found = Manifest.read(folder)
        found.require_same(manifest, folder)
        found.check_files(folder)
        manifest = found
    else:
        manifest.write(folder)
    for pattern in ("shard-*.safetensors", MANIFEST):
        remove_leftovers(folder, pattern)
    return manifest


def _fill(
    writer: _Writer,
    model: EquilibriumModel,
    loader: Iterable[Any],
    settings: Settings,
    memory: Memory | None,
    progress: Progress | None,
) -> None:
    """Pass over the loader: check the batches of finished shards, solve the others.

    `memory`: what the batches of the finished shards leave for the next one; None without memory.
    """
    capture = CAPTURES[writer.manifest.mode]
    limit = writer.manifest.max_batches
    total = _length(loader, limit)
    for done, batch in enumerate(islice(loader, limit), start=1):
        x, y = split_batch(batch)
        structure, tensors = flatten_batch(x, y)
        if not writer.skips:
            kept_structure, kept_tensors = structure, tensors
            if memory is not None:
                _require_tokens(x, done - 1)
                x = Segment(x, memory or require_memory(model).no_memory(len(x)))
                kept_structure, kept_tensors = flatten_batch(x, y)
            context = model.inject(beside(model, x))
            captured = capture(model, context, settings)
            _require_finite(captured.tensors["residual"], done - 1)
            if memory is not None:
                # As it is stored: a resumed run has no other.
                rounded = map_state(lambda t: t.to(settings.dtype).to(t.dtype), captured.endpoint)
                memory = require_memory(model).remember(rounded, context)
            state = {"tuple": captured.is_tuple, "tensors": len(captured.tensors) - 2}
            # Copies, since a loader may reuse its memory, and safetensors refuses two views of one.
            inputs = {n: t.to("cpu", copy=True).contiguous() for n, t in kept_tensors.items()}
            writer.keep({**kept_structure, "state": state}, inputs | captured.tensors)
        writer.count(structure, tensors)
        if progress is not None:
            progress(done, total, {})
    writer.close()


def _memory_left(model: EquilibriumModel, writer: _Writer) -> Memory:
    """What the last batch of the finished shards leaves behind; nothing where there is none."""
    if not writer.finished:
        return ()
    finished = TrajectoryStore(writer.folder, writer.manifest, verify=True)
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


class _Writer:
    """Gathers batches into shards, and shards into the manifest."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.finished = len(manifest.shards)
        self.number = 0  # of the current shard
        self.batches = 0  # in it
        self.tensors: dict[str, Tensor] = {}
        self.digest = BatchDigest()
        self.structure = manifest.structure

    @property
    def skips(self) -> bool:
        """Whether the current shard was finished by an earlier run."""
        return self.number < self.finished

    def keep(self, structure: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Add a batch's tensors to the current shard."""
        index = self.number * self.manifest.batches_per_shard + self.batches
        if self.structure is None:
            self.structure = structure
        elif structure != self.structure:
            raise ValueError(
                f"batch {index} is nested as {structure}, the ones before it as {self.structure}"
            )
        self.tensors |= {f"{batch_key(index)}.{name}": t for name, t in tensors.items()}

    def count(self, structure: dict[str, Any], inputs: dict[str, Tensor]) -> None:
        """Take note of a batch's inputs; the last one of a shard finishes it."""
        self.digest.update(structure, inputs)
        self.batches += 1
        if self.batches == self.manifest.batches_per_shard:
            self._finish_shard()

    def close(self) -> None:
        """Finish the last shard and the store."""
        if self.batches:
            self._finish_shard()
        if self.skips:
            missing = self.folder / self.manifest.shards[self.number].file
            require_same_data(missing, self.manifest.fingerprint["data"][self.number], None)
        if self.number == 0:
            raise ValueError("the loader gave no batches")
        self.manifest = replace(self.manifest, complete=True)
        self.manifest.write(self.folder)

    def _finish_shard(self) -> None:
        path, data = self.folder / shard_name(self.number), self.digest.hexdigest()
        if self.skips:
            require_same_data(path, self.manifest.fingerprint["data"][self.number], data)
        else:
            assert self.structure is not None
            content = save(self.tensors)
            atomic_write_bytes(path, content)
            shard = Shard(
                file=path.name,
                bytes=len(content),
                sha256=hashlib.sha256(content).hexdigest(),
                batches=self.batches,
            )
            self.manifest = self.manifest.with_shard(shard, data, self.structure)
            self.manifest.write(self.folder)
        self.number, self.batches = self.number + 1, 0
        self.tensors, self.digest = {}, BatchDigest()


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

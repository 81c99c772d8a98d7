"""Reading recorded trajectories back, memory-mapped: only what is asked for is read.

Shapes: B samples, K steps, a state (B, ...).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cdeq.equilibrium.states import State
from cdeq.files import sha256_of_file
from cdeq.trajectories.fingerprint import data_fingerprint, teacher_fingerprint
from cdeq.trajectories.manifest import (
    IncompleteStore,
    Manifest,
    altered,
    read_notes,
    require_same,
    require_same_data,
    shard_name,
)
from cdeq.trajectories.nesting import unflatten

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
OPEN_SHARDS = 32  # each holds a file descriptor
STATES_ON_DEVICE = 4
"""States of a batch that are kept on a device; those of a whole trajectory of a large graph would fill it."""


def batch_key(index: int) -> str:
    """The prefix of a batch's tensors in its shard."""
    return f"batch.{index:06d}"


class TrajectoryStore:
    """A folder of recorded trajectories, as a sequence of `TrajectoryBatch`."""

    def __init__(self, folder: Path, manifest: Manifest, verify: bool):
        self.folder, self.manifest, self.verify = folder, manifest, verify
        self._length = sum(shard.batches for shard in manifest.shards)
        self._handles: OrderedDict[int, Any] = OrderedDict()
        self._verified: set[int] = set()

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> TrajectoryStore:
        """Open a complete recording. With `verify`, a shard is checksummed when first read."""
        folder = Path(folder)
        manifest = Manifest.read(folder)
        if not manifest.complete:
            raise IncompleteStore(
                f"{folder} holds {len(read_notes(folder))} shards of an unfinished recording: "
                "call record again with the same arguments to finish it"
            )
        manifest.check_files(folder)
        return cls(folder, manifest, verify)

    def check(self, *, teacher: Any = None, loader: Iterable[Any] | None = None) -> None:
        """Raise FingerprintMismatch unless recorded from this teacher and this data."""
        recorded = self.manifest.fingerprint
        if teacher is not None:
            given = {"teacher": teacher_fingerprint(teacher)}
            require_same({"teacher": recorded["teacher"]}, given, self.folder)
        if loader is not None:
            size, limit = self.manifest.batches_per_shard, self.manifest.max_batches
            found = data_fingerprint(loader, size, limit)
            for number, (ours, theirs) in enumerate(zip_longest(recorded["data"], found)):
                require_same_data(self.folder / shard_name(number), ours, theirs)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> TrajectoryBatch:
        if not -len(self) <= index < len(self):
            raise IndexError(f"batch {index} of a store of {len(self)}")
        return TrajectoryBatch(self, index % len(self))

    def __iter__(self) -> Iterator[TrajectoryBatch]:
        return (self[i] for i in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        # Open files stay behind when a store is sent to another process.
        return {**self.__dict__, "_handles": OrderedDict()}

    def sizes(self) -> list[int]:
        """The number of samples in each batch (1 for a state without a batch axis); reads shapes only."""
        return [residual.get_shape()[0] for residual in self._slices("residual")]

    def unconverged(self, tol: float) -> float:
        """The share of samples whose recorded residual exceeds `tol`; reads the residuals only."""
        above = [~(residual[...] <= tol) for residual in self._slices("residual")]  # of NaN, too
        return float(torch.cat(above).double().mean())

    def precision(self) -> Tensor:
        """How far each recorded equilibrium is estimated to be from the true one, relative, (samples,)."""
        return torch.cat([error[...] for error in self._slices("error")])

    def _slices(self, name: str) -> Iterator[Any]:
        """One unread tensor of each batch, without a checksum, which would read whole shards."""
        for number, shard in enumerate(self.manifest.shards):
            path, first = self.folder / shard.file, number * self.manifest.batches_per_shard
            try:
                with safe_open(path, framework="pt") as file:
                    for index in range(first, first + shard.batches):
                        yield file.get_slice(f"{batch_key(index)}.{name}")
            except (SafetensorError, OSError) as error:
                raise altered(path) from error

    def slice_of(self, index: int, name: str) -> Any:
        """An unread tensor of a batch: has get_shape(), and reads only what it is indexed with."""
        number = index // self.manifest.batches_per_shard
        try:
            return self._handle(number).get_slice(f"{batch_key(index)}.{name}")
        except (SafetensorError, OSError) as error:
            raise altered(self.folder / self.manifest.shards[number].file) from error

    def _handle(self, number: int) -> Any:
        if number not in self._handles:
            shard = self.manifest.shards[number]
            path = self.folder / shard.file
            if self.verify and number not in self._verified:
                if sha256_of_file(path) != shard.sha256:
                    raise altered(path)
                self._verified.add(number)
            self._handles[number] = safe_open(path, framework="pt")
            if len(self._handles) > OPEN_SHARDS:
                self._handles.popitem(last=False)
        self._handles.move_to_end(number)
        return self._handles[number]


class TrajectoryBatch:
    """One recorded batch; everything is read when first asked for, and then kept; on a device, the last few states.

    `steps` is K, the index of the last state; 0 in a store of endpoints. States come in single
    precision, or in double if so recorded, on the CPU; `to` says otherwise.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        index: int,
        rows: slice | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.index = index
        self.steps = store.manifest.steps
        self._store, self._rows = store, rows
        self._device = device
        recorded = torch.float64 if store.manifest.dtype == "float64" else torch.float32
        self._dtype = recorded if dtype is None else dtype
        self._states: dict[int, State] = {}

    @property
    def size(self) -> int:
        """B, the number of samples; 1 for a state without a batch axis."""
        return self._whole if self._rows is None else self._rows.stop - self._rows.start

    @cached_property
    def x(self) -> Any:
        """The input, nested as it was recorded."""
        return self._inputs("x")

    @cached_property
    def y(self) -> Any:
        """The target, or None."""
        return self._inputs("y")

    @cached_property
    def residual(self) -> Tensor:
        """|f(z*) - z*| / |z*| of each sample, (B,), before z* was rounded for storage."""
        return self._read("residual")

    @cached_property
    def endpoint(self) -> State:
        """z*: the last state of a full trajectory, or the solution."""
        if self._store.manifest.mode == "full":
            return self.state(self.steps)
        return self._state("endpoint", ())

    @property
    def states(self) -> list[State] | None:
        """z_0 ... z_K, or None in a store of endpoints. `state(k)` reads one alone."""
        if self._store.manifest.mode != "full":
            return None
        return [self.state(k) for k in range(self.steps + 1)]

    def state(self, k: int) -> State:
        """z_k, 0 <= k <= K; reads no other state."""
        if self._store.manifest.mode != "full":
            raise ValueError(
                f"{self._store.folder} holds endpoints only: record it with mode='full' for states"
            )
        if not 0 <= k <= self.steps:
            raise IndexError(f"state {k} of a trajectory z_0 ... z_{self.steps}")
        if k not in self._states:
            on_device = self._device is not None and self._device.type != "cpu"
            if on_device and len(self._states) >= STATES_ON_DEVICE:
                del self._states[next(iter(self._states))]  # the first that was read
            self._states[k] = self._state("states", (k,))
        return self._states[k]

    def to(self, device: torch.device, dtype: torch.dtype) -> TrajectoryBatch:
        """The same batch on a device, its states in a dtype."""
        return TrajectoryBatch(self._store, self.index, self._rows, device, dtype)

    def before(self) -> TrajectoryBatch | None:
        """The batch recorded before this one, of the same rows; None for the first."""
        if self.index == 0:
            return None
        return TrajectoryBatch(self._store, self.index - 1, self._rows, self._device, self._dtype)

    def part(self, rank: int, world: int) -> TrajectoryBatch:
        """The `rank`-th of `world` equal parts of the samples, for data-parallel training; itself if there is one.

        Cuts the states, the residual, and each tensor of x and y whose first axis has B entries.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank must be from 0 to {world - 1}, not {rank}")
        if world == 1:
            return self
        name = f"batch {self.index} of {self._store.folder}"
        if not self._store.manifest.batched:
            raise ValueError(f"{name} cannot be divided: its state has no batch axis")
        if self.size % world:
            raise ValueError(
                f"{name} has {self.size} samples, which {world} processes cannot share evenly"
            )
        count = self.size // world
        return self.rows(rank * count, (rank + 1) * count)

    def rows(self, start: int, stop: int) -> TrajectoryBatch:
        """The samples from `start` up to `stop`, cut as a `part` is."""
        first = 0 if self._rows is None else self._rows.start
        rows = slice(first + start, first + stop)
        return TrajectoryBatch(self._store, self.index, rows, self._device, self._dtype)

    @cached_property
    def _whole(self) -> int:
        return self._store.slice_of(self.index, "residual").get_shape()[0]

    def _inputs(self, name: str) -> Any:
        structure = self._store.manifest.structure
        assert structure is not None
        return unflatten(structure[name], name, self._read)

    def _read(self, name: str) -> Tensor:
        stored = self._store.slice_of(self.index, name)
        shape = stored.get_shape()
        cut = self._rows is not None and shape and shape[0] == self._whole
        # A copy, so that writing into it does not reach the mapped file's other readers.
        return stored[self._rows if cut else ...].to(self._device, copy=True)

    def _state(self, name: str, leading: tuple[int, ...]) -> State:
        manifest = self._store.manifest
        assert manifest.structure is not None
        form = manifest.structure["state"]
        index = leading if self._rows is None else (*leading, self._rows)
        parts = []
        for j in range(form["tensors"]):
            stored = self._store.slice_of(self.index, f"{name}.{j}")
            parts.append(stored[index or ...].to(self._device, self._dtype, copy=True))
        return tuple(parts) if form["tuple"] else parts[0]

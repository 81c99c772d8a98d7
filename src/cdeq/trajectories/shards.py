"""Batches gathered into shards, by one process or by several: shard n is written by process n modulo their number.

Whoever writes a shard, its bytes are the same, so a recording may be cut short and finished by another number of
processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from cdeq.files import atomic_write_bytes, remove_leftovers
from cdeq.trajectories.fingerprint import BatchDigest
from cdeq.trajectories.manifest import (
    MANIFEST,
    NOTES,
    Manifest,
    Shard,
    ShardNote,
    read_notes,
    remove_notes,
    require_same_data,
    shard_name,
)
from cdeq.trajectories.store import batch_key


def begin_recording(folder: Path, manifest: Manifest) -> tuple[Manifest, dict[int, ShardNote]]:
    """The manifest to go on from, the folder's own if it has one, and the shards that are finished."""
    folder.mkdir(parents=True, exist_ok=True)
    finished: dict[int, ShardNote] = {}
    if (folder / MANIFEST).exists():
        found = Manifest.read(folder)
        found.require_same(manifest, folder)
        found.check_files(folder)
        if found.complete:
            manifest = found
            remove_notes(folder)
        else:
            finished = read_notes(folder)
            for note in finished.values():
                note.shard.check_file(folder)
    else:
        remove_notes(folder)
        manifest.write(folder)
    for pattern in ("shard-*.safetensors", NOTES, MANIFEST):
        remove_leftovers(folder, pattern)
    return manifest, finished


def finish_recording(folder: Path, manifest: Manifest, notes: Mapping[int, ShardNote]) -> None:
    """Write the manifest that lists all shards."""
    if not notes:
        raise ValueError("the loader gave no batches")
    ordered = [notes[number] for number in sorted(notes)]
    short = [note for note in ordered[:-1] if note.shard.batches < manifest.batches_per_shard]
    if len(notes) != max(notes) + 1 or short:
        raise ValueError(
            "the processes were given loaders of different lengths: each must be given the same batches"
        )
    for note in ordered:
        require_same_structure(note.shard.file, note.structure, ordered[0].structure)
    replace(manifest.with_shards(ordered), complete=True).write(folder)
    remove_notes(folder)


def require_same_structure(what: str, structure: dict[str, Any], first: dict[str, Any]) -> None:
    if structure != first:
        raise ValueError(f"{what} is nested as {structure}, the ones before it as {first}")


class ShardWriter:
    """Gathers the batches of this process's shards; those that are `finished` are compared with what they were."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        finished: Mapping[int, ShardNote],
        rank: int = 0,
        world: int = 1,
    ):
        self.folder, self.manifest = folder, manifest
        self.finished, self.rank, self.world = finished, rank, world
        self.size = manifest.batches_per_shard
        self.notes: dict[int, ShardNote] = {}  # of the shards that this process has gone through
        self.number = 0  # of the current shard
        self.batches = 0  # in it
        self.tensors: dict[str, Tensor] = {}
        self.digest = BatchDigest()
        self.structure = next((note.structure for note in finished.values()), None)

    def owns(self, index: int) -> bool:
        """Whether a batch belongs to a shard of this process."""
        return index // self.size % self.world == self.rank

    def is_finished(self, index: int) -> bool:
        """Whether the shard of a batch was finished by an earlier run."""
        return index // self.size in self.finished

    def keep(self, index: int, structure: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Add a batch's tensors to its shard."""
        self.structure = self.structure or structure
        require_same_structure(f"batch {index}", structure, self.structure)
        self.tensors |= {f"{batch_key(index)}.{name}": t for name, t in tensors.items()}

    def count(self, index: int, structure: dict[str, Any], inputs: dict[str, Tensor]) -> None:
        """Take note of a batch's inputs; the last one of a shard finishes it."""
        self.digest.update(structure, inputs)
        self.number, self.batches = index // self.size, self.batches + 1
        if self.batches == self.size:
            self._finish_shard()

    def close(self) -> dict[int, ShardNote]:
        """The notes of all shards of this process, the last of which may be short."""
        if self.batches:
            self._finish_shard()
        for number in sorted(
            {n for n in self.finished if self.owns(n * self.size)} - {*self.notes}
        ):
            note = self.finished[number]
            require_same_data(self.folder / note.shard.file, note.data, None)
        return self.notes

    def _finish_shard(self) -> None:
        number, data = self.number, self.digest.hexdigest()
        path = self.folder / shard_name(number)
        if number in self.finished:
            note = self.finished[number]
            require_same_data(path, note.data, data)
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
            note = ShardNote(shard=shard, data=data, structure=self.structure)
            note.write(self.folder, number)
        self.notes[number] = note
        self.batches, self.tensors, self.digest = 0, {}, BatchDigest()

"""The manifest: what a trajectory folder holds, as JSON; and the errors of an unusable folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cdeq.files import atomic_write_text, differences
from cdeq.trajectories.fingerprint import Fingerprint

FORMAT = 3
MANIFEST = "manifest.json"
NOTES = "shard-*.json"


class StoreError(Exception):
    """A trajectory folder cannot be used; the message names the file and what to do."""


class DamagedStore(StoreError):
    """A file is missing, cut short, altered, or not readable."""


class IncompleteStore(StoreError):
    """The recording was interrupted and not yet resumed to its end."""


class UnsolvedBatch(StoreError):
    """The teacher has no finite residual for a sample, so there is nothing to learn from."""


class FingerprintMismatch(StoreError):
    """The folder was recorded with something else; `parts` names what differs."""

    def __init__(self, message: str, parts: tuple[str, ...]):
        super().__init__(message, parts)
        self.parts = parts

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One finished file of `batches` batches."""

    file: str
    bytes: int
    sha256: str
    batches: int

    def check_file(self, folder: Path) -> None:
        """Refuse a file that is missing or of another length; reads no content."""
        path = folder / self.file
        if not path.is_file():
            raise DamagedStore(f"{path} is missing: restore it, or {_AGAIN}")
        size = path.stat().st_size
        if size != self.bytes:
            raise DamagedStore(
                f"{path} has {size} bytes instead of {self.bytes}: restore it, or {_AGAIN}"
            )


@dataclass(frozen=True, kw_only=True)
class ShardNote:
    """What the manifest will say of a finished shard: a file beside the shard until the manifest lists all.

    So the processes of one recording need not write one file, and a recording that was cut short has what it finished.
    `data` is the SHA-256 of its batches.
    """

    shard: Shard
    data: str
    structure: dict[str, Any]

    def write(self, folder: Path, number: int) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)
        atomic_write_text(folder / note_name(number), text + "\n")

    @classmethod
    def read(cls, path: Path) -> ShardNote:
        try:
            fields = json.loads(path.read_bytes())
            return cls(**fields | {"shard": Shard(**fields["shard"])})
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(path, error) from error


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder holds. `steps` is K, or 0 where only endpoints were kept.

    `fingerprint` has the parts teacher, solver, dtype, and data: a SHA-256 of each shard's batches.
    `structure` says how x, y and the state are nested; None before the first shard.
    """

    mode: str
    dtype: str
    steps: int
    batched: bool
    batches_per_shard: int
    max_batches: int | None
    fingerprint: Fingerprint
    structure: dict[str, Any] | None = None
    shards: tuple[Shard, ...] = ()
    complete: bool = False
    format: int = FORMAT

    def with_shards(self, notes: Sequence[ShardNote]) -> Manifest:
        """The manifest that lists these shards, the first ones of the recording."""
        return replace(
            self,
            shards=tuple(note.shard for note in notes),
            fingerprint={**self.fingerprint, "data": [note.data for note in notes]},
            structure=notes[0].structure,
        )

    def write(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)
        atomic_write_text(folder / MANIFEST, text + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check a folder's manifest."""
        path = folder / MANIFEST
        try:
            fields = json.loads(path.read_bytes())
            version = fields["format"]
        except FileNotFoundError:
            raise DamagedStore(f"{path} is missing: not a trajectory folder; record it") from None
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(path, error) from error
        if version != FORMAT:
            raise StoreError(
                f"{path} has format {version!r}, and this cdeq reads format {FORMAT}: "
                "record it again, or use the version of cdeq that wrote it"
            )
        try:
            shards = tuple(Shard(**shard) for shard in fields.pop("shards"))
            manifest = cls(**fields, shards=shards)
            if len(manifest.fingerprint["data"]) != len(shards):
                raise ValueError("it names another number of shards than of data hashes")
            if any(Path(shard.file).name != shard.file for shard in shards):
                raise ValueError("a shard lies outside the folder")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _unreadable(path, error) from error
        return manifest

    def check_files(self, folder: Path) -> None:
        """Refuse a folder with a shard that is missing or of another length; reads no content."""
        for shard in self.shards:
            shard.check_file(folder)

    def require_same(self, given: Manifest, folder: Path) -> None:
        """Refuse to go on with a recording that was begun with something else."""
        require_same(self._settings(), given._settings(), folder)

    def _settings(self) -> Fingerprint:
        kept = {key: part for key, part in self.fingerprint.items() if key != "data"}
        names = ("mode", "batched", "batches_per_shard", "max_batches")
        return kept | {name: getattr(self, name) for name in names}


_AGAIN = "delete the folder and record it again"


def require_same(recorded: Fingerprint, given: Fingerprint, folder: Path) -> None:
    """Raise FingerprintMismatch, with both values, where two fingerprints differ."""
    found = differences(recorded, given)
    if found:
        parts = tuple(dict.fromkeys(name.split(".")[0] for name in found))
        values = "; ".join(f"{name}: recorded {a!r}, given {b!r}" for name, (a, b) in found.items())
        raise FingerprintMismatch(
            f"{folder / MANIFEST} was recorded with another {', '.join(parts)} ({values}): "
            "use what it was recorded with, or another folder",
            parts,
        )


def require_same_data(shard: Path, recorded: str | None, given: str | None) -> None:
    """Raise FingerprintMismatch if a shard was recorded from other batches; None: from none."""
    if recorded != given:
        raise FingerprintMismatch(
            f"{shard} is the first shard recorded from other data "
            f"(recorded {recorded}, given {given}): the loader must give the same batches in the "
            "same order, unshuffled or with a fixed seed; or use another folder",
            ("data",),
        )


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def note_name(number: int) -> str:
    return f"shard-{number:05d}.json"


def read_notes(folder: Path) -> dict[int, ShardNote]:
    """The shards of an unfinished recording, by number."""
    paths = sorted(folder.glob(NOTES))
    return {int(path.stem.removeprefix("shard-")): ShardNote.read(path) for path in paths}


def remove_notes(folder: Path) -> None:
    """Delete the notes of a recording that is complete, or of one whose manifest is gone."""
    for path in folder.glob(NOTES):
        path.unlink(missing_ok=True)


def altered(path: Path) -> DamagedStore:
    """The error for a file whose content is not what was recorded."""
    return DamagedStore(f"{path} is not as it was recorded: restore it, or {_AGAIN}")


def _unreadable(path: Path, error: Exception) -> DamagedStore:
    return DamagedStore(f"{path} cannot be read ({error}): restore it, or {_AGAIN}")

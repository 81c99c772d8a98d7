"""Runs: trainings and measurements kept by the hash of their whole configuration, so that each is done once.

A run is a folder. A training in it goes on from its last checkpoint, and the seconds it took stand beside that; a
measurement in it is one JSON file, there or not there. Experiments that need the same teacher find the same folder.
A run is locked while a process works on it; the lock of a process that is killed is released. The processes of
torchrun work on a run together: all make the same calls, the first one holds the lock, and it alone writes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cdeq.evaluation import Training, described, timed_training
from cdeq.files import atomic_write_text
from cdeq.training.log import Progress
from cdeq.training.parallel import from_main_process, is_main_process, on_main_process
from cdeq_experiments.options import ExperimentError

CONFIG, RESULT, LOCK = "run.json", "result.json", ".lock"


@dataclass(frozen=True)
class Run:
    """A training or a measurement, by the folder that keeps it."""

    folder: Path

    @classmethod
    def of(cls, folder: Path, name: str, config: dict[str, Any]) -> Run:
        """The run with this configuration, which is written into it for people to read."""
        text = json.dumps(described(config), indent=1, sort_keys=True)
        run = cls(folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")
        if not (run.folder / CONFIG).exists():
            run.folder.mkdir(parents=True, exist_ok=True)
            atomic_write_text(run.folder / CONFIG, text + "\n")
        return run

    @property
    def lock(self) -> FileLock:
        """Inside it the run belongs to this process alone; another that needs it waits, and finds it done."""
        return FileLock(self.folder / LOCK)

    @property
    def _held(self) -> AbstractContextManager[object]:
        return self.lock if is_main_process() else nullcontext()

    @property
    def done(self) -> bool:
        return from_main_process((self.folder / RESULT).exists())

    def result(self, work: Callable[[], Any]) -> Any:
        """What `work()` gives, as plain JSON: kept from before, or done now."""
        if not self.done:
            with self._held:
                self._do(work)
        return self.read()

    def attempt(self, work: Callable[[], Any]) -> bool:
        """As `result`, unless another process is working on it: then False, and nothing is done."""
        try:
            if not self.done:
                with self.lock.acquire(blocking=False):
                    self._do(work)
        except Timeout:
            return False
        return True

    def read(self) -> Any:
        """The result that is there."""
        return on_main_process(self._read)

    def _read(self) -> Any:
        path = self.folder / RESULT
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ExperimentError(
                f"{path} is damaged ({error}): remove it to do its work again"
            ) from None

    def _do(self, work: Callable[[], Any]) -> None:
        if not self.done:  # another process may just have done it
            text = json.dumps(work(), indent=1) + "\n"
            if is_main_process():
                atomic_write_text(self.folder / RESULT, text)

    def train(self, bar: Progress | None, work: Callable[[Progress], object]) -> Training:
        """Train by `work(progress)`; what it took, over all attempts, is kept beside its checkpoint."""
        with self._held:
            if is_main_process():
                return from_main_process(timed_training(self.folder, work, bar))
            work(lambda done, total, metrics: None)
            return from_main_process(None)

"""What solving leaves: trajectories recorded once to disk, read back many times, and augmented."""

from cdeq.trajectories.augment import augment_endpoints
from cdeq.trajectories.manifest import (
    DamagedStore,
    FingerprintMismatch,
    IncompleteStore,
    StoreError,
    UnsolvedBatch,
)
from cdeq.trajectories.recording import record
from cdeq.trajectories.store import TrajectoryBatch, TrajectoryStore

__all__ = [
    "DamagedStore",
    "FingerprintMismatch",
    "IncompleteStore",
    "StoreError",
    "TrajectoryBatch",
    "TrajectoryStore",
    "UnsolvedBatch",
    "augment_endpoints",
    "record",
]

"""What of a recording a student is trained on, judged on, and fitted on in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from cdeq.equilibrium.states import map_state, relative_distance
from cdeq.training.draws import numbered_generator
from cdeq.training.parallel import process_rank

if TYPE_CHECKING:
    from cdeq.consistency.student import Student
    from cdeq.trajectories import TrajectoryBatch, TrajectoryStore

HELD_OUT_SHARE, MOST_HELD_OUT = 8, 4
"""One recorded batch in so many is kept for judging, and no more than so many in all.

With too few batches for that, it is one sample in so many of each."""
SAME = 1e-3
"""A step that differs by less, relatively, is the same, but for rounding."""
PIECES = 4
"""Parts of a batch, for a fit in closed form to fewer batches than that."""


def held_out_count(batches: int) -> int:
    """How many recorded batches are judged on and not trained on; 0 where there are too few to spare any."""
    return min(batches // HELD_OUT_SHARE, MOST_HELD_OUT)


def held_out_samples(size: int, world: int = 1) -> int:
    """How many of a batch's samples are judged on, where batches are too few; `world` processes share the rest."""
    kept = size // HELD_OUT_SHARE
    trained_on = (size - kept) // world * world
    return size - trained_on if kept else 0


@torch.no_grad()
def can_be_cut(student: Student, batch: TrajectoryBatch) -> bool:
    """Whether a few samples of a batch can be had by themselves, and are then what they are among the others."""
    if not student.batched or batch.size < 2:
        return False
    teacher, count = student.teacher, max(batch.size // HELD_OUT_SHARE, 1)
    whole = teacher.inject(batch.x)
    expected = map_state(lambda t: t[:count], teacher.step(teacher.start(whole), whole))
    try:
        context = teacher.inject(batch.rows(0, count).x)
        found = teacher.step(teacher.start(context), context)
        away = relative_distance(found, expected)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False  # its inputs are not one for each sample
    return bool((away < SAME).all())


class Shares:
    """The batches of a store, `placed` where the student is: most are trained on, some judged on if it `judges`.

    Too few batches to keep a whole one: some samples of each, if its inputs can be cut. A graph is both.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        placed: Callable[[TrajectoryBatch], TrajectoryBatch],
        student: Student,
        *,
        judges: bool,
        seed: int,
    ):
        self.store, self.placed, self.seed = store, placed, seed
        self.rank, self.world = process_rank()
        spared = held_out_count(len(store))
        self.trained_on = len(store) - (spared if judges else 0)
        self.can_be_cut = spared == 0 and can_be_cut(student, placed(store[0]))
        self.keeps_samples = judges and self.can_be_cut
        self._read = lru_cache(maxsize=1)(
            self._part
        )  # a graph is one batch, which is read only once

    def batch_at(self, update: int) -> TrajectoryBatch:
        """This process's part; every batch once in each epoch, in an order of the seed and the epoch alone."""
        epoch, place = divmod(update, self.trained_on)
        order = torch.randperm(self.trained_on, generator=numbered_generator(self.seed, epoch))
        return self._read(int(order[place]))

    def judged(self) -> Iterator[TrajectoryBatch]:
        """Whole batches, the same on every process."""
        count = len(self.store)
        first = self.trained_on if self.trained_on < count else max(0, count - MOST_HELD_OUT)
        return (self._divided(i)[1] for i in range(first, count))

    def fitted(self, most: int) -> Iterator[TrajectoryBatch]:
        """For a fit in closed form, which every process does on whole batches: all come to the same weights.

        Of every four, one chooses the ridge: of fewer, a quarter of each.
        """
        for i in range(min(self.trained_on, most)):
            batch = self._divided(i)[0]
            cut = self.can_be_cut and self.trained_on < PIECES <= batch.size
            pieces = PIECES if cut else 1
            ends = [batch.size * k // pieces for k in range(pieces + 1)]
            for start, stop in pairwise(ends):
                yield batch.rows(start, stop) if cut else batch

    def _divided(self, index: int) -> tuple[TrajectoryBatch, TrajectoryBatch]:
        """What of a batch is trained on, and what is judged on; all of it both where nothing is spared."""
        batch = self.placed(self.store[index])
        if not self.keeps_samples or not (kept := held_out_samples(batch.size, self.world)):
            return batch, batch
        first = batch.size - kept
        return batch.rows(0, first), batch.rows(first, batch.size)

    def _part(self, index: int) -> TrajectoryBatch:
        return self._divided(index)[0].part(self.rank, self.world)

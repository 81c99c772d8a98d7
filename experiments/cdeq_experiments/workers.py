"""Pieces of work one after another, or several at a time: in processes of their own, or in those of torchrun."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from typing import TypeVar

import torch

from cdeq_experiments.crew import crew, crew_size
from cdeq_experiments.options import ExperimentError, Options

Item = TypeVar("Item")
Found = TypeVar("Found")


def worked(
    work: Callable[[Item], Found], items: Sequence[Item], options: Options
) -> Iterator[Found]:
    """`work` of each item, in order, `options.jobs` of them at a time."""
    if options.jobs == 1:
        yield from map(work, items)
        return
    if crew_size() > 1:
        yield from crew().shared(work, items)
        return
    threads = options.threads or max(1, torch.get_num_threads() // options.jobs)
    pool = ProcessPoolExecutor(
        options.jobs,
        mp_context=get_context("spawn"),
        initializer=_begin_worker,
        initargs=(partial(torch.set_num_threads, threads),),
    )
    before = set(active_children())
    try:
        for future in [pool.submit(work, item) for item in items]:
            yield future.result()
    except BrokenProcessPool as error:
        raise ExperimentError(
            "a process that worked on a piece was killed, for want of memory perhaps: the same command goes on, "
            "with fewer --jobs if so"
        ) from error
    except BaseException:
        # What the others have done is in their checkpoints: nobody waits an hour to read of the error.
        for child in set(active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker(prepare: Callable[[], None]) -> None:
    """A process that ends when the one that started it does, even if that one was killed."""
    prepare()
    parent = parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()

"""Pieces of work one after another, or several at a time, each in a process of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context, parent_process
from typing import TypeVar

import torch

from cdeq.experiments.options import Options

Item = TypeVar("Item")
Found = TypeVar("Found")


def worked(
    work: Callable[[Item], Found], items: Sequence[Item], options: Options
) -> Iterator[Found]:
    """`work` of each item, in order, `options.jobs` of them at a time."""
    if options.jobs == 1:
        yield from map(work, items)
        return
    threads = options.threads or max(1, torch.get_num_threads() // options.jobs)
    pool = ProcessPoolExecutor(
        options.jobs,
        mp_context=get_context("spawn"),
        initializer=_begin_worker,
        initargs=(partial(torch.set_num_threads, threads),),
    )
    try:
        for future in [pool.submit(work, item) for item in items]:
            yield future.result()
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

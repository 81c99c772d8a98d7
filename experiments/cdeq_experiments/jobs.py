"""Jobs: one after another, in several processes, or shared by several shells with the same command.

All three are the same walk over the same list: a process that finds the run of a job free does it, one that finds it
locked goes on to the next. At the end each waits for what the others are still doing, so that later jobs may rely on
it. So shells on one machine, or on several with a common folder, share the work. The processes of torchrun are one
walker: they do every job together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from typing import Any

import torch

from cdeq.training import process_rank
from cdeq_experiments.options import ExperimentError, Options
from cdeq_experiments.runs import Run


@dataclass(frozen=True)
class Job:
    """A measurement: `work()` gives plain JSON, and can be sent to another process; `run` keeps it."""

    title: str
    run: Run
    work: Callable[[], Any]


def run_jobs(jobs: Sequence[Job], options: Options, *, alone: bool = False) -> list[Any]:
    """The results of all jobs, in order.

    `alone`: one after another in this process, since seconds are measured.
    """
    missing = [job for job in jobs if not job.run.done]
    if alone or min(options.jobs, len(missing)) <= 1:
        walk(missing, options)
    else:
        _walk_in_processes(missing, options)
    return [job.run.read() for job in jobs]


def walk(jobs: Sequence[Job], options: Options) -> None:
    """Do every job that is not done, and wait for those that other processes are doing."""
    held, together = [], process_rank()[1] > 1
    for job in jobs:
        if together:
            job.run.result(job.work)
        if together or job.run.attempt(job.work):
            options.say(f"{job.title}: done")
        else:
            held.append(job)
    for job in held:
        job.run.result(job.work)  # if the other process has failed, it is done here


def _walk_in_processes(jobs: Sequence[Job], options: Options) -> None:
    """`options.jobs` processes, each of which walks over all jobs."""
    count, left, before = min(options.jobs, len(jobs)), list(jobs), set(active_children())
    threads = options.threads or max(1, torch.get_num_threads() // options.jobs)
    spawn = get_context("spawn")
    pool = ProcessPoolExecutor(count, spawn, initializer=_begin_worker, initargs=(threads,))
    try:
        futures = [pool.submit(walk, jobs, options) for _ in range(count)]
        children = set(active_children()) - before
        while futures:
            done, running = wait(futures, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()  # an error there is an error here
            # The pool may not watch a process that it started while it was already waiting.
            if running and any(child.exitcode is not None for child in children):
                raise BrokenProcessPool("a process ended before its jobs were done")
            for job in [job for job in left if job.run.done]:
                left.remove(job)
                options.say(f"{job.title}: done")
            futures = list(running)
    except BaseException as error:
        # What the others have done is in their checkpoints: the error should not wait for them to finish.
        for child in set(active_children()) - before:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ExperimentError(
                "a process that worked on a job was killed, perhaps because memory ran out: the same command "
                "resumes, with fewer --jobs if so"
            ) from error
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker(threads: int) -> None:
    """A process that ends when the one that started it does, even if that one was killed."""
    torch.set_num_threads(threads)
    parent = parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()

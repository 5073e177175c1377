"""Running tasks by an executor: threads, processes, dask, MPI. No scheduler of our own.

Tasks are handed over a few hundred at a time, so that a plan of millions takes no memory, and
each is submitted with what it needs: no worker remembers anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.tools.tasks import ArrayTask, TaskResult, run_task

__all__ = ["executor_or_threads", "run_tasks"]

_MAX_SUBMITTED = 256

_N_THREADS = 4
"""More hardly help on local disks, where Python steps are what is left; on object stores each
thread has up to 64 requests under way."""


@contextmanager
def executor_or_threads(executor: Executor | None) -> Iterator[Executor]:
    """The executor of the user, or threads for as long as the block runs.

    Raises
    ------
    SpecError
        If it is no executor.
    """
    if executor is None:
        with ThreadPoolExecutor(min(_N_THREADS, os.cpu_count() or 1)) as threads:
            yield threads
    elif callable(getattr(executor, "submit", None)):
        yield executor
    else:
        raise SpecError(
            f"executor is a concurrent.futures.Executor, got {type(executor).__name__}; of dask "
            "take client.get_executor()"
        )


def run_tasks(
    executor: Executor,
    task: ArrayTask,
    regions: Iterator[Coords],
    on_result: Callable[[TaskResult], None],
) -> None:
    """Run the tasks of all regions; results come in any order.

    Raises
    ------
    Exception
        The first error of a task, when all that were begun have ended; no other is begun.
    """
    pending: set[Future[TaskResult]] = set()
    try:
        for coords in regions:
            pending.add(executor.submit(run_task, task, coords))
            if len(pending) >= _MAX_SUBMITTED:
                pending = _collect(pending, on_result)
        while pending:
            pending = _collect(pending, on_result)
    except BaseException:
        for future in pending:
            future.cancel()
        wait([future for future in pending if not future.cancelled()])
        raise


def _collect(
    pending: set[Future[TaskResult]], on_result: Callable[[TaskResult], None]
) -> set[Future[TaskResult]]:
    done, rest = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        on_result(future.result())
    return rest

"""Work of one array operation side by side: in threads, or as tasks within a limit of bytes."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from zarr.core.config import config

from zarr_shardstore.io.commits import worker_pool

__all__ = ["map_in_threads", "run_within"]

T = TypeVar("T")
R = TypeVar("R")

_INLINE_NBYTES = 64 * 1024
"""Work on less is done in the event loop: a hop to a thread and back takes about 150 µs."""

_INLINE_NBYTES_OF_SMALL = 512 * 1024
"""Of small items: 512 of 1 kB take about 2 ms there, and longer in threads."""


async def map_in_threads(
    work: Callable[[T], R], items: Sequence[T], nbytes: int, *, are_small: bool = False
) -> list[R]:
    """Results of `work` for all items, in order; one hop to each of a few threads.

    Parameters
    ----------
    nbytes : int
        How much there is to do; a little is done at once, in the event loop.
    are_small
        Most of the work is Python's own steps, so that threads would wait for each other.

    Raises
    ------
    Exception
        The first error of `work`, when no thread works on.
    """
    if nbytes <= (_INLINE_NBYTES_OF_SMALL if are_small else _INLINE_NBYTES):
        return [work(item) for item in items]
    results: list[Any] = [None] * len(items)
    numbers = itertools.count()
    is_stopped = False

    def take_turns() -> None:
        nonlocal is_stopped
        try:
            while not is_stopped and (i := next(numbers)) < len(items):
                results[i] = work(items[i])
        except BaseException:
            is_stopped = True
            raise

    loop, pool = asyncio.get_running_loop(), worker_pool()
    n_threads = min(_n_threads(), len(items))
    threads = [loop.run_in_executor(pool, take_turns) for _ in range(n_threads)]
    try:
        _raise_first(await asyncio.gather(*threads, return_exceptions=True))
    finally:
        is_stopped = True
    return results


async def run_within(
    limit_nbytes: int, units: Iterable[tuple[int, T]], run: Callable[[T], Awaitable[None]]
) -> None:
    """Run units, each given with its size, side by side in this order within a limit.

    A unit that is larger than the limit runs alone.

    Raises
    ------
    Exception
        The first error of a unit: no other one was begun after it, and nothing runs on.
    """
    tasks: dict[asyncio.Future[None], int] = {}
    try:
        for nbytes, unit in units:
            while tasks and sum(tasks.values()) + nbytes > limit_nbytes:
                await _first_done(tasks)
            tasks[asyncio.ensure_future(_awaited(run, unit))] = nbytes
        while tasks:
            await _first_done(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)


async def _awaited(run: Callable[[T], Awaitable[None]], unit: T) -> None:
    await run(unit)


async def _first_done(tasks: dict[asyncio.Future[None], int]) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        del tasks[task]
    _raise_first([task.exception() for task in done])


def _raise_first(outcomes: Iterable[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def _n_threads() -> int:
    """Threads for codecs: as many as zarr was told to take, or one for each core."""
    for name in ("codec_pipeline.max_workers", "threading.max_workers"):
        given = config.get(name, None)
        if isinstance(given, int) and given > 0:
            return given
    return os.cpu_count() or 1

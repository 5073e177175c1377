"""Concurrent work, bounded in number, bytes or threads; pauses between attempts."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache, partial
from queue import SimpleQueue
from random import SystemRandom
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from zarr.core.config import config
from zarr.core.sync import loop as loop_of_zarr
from zarr.core.sync import sync

from zarr_shardstore.synchronized import in_forked_child

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

_chance = SystemRandom()
"""Chance of its own: the numbers that a program draws from `random` stay the same."""

_INLINE_NBYTES = 64 * 1024  # less stays in the event loop: a hop to a thread takes 150 µs
_RUN_LENGTH, _RUN_NBYTES = 16, 512 * 1024
"""Neighbouring items for one thread, because threads on neighbouring chunks share cache lines."""
_MAX_LEAVE_S, _LEAVE_PAUSE_S = 1.0, 0.001
"""Longest wait of the interpreter, when it ends, for threads of clients, and between two looks."""


@cache
def worker_pool() -> ThreadPoolExecutor:
    """Return the threads for blocking work of async callers. None waits for a commit."""
    n_threads = min(32, (os.cpu_count() or 1) + 4)
    return ThreadPoolExecutor(n_threads, thread_name_prefix="zarr-shardstore")


def codec_pool() -> ThreadPoolExecutor:
    """Return the threads of codecs: one for each core, however many operations are under way.

    None of them waits for a lock.
    """
    return _pool("codec", n_threads())


def bulk_pool() -> ThreadPoolExecutor:
    """Return the threads that encode whole shards and commit them, which may wait for locks."""
    return _pool("bulk", n_threads())


@cache
def _pool(use: str, n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix=f"zarr-shardstore-{use}")


@dataclass(slots=True)
class StateApart:
    """State of a read apart from signals, which an interrupt may stop."""

    waits: bool = False
    """Whether it waits for values. If it is stopped then, it decodes them no more."""
    is_stopped: bool = False
    jobs: list[Future[None]] = field(default_factory=list)

    def stop(self) -> bool:
        self.is_stopped = True
        return self.waits and all(job.done() for job in self.jobs)


_INTERRUPTED_LOOK_S = 0.001  # between two looks of an interrupted caller


def run_apart_from_signals(work: Callable[[], None], may_leave: Callable[[], bool] = bool) -> None:
    """Call a function; from the main thread in another one, whose locks no signal interrupts.

    An interrupt waits until the function has ended, or `may_leave` returns true: then it waits for
    something that may never come, and will change nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    try:
        queue = _for_main_thread()
    except RuntimeError:  # no thread can be started
        work()
        return
    ended, last = SimpleQueue[list[BaseException]](), SimpleQueue[list[BaseException]]()
    try:
        queue.put((partial(copy_context().run, work), ended))
        errors = ended.get()  # or the process might end before
    except BaseException:
        queue.put((int, last))  # after the function, if that was put
        while last.empty() and not may_leave():
            time.sleep(_INTERRUPTED_LOOK_S)
        if last.empty():
            _for_main_thread.cache_clear()
        raise
    if errors:
        raise errors.pop()


_Jobs: TypeAlias = "SimpleQueue[tuple[Callable[[], Any], SimpleQueue[list[BaseException]]]]"


@cache
def _for_main_thread() -> _Jobs:
    """Return the queue of a thread that works for the main thread."""
    queue: _Jobs = SimpleQueue()

    def run() -> None:
        while True:
            work, ended = queue.get()
            errors = list[BaseException]()
            try:
                work()
            except BaseException as error:
                errors.append(error)
            ended.put(errors)
            del work, ended, errors

    threading.Thread(target=run, name="zarr-shardstore-main", daemon=True).start()
    return queue


for _each in (worker_pool, _pool, _for_main_thread):
    in_forked_child(_each.cache_clear)  # the child has none of its parent's threads


def backoff(
    first_s: float, longest_s: float, limit_s: float, *, is_random: bool = False
) -> Iterator[float]:
    """Yield the pause after each attempt, in s, until the limit is over; each is twice the last.

    If it `is_random`, yield a random share of it, so that two writers do not meet again.
    """
    end, pause_s = time.monotonic() + limit_s, first_s
    is_over = False
    while not is_over:
        is_over = time.monotonic() > end
        yield _chance.uniform(0, pause_s) if is_random else pause_s
        pause_s = min(2 * pause_s, longest_s)


def zarrs_loop() -> asyncio.AbstractEventLoop:
    """Return zarr's event loop, which never ends. A forked child has another one."""
    while loop_of_zarr[0] is None:
        sync(asyncio.sleep(0))  # zarr makes its loop for the first call
    return loop_of_zarr[0]


def let_clients_leave() -> None:
    """Wait until no thread that Python did not start runs Python code.

    A client in Rust calls `call_soon_threadsafe` of the event loop from such a thread. The process
    aborts if the interpreter ends during that call (Python before 3.14; pyo3-async-runtimes,
    issue 40).
    """
    end, n_quiet = time.monotonic() + _MAX_LEAVE_S, 0
    while n_quiet < 2 and time.monotonic() < end:
        ours = {thread.ident for thread in threading.enumerate()}
        n_quiet = 0 if sys._current_frames().keys() - ours else n_quiet + 1
        time.sleep(_LEAVE_PAUSE_S)  # gives them the interpreter


async def map_in_threads(
    work: Callable[[Sequence[T]], Sequence[R]],
    items: Sequence[T],
    nbytes: int,
    pool: ThreadPoolExecutor | None = None,
) -> list[R]:
    """Return the results of `work` for all items, in order; one hop to each of a few threads.

    `work` gets runs of up to 16 items and 512 KiB. If all items have few bytes, `nbytes`, the event
    loop does the work. The first error of `work`, and a cancellation, is raised after every thread
    has stopped: none of it goes on later.
    """
    if nbytes <= _INLINE_NBYTES and pool is None:
        return list(work(items))
    results: list[Any] = [None] * len(items)
    n = min(n_threads(), len(items))
    n_in_limits = min(_RUN_LENGTH, len(items) * _RUN_NBYTES // max(1, nbytes))
    length = max(1, min(n_in_limits, len(items) // (4 * n)))
    starts = iter(range(0, len(items), length))
    threads_of = pool or codec_pool()
    stopped = threading.Event()

    def take_turns() -> None:
        try:
            while not stopped.is_set() and (start := next(starts, None)) is not None:
                threads_of.submit(int)  # raises if the interpreter ends
                run = slice(start, start + length)
                results[run] = work(items[run])
        except BaseException:
            stopped.set()
            raise

    await in_threads([take_turns] * n, threads_of, stopped.set)
    return results


async def in_threads(
    works: Sequence[Callable[[], R]], pool: ThreadPoolExecutor | None, stop: Callable[[], None]
) -> list[R]:
    """Return the results of calls in threads. Call `stop` if cancelled, and wait for their ends."""
    loop = asyncio.get_running_loop()
    threads = [loop.run_in_executor(pool, work) for work in works]
    cancelled: asyncio.CancelledError | None = None
    while not all(thread.done() for thread in threads):
        try:
            await asyncio.wait(threads)
        except asyncio.CancelledError as error:
            cancelled = error
            stop()
    errors = [thread.exception() for thread in threads]
    if cancelled is not None:
        raise cancelled
    raise_first(errors)
    return [thread.result() for thread in threads]


async def to_the_end(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in a thread, as ``asyncio.to_thread``. A caller that is cancelled waits for
    its end: so nothing is stored later."""
    in_context = partial(copy_context().run, work, *args, **kwargs)
    (result,) = await in_threads([in_context], None, lambda: None)
    return result


async def gather_bounded(coros: Sequence[Coroutine[Any, Any, R]], n_at_once: int) -> list[R]:
    """Return the results of coroutines, in order; the first error cancels the others."""
    slots = asyncio.Semaphore(n_at_once)

    async def one(coro: Coroutine[Any, Any, R]) -> R:
        async with slots:
            return await coro

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(coro)) for coro in coros]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for coro in coros:
            coro.close()  # those that still waited for a slot
    return [task.result() for task in tasks]


class PerLoop(WeakKeyDictionary[asyncio.AbstractEventLoop, T]):
    """One object for each event loop, made when it is first asked for."""

    def __init__(self, make: Callable[[], T]) -> None:
        super().__init__()
        self._make = make

    def here(self) -> T:
        """Return the object of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self:
            self[loop] = self._make()
        return self[loop]


class Turns:
    """Two kinds of tasks of one event loop. A task waits for those of the other kind that began
    before it; tasks of one kind run concurrently."""

    def __init__(self) -> None:
        self._under_way: dict[bool, set[asyncio.Future[None]]] = {False: set(), True: set()}

    @asynccontextmanager
    async def taken(self, kind: bool) -> AsyncIterator[None]:
        others, mine = self._under_way[not kind].copy(), self._under_way[kind]
        end = asyncio.get_running_loop().create_future()
        mine.add(end)
        try:
            if others:
                await asyncio.wait(others)
            yield
        finally:
            mine.discard(end)
            end.set_result(None)


async def run_within(
    limit_nbytes: int, units: Iterable[tuple[int, T]], run: Callable[[T], Coroutine[Any, Any, None]]
) -> None:
    """Run units concurrently, begun in this order, while their sizes stay within a limit.

    A larger unit runs alone. The first error is raised when all units that were begun have ended;
    no other is begun.
    """
    tasks: dict[asyncio.Task[None], int] = {}
    try:
        for nbytes, unit in units:
            while tasks and sum(tasks.values()) + nbytes > limit_nbytes:
                await _first_done(tasks)
            tasks[asyncio.create_task(run(unit))] = nbytes
        while tasks:
            await _first_done(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_done(tasks: dict[asyncio.Task[None], int]) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        del tasks[task]
    raise_first([task.exception() for task in done])


def raise_first(outcomes: Iterable[object]) -> None:
    """Raise the first exception among outcomes."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def n_threads() -> int:
    """Return the number of threads for codecs, by zarr's configuration or the cores."""
    for name in ("codec_pipeline.max_workers", "threading.max_workers"):
        given = config.get(name, None)
        if isinstance(given, int) and given > 0:
            return given
    return os.cpu_count() or 1


async def one_ahead(step: Callable[[], Coroutine[Any, Any, T | None]]) -> AsyncGenerator[T, None]:
    """Yield the results of steps until one is ``None``, each step begun one result ahead.

    Closing the generator cancels the step under way.
    """
    task = asyncio.create_task(step())
    try:
        while (result := await task) is not None:
            task = asyncio.create_task(step())
            await asyncio.sleep(0)  # a task begins when its creator waits
            yield result
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class SingleFlight(Generic[T]):
    """Requests under way, by their scope: concurrent callers of one event loop share one.

    Thread safety: may be used from any thread.
    """

    def __init__(self) -> None:
        self._under_way: PerLoop[dict[Hashable, asyncio.Task[T]]] = PerLoop(dict)

    async def join(self, scope: Hashable, ask: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """Return a reply, which may be older than this call, and whether the request is new."""
        tasks = self._under_way.here()
        task = tasks.get(scope)
        is_ours = task is None or task.done()
        if task is None or is_ours:

            async def run() -> T:
                try:
                    return await ask()
                finally:
                    tasks.pop(scope, None)

            # A task of its own: the first caller may be cancelled without harm to the others.
            task = tasks[scope] = asyncio.create_task(run())
            # asyncio warns of an error that no caller takes, because all are cancelled.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task), is_ours


_Turn = list[tuple[T, "asyncio.Future[R]"]]


class CallBatcher(Generic[T, R]):
    """Batches of the questions that are asked in one turn of an event loop.

    zarr asks for one chunk in each of many concurrent tasks. Batched, the tasks read each index
    once, and neighbouring chunks in one span.

    `ask` answers questions, in order. If it fails for many, each question is asked alone, so that
    each caller gets its own error.

    Thread safety: may be used from any thread.
    """

    def __init__(self, ask: Callable[[Sequence[T]], Awaitable[Sequence[R]]]) -> None:
        self._ask = ask
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn[T, R]] = WeakKeyDictionary()
        self._running: set[asyncio.Task[None]] = set()

    async def answer(self, question: T) -> R:
        """Return the answer to a question, asked with the others of this turn."""
        loop = asyncio.get_running_loop()
        turn = self._turns.get(loop)
        if turn is None:
            loop.call_soon(self._begin, loop)
            turn = self._turns[loop] = []
        future: asyncio.Future[R] = loop.create_future()
        turn.append((question, future))
        return await future

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = self._turns.pop(loop, [])
        try:
            turn = [(question, future) for question, future in turn if not future.done()]
            if turn:
                task = loop.create_task(self._answer_all(turn))
                self._running.add(task)  # an event loop holds its tasks only weakly
                task.add_done_callback(self._running.discard)
        except Exception as error:
            for _, future in turn:
                _fail(future, error)

    async def _answer_all(self, turn: _Turn[T, R]) -> None:
        try:
            answers = await self._ask([question for question, _ in turn])
        except Exception as error:
            if len(turn) == 1:
                _fail(turn[0][1], error)
                return
            await asyncio.gather(*(self._answer_all([one]) for one in turn))
        except BaseException:
            for _, future in turn:
                future.cancel()
            raise
        else:
            for (_, future), answer in zip(turn, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


def _fail(future: asyncio.Future[R], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)

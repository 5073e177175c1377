"""Update queue: one writer at a time for each shard of the process, and group commit.

Theory of operation
-------------------
1. *Group commit.* An update joins the queue of its shard. The caller whose update finds no queue
   leads: it takes all updates that wait, commits them in one write, and repeats until none wait.
2. *Several stores share a queue.* Each update is committed by the driver of its own store. Only
   updates of one store, with the same layout of the shard, are one group.
3. *A leader works for itself first.* A blocking caller commits its own update. Then it passes the
   lead on to a worker thread if others wait.
4. *Leader tokens.* The queue knows its leader by a token, which is replaced when the lead is passed
   on. Whatever exception ends a leader, at whatever line, it calls `_abandon` with its token: all
   callers that wait get an error, and the shard is free.
5. *Locks stay in their thread.* The thread that locks a shard commits and unlocks it. Only for
   async base stores a worker waits for the file lock. A commit that holds a shard lock never waits
   for the worker pool: all workers may be blocked on that lock.
6. *An event loop never blocks.* It waits for no lock and no disk: a worker thread does the whole
   commit.
7. *An event loop may end or block.* So a writer elsewhere takes the lead from a leader that waits a
   turn. Leaders for async base stores are tasks of zarr's loop, which does neither. Where the
   clients of a base store belong to the loop of the caller (`Backend.needs_callers_loop`), only the
   commit is a task there: if that loop ends first, the commit fails. A caller that blocks a loop
   that the commit of the shard needs is refused: its wait would never end.
8. *Cancelled callers.* A caller that is cancelled does not cancel the commit of its update.
9. *Signals.* They interrupt the main thread also inside the standard library. Conditions and pools
   are written in Python, so an interrupt may leave their locks taken. Therefore a caller that
   blocks uses queues in C only, and another thread submits its work to the pool.

Thread safety: all functions may be called from any thread and any task.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from zarr.core.sync import loop as loop_of_zarr

from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.io.concurrency import (
    let_clients_leave,
    run_apart_from_signals,
    worker_pool,
    zarrs_loop,
)
from zarr_shardstore.shards.requests import EntryUpdate, Flow, UpdateShard
from zarr_shardstore.synchronized import in_forked_child, synchronized

if TYPE_CHECKING:
    from zarr_shardstore.io.driver import Driver

_MAX_END_S = 30.0  # longest wait of the interpreter, when it ends, for commits in zarr's event loop
_LOOK_S = 0.5  # between two looks whether the loop of a commit was closed

_Loop: TypeAlias = asyncio.AbstractEventLoop

Groups: TypeAlias = Sequence[Sequence[EntryUpdate]]
Outcomes: TypeAlias = Sequence[Exception | None]
_Outcome: TypeAlias = Outcomes | Exception
UpdateFlow: TypeAlias = Callable[[UpdateShard, Groups], Flow[Outcomes]]
"""The write strategy: a flow that commits groups of updates of one shard, the request's first."""


@dataclass(slots=True, eq=False)
class QueuedUpdate:
    """Update that waits for its commit by the driver of its store."""

    driver: Driver
    request: UpdateShard
    loop: _Loop | None = None
    """The event loop in which its caller waits; ``None`` for a caller that blocks."""
    outcomes: SimpleQueue[list[Exception]] = field(default_factory=SimpleQueue)
    """The error of its commit, or none, when it has ended. Of several outcomes the first counts."""
    ended: asyncio.Event | None = None
    """What its task waits for."""


@dataclass(slots=True)
class _Queue:
    leader: object
    loop: _Loop | None
    """The loop whose next turn the leader waits for; ``None`` while it commits."""
    waiting: list[QueuedUpdate] = field(default_factory=list)
    taken: list[QueuedUpdate] = field(default_factory=list)
    """By the leader, for the commit under way."""


_synchronized = synchronized()
_queues: dict[Hashable, _Queue] = {}
_n_closed = [0] * 4096  # queues that were closed, by the hash of their scope
_leading: set[asyncio.Task[Any]] = set()  # leaders in event loops, which hold tasks only weakly

blocked_loop: ContextVar[_Loop | None] = ContextVar("blocked_loop", default=None)
"""The event loop that is blocked by a caller of this task, so that no task of it can commit."""


def commit(driver: Driver, request: UpdateShard) -> None:
    """Commit an update in this thread, or wait for the leader that does (rules 3, 4 and 7)."""
    scope = driver.backend.scope(request.shard.key)
    update = QueuedUpdate(driver, request)
    try:
        if _join(scope, update):
            for group in _groups(_take(scope, update)):
                _commit(group)
            if others := _take(scope, update):
                run_apart_from_signals(partial(_lead_in_thread, scope, update, others))
    except BaseException:
        _abandon(scope, update)
        raise
    if outcome := update.outcomes.get():
        raise outcome.pop()  # or this frame and the error keep each other


async def commit_async(driver: Driver, request: UpdateShard) -> None:
    """As `commit`, waiting in this task."""
    loop = asyncio.get_running_loop()
    scope = driver.backend.scope(request.shard.key)
    update = QueuedUpdate(driver, request, loop)
    try:
        if _join(scope, update):
            try:
                # One turn of the loop: siblings that are ready to write join this commit.
                await asyncio.sleep(0)
            finally:
                _lead_apart(scope, update)
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException:
        _abandon(scope, update)
        raise
    update.ended = asyncio.Event()
    if update.outcomes.empty():  # looked at after there is an event
        await update.ended.wait()
    if outcome := update.outcomes.get():
        raise outcome.pop()


def _lead_apart(scope: Hashable, update: QueuedUpdate) -> None:
    """Lead apart from the caller, which may be cancelled without harm to the others."""
    match update.driver.backend.mode:
        case "inline":
            while groups := _groups(_take(scope, update)):
                for group in groups:
                    _commit(group)
        case "thread":
            _claim(scope, update, update)  # callers that block this loop may wait from now on
            _lead_in_thread(scope, update, _take(scope, update))
        case "async":
            _claim(scope, update, update)
            asyncio.run_coroutine_threadsafe(_lead_async(scope, update), zarrs_loop())


def _lead_in_thread(scope: Hashable, leader: object, taken: Sequence[QueuedUpdate]) -> None:
    """Pass the lead on to a worker thread, which first commits what was taken."""
    heir = object()

    def lead() -> None:
        left = taken
        try:
            if _claim(scope, leader, heir):
                while left:
                    for group in _groups(left):
                        _commit(group)
                    left = _take(scope, heir)
        except BaseException:
            _abandon(scope, heir)
            raise

    def see_failure(done: Future[None]) -> None:
        if done.exception() is not None:
            _abandon(scope, leader)

    try:
        worker_pool().submit(lead).add_done_callback(see_failure)
    except RuntimeError:  # there is no thread any more, as the interpreter ends
        lead()
    except BaseException:
        _abandon(scope, leader)
        raise


async def _lead_async(scope: Hashable, former: object) -> None:
    """Lead in the place of a former leader, as a task of zarr's event loop."""
    leader = object()
    task = asyncio.current_task()
    assert task is not None
    _leading.add(task)
    task.add_done_callback(_leading.discard)
    try:
        if not _claim(scope, former, leader):
            return
        while taken := _take(scope, leader):
            if any(update.driver.backend.mode != "async" for update in taken):
                # A wrapper leads, and stores of the local files themselves wait: these read a shard
                # in the thread that has its lock.
                _lead_in_thread(scope, leader, taken)
                return
            for group in _groups(taken):
                _settle(group, await _commit_async(group))
    except BaseException:
        _abandon(scope, leader)
        raise


async def _commit_async(group: Sequence[QueuedUpdate]) -> _Outcome:
    """Commit one group in zarr's event loop, or in the loop that it needs."""
    driver, request = group[0].driver, group[0].request
    try:
        updates = [update.request.updates for update in group]
        return await _in_its_loop(group[0], driver.update_async(request, updates))
    except Exception as error:
        return error


async def _in_its_loop(update: QueuedUpdate, committing: Coroutine[Any, Any, Outcomes]) -> _Outcome:
    """Await a commit in zarr's event loop, or in the loop that it needs."""
    loop = update.loop if update.driver.backend.needs_callers_loop else None
    try:
        if loop in (None, zarrs_loop()):
            return await committing
        ended = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(committing, loop))
        while not ended.done() and not loop.is_closed():
            await asyncio.wait([ended], timeout=_LOOK_S)
        return ended.result() if ended.done() and not ended.cancelled() else _interrupted()
    finally:
        with suppress(Exception):  # it has not begun, or not ended, if its loop was closed
            committing.close()


@cache
def end_with_the_process() -> None:
    """Let the end of the process wait for zarr's loop and for clients. An import alone does not."""
    atexit.register(_end_zarrs_loop)  # after zarr's, which closes the loop: so it is called before


def _end_zarrs_loop() -> None:
    """Wait for the commits in zarr's event loop, cancel its other tasks, and let clients leave."""
    loop = loop_of_zarr[0]

    async def end() -> None:
        while leaders := _leading & asyncio.all_tasks():
            await asyncio.wait(leaders)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    if loop is not None and loop.is_running():
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), loop).result(_MAX_END_S)
    let_clients_leave()


def state_of_queue(scope: Hashable) -> tuple[int, bool]:
    """Return a number that changes when an update of an object ends, and whether one is under way:
    a write beside the queue compares both."""
    return _n_closed[hash(scope) % len(_n_closed)], scope in _queues


def _commit(group: Sequence[QueuedUpdate]) -> None:
    """Commit one group under the lock of its shard."""
    driver, request = group[0].driver, group[0].request
    outcome: _Outcome
    try:
        with driver.backend.lock(request.shard.key) or nullcontext():
            updates = [update.request.updates for update in group]
            flow = driver.update_flow(request, updates)
            if driver.backend.needs_callers_loop:
                committing = _in_its_loop(group[0], driver.run_async(flow))
                outcome = asyncio.run_coroutine_threadsafe(committing, zarrs_loop()).result()
            else:
                outcome = driver.run(flow)
    except Exception as error:
        outcome = error
    _settle(group, outcome)
    del group, outcome  # or they and the traceback of an error keep each other, and so the lock


def _groups(taken: Sequence[QueuedUpdate]) -> list[list[QueuedUpdate]]:
    kinds = groupby(
        taken,
        lambda u: (
            *(id(u.driver), u.request.shard, u.request.below),
            u.driver.backend.needs_callers_loop and u.loop,
        ),
    )
    return [list(group) for _, group in kinds]


def _settle(updates: Sequence[QueuedUpdate], outcome: _Outcome) -> None:
    """Tell the callers of updates their outcomes; once more after an interrupt."""
    errors = [outcome] * len(updates) if isinstance(outcome, Exception) else outcome
    for update, error in zip(updates, errors, strict=True):
        if update.outcomes.empty():
            update.outcomes.put([] if error is None else [error])
        if update.ended is not None and update.loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                update.loop.call_soon_threadsafe(update.ended.set)


@_synchronized
def _join(scope: Hashable, update: QueuedUpdate) -> bool:
    """Put an update into the queue of its shard; return whether its caller leads."""
    queue = _queues.get(scope)
    if queue is None:
        _queues[scope] = _Queue(update, update.loop, [update])
        return True
    blocked = running_loop() if update.loop is None else blocked_loop.get()
    here = [u for u in queue.taken + queue.waiting if u.driver.backend.needs_callers_loop]
    if blocked is not None and any(u.loop is blocked for u in here):
        raise ShardConflictError(
            "a blocking write of a shard that a task of the same event loop is writing would never "
            "end; await the async operation instead"
        )
    queue.waiting.append(update)
    if queue.loop in (None, update.loop):
        return False
    queue.leader, queue.loop = update, update.loop  # the other loop may end or block in its turn
    return True


@_synchronized
def _take(scope: Hashable, leader: object) -> list[QueuedUpdate]:
    """Take all updates that wait for a shard; if there are none, close its queue."""
    queue = _queues.get(scope)
    if queue is None or queue.leader is not leader:
        return []
    queue.taken, queue.waiting, queue.loop = queue.waiting, [], None
    if not queue.taken:
        _n_closed[hash(scope) % len(_n_closed)] += 1
        del _queues[scope]
    return queue.taken


@_synchronized
def _claim(scope: Hashable, leader: object, heir: object) -> bool:
    """Lead a queue in the place of its leader, if that has not failed."""
    queue = _queues.get(scope)
    if queue is None or queue.leader is not leader:
        return False
    queue.leader, queue.loop = heir, None
    return True


@_synchronized
def _abandon(scope: Hashable, leader: object) -> None:
    """Fail the waiting callers of an interrupted leader, and free the shard."""
    queue = _queues.get(scope)
    if queue is not None and queue.leader is leader:
        _settle(queue.taken + queue.waiting, _interrupted())
        _n_closed[hash(scope) % len(_n_closed)] += 1
        del _queues[scope]


def _interrupted() -> ShardConflictError:
    return ShardConflictError(
        "the writer that was committing this update was interrupted: the update may or may not "
        "be stored; write it again"
    )


def running_loop() -> _Loop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


in_forked_child(_queues.clear)  # the child has none of the leaders

"""One writer at a time for each shard of the process, and group commit.

An update joins the queue of its shard. The first one in leads: it takes all updates that wait,
commits them in one write, and so on until none wait; when its own is committed, a worker thread
leads on. The others wait for a future. So n concurrent updates of one shard cost a few writes,
not n, and none is lost.

The queue excludes: several stores may share it, each update is committed by its own store.

A queue exists only while its shard is being written. Each leader has a token of its own, which the
queue knows. Whatever exception ends a leader, it then calls `abandon` with its token: the waiting
callers get an error, and the shard is free. A leader that has passed the lead on has no say.

Leading the queue of a shard: its updates are committed group by group, by whoever leads.

A small change of a file that is open takes less time than a hop to a worker thread and back. So
an event loop makes it itself, and lets a thread go on where a step may take long.

Updates that begin anew if another writer was quicker.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Hashable,
    Iterable,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, TypeAlias, TypeVar

from zarr.core.sync import _get_loop

from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.io.backends.base import MAX_LIGHT_NBYTES
from zarr_shardstore.shards.requests import UpdateShard
from zarr_shardstore.shards.updates import nbytes_of
from zarr_shardstore.synchronized import synchronized


@dataclass(slots=True, eq=False)
class QueuedUpdate:
    """An update that waits for its commit by `owner`, the driver of the store it came from."""

    owner: Any
    request: UpdateShard
    loop: asyncio.AbstractEventLoop | None = None
    """In which event loop its caller waits; ``None`` for one that blocks."""
    done: Future[None] | None = None
    """Resolves when it is committed; ``None`` if whoever queued it commits it."""
    error: BaseException | None = None

    def settle(self, error: BaseException | None) -> None:
        """Tell whoever waits what became of it; once."""
        self.error = error
        if self.done is None or self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


@dataclass(slots=True)
class _Queue:
    leader: object
    loop: asyncio.AbstractEventLoop | None
    waiting: list[QueuedUpdate] = field(default_factory=list)
    taken: list[QueuedUpdate] = field(default_factory=list)
    """By its leader, for the commit under way."""


_synchronized = synchronized()
_queues: dict[Hashable, _Queue] = {}
_pool: ThreadPoolExecutor | None = None


@_synchronized
def join(
    scope: Hashable,
    pending: QueuedUpdate,
    blocked: asyncio.AbstractEventLoop | None = None,
    *,
    leads_itself: bool = False,
) -> bool:
    """Put an update into the queue of its shard.

    Parameters
    ----------
    scope
        Identity of the shard in this process.
    pending
        The update; it is the token of its caller, too, if that leads.
    blocked
        An event loop that waits for the caller, so that no task of it can commit anything.
    leads_itself
        If the caller leads it commits its own update before it does anything else.

    Raises
    ------
    ShardConflictError
        If a task of the blocked loop leads; the update was not queued.

    Returns
    -------
    bool
        The caller leads: it must now `take` and commit until `take` returns nothing.
    """
    queue = _queues.get(scope)
    if queue is not None and queue.loop is not None and queue.loop.is_closed():
        # Its event loop ended before it was done: nobody else will commit what waits.
        for waiting in queue.waiting:
            waiting.settle(_interrupted())
        queue = None
    if queue is not None and blocked is not None and queue.loop is blocked:
        raise _would_never_end()
    leads = queue is None
    if not (leads and leads_itself):
        # Running: a waiter that is cancelled does not cancel the commit under way.
        pending.done = Future()
        pending.done.set_running_or_notify_cancel()
    if queue is None:
        _queues[scope] = _Queue(pending, pending.loop, [pending])
    else:
        queue.waiting.append(pending)
    return leads


@_synchronized
def take(scope: Hashable, leader: object) -> list[QueuedUpdate]:
    """All updates that wait for a shard; if there are none, its queue is closed."""
    queue = _queues.get(scope)
    if queue is None or queue.leader is not leader:
        return []
    queue.taken, queue.waiting = queue.waiting, []
    if not queue.taken:
        del _queues[scope]
    return queue.taken


@_synchronized
def has_waiting(scope: Hashable, leader: object) -> bool:
    """Whether updates wait for a shard; if there are none, its queue is closed."""
    queue = _queues.get(scope)
    if queue is None or queue.leader is not leader:
        return False
    if not queue.waiting:
        del _queues[scope]
    return bool(queue.waiting)


@_synchronized
def claim(scope: Hashable, leader: object, heir: object) -> bool:
    """Lead a queue in the place of the leader that passed it on, if that did not fail since."""
    queue = _queues.get(scope)
    if queue is None or queue.leader is not leader:
        return False
    queue.leader = heir
    return True


@_synchronized
def hand_over(
    scope: Hashable, loop: asyncio.AbstractEventLoop, endless: asyncio.AbstractEventLoop
) -> asyncio.AbstractEventLoop | None:
    """The event loop that must lead instead of `loop`, because nobody waits there any more.

    Parameters
    ----------
    endless
        An event loop that never ends, for callers that block.

    Returns
    -------
    event loop or None
        ``None`` if `loop` may go on: one of its callers waits, or nobody does.
    """
    queue = _queues.get(scope)
    if queue is None:
        return None
    loops = [pending.loop for pending in queue.waiting]
    if not loops or loop is endless or loop in loops:
        return None
    alive = [other for other in loops if other is not None and not other.is_closed()]
    queue.loop = alive[0] if alive else endless
    return queue.loop


@_synchronized
def leave_loop(scope: Hashable) -> None:
    """The leader goes on elsewhere: whoever blocks the event loop may wait for it."""
    queue = _queues.get(scope)
    if queue is not None:
        queue.loop = None


@_synchronized
def abandon(scope: Hashable, leader: object) -> None:
    """The leader was interrupted: the waiting callers get an error, the shard is free again."""
    queue = _queues.get(scope)
    if queue is not None and queue.leader is leader:
        for pending in queue.taken + queue.waiting:
            pending.settle(_interrupted())
        del _queues[scope]


def _would_never_end() -> ShardConflictError:
    return ShardConflictError(
        "a blocking write of a shard that a task of the same event loop is writing would never "
        "end; await the async operation instead"
    )


def _interrupted() -> ShardConflictError:
    return ShardConflictError(
        "the writer that was committing this update was interrupted: the update may or may not "
        "be stored; write it again"
    )


def wait_blocking(scope: Hashable, done: Future[None]) -> None:
    """Wait for a commit that another caller leads.

    Raises
    ------
    ShardConflictError
        If the leader is a task of the event loop of this very thread: waiting would block it.
    """
    if not done.done():
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        queue = _queues.get(scope)
        if running is not None and queue is not None and queue.loop is running:
            raise _would_never_end()
    done.result()


@_synchronized
def worker_pool() -> ThreadPoolExecutor:
    """Threads for blocking work of async callers.

    Our own, so that leaders always find one that is free: no thread of it ever waits for a
    commit, and whoever holds a lock that they wait for does not wait for a thread.
    """
    global _pool
    if _pool is None:
        n_threads = min(32, (os.cpu_count() or 1) + 4)
        _pool = ThreadPoolExecutor(n_threads, thread_name_prefix="zarr-shardstore")
    return _pool


def _reset_after_fork() -> None:
    """The child has neither the parent's leaders nor its threads."""
    global _pool
    _queues.clear()
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)

_Outcome: TypeAlias = "Sequence[Exception | None] | Exception"

_Pause: TypeAlias = Literal["free", "held"]
"""Whether the shard is held already where a commit pauses."""

_MAX_AT_ONCE_S = 0.001
"""What a commit in an event loop may take: several times what it does take on a local disk."""

_MAX_UPDATES_AT_ONCE = 64
"""Of one shard, together: each takes some µs."""

_PAUSE_PER_S = 100
"""Where one took longer (a network file system, a disk that lags behind) threads make all commits
for so many times as long, and the loop waits 1 % of the time."""


def lead_blocking(scope: Hashable, leader: object) -> None:
    """Commit what waits for a shard, group by group, until nothing does."""
    while taken := take(scope, leader):
        commit_blocking(taken)


def commit_blocking(taken: list[QueuedUpdate]) -> None:
    """Commit updates that were taken, in this thread."""
    _exhaust(_commit(taken, at_once=False))


def lead_in_thread(
    scope: Hashable,
    leader: object,
    steps: Iterable[_Pause] = (),
    *,
    is_held: bool = False,
) -> None:
    """Pass the lead on to another thread.

    Parameters
    ----------
    steps
        The rest of a commit, which comes first.
    is_held
        The commit holds the shard. Then the thread is a new one: all worker threads may be waiting
        for this shard.
    """
    heir = object()

    def go_on() -> None:
        try:
            if claim(scope, leader, heir):
                _exhaust(steps)
                lead_blocking(scope, heir)
        except BaseException:
            abandon(scope, heir)
            raise

    def see_failure(done: Future[None]) -> None:
        if done.exception() is not None:
            abandon(scope, leader)

    try:
        if is_held:
            threading.Thread(target=go_on).start()
        else:
            worker_pool().submit(go_on).add_done_callback(see_failure)
    except RuntimeError:  # there is no thread any more, as the interpreter ends
        go_on()


def commit_inline(scope: Hashable, leader: object) -> None:
    """As `lead_blocking`, for an event loop that must not wait: what may take long, and what
    comes after it, is done by another thread.
    """
    taken = take(scope, leader)
    driver = taken[0].owner
    begun = time.monotonic()
    if begun < driver.at_once_from or not _are_small(taken):
        lead_in_thread(scope, leader, _commit(taken, at_once=False))
        return
    steps = _commit(taken, at_once=True)
    pause = next(steps, None)
    took = time.monotonic() - begun
    if took > _MAX_AT_ONCE_S:
        driver.at_once_from = begun + took * _PAUSE_PER_S
    if pause is None:
        if has_waiting(scope, leader):
            lead_in_thread(scope, leader)
    else:
        lead_in_thread(scope, leader, steps, is_held=pause == "held")


def _are_small(taken: list[QueuedUpdate]) -> bool:
    """Whether updates are little work before and beside what is written, too."""
    driver = taken[0].owner
    updates = [update for pending in taken for update in pending.request.updates]
    return (
        len(updates) <= _MAX_UPDATES_AT_ONCE
        # Without an update what a batch holds is published: it may be all of a shard.
        and all(pending.owner is driver and pending.request.updates for pending in taken)
        and sum(map(nbytes_of, updates)) <= MAX_LIGHT_NBYTES
    )


def _exhaust(steps: Iterable[_Pause]) -> None:
    for _ in steps:
        pass


def _commit(taken: list[QueuedUpdate], *, at_once: bool) -> Generator[_Pause, None, None]:
    """Commit updates that were taken.

    Parameters
    ----------
    at_once
        Pause before what may take long. Any thread may go on.
    """
    for driver, members in _groups(taken):
        try:
            outcome: _Outcome = yield from _commit_group(driver, members, at_once=at_once)
        except Exception as error:
            outcome = error
        _settle(members, outcome)


def _commit_group(
    driver: Any, members: list[QueuedUpdate], *, at_once: bool
) -> Generator[_Pause, None, Sequence[Exception | None]]:
    key = members[0].request.shard.key
    held = driver.backend.try_lock(key) if at_once else None
    outcomes: Sequence[Exception | None]
    if held is None:
        if at_once:
            yield "free"
        with driver.backend.lock(key) or nullcontext():
            outcomes = driver.run(driver.update_flow(members))
        return outcomes
    with held:
        steps = driver.run_in_steps(driver.update_flow(members), held)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                outcomes = stop.value
                return outcomes
            held.put_down()
            yield "held"
            held.take_up()


async def lead_async(scope: Hashable, former: object, begun: asyncio.Event | None = None) -> None:
    """As `lead_blocking` in the place of a former leader, in an event loop where a caller waits.

    Such a loop may end as soon as none does: callers that still wait then lead on in theirs.
    """
    leader = object()
    try:
        if begun is not None:
            begun.set()
        if not claim(scope, former, leader):
            return
        loop = asyncio.get_running_loop()
        while True:
            elsewhere = hand_over(scope, loop, _get_loop())
            if elsewhere is not None:
                asyncio.run_coroutine_threadsafe(lead_async(scope, leader), elsewhere)
                return
            taken = take(scope, leader)
            if not taken:
                return
            for driver, members in _groups(taken):
                try:
                    outcome: _Outcome = await driver.update_async(members)
                except Exception as error:
                    outcome = error
                _settle(members, outcome)
    except BaseException:
        abandon(scope, leader)
        raise


@asynccontextmanager
async def locked_by_worker(lock: AbstractContextManager[None]) -> AsyncIterator[None]:
    """Wait for a lock without blocking the event loop."""
    entered = asyncio.get_running_loop().run_in_executor(worker_pool(), lock.__enter__)
    try:
        await asyncio.shield(entered)
    except asyncio.CancelledError:
        entered.add_done_callback(lambda f: f.exception() or lock.__exit__(None, None, None))
        raise
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def _groups(taken: list[QueuedUpdate]) -> list[tuple[Any, list[QueuedUpdate]]]:
    """Updates to commit together: of one store, and of one mind about the layout."""
    groups = []
    for _, pending in groupby(taken, key=lambda p: (id(p.owner), p.request.shard, p.request.below)):
        members = list(pending)
        groups.append((members[0].owner, members))
    return groups


def _settle(members: list[QueuedUpdate], outcome: _Outcome) -> None:
    """Tell each waiting caller what became of its update."""
    errors = [outcome] * len(members) if isinstance(outcome, Exception) else outcome
    for pending, error in zip(members, errors, strict=True):
        pending.settle(error)


T = TypeVar("T")

MAX_WAIT_S = 120.0
"""As long as for a lock. At 10 requests a second that is some hundred attempts."""

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.5
"""Half of it on average, so that two writers do not meet again."""


class ReplacedMeanwhileError(Exception):
    """What an update has read is not what is stored any more; its argument is the key."""


async def until_not_replaced(attempt: Callable[[], Awaitable[T]]) -> T:
    """Try an update until no other writer comes between its read and its write.

    Raises
    ------
    ShardConflictError
        If others were quicker for two minutes; nothing was stored.
    """
    end = time.monotonic() + MAX_WAIT_S
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return await attempt()
        except ReplacedMeanwhileError as error:
            if time.monotonic() > end:
                raise ShardConflictError(
                    f"other writers have replaced {error.args[0]!r} again and again, for "
                    f"{MAX_WAIT_S:.0f} s; it was not written"
                ) from None
        await asyncio.sleep(random.uniform(0, pause))
        pause = min(2 * pause, _LONGEST_PAUSE_S)

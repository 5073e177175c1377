"""One writer at a time for each shard of the process, and group commit.

An update joins the queue of its shard. The first one in leads: it takes all updates that wait,
commits them in one write, and so on until none wait; when its own is committed, a worker thread
leads on. The others wait for a future. So n concurrent updates of one shard cost a few writes,
not n, and none is lost.

The queue excludes: several stores may share it, each update is committed by its own store.

A queue exists only while its shard is being written. Each leader has a token of its own, which the
queue knows. Whatever exception ends a leader, it then calls `abandon` with its token: the waiting
callers get an error, and the shard is free. A leader that has passed the lead on has no say.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.io.synchronized import synchronized
from zarr_shardstore.plan.requests import UpdateShard

__all__ = [
    "Pending",
    "abandon",
    "claim",
    "hand_over",
    "has_waiting",
    "join",
    "leave_loop",
    "take",
    "wait_blocking",
    "worker_pool",
]


@dataclass(slots=True, eq=False)
class Pending:
    """An update that waits for its commit by `owner`, the runner of the store it came from."""

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
    waiting: list[Pending] = field(default_factory=list)
    taken: list[Pending] = field(default_factory=list)
    """By its leader, for the commit under way."""


_synchronized = synchronized()
_queues: dict[Hashable, _Queue] = {}
_pool: ThreadPoolExecutor | None = None


@_synchronized
def join(
    scope: Hashable,
    pending: Pending,
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
def take(scope: Hashable, leader: object) -> list[Pending]:
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

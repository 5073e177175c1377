"""The two drivers of flows: blocking and async. Every decision is in the flows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Hashable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

from zarr.core.sync import _get_loop, sync

from zarr_shardstore.io.backends.base import Backend, Held, Perform, Session
from zarr_shardstore.io.counters import Counters
from zarr_shardstore.io.local.fs import max_shards_of_a_write
from zarr_shardstore.io.update_queue import (
    QueuedUpdate,
    abandon,
    commit_blocking,
    commit_inline,
    has_waiting,
    join,
    lead_async,
    lead_blocking,
    lead_in_thread,
    leave_loop,
    locked_by_worker,
    take,
    until_not_replaced,
    wait_blocking,
    worker_pool,
)
from zarr_shardstore.io.write_epochs import UNSTABLE, publishing, version_of
from zarr_shardstore.shards.requests import (
    ChangeShard,
    Delete,
    DeletePrefix,
    Flow,
    Found,
    FoundIndex,
    Get,
    GetIndex,
    Request,
    Set,
    SetIfNotExists,
    SetWithGaps,
    UpdateShard,
)
from zarr_shardstore.shards.updates import EntryUpdate

T = TypeVar("T")

UpdateFlow: TypeAlias = Callable[
    [UpdateShard, Sequence[Sequence[EntryUpdate]]], Flow[Sequence[Exception | None]]
]
"""The write strategy: a flow that commits groups of updates of one shard, the first of which
the request has."""

_WRITES = (Set, SetIfNotExists, SetWithGaps, ChangeShard, Delete, DeletePrefix)
"""Requests after which an object may be another one: readers of this process are told."""

_PAUSE_S = 0.001
"""Before a read that met a write in place is repeated: about what writing a shard takes."""

_MAX_WAIT_S = 10.0
"""Then the reply is taken as it is: its checks find what is torn."""


class Driver:
    """Runs flows against a backend.

    Parameters
    ----------
    backend : Backend
        Performs the requests.
    update_flow
        Performs `UpdateShard`, one at a time for each shard of the process.
    counters : Counters, optional
        Count what is asked of the backend.

    Thread safety: all methods may be called from any thread and any task.
    """

    def __init__(
        self, backend: Backend, update_flow: UpdateFlow, counters: Counters | None = None
    ) -> None:
        self.backend = backend
        self.counters = counters or Counters()
        self._update_flow = update_flow
        self.at_once_from = 0.0
        """From when on, by the monotonic clock in s, event loops may commit by themselves."""

    # ------------------------------------------------------------ blocking

    def run(self, flow: Flow[T]) -> T:
        """Run a flow in this thread; through zarr's event loop if the backend cannot block."""
        if not self.backend.can_block:
            return sync(self._run_for(_running_loop(), flow))
        with self.backend.session() as session:
            return _drive(flow, lambda batch: self._perform(batch, session))

    def run_in_steps(self, flow: Flow[T], held: Held) -> Generator[None, None, T]:
        """As `run`, of an update of what is held, but with a pause before each batch that is not
        light; another thread may go on then."""
        with self.backend.session() as session:
            return (
                yield from _steps(
                    flow, lambda batch: self._perform(batch, session), held.can_commit_inline
                )
            )

    async def _run_for(self, blocked: asyncio.AbstractEventLoop | None, flow: Flow[T]) -> T:
        """Run a flow for a caller that waits in another thread, and blocks its own event loop."""
        _blocked.set(blocked)
        return await self.run_async(flow)

    def _perform(self, batch: list[Request], session: Session) -> list[Any]:
        perform = session.perform
        if len(batch) == 1 and isinstance(batch[0], UpdateShard):
            session.let_go()
            self._commit(batch[0])
            return [None]
        if self.backend.has_versions and not any(isinstance(r, UpdateShard) for r in batch):
            return self._perform_stamped(batch, perform)
        updates, others = _split(batch)
        replies: dict[int, Any] = {}
        if others:
            requests = [request for _, request in others]
            found = self._perform_stamped(requests, perform)
            end = time.monotonic() + _MAX_WAIT_S
            while (torn := self._torn(requests, found)) and time.monotonic() < end:
                time.sleep(_PAUSE_S)
                again = self._perform_stamped([requests[i] for i in torn], perform)
                self._mend(found, torn, again)
            replies.update((i, reply) for (i, _), reply in zip(others, found, strict=True))
        session.let_go()
        for i, update in updates:
            self._commit(update)
            replies[i] = None
        return [replies[i] for i in range(len(batch))]

    def _perform_stamped(self, requests: list[Request], perform: Perform) -> list[Any]:
        if self.backend.has_versions:
            with self._announced(requests):
                found = perform(requests)
            self.counters.count_round(requests, found)
            return found
        before = self._versions(requests)
        with self._announced(requests):
            found = perform(requests)
        self.counters.count_round(requests, found)
        return self._stamped(requests, found, before)

    def _commit(self, request: UpdateShard) -> None:
        scope = self.backend.scope(request.shard.key)
        pending = QueuedUpdate(self, request)
        try:
            if join(scope, pending, leads_itself=True):
                commit_blocking(take(scope, pending))
                if has_waiting(scope, pending):  # they do not wait for us, nor we for them
                    lead_in_thread(scope, pending)
        except BaseException:
            abandon(scope, pending)
            raise
        if pending.done is not None:
            wait_blocking(scope, pending.done)
        elif pending.error is not None:
            raise pending.error

    # --------------------------------------------------------------- async

    async def run_async(self, flow: Flow[T], *, only_reads: bool = False) -> T:
        """Run a flow in this task.

        With `only_reads`, which says that the flow writes nothing, blocking work takes one
        hop to a thread for the whole flow instead of one for each batch.
        """
        if only_reads and self.backend.mode == "thread":
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(worker_pool(), self.run, flow)
        return await _drive_async(flow, self._perform_async)

    async def _perform_async(self, batch: list[Request]) -> list[Any]:
        updates, others = _split(batch)
        replies: dict[int, Any] = {}
        if others:
            requests = [request for _, request in others]
            found = await self._perform_stamped_async(requests)
            end = time.monotonic() + _MAX_WAIT_S
            while (torn := self._torn(requests, found)) and time.monotonic() < end:
                await asyncio.sleep(_PAUSE_S)
                again = await self._perform_stamped_async([requests[i] for i in torn])
                self._mend(found, torn, again)
            replies.update((i, reply) for (i, _), reply in zip(others, found, strict=True))
        if len(updates) == 1:
            await self._commit_async(updates[0][1])
        elif updates:
            await _all_settled(self._commit_async, [update for _, update in updates])
        return [replies.get(i) for i in range(len(batch))]

    async def _perform_stamped_async(self, requests: list[Request]) -> list[Any]:
        before = self._versions(requests)
        with self._announced(requests, asyncio.get_running_loop()):
            found = await self._perform_others(requests)
        self.counters.count_round(requests, found)
        return self._stamped(requests, found, before)

    async def _perform_others(self, requests: list[Request]) -> list[Any]:
        match self.backend.mode:
            case "inline":
                return self.backend.perform(requests)
            case "thread":
                loop = asyncio.get_running_loop()
                pool = worker_pool()
                return await loop.run_in_executor(pool, self.backend.perform, requests)
            case "async":
                return await self.backend.perform_async(requests)

    async def _commit_async(self, request: UpdateShard) -> None:
        loop = asyncio.get_running_loop()
        scope = self.backend.scope(request.shard.key)
        pending = QueuedUpdate(self, request, loop)
        try:
            if join(scope, pending, _blocked.get()):
                try:
                    # One turn of the loop: siblings that are ready to write join this commit.
                    await asyncio.sleep(0)
                except (asyncio.CancelledError, GeneratorExit):
                    # This loop may be about to end, and others wait: zarr's loop does not.
                    self._start_leading(scope, pending, _get_loop(), at_once=False)
                    raise
                self._start_leading(scope, pending, loop)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException:
            abandon(scope, pending)
            raise
        assert pending.done is not None, "who waits in an event loop has a future"
        if pending.done.done():
            pending.done.result()
        else:
            await asyncio.wrap_future(pending.done)

    def _start_leading(
        self,
        scope: Hashable,
        leader: object,
        loop: asyncio.AbstractEventLoop,
        *,
        at_once: bool = True,
    ) -> None:
        """Lead apart from the caller, who may be cancelled without harm to the others.

        Not `at_once` where it may be the garbage collector that ends the caller, at any place.
        """
        match self.backend.mode:
            case "inline":
                lead_blocking(scope, leader)
            case "thread":
                leave_loop(scope)
                if at_once:
                    commit_inline(scope, leader)
                else:
                    lead_in_thread(scope, leader)
            case "async":
                if loop is not asyncio.get_running_loop():
                    leave_loop(scope)
                    asyncio.run_coroutine_threadsafe(lead_async(scope, leader), loop)
                    return
                begun = asyncio.Event()
                task = loop.create_task(lead_async(scope, leader, begun))

                def done(task: asyncio.Task[None]) -> None:
                    _leading.discard(task)
                    if task.cancelled() and not begun.is_set():  # the loop ended before that
                        leave_loop(scope)
                        asyncio.run_coroutine_threadsafe(lead_async(scope, leader), _get_loop())

                _leading.add(task)
                task.add_done_callback(done)

    async def update_async(self, members: list[QueuedUpdate]) -> Sequence[Exception | None]:
        """Commit updates of one shard, with other processes kept out, or begun anew after them."""
        return await until_not_replaced(lambda: self._try_update(members))

    async def _try_update(self, members: list[QueuedUpdate]) -> Sequence[Exception | None]:
        view = self.backend.optimistic()
        if view is not None:
            driver = Driver(view, self._update_flow, self.counters)
            return await driver.run_async(self.update_flow(members))
        lock = self.backend.lock(members[0].request.shard.key)
        async with nullcontext() if lock is None else locked_by_worker(lock):
            return await self.run_async(self.update_flow(members))

    # -------------------------------------------------------------- shared

    def update_flow(self, members: list[QueuedUpdate]) -> Flow[Sequence[Exception | None]]:
        """The flow that commits updates of one shard, in the order in which they came."""
        return self._update_flow(members[0].request, [m.request.updates for m in members])

    def _versions(self, requests: list[Request]) -> list[object]:
        return [
            version_of(self.backend.scope(r.key)) if isinstance(r, Get | GetIndex) else None
            for r in requests
        ]

    def _stamped(
        self, requests: list[Request], replies: list[Any], before: list[object]
    ) -> list[Any]:
        """Give the replies of `Get` their versions, where the backend has none."""
        stamped = []
        for request, reply, version in zip(requests, replies, before, strict=True):
            if (
                isinstance(request, Get | GetIndex)
                and isinstance(reply, Found | FoundIndex)
                and (reply.version is None or not self.backend.replaces_at_once)
            ):
                after = version_of(self.backend.scope(request.key))
                both = version, reply.version
                reply = reply._replace(version=both if after == version else UNSTABLE)
            stamped.append(reply)
        return stamped

    def _torn(self, requests: list[Request], found: list[Any]) -> list[int]:
        """Positions of reads that may have seen half of a write of this process."""
        if self.backend.replaces_at_once:
            return []
        pairs = enumerate(zip(requests, found, strict=True))
        return [i for i, (r, f) in pairs if isinstance(r, Get | GetIndex) and f.version is UNSTABLE]

    @staticmethod
    def _mend(found: list[Any], torn: list[int], again: list[Any]) -> None:
        for i, reply in zip(torn, again, strict=True):
            found[i] = reply

    def _announced(
        self, requests: list[Request], loop: asyncio.AbstractEventLoop | None = None
    ) -> Any:
        """Announce the writes among the requests while they are performed."""
        writes = [
            self.backend.scope(r.prefix if isinstance(r, DeletePrefix) else r.key)
            for r in requests
            if isinstance(r, _WRITES)
        ]
        return publishing(writes, loop) if writes else nullcontext()


_blocked: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("_blocked", default=None)
"""The event loop that waits for this task, see `Driver.run`."""

_leading: set[asyncio.Task[None]] = set()
"""Keeps leaders alive: an event loop holds its tasks only weakly."""


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _drive(flow: Flow[T], perform: Perform) -> T:
    try:
        next(_steps(flow, perform, lambda _: True))
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("steps without a pause pause")


def _steps(
    flow: Flow[T], perform: Perform, can_commit_inline: Callable[[list[Request]], bool]
) -> Generator[None, None, T]:
    """Drive a flow, with a pause before each batch that is not light."""
    try:
        batch = next(flow)
        while True:
            if not can_commit_inline(batch):
                yield
            try:
                replies = perform(batch)
            except Exception as error:
                batch = flow.throw(error)
            else:
                batch = flow.send(replies)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        flow.close()


async def _drive_async(
    flow: Flow[T], perform: Callable[[list[Request]], Awaitable[list[Any]]]
) -> T:
    try:
        batch = next(flow)
        while True:
            try:
                replies = await perform(batch)
            except Exception as error:
                batch = flow.throw(error)
            else:
                batch = flow.send(replies)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        flow.close()


def _split(
    batch: list[Request],
) -> tuple[list[tuple[int, UpdateShard]], list[tuple[int, Request]]]:
    """Updates of shards, and all other requests, each with its position in the batch."""
    updates: list[tuple[int, UpdateShard]] = []
    others: list[tuple[int, Request]] = []
    for i, request in enumerate(batch):
        if isinstance(request, UpdateShard):
            updates.append((i, request))
        else:
            others.append((i, request))
    return updates, others


async def _all_settled(
    commit: Callable[[UpdateShard], Awaitable[None]], updates: list[UpdateShard]
) -> None:
    """Commit all, a few at a time; then raise the first error, when nothing runs on."""
    slots = asyncio.Semaphore(max_shards_of_a_write())

    async def one(update: UpdateShard) -> None:
        async with slots:
            await commit(update)

    for outcome in await asyncio.gather(*map(one, updates), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome

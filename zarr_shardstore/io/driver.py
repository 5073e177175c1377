"""Driver of flows: performs their requests, blocking or async.

Flows decide what is requested. The driver decides about retries and their pauses only.

Both ways share one coroutine, `Driver._run`. To run it blocking, no event loop is needed:
nothing that it awaits then waits.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from logging import DEBUG
from typing import Any, TypeAlias, TypeVar

from zarr.core.sync import sync

from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.io.backends.base import Backend, OpenFiles, ReplacedMeanwhileError
from zarr_shardstore.io.backends.store_traits import note_cause
from zarr_shardstore.io.concurrency import Slots, worker_pool
from zarr_shardstore.io.counters import Counters
from zarr_shardstore.io.local.fs import max_shards_of_a_write
from zarr_shardstore.io.update_queue import (
    blocked_loop,
    commit,
    commit_async,
    end_with_the_process,
    running_loop,
    state_of_queue,
)
from zarr_shardstore.io.write_epochs import UNSTABLE, announced, version_of
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.requests import EntryUpdate, Flow, PlainValue, Request, UpdateShard
from zarr_shardstore.shards.shard_writer import ShardWriter
from zarr_shardstore.telemetry import LOG, TRACING, log_round, span

T = TypeVar("T")

UpdateFlow: TypeAlias = Callable[
    [UpdateShard, Sequence[Sequence[EntryUpdate]]], Flow[Sequence[Exception | None]]
]
"""The write strategy: a flow that commits groups of updates of one shard, the first of which
the request has."""

_READS = (requests.Get, requests.GetIndex)
_WRITES = (
    requests.Set,
    requests.SetIfNotExists,
    requests.SetWithGaps,
    requests.ChangeShard,
    requests.Delete,
    requests.DeletePrefix,
)
"""Requests after which an object may be another one: readers of this process are told."""

MAX_CONFLICT_S = 120.0
"""As long as for a lock. At 10 requests a second that is some hundred attempts."""

_FIRST_BACKOFF_S = 0.005
_LONGEST_BACKOFF_S = 0.5
"""Half of it on average, so that two writers do not meet again."""

_commits = Slots(max_shards_of_a_write)
"""Commits of one event loop; each has its shard in memory."""


class Driver:
    """Runs flows against a backend.

    `fits_inline` tells for updates of a shard whether `update_flow` only writes small pieces into
    the open shard; without it event loops commit nothing inline.

    Thread safety: all methods may be called from any thread and any task.
    """

    def __init__(
        self,
        backend: Backend,
        update_flow: UpdateFlow,
        counters: Counters | None = None,
        fits_inline: Callable[
            [UpdateShard, Sequence[EntryUpdate], ShardWriter], bool
        ] = lambda *_: False,
    ) -> None:
        self.backend = backend
        self.counters = counters or Counters()
        self.inline_from = 0.0
        """From this time on, by the monotonic clock in s, event loops may commit inline."""
        self.update_flow = update_flow
        self.fits_inline = fits_inline
        end_with_the_process()

    def run(self, flow: Flow[T]) -> T:
        """Run a flow in this thread; through zarr's event loop if the backend cannot block."""
        if not self.backend.can_block:
            blocked = running_loop()

            async def run_in_zarrs_loop() -> T:
                blocked_loop.set(blocked)
                return await self.run_async(flow)

            return sync(run_in_zarrs_loop())
        opened = OpenFiles()
        running = self._run(flow, opened)
        try:
            running.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            if opened:
                opened.close()
            running.close()
        raise AssertionError("a blocking flow never waits for an event loop")

    async def run_async(self, flow: Flow[T], *, only_reads: bool = False) -> T:
        """Run a flow in this task.

        With `only_reads`, which says that the flow writes nothing, blocking work takes one
        hop to a thread for the whole flow instead of one for each batch.
        """
        if only_reads and self.backend.mode == "thread":
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(worker_pool(), self.run, flow)
        return await self._run(flow, None)

    async def _run(self, flow: Flow[T], opened: OpenFiles | None) -> T:
        """Run a flow: blocking, with the files that it has opened, or else in this task."""
        with span(flow) if TRACING in sys.modules else nullcontext():
            try:
                batch = next(flow)
                while True:
                    try:
                        replies = await self._reply(batch, opened)
                    except Exception as error:
                        batch = flow.throw(error)
                    else:
                        batch = flow.send(replies)
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                flow.close()

    async def _reply(self, batch: list[Request], opened: OpenFiles | None) -> list[Any]:
        """Return the replies to a batch; its updates are committed after the other requests."""
        updates = [request for request in batch if isinstance(request, UpdateShard)]
        if not updates:
            return await self._ask(batch, opened)
        others: list[Request] = [r for r in batch if not isinstance(r, UpdateShard)]
        replies = iter(await self._ask(others, opened) if others else ())
        if any(isinstance(update.shard, PlainValue) for update in updates):
            updates = await self._without_whole_writes(updates, opened)
        if opened is not None:
            if opened:
                opened.close()
            for update in updates:
                commit(self, update)
        elif len(updates) == 1:  # without a task for it
            await commit_async(self, updates[0])
        else:
            await self._commit_all(updates)
        return [None if isinstance(r, UpdateShard) else next(replies) for r in batch]

    async def _without_whole_writes(
        self, updates: list[UpdateShard], opened: OpenFiles | None
    ) -> list[UpdateShard]:
        """Perform the whole writes of plain values beside the queue; return the other updates.

        A part of such a value may have been read before the write and be stored after it. Then the
        write is lost, and its update is returned, too: it waits for the part. Of the parts of this
        process the queue tells, of those of others the backend (see `Backend.locks_whole_writes`).
        """
        if self.backend.locks_whole_writes:
            return updates
        pairs = [(update, update.as_whole_write()) for update in updates]
        whole = [(update, write) for update, write in pairs if write is not None]
        if not whole:
            return updates
        scopes = [self.backend.scope(write.key) for _, write in whole]
        before = [(n, False) for n, _ in map(state_of_queue, scopes)]
        replies = await self._ask([write for _, write in whole], opened)
        return [update for update, write in pairs if write is None] + [
            update
            for (update, _), scope, state, reply in zip(whole, scopes, before, replies, strict=True)
            if reply == "disturbed" or state_of_queue(scope) != state
        ]

    async def _commit_all(self, updates: Sequence[UpdateShard]) -> None:
        """Commit all, a few at a time; then raise the first error, when nothing runs on."""
        slots = asyncio.Semaphore(max_shards_of_a_write())

        async def one(update: UpdateShard) -> None:
            async with slots:
                await commit_async(self, update)

        for outcome in await asyncio.gather(*map(one, updates), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _ask(self, batch: list[Request], opened: OpenFiles | None) -> list[Any]:
        """Ask the backend, and announce the writes among the requests as long as it takes."""
        backend = self.backend
        before = None if backend.has_versions else self._epochs(batch)
        writes = [
            backend.scope(r.prefix if isinstance(r, requests.DeletePrefix) else r.key)
            for r in batch
            if isinstance(r, _WRITES)
        ]
        loop = asyncio.get_running_loop() if opened is None else None
        try:
            with announced(writes, loop) if writes else nullcontext():
                if opened is None:
                    replies = await backend.perform_async(batch)
                else:
                    replies = backend.perform(batch, opened)
        except Exception as error:
            note_cause(error)
            raise
        self.counters.count_round(batch, replies)
        if LOG.isEnabledFor(DEBUG):
            log_round(backend, batch)
        if before is None:
            return replies
        for i, after in enumerate(self._epochs(batch)):
            reply = replies[i]
            if isinstance(reply, requests.Found | requests.FoundIndex) and reply.version is None:
                version = before[i] if before[i] == after else UNSTABLE
                replies[i] = reply._replace(version=version)
        return replies

    def _epochs(self, batch: list[Request]) -> list[object]:
        """Return the write epoch of each object that is read."""
        return [
            version_of(self.backend.scope(r.key)) if isinstance(r, _READS) else None for r in batch
        ]

    # ------------------------------------------------- for the update queue

    async def update_async(
        self, request: UpdateShard, groups: Sequence[Sequence[EntryUpdate]]
    ) -> Sequence[Exception | None]:
        """Commit groups of updates of one shard under the lock, or again after a foreign writer.

        Raises `ShardConflictError` if others were quicker for two minutes; nothing was stored.
        """
        end = time.monotonic() + MAX_CONFLICT_S
        backoff = _FIRST_BACKOFF_S
        while (view := self.backend.optimistic()) is not None:
            try:
                driver = Driver(view, self.update_flow, self.counters)
                async with _commits.here():
                    return await driver.run_async(self.update_flow(request, groups))
            except ReplacedMeanwhileError as error:
                if time.monotonic() > end:
                    raise ShardConflictError(
                        f"other writers have replaced {error.args[0]!r} again and again, for "
                        f"{MAX_CONFLICT_S:.0f} s; it was not written"
                    ) from None
            await asyncio.sleep(random.uniform(0, backoff))
            backoff = min(2 * backoff, _LONGEST_BACKOFF_S)
        lock = self.backend.lock(request.shard.key)
        async with nullcontext() if lock is None else _locked_by_worker(lock), _commits.here():
            return await self.run_async(self.update_flow(request, groups))


@asynccontextmanager
async def _locked_by_worker(lock: AbstractContextManager[object]) -> AsyncIterator[None]:
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

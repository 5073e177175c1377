"""Driver of flows: performs their requests, blocking or async, and counts them.

Both ways share one coroutine, `Driver._run`. A blocking caller needs no event loop for it: then it
awaits only what is done. The driver decides about retries of updates, the flow about all else.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, fields
from itertools import count
from logging import DEBUG
from typing import Any, TypeVar

from zarr.core.sync import sync

from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.io.backends.base import Backend, OpenFiles, ReplacedMeanwhileError
from zarr_shardstore.io.backends.store_traits import note_cause
from zarr_shardstore.io.concurrency import PerLoop, backoff, raise_first, worker_pool
from zarr_shardstore.io.local.fs import max_shards_of_a_write
from zarr_shardstore.io.update_queue import (
    Groups,
    Outcomes,
    UpdateFlow,
    blocked_loop,
    commit,
    commit_async,
    end_with_the_process,
    running_loop,
    state_of_queue,
)
from zarr_shardstore.io.write_epochs import UNSTABLE, announced, of_place, version_of
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.requests import (
    DeletePrefix,
    Flow,
    Found,
    FoundIndex,
    GetIndex,
    Move,
    PlainValue,
    Request,
    UpdateShard,
)
from zarr_shardstore.synchronized import synchronized
from zarr_shardstore.telemetry import LOG, TRACING, log_round, span

T = TypeVar("T")

_READS = (requests.Get, GetIndex)
_WRITES = (
    requests.Set,
    requests.SetIfNotExists,
    requests.SetWithGaps,
    requests.ChangeShard,
    requests.Delete,
    Move,
)
"""Requests that may change an object: they are announced to the readers of this process."""

MAX_CONFLICT_S = 120.0  # as long as for a lock: some hundred attempts
_commits = PerLoop(lambda: asyncio.Semaphore(max_shards_of_a_write()))  # shards in memory


@dataclass(frozen=True, slots=True)
class Stats:
    """Requests that a store has made to its base store since the store was made.

    Parameters
    ----------
    requests : int
        Requests of any kind: reads, writes, listings. Retries of a client of an object store, and
        a size that is asked for before the end of an object, are not counted.
    nbytes_read : int
        Bytes of values and indexes in the replies.
    rounds : int
        Batches of requests that were waited for together.
    index_requests : int
        Requests for a shard index, or for a consolidated index; they are among `requests`.
    index_hits : int
        Indexes that were needed, and cached.
    warm_reads : int
        Chunks of local files that were read by one positioned read, with a cached index;
        they are not among `requests`.
    """

    requests: int
    nbytes_read: int
    rounds: int
    index_requests: int
    index_hits: int
    warm_reads: int


_synchronized = synchronized()


class Counters:
    """Counts for one store. Thread safety: may be used from any thread."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._fast_reads = count()
        self.count_fast_read = self._fast_reads.__next__  # needs no lock
        self._n_looks = 0

    @_synchronized
    def count_round(self, batch: Sequence[Request], replies: Sequence[Any]) -> None:
        n_requests, counts = len(batch), self._counts
        for request, reply in zip(batch, replies, strict=True):
            if isinstance(reply, Found):
                counts["nbytes_read"] += len(reply.value or b"")
            elif isinstance(reply, FoundIndex) and isinstance(request, GetIndex):
                counts["index_requests" if reply.was_requested else "index_hits"] += 1
                n_requests -= not reply.was_requested
                if reply.consolidated_nbytes is not None:
                    n_requests += 1
                    counts["index_requests"] += 1
                    counts["nbytes_read"] += reply.consolidated_nbytes
                if reply.value is not None:
                    counts["nbytes_read"] += len(reply.value)
                elif reply.was_requested and reply.decoded is not None:
                    counts["nbytes_read"] += request.shard.spec.index_nbytes
        counts["requests"] += n_requests
        counts["rounds"] += n_requests > 0

    @_synchronized
    def stats(self) -> Stats:
        n_fast_reads = next(self._fast_reads) - self._n_looks  # a look also counts
        self._n_looks += 1
        counts = self._counts + Counter(index_hits=n_fast_reads, warm_reads=n_fast_reads)
        return Stats(**{each.name: counts[each.name] for each in fields(Stats)})


class Driver:
    """Runs flows against a backend.

    Thread safety: all methods may be called from any thread and any task.
    """

    def __init__(
        self, backend: Backend, update_flow: UpdateFlow, counters: Counters | None = None
    ) -> None:
        self.backend = backend
        self.counters = counters or Counters()
        self.update_flow = update_flow
        end_with_the_process()

    def run(self, flow: Flow[T]) -> T:
        """Run a flow in this thread; in zarr's event loop if the backend works in event loops."""
        if self.backend.mode == "async":
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

        With `only_reads` blocking work takes one hop to a thread for the whole flow, not for each
        batch. The flow must not write then.
        """
        if only_reads and self.backend.mode == "thread":
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(worker_pool(), self.run, flow)
        return await self._run(flow, None)

    async def _run(self, flow: Flow[T], opened: OpenFiles | None) -> T:
        """Run a flow: blocking with `opened`, or else in this task."""
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

        A concurrent change of a part may have read the value before the write, and store it after.
        Then the write is lost, and its update is also returned. The queue knows the changes of this
        process, the backend the changes of others (`Backend.locks_whole_writes`).
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
        """Commit all, a few at a time; then raise the first error."""
        slots = asyncio.Semaphore(max_shards_of_a_write())

        async def one(update: UpdateShard) -> None:
            async with slots:
                await commit_async(self, update)

        raise_first(await asyncio.gather(*map(one, updates), return_exceptions=True))

    async def _ask(self, batch: list[Request], opened: OpenFiles | None) -> list[Any]:
        """Ask the backend; meanwhile announce the writes among the requests."""
        backend = self.backend
        before = None if backend.has_versions else self._epochs(batch)
        writes = [backend.scope(r.key) for r in batch if isinstance(r, _WRITES)]
        writes += [backend.scope(r.to) for r in batch if isinstance(r, Move)]
        writes += [of_place(backend.scope("")) for r in batch if isinstance(r, DeletePrefix)]
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
            if isinstance(reply, Found | FoundIndex) and reply.version is None:
                version = before[i] if before[i] == after else UNSTABLE
                replies[i] = reply._replace(version=version)
        return replies

    def _epochs(self, batch: list[Request]) -> list[object]:
        """Return the write epoch of each object that is read."""
        return [
            version_of(self.backend.scope(r.key)) if isinstance(r, _READS) else None for r in batch
        ]

    # ------------------------------------------------- for the update queue

    async def update_async(self, request: UpdateShard, groups: Groups) -> Outcomes:
        """Commit groups of updates of one shard under the lock, or compare and swap until it works.

        Raises `ShardConflictError` if other writers were faster for two minutes.
        """
        key = ""
        for pause_s in backoff(0.005, 0.5, MAX_CONFLICT_S, is_random=True):
            view = self.backend.optimistic()
            if view is None:
                break
            try:
                driver = Driver(view, self.update_flow, self.counters)
                async with _commits.here():
                    return await driver.run_async(self.update_flow(request, groups))
            except ReplacedMeanwhileError as error:
                key = error.args[0]
            await asyncio.sleep(pause_s)
        else:
            raise ShardConflictError(
                f"other writers have replaced {key!r} again and again, for "
                f"{MAX_CONFLICT_S:.0f} s; it was not written"
            )
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

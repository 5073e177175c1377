"""`Batch`: a block in which writes of chunks are buffered, so that each shard is stored once.

`Flusher` stores what is buffered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, Self

from zarr_shardstore.arrays.catalog import Catalog, TransformedKey
from zarr_shardstore.errors import (
    ShardConflictError,
    ShardStoreError,
    SpecError,
    UnpublishedError,
)
from zarr_shardstore.format.arguments import whole_number
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.metadata.documents import Node, node_of_document
from zarr_shardstore.operations.write_buffer import WriteBuffer
from zarr_shardstore.shards.requests import Flow, Set, UpdateShard

DEFAULT_MAX_NBYTES = 256 * 1024 * 1024
"""A few shards of the recommended 10 to 100 MB."""

_entered: ContextVar[tuple[weakref.ref[Batch], ...]] = ContextVar("_entered", default=())
"""Blocks, of any store, that this thread or task is in."""


class Batch:
    """A block of writes to one store, whose ``batch`` method makes it.

    Use it by ``with`` or by ``async with``. An open batch buffers writes and erasures of chunks of
    sharded arrays in memory, and reads through the same store see them. It flushes a shard, which
    means storing it, when all of its entries have a new value. When more than `max_nbytes` are
    buffered, it flushes the shards with the most bytes. The end of the block flushes the rest.

    Notes
    -----
    - All other keys are written immediately: metadata, and chunks of arrays that are not sharded.
      Before metadata changes what the keys of an array mean, the array is flushed.
    - While `append_frames` is open on an array, its other writes are also stored immediately.
    - A listing and a sum of sizes first flush the arrays that they could see. So does the removal
      of a part of a directory.
    - An exception that ends the block drops buffered writes. Flushed ones stay: a batch is no
      transaction.
    - If shards cannot be stored at the end, the others are, and `UnpublishedError` names them. If a
      flush fails before the end, the call that caused it raises the error of the base store. The
      writes stay buffered.
    - A batch inside a batch of the same store, in the same thread or task, is a part of it: its end
      flushes and drops nothing. So is the batch of a task, or of ``asyncio.to_thread``, that begins
      in the block.
    - Batches of several threads or tasks on one store share one buffer. Each that ends without an
      exception has flushed the whole buffer. One that ends by an exception drops nothing while
      another is open, which will flush it. The smallest limit counts. So rather open one batch
      around all workers.
    - It covers the store that made it, and those that share its state: made by
      ``with_read_only``, a `ShardingMapping` or `DraftHierarchyStore` on it. Other stores, copies
      by pickling, and child processes have no batch and see only what is stored.

    Thread safety: any thread and any task may write while it is open. Concurrent writers must be
    done before the block ends: later writes are stored immediately.

    Cost: no request for whole values and erasures. `set_partial_values` and
    ``set_if_not_exists`` of a value that is not buffered flush its shard. Shards that are being
    stored take memory besides `max_nbytes`.
    """

    def __init__(
        self,
        buffer: WriteBuffer,
        flush: Callable[[Sequence[str]], Flow[dict[str, Exception]]],
        run: Callable[[Flow[Any]], Any],
        run_async: Callable[[Flow[Any]], Coroutine[Any, Any, Any]],
        max_nbytes: int | None,
    ) -> None:
        self.max_nbytes = DEFAULT_MAX_NBYTES
        if max_nbytes is not None:
            self.max_nbytes = whole_number("max_nbytes", max_nbytes)
        self.outer: Batch | None = None  # of which this one is a part
        self.is_leaving = False
        self._buffer = buffer
        self._flush = flush
        self._run = run
        self._run_async = run_async

    @property
    def nbytes(self) -> int:
        """Bytes that the store has buffered now."""
        return self._buffer.nbytes

    def __enter__(self) -> Self:
        if self._buffer.has_open(self):
            raise SpecError("this batch is open already: call batch() for another one")
        entered = [block for ref in _entered.get() if (block := ref()) is not None]
        around = [b for b in entered if b._buffer is self._buffer and self._buffer.has_open(b)]
        self.outer = around[-1] if around else None
        self.is_leaving = False
        self._buffer.enter(self)
        _entered.set((*_entered.get(), weakref.ref(self)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failures: dict[str, Exception] = {}
        try:
            if keys := self._leave(is_good=kind is None):
                failures = self._run(self._flush(keys))
        finally:
            self._end(failures)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failures: dict[str, Exception] = {}
        try:
            if keys := self._leave(is_good=kind is None):
                failures = await self._run_async(self._flush(keys))
        finally:
            self._end(failures)

    def _leave(self, *, is_good: bool) -> list[str]:
        _entered.set(tuple(ref for ref in _entered.get() if ref() not in (self, None)))
        is_inner = self.outer is not None and self._buffer.has_open(self.outer)
        return self._buffer.leave(self) if is_good and not is_inner else []

    def _end(self, failures: dict[str, Exception]) -> None:
        try:
            unstored = self._buffer.chunk_keys(failures)
        finally:
            self._buffer.end(self)
        if unstored:
            raise UnpublishedError(
                f"{len(unstored)} shards could not be stored",
                [failures[key] for key in unstored],
                unstored,
            )


class Flusher:
    """Flows that flush the write buffer of one store; what is not stored stays buffered."""

    def __init__(self, catalog: Catalog, buffer: WriteBuffer) -> None:
        self.catalog = catalog
        self.buffer = buffer

    def flush(self, shard_keys: Sequence[str]) -> Flow[dict[str, Exception]]:
        """Store the updates of shards; return errors by shard key."""
        failures: dict[str, Exception] = {}
        left = yield from self._commits(shard_keys, failures)
        while left:
            try:
                yield [*left]
                break
            except Exception as error:
                # The driver may not have begun the commits that did not fail themselves.
                found = [(commit, self.buffer.get(commit.shard.key)) for commit in left]
                failed = {c.shard.key: b.error for c, b in found if b is not None and b.error}
                left = [c for c, b in found if b is not None and not b.error]
                if left and not failed:
                    failed[left.pop(0).shard.key] = error
                failures |= failed
        return failures

    def flush_below(self, prefix: str) -> Flow[None]:
        """Flush the arrays that may have chunk keys that start with `prefix`."""
        yield from self.flush_arrays(
            lambda layout: layout.prefix.startswith(prefix) or prefix.startswith(layout.prefix)
        )

    def flush_array(self, node: Node, later: ArrayLayout | None = None) -> Flow[None]:
        """Flush an array, before its document changes, unless `later` it has all chunks, in the
        same entries: the erasures of a resize are stored before the document is."""

        def is_changed(layout: ArrayLayout) -> bool:
            if later is None or not layout.has_same_entries(later):
                return True
            return any(
                n > m for n, m in zip(layout.grid_shape or (), later.grid_shape or (), strict=False)
            )

        yield from self.flush_arrays(
            lambda layout: layout.prefix == node.chunk_prefix and is_changed(layout)
        )

    def flush_arrays(self, is_wanted: Callable[[ArrayLayout], bool]) -> Flow[None]:
        """Flush the arrays with wanted layouts."""
        if self.buffer.is_active:
            layouts = self.buffer.layouts()
            yield from self.flush_shards([key for key in layouts if is_wanted(layouts[key])])

    def flush_shards(self, shard_keys: Sequence[str]) -> Flow[None]:
        """Flush shards; raise the first error, with a note of how many there are."""
        failures = (yield from self.flush(shard_keys)) if shard_keys else {}
        for key, error in failures.items():
            others = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            error.add_note(
                f"when the batch stored the shard {key!r}{others}; their values are still "
                "buffered, and are tried again when the batch ends"
            )
            raise error

    def _commits(
        self, shard_keys: Sequence[str], failures: dict[str, Exception]
    ) -> Flow[list[UpdateShard]]:
        """Return commits of shards whose arrays are still declared as they were."""
        try:
            found = yield from self.catalog.shards_of(shard_keys)
        except Exception as error:
            failures |= dict.fromkeys(shard_keys, error)
            return []
        commits: list[UpdateShard] = []
        for key, now in zip(shard_keys, found, strict=True):
            buffered = self.buffer.get(key)
            if buffered is None:
                continue
            buffered.error = None
            layout = buffered.shard.layout
            erased = self.catalog.erased_array(key)
            array = now.array if isinstance(now, TransformedKey) else erased
            declared, below = (None, ()) if array is None else array.sharding
            match now:
                case ShardStoreError():
                    failures[key] = now
                    continue
                case _ if declared is not None and layout.has_same_entries(declared):
                    commits.append(UpdateShard(buffered.shard, (), below))
                    continue
                case ShardRef() if layout.has_same_entries(now.layout):
                    commits.append(UpdateShard(now, ()))
                    continue
                case None if not any(
                    isinstance(state, Set)
                    for state in (*buffered.snapshot.values(), *buffered.updates.values())
                ):
                    node = node_of_document(layout.document_key)
                    there = (yield from self.catalog.arrays.lookup([node])) if node else {}
                    if not any(there.values()):  # the array was removed, as was wanted
                        self.buffer.forget(buffered)
                        continue
            failures[key] = ShardConflictError(
                f"shard {key!r}: another store removed the array {layout.path!r}, or declared it "
                "anew, while a batch buffered values of it; write them again if they are still "
                "wanted"
            )
        return commits

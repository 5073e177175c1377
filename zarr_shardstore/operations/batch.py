"""`Batch`: a block in which writes of chunks are buffered, so that each shard is stored once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

from zarr_shardstore.errors import SpecError, UnpublishedError
from zarr_shardstore.format.arguments import whole_number
from zarr_shardstore.operations.write_buffer import WriteBuffer
from zarr_shardstore.shards.requests import Flow

DEFAULT_MAX_NBYTES = 256 * 1024 * 1024
"""A few shards of the recommended 10 to 100 MB."""

_entered: ContextVar[tuple[weakref.ref[Batch], ...]] = ContextVar("_entered", default=())
"""Blocks, of any store, that this thread or task is in."""


class Batch:
    """A block of writes to one store, whose ``batch`` method makes it.

    Use it by ``with`` or by ``async with``. While it is open, writes and erasures of chunks of
    sharded arrays are buffered in memory, and reads through the same store see them. A shard is
    flushed, which means stored, when all of its entries have a new value. When more than
    `max_nbytes` are buffered, the shards with the most bytes are flushed; the rest when the block
    ends.

    Notes
    -----
    - All other keys are written immediately: metadata, and chunks of arrays that are not sharded.
      Before metadata changes what the keys of an array mean, the array is flushed.
    - A listing, a sum of sizes and the removal of a part of a directory first flush the arrays
      that they could see.
    - If the block ends by an exception, buffered writes are dropped. What was flushed before
      stays: a batch is no transaction.
    - If shards cannot be stored at the end, the others are, and `UnpublishedError` names them. If
      a flush fails before the end, the call that caused it raises the error of the base store,
      and the writes stay buffered.
    - A batch inside a batch of the same store, in the same thread or task, is a part of it:
      nothing is flushed or dropped when it ends.
    - Batches of several threads or tasks on one store share one buffer. Each that ends without an
      exception has flushed the whole buffer. One that ends by an exception drops nothing as long
      as another is open, which will flush it. Of the limits the smallest counts. So rather open
      one batch around all workers.
    - It covers the store it was made by, and those that share its state: made by
      ``with_read_only``, a `ShardingMapping` or `DraftHierarchyStore` on it. Other stores, copies
      by pickling, and child processes have no batch and see only what is stored.

    Thread safety: any thread and any task may write while it is open. Concurrent writers must be
    done before the block ends: later writes are stored immediately.

    Cost: no request for whole values and erasures. `set_partial_values` and
    ``set_if_not_exists`` of a value that is not buffered flush its shard. Shards that are being
    stored are in memory besides `max_nbytes`.
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
        self.outer: Batch | None = None
        """The batch of the same store that this one is a part of."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failures: dict[str, Exception] = {}
        try:
            if keys := self._leave(is_good=kind is None):
                failures = self._run(self._flush(keys))
        finally:
            self._end(failures)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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

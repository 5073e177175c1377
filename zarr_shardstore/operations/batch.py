"""`Batch`: a block in which writes are held in memory, so that each shard is published once."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeAlias

from zarr_shardstore.errors import SpecError, UnpublishedError
from zarr_shardstore.format.arguments import whole_number
from zarr_shardstore.operations.flush import Flusher
from zarr_shardstore.shards.pending import PendingShards
from zarr_shardstore.shards.requests import Flow
from zarr_shardstore.synchronized import synchronized

DEFAULT_MAX_NBYTES = 256 * 1024 * 1024
"""A few shards of the recommended 10 to 100 MB."""

_Failures: TypeAlias = dict[str, Exception]
_entered: ContextVar[tuple[weakref.ref[Batch], ...]] = ContextVar("_entered", default=())
"""Blocks, of any store, that this thread or task is in."""

_tables: weakref.WeakSet[BatchState] = weakref.WeakSet()


_synchronized = synchronized()


class SharedShards(PendingShards):
    """`PendingShards` of which one thread at a time calls the methods."""

    find = _synchronized(PendingShards.find)
    entries = _synchronized(PendingShards.entries)
    pending = _synchronized(PendingShards.pending)
    get = _synchronized(PendingShards.get)
    keys_of_array = _synchronized(PendingShards.keys_of_array)
    hold = _synchronized(PendingShards.hold)
    due = _synchronized(PendingShards.due)
    release = _synchronized(PendingShards.release)
    take = _synchronized(PendingShards.take)
    committed = _synchronized(PendingShards.committed)
    put_back = _synchronized(PendingShards.put_back)
    forget_errors = _synchronized(PendingShards.forget_errors)
    error_of = _synchronized(PendingShards.error_of)
    promise = _synchronized(PendingShards.promise)
    unpromise = _synchronized(PendingShards.unpromise)
    discard = _synchronized(PendingShards.discard)
    drop = _synchronized(PendingShards.drop)
    drop_below = _synchronized(PendingShards.drop_below)
    clear = _synchronized(PendingShards.clear)


class BatchState:
    """What one store holds, and the blocks that are open on it.

    It refers to blocks only weakly. A block that is dropped without having ended, because an
    exception came just before its end, has failed.

    Thread safety: may be used from any thread.
    """

    def __init__(self) -> None:
        self.pending = SharedShards()
        self._open: list[weakref.ref[Batch]] = []
        self._leaving: list[Batch] = []
        _tables.add(self)

    @_synchronized
    def enter(self, block: Batch) -> None:
        """Hold values from now on."""
        state = weakref.ref(self)

        def fail(gone: weakref.ref[Batch]) -> None:
            of = state()
            if of is not None:
                of._remove(gone)

        self._open.append(weakref.ref(block, fail))
        self._set_limit()

    @_synchronized
    def leave(self, block: Batch, *, is_good: bool) -> list[str] | None:
        """End a block.

        Returns
        -------
        list, optional
            Keys of the shards that it must publish, and then `finish`; ``None`` if it need not.
        """
        if not self.is_in(block):
            return None  # a child process: the parent has the block
        is_inner = block.outer is not None and self.is_in(block.outer)
        if not is_good or is_inner:
            self._remove(weakref.ref(block), drops=not is_inner)
            return None
        self._leaving.append(block)
        keys = self.pending.promise()
        self._remove(weakref.ref(block), drops=False)
        return keys

    @_synchronized
    def fail(self, block: Batch) -> None:
        """End a block that an exception has cut off while it ended: it publishes nothing."""
        self._leaving = [other for other in self._leaving if other is not block]
        if not self._leaving:
            self.pending.unpromise([p.shard.key for p in self.pending.pending()])
        self._remove(weakref.ref(block))

    @_synchronized
    def _remove(self, block: weakref.ref[Batch], *, drops: bool = True) -> None:
        """Take a block out of those that are open, by its reference; drop what is held for it."""
        gone = [ref for ref in self._open if ref is block or ref() in (None, block())]
        self._open = [ref for ref in self._open if ref not in gone]
        self._set_limit()
        if drops and not self._open:
            self.pending.discard()

    @_synchronized
    def finish(self, block: Batch) -> None:
        """All is published that was held when `block` ended, or its caller is told what is not."""
        if block not in self._leaving:
            return
        self._leaving.remove(block)
        if self._leaving:
            return  # the other one tries what is left
        left = [p.shard.key for p in self.pending.pending()]
        if self._open:
            self.pending.unpromise(left)
        else:
            self.pending.drop(left)

    def is_in(self, block: Batch) -> bool:
        """Whether a block is open."""
        return any(ref() is block for ref in self._open)

    def reset(self) -> None:
        """In a child process: what the parent holds, the parent publishes."""
        self._open.clear()
        self._leaving.clear()
        self.pending.clear()

    def _set_limit(self) -> None:
        blocks = [ref() for ref in self._open]
        limits = [block.max_nbytes for block in blocks if block is not None]
        self.pending.max_nbytes = min(limits, default=None)


class Batch:
    """A block of writes to one store; made by its ``batch`` method.

    Use it by ``with`` or by ``async with``. While it is open, writes and erasures of chunks of
    sharded arrays are held in memory, and whatever reads through the same store sees them. A
    shard is published when all of its entries have a new value; when more than `max_nbytes`
    are held, those with the most; and the rest when the block ends.

    Notes
    -----
    - All other keys are written at once: metadata, and chunks of arrays that are not sharded.
      Before metadata changes what the keys of an array mean, what is held of it is published.
    - If the block ends by an exception, what is held is dropped. What was published before
      stays: a batch is no transaction.
    - If shards cannot be published at the end, the others are, and `UnpublishedError` names
      them. If that happens before, the write that caused it raises the error of the base store,
      and what is held stays held.
    - A batch inside a batch of the same store, in the same thread or task, is a part of it:
      nothing is published or dropped when it ends.
    - Batches of several threads or tasks on one store hold their values together. Each that ends
      without an exception has published all that was held then, by whomever. One that ends by an
      exception drops nothing as long as another is open, which will publish it. Of the limits
      the smallest counts. So rather open one batch around all workers.
    - It covers the store it was made by, and those that share its state: made by
      ``with_read_only``, a `ShardingMapping` or `DraftHierarchyStore` on it. Other stores, copies
      by pickling, and child processes have no batch and see what is published.

    Thread safety: any thread and any task may write while it is open. Writers beside the one that
    leaves it must be done before: what they write afterwards is written at once.

    Cost: no request for whole values and erasures. `set_partial_values` and
    ``set_if_not_exists`` read the values that they depend on, once. Shards that are being
    published are in memory besides `max_nbytes`.
    """

    def __init__(
        self,
        state: BatchState,
        publisher: Flusher,
        run: Callable[[Flow[_Failures]], _Failures],
        run_async: Callable[[Flow[_Failures]], Coroutine[Any, Any, _Failures]],
        max_nbytes: int | None,
    ) -> None:
        if max_nbytes is None:
            max_nbytes = DEFAULT_MAX_NBYTES
        self.max_nbytes = whole_number("max_nbytes", max_nbytes)
        self.outer: Batch | None = None
        """The batch of the same store that this one is a part of."""
        self._state = state
        self._publisher = publisher
        self._run = run
        self._run_async = run_async

    @property
    def nbytes(self) -> int:
        """Bytes that the store holds now."""
        return self._state.pending.nbytes

    def __enter__(self) -> Self:
        if self._state.is_in(self):
            raise SpecError("this batch is open already: call batch() for another one")
        entered = [block for ref in _entered.get() if (block := ref()) is not None]
        around = [b for b in entered if b._state is self._state and self._state.is_in(b)]
        self.outer = around[-1] if around else None
        self._state.enter(self)
        _entered.set((*_entered.get(), weakref.ref(self)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        keys = self._leave(is_good=kind is None)
        if keys is not None:
            try:
                failures = self._run(self._publisher.publish(keys))
            except BaseException as failure:
                self._end(keys, failure)
                raise
            self._end(keys, failures)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        keys = self._leave(is_good=kind is None)
        if keys is not None:
            try:
                failures = await self._run_async(self._publisher.publish(keys))
            except BaseException as failure:
                self._end(keys, failure)
                raise
            self._end(keys, failures)

    def _leave(self, *, is_good: bool) -> list[str] | None:
        try:
            return self._try_to_leave(is_good=is_good)
        except BaseException:
            self._state.fail(self)
            raise

    def _try_to_leave(self, *, is_good: bool) -> list[str] | None:
        _entered.set(tuple(ref for ref in _entered.get() if ref() not in (self, None)))
        return self._state.leave(self, is_good=is_good)

    def _end(self, keys: Sequence[str], failures: _Failures | BaseException) -> None:
        """Forget what could not be published, and say what it was."""
        if isinstance(failures, Exception):
            failures = dict.fromkeys(keys, failures)
        elif isinstance(failures, BaseException):
            failures = {}  # cancelled or interrupted: its caller knows
        chunk_keys: dict[str, list[str]] = {}
        for key in failures:
            held = self._state.pending.get(key)
            if held is not None:
                chunk_keys[key] = [held.shard.chunk_key(i) for i in sorted(held.entries)]
        self._state.finish(self)
        if chunk_keys:
            raise UnpublishedError(
                f"{len(chunk_keys)} shards could not be published",
                [failures[key] for key in chunk_keys],
                chunk_keys,
            )


def _reset_after_fork() -> None:
    """Another thread of the parent may have been inside a lock."""
    for state in list(_tables):
        state.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)

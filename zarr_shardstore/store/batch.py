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
from zarr_shardstore.io.safe_lock import SafeLock
from zarr_shardstore.plan.pending import PendingShards
from zarr_shardstore.plan.requests import Flow
from zarr_shardstore.store.publishing import Publisher

__all__ = ["DEFAULT_MAX_NBYTES", "Batch", "BatchState"]

DEFAULT_MAX_NBYTES = 256 * 1024 * 1024
"""A few shards of the recommended 10 to 100 MB."""

_Failures: TypeAlias = dict[str, Exception]
_entered: ContextVar[tuple[Batch, ...]] = ContextVar("_entered", default=())
"""Blocks, of any store, that this thread or task is in."""

_tables: weakref.WeakSet[BatchState] = weakref.WeakSet()


class BatchState:
    """What one store holds, and the blocks that are open on it.

    Thread safety: may be used from any thread.
    """

    def __init__(self) -> None:
        self.pending = PendingShards(SafeLock().held)
        self._open: list[Batch] = []
        self._leaving: list[Batch] = []
        _tables.add(self)

    def enter(self, block: Batch) -> None:
        """Hold values from now on."""
        with self.pending.lock():
            self._open.append(block)
            self._set_limit()

    def leave(self, block: Batch, *, is_good: bool) -> list[str] | None:
        """End a block.

        Returns
        -------
        list, optional
            Keys of the shards that it must publish, and then `finish`; ``None`` if it need not.
        """
        with self.pending.lock():
            if block not in self._open:
                return None  # a child process: the parent has the block
            self._open.remove(block)
            self._set_limit()
            if block.outer is not None and block.outer in self._open:
                return None
            if is_good:
                self._leaving.append(block)
                return self.pending.promise()
            if not self._open:
                self.pending.discard()
            return None

    def finish(self, block: Batch) -> None:
        """All is published that was held when `block` ended, or its caller is told what is not."""
        with self.pending.lock():
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
        return block in self._open

    def reset(self) -> None:
        """In a child process: what the parent holds, the parent publishes."""
        self.pending.lock = SafeLock().held
        self._open.clear()
        self._leaving.clear()
        self.pending.clear()

    def _set_limit(self) -> None:
        limits = [block.max_nbytes for block in self._open]
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
        publisher: Publisher,
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
        around = [b for b in _entered.get() if b._state is self._state and self._state.is_in(b)]
        self.outer = around[-1] if around else None
        self._state.enter(self)
        _entered.set((*_entered.get(), self))
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
        _entered.set(tuple(block for block in _entered.get() if block is not self))
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

"""Engine of both stores: a base store, the operations on it, and their driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from zarr.abc.store import Store

from zarr_shardstore.errors import ReadOnlyError, SpecError, UnsupportedError
from zarr_shardstore.format.ranges import ByteRange
from zarr_shardstore.io.backends.base import Backend
from zarr_shardstore.io.backends.resolve import BaseStore, backend_of
from zarr_shardstore.io.concurrency import CallBatcher, worker_pool
from zarr_shardstore.io.driver import Driver
from zarr_shardstore.io.local.cached_files import MISS
from zarr_shardstore.io.seal import seal_all, seal_all_async
from zarr_shardstore.operations.batch import Batch
from zarr_shardstore.operations.initialized import Region, chunks_initialized
from zarr_shardstore.operations.upkeep import compact_below, compaction_of, consolidate_below
from zarr_shardstore.operations.values import Operations
from zarr_shardstore.shards.requests import Flow
from zarr_shardstore.shards.sharding import Strategy, WriteStrategy
from zarr_shardstore.store.fast_reads import FastReads
from zarr_shardstore.store.options import ShardingOptions

Value: TypeAlias = bytes | memoryview
KeyRange: TypeAlias = tuple[str, ByteRange | None]


class ShardingEngine:
    """A base store with sharding: operations and driver.

    Pickles without the cached array metadata.

    Thread safety: may be used from any thread and any event loop.
    """

    def __init__(self, base: BaseStore, options: ShardingOptions) -> None:
        self.base = base
        self.options = options
        backend = backend_of(base, options.files, is_static=options.static)
        strategy = _strategy_for(options.strategy, backend)
        self.appends = strategy == "append"
        self.operations = Operations(
            options.new_arrays,
            native=options.native,
            reading=replace(
                options.reading,
                max_shards_at_once=backend.max_shards_at_once,
                max_requests_at_once=backend.max_requests_at_once,
            ),
            order=options.order,
            strategy=strategy,
            max_dead_nbytes=options.max_dead_bytes,
            refuse_links=backend.refuse_links,
        )
        self.driver = Driver(
            backend, self.operations.update_shard, fits_inline=self.operations.fits_inline
        )
        buffer = self.operations.buffer
        self.fast_reads = FastReads(self.driver, self.operations.catalog, buffer)
        self._call_batcher = CallBatcher(self.get_many)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardingEngine, (self.base, self.options)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardingEngine)
            and self.driver.backend == other.driver.backend
            and self.options == other.options
        )

    __hash__ = None  # type: ignore[assignment]

    def describe(self) -> str:
        """Return the arguments that make this, for a repr."""
        return ", ".join([repr(self.driver.backend), *self.options.describe()])

    @property
    def is_base_read_only(self) -> bool:
        """Whether the base store refuses writes."""
        return isinstance(self.base, Store) and self.base.read_only

    def writable(self) -> ShardingEngine:
        """Return the same with a base store that takes writes, as far as it offers that."""
        if not isinstance(self.base, Store) or not self.base.read_only:
            return self
        return ShardingEngine(self.base.with_read_only(False), self.options)

    # -------------------------------------------------------------------- reads

    async def get(self, key: str, byte_range: ByteRange | None) -> Value | None:
        """Return one value, or a range of it; ``None`` if the key is missing."""
        value = self.fast_reads.get(key, byte_range, at_once=True)
        if value is MISS:
            return await self._call_batcher.answer((key, byte_range))
        return value

    def get_blocking(self, key: str, byte_range: ByteRange | None) -> Value | None:
        """As `get`."""
        value = self.fast_reads.get(key, byte_range)
        if value is MISS:
            return self.driver.run(self.operations.get(key, byte_range))
        return value

    async def get_many(self, key_ranges: Sequence[KeyRange]) -> Sequence[Value | None]:
        """Return values, or ranges of them; ``None`` for a missing key."""
        if self.fast_reads.is_possible:  # one hop to a thread, hits or not
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(worker_pool(), self.get_many_blocking, key_ranges)
        flow = self.operations.get_many(key_ranges)
        return await self.driver.run_async(flow, only_reads=True)

    def get_many_blocking(self, key_ranges: Sequence[KeyRange]) -> Sequence[Value | None]:
        """As `get_many`."""
        if not self.fast_reads.is_possible:
            return self.driver.run(self.operations.get_many(key_ranges))
        values: list[Any] = self.fast_reads.get_many(key_ranges)
        left = [i for i, value in enumerate(values) if value is MISS]
        if left:
            found = self.driver.run(self.operations.get_many([key_ranges[i] for i in left]))
            for i, value in zip(left, found, strict=True):
                values[i] = value
        return values

    def chunks_initialized(self, path: str, region: Region) -> Flow[npt.NDArray[np.bool_]]:
        """Return the flow that tells the stored chunks of an array."""
        operations = self.operations
        return chunks_initialized(operations.arrays, operations.flusher, path, region)

    # ------------------------------------------------------------------- writes

    def batch(
        self,
        max_nbytes: int | None,
        run_async: Callable[
            [Flow[dict[str, Exception]]], Coroutine[Any, Any, dict[str, Exception]]
        ],
    ) -> Batch:
        """Return a batch of writes, to be entered."""
        operations = self.operations
        flush = operations.flusher.flush
        return Batch(operations.buffer, flush, self.driver.run, run_async, max_nbytes)

    def flush(self) -> None:
        """Seal every shard file that this process has appended to, blocking."""
        seal_all(self.driver.backend, self.options.order)

    async def flush_async(self) -> None:
        """As `flush`."""
        await seal_all_async(self.driver.backend, self.options.order)

    def compaction(self, prefix: str) -> tuple[Driver, Flow[None]]:
        """Return the flow that compacts the shards below a prefix, and its driver.

        Raises
        ------
        UnsupportedError
            If nothing can be replaced in the base store.
        """
        if isinstance(self.base, Store) and not self.base.supports_deletes:
            raise UnsupportedError(
                f"in {self.base} nothing can be removed or replaced, so no byte would become free: "
                "convert it into another store"
            )
        backend = self.driver.backend
        compact = compaction_of(order=self.options.order, can_append=backend.can_append)
        flow = compact_below(self.operations.listing, prefix)
        return Driver(backend, compact, self.driver.counters), flow

    def compact(self, prefix: str) -> None:
        """Compact the shards below a prefix, blocking."""
        self.driver.run(self.operations.flusher.flush_below(prefix))
        driver, flow = self.compaction(prefix)
        driver.run(flow)

    def consolidation(self, path: str) -> Flow[list[str]]:
        """Return the flow that consolidates the indexes of the arrays at or below a path.

        Raises
        ------
        UnsupportedError
            If the base store tells no versions.
        """
        self.check_consolidation()
        operations = self.operations
        return consolidate_below(operations.listing, operations.arrays, path)

    def consolidate(self, path: str) -> list[str]:
        """Seal shards, then run `consolidation`, blocking."""
        flow = self.consolidation(path)
        self.flush()
        return self.driver.run(flow)

    def check_consolidation(self) -> None:
        """Raise `UnsupportedError` if the base store tells no versions."""
        if not self.driver.backend.has_lasting_versions:
            raise UnsupportedError(
                f"{self.driver.backend!r} tells no versions of its objects, so no reader could "
                "see that a consolidated index still holds: open the store by its path, or through "
                "obstore"
            )


def _strategy_for(strategy: Strategy, backend: Backend) -> WriteStrategy:
    """Return the strategy that an option means on a base store.

    Raises
    ------
    SpecError
        If the base store cannot do it.
    """
    if strategy == "auto":
        return "append" if backend.can_append else "rewrite"
    if strategy == "append" and not backend.can_append:
        raise SpecError(
            f"strategy={strategy!r} changes files in their place: it is for local files, "
            f"with locking='os', got {backend!r}; leave it away, or take 'rewrite'"
        )
    return strategy


def check_writable(is_read_only: bool) -> None:
    """Raise `ReadOnlyError` if it is."""
    if is_read_only:
        raise ReadOnlyError

"""What both stores are made of: a base store, the operations on it, and their driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from zarr.abc.store import Store

from zarr_shardstore.arrays.policy import ChunksPerShard, NewArrays, ShardingPolicy, V3Declaration
from zarr_shardstore.arrays.registry import check_known
from zarr_shardstore.errors import ReadOnlyError, SpecError, UnsupportedError
from zarr_shardstore.format.arguments import items_of, whole_number
from zarr_shardstore.format.index import ZEP2_INDEX, IndexFormat
from zarr_shardstore.format.ranges import ByteRange
from zarr_shardstore.format.shard import EntryOrder, check_order
from zarr_shardstore.io.backends.base import DEFAULT_FILE_OPTIONS, Backend, Durability, FileOptions
from zarr_shardstore.io.backends.resolve import BaseStore, BaseStoreLike, backend_of, base_store_of
from zarr_shardstore.io.concurrency import CallBatcher
from zarr_shardstore.io.counters import Stats
from zarr_shardstore.io.driver import Driver
from zarr_shardstore.io.local.cached_files import MISS
from zarr_shardstore.io.local.locks import Locking
from zarr_shardstore.io.seal import seal_all, seal_all_async
from zarr_shardstore.io.update_queue import worker_pool
from zarr_shardstore.metadata.declaration import Native
from zarr_shardstore.metadata.transformer_list import (
    SHARDING,
    TransformerSpec,
    index_format,
    spell_transformers,
    transformer_specs,
)
from zarr_shardstore.metadata.transformer_list import index_codecs as spell_index_codecs
from zarr_shardstore.operations.batch import Batch
from zarr_shardstore.operations.initialized import Region, chunks_initialized
from zarr_shardstore.operations.upkeep import compact_below, compaction_of, consolidate_below
from zarr_shardstore.operations.values import Operations, Options
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.requests import Flow
from zarr_shardstore.shards.sharding import Strategy, WriteStrategy
from zarr_shardstore.store.fast_reads import FastReads

Value: TypeAlias = bytes | memoryview
KeyRange: TypeAlias = tuple[str, ByteRange | None]
Transformer: TypeAlias = str | Mapping[str, Any]
Transformers: TypeAlias = Transformer | Sequence[Transformer] | None


class ShardingEngine:
    """A base store with sharding: operations and driver.

    Pickles without what it learned about arrays; another process learns it anew.
    """

    def __init__(
        self,
        base: BaseStore,
        new_arrays: NewArrays,
        options: Options,
        files: FileOptions = DEFAULT_FILE_OPTIONS,
        is_static: bool = False,
    ) -> None:
        self.base = base
        self.new_arrays = new_arrays
        self.options = options
        self.files = files
        self.is_static = is_static
        backend = backend_of(base, files, is_static=is_static)
        reading = replace(
            options.reading,
            max_shards_at_once=backend.max_shards_at_once,
            max_requests_at_once=backend.max_requests_at_once,
        )
        strategy = _strategy_for(options.strategy, backend)
        self.appends = strategy == "append"
        self.operations = Operations(
            new_arrays, replace(options, reading=reading), strategy, backend.refuse_links
        )
        self.driver = Driver(backend, self.operations.update_shard)
        pending = self.operations.batches.pending
        self.warm = FastReads(self.driver, self.operations.catalog, pending)
        self._gatherer = CallBatcher(self.get_many)

    async def get(self, key: str, byte_range: ByteRange | None) -> Value | None:
        """One value, or a range of it; ``None`` if the key is missing."""
        value = self.warm.get(key, byte_range, at_once=True)
        if value is MISS:
            return await self._gatherer.answer((key, byte_range))
        return value

    def get_blocking(self, key: str, byte_range: ByteRange | None) -> Value | None:
        """As `get`."""
        value = self.warm.get(key, byte_range)
        if value is MISS:
            return self.driver.run(self.operations.get(key, byte_range))
        return value

    async def get_many(self, key_ranges: Sequence[KeyRange]) -> Sequence[Value | None]:
        """Values, or ranges of them; ``None`` for a missing key."""
        if self.warm.is_possible:  # one hop to a thread, for whatever is there
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(worker_pool(), self.get_many_blocking, key_ranges)
        flow = self.operations.get_many(key_ranges)
        return await self.driver.run_async(flow, only_reads=True)

    def get_many_blocking(self, key_ranges: Sequence[KeyRange]) -> Sequence[Value | None]:
        """As `get_many`."""
        if not self.warm.is_possible:
            return self.driver.run(self.operations.get_many(key_ranges))
        values: list[Any] = self.warm.get_many(key_ranges)
        left = [i for i, value in enumerate(values) if value is MISS]
        if left:
            found = self.driver.run(self.operations.get_many([key_ranges[i] for i in left]))
            for i, value in zip(left, found, strict=True):
                values[i] = value
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardingEngine, self._parts

    @property
    def _parts(self) -> tuple[BaseStore, NewArrays, Options, FileOptions, bool]:
        return self.base, self.new_arrays, self.options, self.files, self.is_static

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardingEngine)
            and self.driver.backend == other.driver.backend
            and self.new_arrays == other.new_arrays
            and self.options == other.options
            and self.files == other.files
            and self.is_static == other.is_static
        )

    __hash__ = None  # type: ignore[assignment]

    def batch(
        self,
        max_nbytes: int | None,
        run_async: Callable[
            [Flow[dict[str, Exception]]], Coroutine[Any, Any, dict[str, Exception]]
        ],
    ) -> Batch:
        """A batch of writes, to be entered."""
        operations = self.operations
        return Batch(
            operations.batches, operations.publisher, self.driver.run, run_async, max_nbytes
        )

    def stats(self) -> Stats:
        """What was asked of the base store."""
        return self.driver.counters.stats()

    def flush(self) -> None:
        """Seal the shards that were changed in their place, blocking."""
        seal_all(self.driver.backend, self.options.order)

    async def flush_async(self) -> None:
        """As `flush`."""
        await seal_all_async(self.driver.backend, self.options.order)

    def compacting(self, prefix: str) -> tuple[Driver, Flow[None]]:
        """The flow that compacts the shards below a prefix, and its driver.

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
        backend, operations = self.driver.backend, self.operations
        compaction = compaction_of(order=self.options.order, can_append=backend.can_append)
        flow = compact_below(operations.listing, prefix)
        return Driver(backend, compaction, self.driver.counters), flow

    def compact(self, prefix: str) -> None:
        """Compact the shards below a prefix, blocking."""
        driver, flow = self.compacting(prefix)
        driver.run(flow)

    def chunks_initialized(self, path: str, region: Region) -> Flow[npt.NDArray[np.bool_]]:
        """The flow that says which chunks of an array are stored."""
        operations = self.operations
        return chunks_initialized(operations.arrays, operations.batches.pending, path, region)

    def consolidating(self, path: str) -> Flow[list[str]]:
        """The flow that consolidates the indexes of the arrays at or below a path.

        Raises
        ------
        UnsupportedError
            If the base store tells no versions.
        """
        self.check_consolidation()
        operations = self.operations
        return consolidate_below(
            operations.catalog, operations.arrays, operations.batches.pending, path
        )

    def consolidate(self, path: str) -> list[str]:
        """As `consolidating`, when shards are sealed; blocking."""
        flow = self.consolidating(path)
        self.flush()
        return self.driver.run(flow)

    def check_consolidation(self) -> None:
        """Raise `UnsupportedError` if the base store tells no versions."""
        if not self.driver.backend.has_lasting_versions:
            raise UnsupportedError(
                f"{self.driver.backend!r} tells no versions of its objects, so nobody could see "
                "that a consolidated index still holds: open the store by its path, or through "
                "obstore"
            )

    @property
    def is_base_read_only(self) -> bool:
        """Whether the base store refuses writes."""
        return isinstance(self.base, Store) and self.base.read_only

    def writable(self) -> ShardingEngine:
        """The same with a base store that takes writes, as far as it offers that."""
        if not self.is_base_read_only or not isinstance(self.base, Store):
            return self
        base = self.base.with_read_only(False)
        return ShardingEngine(base, *self._parts[1:])

    def describe(self) -> str:
        """Arguments that make this, for a repr."""
        parts = [repr(self.driver.backend)]
        new, default = self.new_arrays, NewArrays(ShardingPolicy())
        if new.policy.chunks_per_shard is not None:
            parts.append(f"chunks_per_shard={new.policy.chunks_per_shard!r}")
        if new.transformers is not None:
            parts.append(f"storage_transformers={spell_transformers(new.transformers)!r}")
        elif new.declaration != default.declaration:
            parts.append(f"declaration={new.declaration!r}")
        if new.index is not None:
            parts.append(f"index_codecs={spell_index_codecs(new.index)!r}")
            parts.append(f"index_location={new.index.location!r}")
        if self.options.native != Options().native:
            parts.append(f"native={self.options.native!r}")
        parts += [
            f"{name}={getattr(self.options, name)!r}"
            for name in ("order", "strategy", "max_dead_bytes")
            if getattr(self.options, name) != getattr(Options(), name)
        ]
        parts += [
            f"{name}={getattr(self.files, name)!r}"
            for name in ("locking", "durability")
            if getattr(self.files, name) != getattr(DEFAULT_FILE_OPTIONS, name)
        ]
        if self.is_static:
            parts.append("static=True")
        reading, default_reading = self.options.reading, ReadOptions()
        parts += [
            f"{name}={getattr(reading, name)!r}"
            for name in ("max_gap_bytes", "max_coalesced_bytes")
            if getattr(reading, name) != getattr(default_reading, name)
        ]
        return ", ".join(parts)


def open_sharding(
    store: BaseStoreLike,
    *,
    chunks_per_shard: ChunksPerShard,
    declaration: V3Declaration | None,
    storage_transformers: Transformers,
    index_codecs: Sequence[Any] | None,
    index_location: Literal["start", "end"] | None,
    native: Native,
    order: EntryOrder,
    strategy: Strategy,
    locking: Locking,
    durability: Durability,
    max_dead_bytes: int | None,
    max_gap_bytes: int | None,
    max_coalesced_bytes: int | None,
    storage_options: Mapping[str, Any] | None,
    static: bool,
) -> ShardingEngine:
    """Check the options that both stores take, and open the base store.

    Raises
    ------
    SpecError, TypeError
        If an option or the base store is not valid.
    """
    if native not in ("flat", "passthrough"):
        raise SpecError(f"native is 'flat' or 'passthrough', got {native!r}")
    if declaration not in (None, "codec", "storage_transformers"):
        raise SpecError(f"declaration is 'codec' or 'storage_transformers', got {declaration!r}")
    transformers = _check_transformers(storage_transformers)
    if declaration == "codec" and (native == "passthrough" or transformers is not None):
        raise SpecError(
            "arrays declared by the codec are native sharded arrays: with storage_transformers, or "
            "with native='passthrough', leave declaration away"
        )
    if declaration is None:
        is_codec = native == "flat" and transformers is None
        declaration = "codec" if is_codec else "storage_transformers"
    check_order(order)
    files = FileOptions(locking, durability)
    reading = ReadOptions()
    if max_gap_bytes is not None:
        reading = replace(reading, max_gap_bytes=whole_number("max_gap_bytes", max_gap_bytes))
    if max_coalesced_bytes is not None:
        n = whole_number("max_coalesced_bytes", max_coalesced_bytes)
        reading = replace(reading, max_coalesced_bytes=n)
    if max_dead_bytes is not None:
        max_dead_bytes = whole_number("max_dead_bytes", max_dead_bytes)
    base = base_store_of(store, storage_options)
    index = check_index(index_codecs, index_location)
    new_arrays = NewArrays(ShardingPolicy(chunks_per_shard), declaration, transformers, index)
    return ShardingEngine(
        base, new_arrays, Options(order, reading, native, strategy, max_dead_bytes), files, static
    )


def _strategy_for(strategy: Strategy, backend: Backend) -> WriteStrategy:
    """The strategy that a user's choice means on a base store.

    Raises
    ------
    SpecError
        If there is none of that name, or the base store cannot do it.
    """
    if strategy not in get_args(Strategy):
        names = ", ".join(map(repr, get_args(Strategy)))
        raise SpecError(f"strategy is one of {names}, got {strategy!r}")
    if strategy == "auto":
        return "append" if backend.can_append else "rewrite"
    if strategy != "rewrite" and not backend.can_append:
        raise SpecError(
            f"strategy={strategy!r} changes files in their place: it is for local files, "
            f"with locking='os', got {backend!r}; leave it away, or take 'rewrite'"
        )
    return strategy


def _check_transformers(given: Transformers) -> tuple[TransformerSpec, ...] | None:
    if given is None:
        return None
    specs = transformer_specs([given] if isinstance(given, str | Mapping) else given)
    if [spec.name for spec in specs].count(SHARDING) > 1:
        raise SpecError(f"sharding comes once in a stack, got {given!r}")
    for spec in specs:
        check_known(spec.name)
    return specs


def check_index(
    codecs: Sequence[Any] | None, location: Literal["start", "end"] | None
) -> IndexFormat | None:
    """The form of the shard index that options ask for; ``None`` if they do not.

    Raises
    ------
    SpecError
        If there is no such form.
    """
    if codecs is None and location is None:
        return None
    if codecs is None:
        codecs = spell_index_codecs(ZEP2_INDEX)
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    spelled = [little if codec == "bytes" else codec for codec in items_of("index_codecs", codecs)]
    index = index_format({"index_codecs": spelled, "index_location": location or "end"})
    if index is None:
        raise SpecError(
            "index_codecs is ['bytes'] or ['bytes', 'crc32c'], or the same as metadata writes "
            f"it, and index_location is 'start' or 'end'; got {codecs!r} and {location!r}"
        )
    return index


def check_writable(is_read_only: bool) -> None:
    """Raise `ReadOnlyError` if it is."""
    if is_read_only:
        raise ReadOnlyError

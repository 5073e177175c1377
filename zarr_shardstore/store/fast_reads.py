"""Reads of chunks whose array, index and open file are all cached: no flow is run.

A hit is the value that the flow would return. On a miss, or while a batch buffers writes, the
caller runs the flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

from zarr_shardstore.arrays.catalog import Catalog
from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.format.ranges import ByteRange, column_of_ranges, resolve_range
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.driver import Driver
from zarr_shardstore.io.local.cached_files import MISS, CachedValue, find_file
from zarr_shardstore.operations.batch import WriteBuffer
from zarr_shardstore.shards.index_reads import try_read_indexes
from zarr_shardstore.shards.read import ShardReads

_MIN_TO_WARM = 8
"""Chunks of one shard in one call from which on its index is read before the chunks."""

_SHARDS_AT_ONCE = 64
"""Shards whose indexes are read together; half of the number of cached open files."""

KeyRange: TypeAlias = tuple[str, ByteRange | None]


class FastReads:
    """Reads by the cache of open shard files; other base stores than local files always miss.

    Thread safety: may be used from any thread.
    """

    def __init__(self, driver: Driver, catalog: Catalog, buffer: WriteBuffer) -> None:
        backend = driver.backend
        self._root: str | None = None
        if isinstance(backend, LocalBackend) and backend.keeps_handles:
            self._root = backend.path_of("")
        self._catalog = catalog
        self._buffer = buffer
        self._driver = driver
        self._count = driver.counters.count_fast_read

    @property
    def is_possible(self) -> bool:
        """Whether the base store has local files, so that there may be hits."""
        return self._root is not None

    def get(self, key: str, byte_range: ByteRange | None, *, at_once: bool = False) -> CachedValue:
        """Return the value of a chunk, ``None`` if it is missing, `MISS` if the flow must be run.

        Parameters
        ----------
        at_once
            Return `MISS` rather than wait for a disk.
        """
        if self._root is None or self._buffer.is_active:
            return MISS
        if byte_range is not None:
            resolve_range(byte_range, 0)  # raises if it is not valid, hit or miss
        for table in self._catalog.arrays.current().key_tables:
            place = table.translate(key)
            if place is None:
                continue
            path = self._root + place[0]
            file = find_file(path)
            spec = table.layout.spec
            if file is None or (file.spec is not spec and not file.has_spec(spec)):
                return MISS
            value = file.read(path, place[1], byte_range, may_wait=not at_once)
            if value is not MISS:
                self._count()
            return value
        return MISS

    def get_many(self, key_ranges: Sequence[KeyRange]) -> list[CachedValue]:
        """As `get`, of many keys.

        Chunks of one shard are all hits or all misses: one call reads a snapshot of each shard.
        """
        if len(key_ranges) == 1:
            return [self.get(*key_ranges[0])]
        values: list[CachedValue] = [MISS] * len(key_ranges)
        if not values or self._root is None or self._buffer.is_active:
            return values
        keys = [key for key, _ in key_ranges]
        byte_ranges = column_of_ranges([byte_range for _, byte_range in key_ranges])
        groups = self._catalog.arrays.current().reads_by_shard(keys, byte_ranges)
        if not groups and len(keys) >= _MIN_TO_WARM:
            with suppress(ShardStoreError):  # the flow will raise it
                self._driver.run(self._catalog.chunks_of(keys[:1]))
            groups = self._catalog.arrays.current().reads_by_shard(keys, byte_ranges)
        self._warm_up(groups)
        for reads in groups:
            path = self._root + reads.shard.key
            file = find_file(path)
            if file is None or not file.has_spec(reads.shard.layout.spec):
                continue
            found = file.read_many(path, reads.entry_ids, reads.byte_ranges)
            if found is not None:
                for i, value in zip(reads.positions, found, strict=True):
                    values[i] = value
                    self._count()
        return values

    def _warm_up(self, groups: Sequence[ShardReads]) -> None:
        """Read the indexes of shards of which many chunks are wanted and nothing is cached."""
        cold = [
            reads.shard
            for reads in groups
            if len(reads.positions) >= _MIN_TO_WARM
            and find_file(f"{self._root}{reads.shard.key}") is None
        ]
        for first in range(0, len(cold), _SHARDS_AT_ONCE):
            self._driver.run(try_read_indexes(cold[first : first + _SHARDS_AT_ONCE]))

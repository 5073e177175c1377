"""Reads of encoded chunks that a program plans shard by shard, as a loader of batches does."""

from __future__ import annotations

import asyncio
import os
from asyncio import AbstractEventLoop
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from zarr.core.sync import sync

from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.format.arguments import array_path
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ArrayLayout
from zarr_shardstore.shards.read import ShardReads, price_of
from zarr_shardstore.shards.requests import Flow, GetIndex, ask
from zarr_shardstore.store.direct_reads import ChunkReader, DirectReads
from zarr_shardstore.store.engine import ShardingEngine
from zarr_shardstore.zarr_hooks.box_jobs import Values

EntryPart: TypeAlias = tuple[Coords, npt.NDArray[np.int64]]
"""Coordinates of a shard, and of some of its chunks, n x ndim."""


class EntryReader(NamedTuple):
    """Reads of chunks of one array that a program plans shard by shard; for any thread."""

    engine: ShardingEngine
    chunks: ChunkReader
    layout: ArrayLayout | None
    """``None``: no shards are known, so each chunk counts as one."""
    stored: StoredArray
    given: ShardingEngine
    """Engine of the store that was given, whose batches buffer values."""

    @classmethod
    def of(cls, store: DirectReads, path: str) -> EntryReader:
        """Return a reader of an array, as its document is now."""
        by_chunks: Any = store._by_chunks()
        reader = by_chunks._current_reader_of(array_path(path))
        layout = sync(by_chunks._layout_of(reader.first_key, reads=True))
        is_known = layout is not None and layout.grid_shape == reader.grid_shape
        engine = by_chunks._engine
        stored, _ = engine.chunk_readers[reader.node.path]
        return cls(engine, reader, layout if is_known else None, stored, store._engine)

    @property
    def can_block(self) -> bool:
        """Whether `read` leaves zarr's event loop alone."""
        return self.engine.driver.backend.mode != "async"

    @property
    def _reads_by_key(self) -> bool:
        """Whether shards are not known, or a batch may have newer values of their chunks."""
        return self.layout is None or self.engine.operations.buffer.is_active

    def read(self, parts: Sequence[EntryPart]) -> Values:
        """Return the encoded chunks of all parts, ``None`` for missing ones."""
        engine = self.engine
        if by_key := self._reads_by_key:
            values = engine.get_many_blocking(self._keys(parts))
        else:
            values = [*chain.from_iterable(engine.get_groups_blocking(self._groups(parts)))]
        if engine.root is None:
            if not self._is_cached:
                engine.driver.run(self._known())
        elif not by_key:
            self._confirm()
        return values

    @property
    def _is_cached(self) -> bool:
        """Whether no store of this process has changed the document."""
        known = self.engine.operations.arrays.current().arrays
        return known.get(self.chunks.node) is self.stored

    def _known(self) -> Flow[StoredArray]:
        """Return the array as last read in this process, or refuse another one."""
        node = self.chunks.node
        found = (yield from self.engine.operations.arrays.lookup([node]))[node]
        if not isinstance(found, StoredArray) or not self.stored.has_same_chunks(found):
            raise ShardConflictError.of_replaced(node.path)
        return found

    def _confirm(self) -> None:
        """Refuse an array that another process has replaced, also if its indexes are cached."""
        layout: Any = self.layout
        confirming = self.engine.operations.arrays.confirm({layout.document_key: layout})
        self.engine.driver.run(confirming)

    def read_into(
        self, parts: Sequence[EntryPart], buffers: Sequence[Sequence[Any]], nbytes: int
    ) -> bool:
        """Read chunks of shard files with cached indexes, each into the buffers of a list, which
        together have `nbytes`.

        False: the chunks must be read otherwise, and the buffers may have any bytes.
        """
        engine, left = self.engine, iter(buffers)
        if self._reads_by_key or engine.root is None or not hasattr(os, "preadv"):
            return False

        def pread(fd: int, stored_nbytes: int, offset: int) -> Sequence[Any]:
            if stored_nbytes != nbytes:
                return b"" if stored_nbytes else b"-"  # another length: a miss
            return range(os.preadv(fd, next(left), offset))  # as long as the bytes that were read

        found = engine.get_groups_cached(self._groups(parts), pread)
        self._confirm()
        return all(values is not None and None not in values for values in found)

    def shape_now(self) -> tuple[int, ...]:
        """Return the shape in the document: of a local file as stored now, else as last read here.
        With ``view="shards"`` an open batch stores first what it has buffered.

        Raises
        ------
        ShardConflictError
            If the array is another one now.
        """
        engine, node, given = self.engine, self.chunks.node, self.given
        if given is not engine:  # its buffer is not looked into
            given.driver.run(given.operations.flusher.flush_array(node))
        if engine.root is not None:
            store: Any = self.chunks.array.store
            store._current_reader_of(node.path)
        found = engine.driver.run(self._known())
        geometry = found.document.geometry
        return self.chunks.array.shape if geometry is None else geometry.shape

    def begin(self, parts: Sequence[EntryPart], loop: AbstractEventLoop) -> Future[Values]:
        """Begin to `read` in an event loop that runs in another thread."""

        async def read() -> Values:
            if self._reads_by_key:
                values = await self.engine.get_many(self._keys(parts))
            else:
                found = await self.engine.get_groups(self._groups(parts))
                values = [*chain.from_iterable(found)]
            if not self._is_cached:
                await self.engine.driver.run_async(self._known(), only_reads=True)
            return values

        return asyncio.run_coroutine_threadsafe(read(), loop)

    def price(self, parts: Sequence[EntryPart]) -> tuple[int, int]:
        """Return the requests for chunks of shards, and their encoded bytes, by the indexes.

        A shard that is not stored is asked for each time.
        """
        groups, operations = self._groups(parts), self.engine.operations
        found = self.engine.driver.run(ask([GetIndex(reads.shard) for reads in groups]))
        n_missing = sum(each.decoded is None for each in found)
        n_requests, nbytes = price_of(groups, found, operations.reading)
        return n_missing + n_requests, nbytes

    def _groups(self, parts: Sequence[EntryPart]) -> list[ShardReads]:
        layout, groups = cast(Any, self.layout), list[ShardReads]()
        for coords, chunks in parts if layout is not None else ():
            shard, ids = layout.shard(coords), np.zeros(len(chunks), np.int64)
            for column, (start, stop) in zip(chunks.T, layout.spec.boxes.box(coords), strict=True):
                ids = ids * (stop - start) + column - start
            groups.append(ShardReads(shard, None, entry_ids=ids.tolist()))
        return groups

    def _keys(self, parts: Sequence[EntryPart]) -> list[tuple[str, None]]:
        return [(key, None) for _, coords in parts for key in self.chunks.keys(coords)]

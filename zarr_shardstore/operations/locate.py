"""Places of chunks: the shapes of shards, the shard of each chunk, and the stored chunks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.arrays.array_cache import ArrayCache
from zarr_shardstore.arrays.catalog import Catalog, InvalidChunkKey, TransformedKey, layouts_of
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardStoreError, SpecError, UnsupportedError
from zarr_shardstore.format.arguments import array_path, box_of
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ChunkRef
from zarr_shardstore.metadata.documents import Node
from zarr_shardstore.operations.batch import Flusher
from zarr_shardstore.operations.walk import ObjectGrid, Walk, read_stored, sizes_of
from zarr_shardstore.shards.index_reads import read_indexes
from zarr_shardstore.shards.requests import Flow
from zarr_shardstore.shards.stack import in_shared_rounds

Owner: TypeAlias = "ChunkRef | TransformedKey | InvalidChunkKey | None"
"""The chunk or transformed key that a key names; ``None``: the key passes through."""

Location: TypeAlias = tuple[str, int, int] | None
"""Key of a stored object, and offset and size in bytes of a value there."""

Region: TypeAlias = Sequence[slice] | None
"""A slice of chunk coordinates for each dimension; the last dimensions may be left out."""


def array_at(arrays: ArrayCache, path: str) -> Flow[StoredArray]:
    """Return the array at a path, one that is sharded if there are two; `SpecError` if none is."""
    path = array_path(path)
    found: StoredArray | None = None
    for node in (Node("v3", path), Node("v2", path), Node("draft", path)):
        array = (yield from arrays.lookup([node]))[node]
        if isinstance(array, ShardStoreError):
            raise array
        if array is not None and array.sharding[0] is not None:
            return array
        found = found or array
    if found is None:
        raise SpecError(f"there is no array at {path!r}")
    return found


def shard_shape(arrays: ArrayCache, path: str) -> Flow[Coords | None]:
    """Return the shape of the shards in elements, clipped to the grid, or of the largest;
    ``None``: not sharded."""
    array = yield from array_at(arrays, path)
    (layout, _), geometry = array.sharding, array.document.geometry
    if layout is None or geometry is None:
        return None
    spec = layout.spec
    if geometry.sides or spec.sides:
        return geometry.in_boxes(spec.boxes).chunk_shape
    cps = spec.chunks_per_shard
    sides = zip(geometry.chunk_shape, cps, array.grid_shape or cps, strict=True)
    return tuple(size * (min(n, in_grid) if in_grid else n) for size, n, in_grid in sides)


def shard_ids(catalog: Catalog, keys: Sequence[str]) -> Flow[list[Hashable]]:
    """Return ids of keys, a hint for writers of whole shards: chunks of one have equal ids."""
    yield from catalog.chunks_of(keys[:1])  # which makes a key table for the others
    pairs = zip(keys, (yield from catalog.chunks_of(keys)), strict=True)
    return [shard_id(*pair) for pair in pairs]


def shard_id(key: str, owner: Owner) -> Hashable:
    if isinstance(owner, TransformedKey):
        layout, _ = owner.array.sharding
        owner = None if layout is None else layout.chunk_of_key(key)
    return owner.shard.key if isinstance(owner, ChunkRef) else key


def locate(flusher: Flusher, keys: Sequence[str]) -> Flow[list[Location]]:
    """Return where values are stored. Cost: the documents that are not cached, then one round."""
    owners = yield from flusher.catalog.chunks_of(keys)
    chunks = [_chunk_of(key, owner) for key, owner in zip(keys, owners, strict=True)]
    shards = list({chunk.shard: None for chunk in chunks if chunk is not None})
    if flusher.buffer.is_active:
        yield from flusher.flush_shards([s.key for s in shards if flusher.buffer.get(s.key)])
    others = [key for key, owner in zip(keys, owners, strict=True) if owner is None]
    yield from flusher.catalog.arrays.confirm(layouts_of(shards))
    found, sizes = yield from in_shared_rounds([read_indexes(shards), sizes_of(others)])
    indexes = dict(zip(shards, found, strict=True))
    locations: list[Location] = []
    for key, chunk in zip(keys, chunks, strict=True):
        index, size = None if chunk is None else indexes[chunk.shard], sizes.get(key)
        entry = None if chunk is None or index is None else index.entry(chunk.entry_id)
        if chunk is not None and entry is not None:
            locations.append((chunk.shard.key, *entry))
        else:
            locations.append(None if size is None else (key, 0, size))
    return locations


def _chunk_of(key: str, owner: object) -> ChunkRef | None:
    if not isinstance(owner, TransformedKey):
        return owner if isinstance(owner, ChunkRef) else None
    layout, below = owner.array.sharding
    if layout is None or below:
        raise UnsupportedError(
            f"storage transformers of the array {owner.array.node.path!r} change the stored bytes "
            f"of {key!r}, so they are at no place: read it through the store"
        )
    return layout.chunk_of_key(key)


def chunks_initialized(flusher: Flusher, path: str, region: Region) -> Flow[npt.NDArray[np.bool_]]:
    """Return whether each chunk of a region of the array at `path` is stored.

    Cost: a listing of the smallest directory with all shards of the region, and their indexes.
    """
    array = yield from array_at(flusher.catalog.arrays, path)
    layout, _ = array.sharding
    if layout is None:
        raise SpecError(f"the array {array.node.path!r} is not sharded")
    if (yield from flusher.catalog.arrays.confirm(layouts_of([array]))):
        array = yield from array_at(flusher.catalog.arrays, path)  # it has grown
    yield from flusher.flush_array(array.node)
    grid = ObjectGrid.of_array(array)
    box = box_of(region, grid.grid_shape)
    out = np.zeros([stop - start for start, stop in box], bool)
    walk = Walk(grid, box)
    while out.size and walk.has_more:
        for stored in (yield from read_stored(grid, (yield from walk.next_round()))):
            stored.check()
            stored.mark(out, box)
    return out

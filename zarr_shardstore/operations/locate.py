"""Shapes of shards and locations of chunks: what a caller needs to align its writes and reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from zarr_shardstore.arrays.array_cache import ArrayCache
from zarr_shardstore.arrays.catalog import TransformedKey
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardStoreError, SpecError, UnsupportedError
from zarr_shardstore.format.arguments import array_path
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ChunkRef
from zarr_shardstore.metadata.documents import Node
from zarr_shardstore.operations.buffered import Flusher
from zarr_shardstore.shards.index_reads import read_indexes
from zarr_shardstore.shards.requests import Flow, GetSize
from zarr_shardstore.shards.stack import in_shared_rounds, split_at_sharding

Location: TypeAlias = tuple[str, int, int] | None
"""Key of a stored object, and offset and size in bytes of a value there."""


def shard_shape(arrays: ArrayCache, path: str) -> Flow[Coords | None]:
    """Return the shape of the shards of an array in elements, clipped to its grid; ``None``
    if it is not sharded."""
    array = yield from array_at(arrays, path)
    split = split_at_sharding(array.stack)
    if split is None or array.document.geometry is None:
        return None
    sizes, cps = array.document.geometry.chunk_shape, split[0].layout.spec.chunks_per_shard
    sides = zip(sizes, cps, array.grid_shape or cps, strict=True)
    return tuple(size * (min(n, in_grid) if in_grid else n) for size, n, in_grid in sides)


def locate(flusher: Flusher, keys: Sequence[str]) -> Flow[list[Location]]:
    """Return where values are stored. Cost: the documents that are not cached, then one round."""
    owners = yield from flusher.catalog.chunks_of(keys)
    chunks = [_chunk_of(key, owner) for key, owner in zip(keys, owners, strict=True)]
    shards = list({chunk.shard: None for chunk in chunks if chunk is not None})
    if flusher.buffer.is_active:
        yield from flusher.flush_shards([s.key for s in shards if flusher.buffer.get(s.key)])
    others = [key for key, owner in zip(keys, owners, strict=True) if owner is None]
    found, nbytes = yield from in_shared_rounds([read_indexes(shards), _sizes(others)])
    indexes, sizes = dict(zip(shards, found, strict=True)), dict(zip(others, nbytes, strict=True))
    locations: list[Location] = []
    for key, chunk in zip(keys, chunks, strict=True):
        index, size = None if chunk is None else indexes[chunk.shard], sizes.get(key)
        entry = None if chunk is None or index is None else index.entry(chunk.entry_id)
        if chunk is not None and entry is not None:
            locations.append((chunk.shard.key, *entry))
        else:
            locations.append(None if size is None else (key, 0, size))
    return locations


def _sizes(keys: Sequence[str]) -> Flow[list[int | None]]:
    return (yield [GetSize(key) for key in keys]) if keys else []


def _chunk_of(key: str, owner: object) -> ChunkRef | None:
    if not isinstance(owner, TransformedKey):
        return owner if isinstance(owner, ChunkRef) else None
    split = split_at_sharding(owner.array.stack)
    if split is None or split[1]:
        raise UnsupportedError(
            f"storage transformers of the array {owner.array.node.path!r} change the stored bytes "
            f"of {key!r}, so they are at no place: read it through the store"
        )
    return split[0].layout.chunk_of_key(key)


def array_at(arrays: ArrayCache, path: str) -> Flow[StoredArray]:
    """Return the array at a path, one that is sharded if there are two; `SpecError` if none is."""
    path = array_path(path)
    found: StoredArray | None = None
    for node in (Node("v3", path), Node("v2", path), Node("draft", path)):
        array = (yield from arrays.lookup([node]))[node]
        if isinstance(array, ShardStoreError):
            raise array
        if array is not None and split_at_sharding(array.stack) is not None:
            return array
        found = found or array
    if found is None:
        raise SpecError(f"there is no array at {path!r}")
    return found

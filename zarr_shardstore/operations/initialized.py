"""Stored chunks of a region of an array, as booleans from the indexes of its shards.

No chunk key is spelled and no chunk is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from posixpath import commonpath, dirname
from reprlib import repr as short
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.arrays.array_cache import ArrayCache
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import CorruptShardError, ShardStoreError, SpecError
from zarr_shardstore.format.arguments import array_path, items_of
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import Box, ShardRef, grid_box
from zarr_shardstore.format.shard import MISSING, ShardIndex
from zarr_shardstore.metadata.documents import Node
from zarr_shardstore.operations.buffered import Flusher
from zarr_shardstore.shards.index_reads import index_nbytes_of, rounds_of, try_read_indexes
from zarr_shardstore.shards.requests import Flow
from zarr_shardstore.shards.shard_listing import KeyPages
from zarr_shardstore.shards.sharding import split_at_sharding
from zarr_shardstore.shards.stack import ValueTransformer, run_above

Region: TypeAlias = Sequence[slice] | None
"""A slice of chunk coordinates for each dimension; the last dimensions may be left out."""

_MAX_CHUNKS = 2**32
"""Bytes of a result. A larger region is a mistake, or comes from hostile metadata."""


def chunks_initialized(
    arrays: ArrayCache, flusher: Flusher, path: str, region: Region
) -> Flow[npt.NDArray[np.bool_]]:
    """Return whether each chunk of a region of the array at `path` is stored.

    Cost: a listing of the smallest directory with all shards of the region, and the indexes of
    those that are stored.
    """
    array = yield from _sharded_array(arrays, path)
    yield from flusher.flush_array(array.node)
    split = split_at_sharding(array.stack)
    assert split is not None
    assert array.grid_shape is not None
    layout, below = split[0].layout, split[1]
    box = _box_of(region, array.grid_shape)
    out = np.zeros([stop - start for start, stop in box], bool)
    if not out.size:
        return out
    sides = zip(box, layout.spec.chunks_per_shard, strict=True)
    shard_ranges = [range(start // n, -(-stop // n)) for (start, stop), n in sides]

    def mark(shards: Iterable[tuple[ShardRef, object]]) -> Flow[None]:
        """Mark the chunks of shards, whose versions a listing has just shown."""
        for part in rounds_of(shards, lambda item: index_nbytes_of(item[0])):
            refs, versions = [shard for shard, _ in part], [version for _, version in part]
            flow = try_read_indexes(refs, versions, cache=False)
            indexes = yield from run_above(below, flow)
            for shard, index in zip(refs, indexes, strict=True):
                if isinstance(index, CorruptShardError):
                    raise index
                if index is not None:
                    _mark_chunks(out, box, shard, index)

    if not all(isinstance(transformer, ValueTransformer) for transformer in below):
        # Shards may have other keys in the base store.
        yield from mark((layout.shard(coords), None) for coords in product(*shard_ranges))
        return out
    corners = [layout.shard(tuple(r[i] for r in shard_ranges)).key for i in (0, -1)]
    common = commonpath([dirname(key) for key in corners])
    pages = KeyPages([f"{common}/" if common else ""])
    while pages.has_more:
        page = yield from pages.next_page()
        yield from mark(
            (shard, version)
            for key, version in zip(page, page.versions, strict=True)
            if key.startswith(layout.prefix)
            and (shard := layout.shard_of_key(key)) is not None
            and all(c in r for c, r in zip(shard.coords, shard_ranges, strict=True))
        )
    return out


def _box_of(region: Region, grid_shape: Coords) -> Box:
    """Return the chunks of a region, clipped to the grid as Python clips slices."""
    slices = () if region is None else tuple(items_of("region", region))
    if len(slices) > len(grid_shape) or not all(isinstance(s, slice) for s in slices):
        raise SpecError(
            f"region is a slice for each of {len(grid_shape)} dims, got {short(region)}"
        )
    slices += (slice(None),) * (len(grid_shape) - len(slices))
    box = []
    for part, n in zip(slices, grid_shape, strict=True):
        start, stop, step = part.indices(n)
        if step != 1:
            raise SpecError(f"a region has no steps, got {region!r}")
        box.append((start, max(start, stop)))
    n_chunks = math.prod(stop - start for start, stop in box)
    if n_chunks > _MAX_CHUNKS:
        raise SpecError(f"the region has {n_chunks} chunks, a call takes at most {_MAX_CHUNKS}")
    return tuple(box)


def _mark_chunks(out: npt.NDArray[np.bool_], box: Box, shard: ShardRef, index: ShardIndex) -> None:
    """Set the elements of `out`, which has the shape of the box, for the chunks of one shard."""
    cps = shard.layout.spec.chunks_per_shard
    present = (index.fields != MISSING).any(axis=1).reshape(cps)
    covered = grid_box(shard.coords, cps, shard.layout.grid_shape)
    both = [(max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in zip(box, covered, strict=True)]
    there = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, covered, strict=True))
    here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, box, strict=True))
    out[here] = present[there]


def _sharded_array(arrays: ArrayCache, path: str) -> Flow[StoredArray]:
    path = array_path(path)
    is_there = False
    for node in (Node("v3", path), Node("v2", path), Node("draft", path)):
        array = (yield from arrays.lookup([node]))[node]
        if isinstance(array, ShardStoreError):
            raise array
        if array is not None and split_at_sharding(array.stack) is not None:
            return array
        is_there |= array is not None
    raise SpecError(
        f"the array {path!r} is not sharded" if is_there else f"there is no array at {path!r}"
    )

"""Stored chunks of a region of an array, as booleans from the indexes of its shards.

No chunk key is spelled and no chunk is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from reprlib import repr as short
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.arrays.array_cache import ArrayCache
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import CorruptShardError, ShardStoreError, SpecError
from zarr_shardstore.format.arguments import array_path, items_of
from zarr_shardstore.format.index import MISSING, ShardIndex
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ArrayLayout, Box, ShardRef, grid_box
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


def box_of_region(region: Region, grid_shape: Coords) -> Box:
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


def directory_of_box(layout: ArrayLayout, box: Box) -> str:
    """Return the smallest directory of the base store with all shards that a box touches."""
    ranges = _shard_ranges(layout, box)
    first = layout.shard(tuple(r[0] for r in ranges)).key.split("/")
    last = layout.shard(tuple(r[-1] for r in ranges)).key.split("/")
    n_common = 0
    while n_common < len(first) - 1 and first[n_common] == last[n_common]:
        n_common += 1
    return "".join(f"{part}/" for part in first[:n_common])


def shards_of_box(layout: ArrayLayout, box: Box) -> Iterator[ShardRef]:
    """Return all shards that a box touches, whether they are stored or not."""
    return map(layout.shard, itertools.product(*_shard_ranges(layout, box)))


def is_in_box(shard: ShardRef, box: Box) -> bool:
    """Whether a shard may have chunks of a box."""
    ranges = _shard_ranges(shard.layout, box)
    return all(c in r for c, r in zip(shard.coords, ranges, strict=True))


def mark_chunks(out: npt.NDArray[np.bool_], box: Box, shard: ShardRef, index: ShardIndex) -> None:
    """Set the elements of `out`, which has the shape of the box, for the chunks of one shard."""
    cps = shard.layout.spec.chunks_per_shard
    present = (index.fields != MISSING).any(axis=1).reshape(cps)
    covered = grid_box(shard.coords, cps, shard.layout.grid_shape)
    both = [(max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in zip(box, covered, strict=True)]
    there = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, covered, strict=True))
    here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, box, strict=True))
    out[here] = present[there]


def _shard_ranges(layout: ArrayLayout, box: Box) -> list[range]:
    cps = layout.spec.chunks_per_shard
    return [range(a // n, -(-b // n)) for (a, b), n in zip(box, cps, strict=True)]


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
    sharding, below = split
    box = box_of_region(region, array.grid_shape)
    out = np.zeros([stop - start for start, stop in box], bool)
    if not out.size:
        return out
    layout = sharding.layout

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
                    mark_chunks(out, box, shard, index)

    if not all(isinstance(transformer, ValueTransformer) for transformer in below):
        # Shards may have other keys in the base store.
        yield from mark((shard, None) for shard in shards_of_box(layout, box))
        return out
    pages = KeyPages([directory_of_box(layout, box)])
    while pages.has_more:
        page = yield from pages.next_page()
        found = [
            (shard, version)
            for key, version in zip(page, page.versions, strict=True)
            if key.startswith(layout.prefix)
            and (shard := layout.shard_of_key(key)) is not None
            and is_in_box(shard, box)
        ]
        yield from mark(found)
    return out


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

"""Which chunks of a sharded array are stored: a listing that spells no chunk keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import CorruptShardError, ShardStoreError, SpecError
from zarr_shardstore.format.arguments import array_path
from zarr_shardstore.format.documents import Node
from zarr_shardstore.format.index import ShardIndex
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.plan.holding import read_indexes_with_held, split_at_sharding, with_held
from zarr_shardstore.plan.initialized import (
    Region,
    box_of_region,
    directory_of_box,
    is_in_box,
    mark_chunks,
    shards_of_box,
)
from zarr_shardstore.plan.key_pages import KeyPages
from zarr_shardstore.plan.pending import PendingShards
from zarr_shardstore.plan.requests import Flow
from zarr_shardstore.plan.stack import ValueTransformer, through
from zarr_shardstore.store.arrays import StoredArray
from zarr_shardstore.store.known_arrays import KnownArrays

__all__ = ["chunks_initialized"]

_SHARDS_PER_ROUND = 64

_Versioned: TypeAlias = tuple[ShardRef, object]


def chunks_initialized(
    known: KnownArrays, pending: PendingShards, path: str, region: Region
) -> Flow[npt.NDArray[np.bool_]]:
    """Whether each chunk of a region of the array at `path` is stored.

    Cost: a listing of the smallest directory that holds the shards of the region, and the indexes
    of those that are there.

    Raises
    ------
    SpecError
        If there is no sharded array, or the region is not valid.
    CorruptShardError
        If an index is damaged.
    """
    array = yield from _sharded_array(known, path)
    split = split_at_sharding(with_held(array.stack, pending))
    assert split is not None
    assert array.grid_shape is not None
    sharding, below = split
    box = box_of_region(region, array.grid_shape)
    out = np.zeros([stop - start for start, stop in box], bool)
    if not out.size:
        return out
    layout = sharding.layout

    def take(shards: Sequence[_Versioned]) -> Flow[None]:
        refs = [shard for shard, _ in shards]
        indexes: Sequence[ShardIndex | CorruptShardError | None]
        if below:
            indexes = yield from through(below, sharding.read_indexes(refs))
        else:
            versions = [version for _, version in shards]
            indexes = yield from read_indexes_with_held(refs, pending, versions)
        for shard, index in zip(refs, indexes, strict=True):
            if isinstance(index, CorruptShardError):
                raise index
            if index is not None:
                mark_chunks(out, box, shard, index)

    if not all(isinstance(transformer, ValueTransformer) for transformer in below):
        # Shards may have other keys in the base store.
        for part in _parts((shard, None) for shard in shards_of_box(layout, box)):
            yield from take(part)
        return out
    pages = KeyPages([directory_of_box(layout, box)], pending)
    while pages.has_more:
        page = yield from pages.next_page()
        found: list[_Versioned] = []
        for key, version in zip(page, page.versions, strict=True):
            shard = layout.shard_of_key(key) if key.startswith(layout.prefix) else None
            if shard is not None and is_in_box(shard, box):
                found.append((shard, version))
        for part in _parts(iter(found)):
            yield from take(part)
    return out


def _parts(shards: Iterator[_Versioned]) -> Iterator[list[_Versioned]]:
    while part := list(islice(shards, _SHARDS_PER_ROUND)):
        yield part


def _sharded_array(known: KnownArrays, path: str) -> Flow[StoredArray]:
    path = array_path(path)
    is_there = False
    for node in (Node("v3", path), Node("v2", path), Node("draft", path)):
        array = (yield from known.know([node], known.now()))[node]
        if isinstance(array, ShardStoreError):
            raise array
        if array is not None and split_at_sharding(array.stack) is not None:
            return array
        is_there |= array is not None
    raise SpecError(
        f"the array {path!r} is not sharded" if is_there else f"there is no array at {path!r}"
    )

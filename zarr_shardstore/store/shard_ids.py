"""Which chunks share a shard, told from their keys alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from zarr_shardstore.format.grid import shard_coords_of
from zarr_shardstore.format.keys import Coords, check_key
from zarr_shardstore.format.layout import ChunkRef
from zarr_shardstore.plan.requests import Flow
from zarr_shardstore.plan.sharding import ShardingTransformer
from zarr_shardstore.store.catalog import Catalog, Misfit, StackedKey

__all__ = ["shard_ids"]


def shard_ids(catalog: Catalog, keys: Sequence[str]) -> Flow[Sequence[Hashable]]:
    """Which keys are chunks of one shard, by the array of the first: equal ids mean so.

    For a caller that wants to hand over whole shards; what is written and read does not depend
    on it. Cost: none, or one document.
    """
    (owner,) = yield from catalog.chunks_of(keys[:1])
    chunks = catalog.recent.chunks_of(keys)  # its array is one of these now
    left = [key for key, chunk in zip(keys, chunks, strict=True) if chunk is None]
    for key in left:
        check_key(key)
    rest = iter(_shard_ids(owner, left))
    return [next(rest) if chunk is None else chunk.shard.key for chunk in chunks]


def _shard_ids(
    owner: ChunkRef | StackedKey | Misfit | None, keys: Sequence[str]
) -> Sequence[Hashable]:
    """Shard coordinates of the keys of one array, in which `owner` is; other keys as they are."""
    coords_of: Callable[[str], Coords | None]
    if isinstance(owner, ChunkRef):
        layout = owner.shard.layout
        coords_of, prefix = layout.coords_of, layout.prefix
        chunks_per_shard = layout.spec.chunks_per_shard
    elif isinstance(owner, StackedKey):
        coords_of, prefix = owner.array.coords_of, owner.array.node.chunk_prefix
        shardings = [t for t in owner.array.stack if isinstance(t, ShardingTransformer)]
        if not shardings:
            return keys
        chunks_per_shard = shardings[0].layout.spec.chunks_per_shard
    else:
        return keys
    ids: list[Hashable] = []
    for key in keys:
        coords = coords_of(key) if key.startswith(prefix) else None
        ids.append(key if coords is None else shard_coords_of(coords, chunks_per_shard))
    return ids

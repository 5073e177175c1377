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
    ids: list[Hashable] = [None] * len(keys)
    for reads in catalog.recent.by_shard(keys):  # its array is one of the recent ones now
        for i in reads.positions:
            ids[i] = reads.shard.key
    left = [i for i, shard_id in enumerate(ids) if shard_id is None]
    for i in left:
        check_key(keys[i])
    for i, shard_id in zip(left, _shard_ids(owner, [keys[i] for i in left]), strict=True):
        ids[i] = shard_id
    return ids


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

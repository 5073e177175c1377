"""Flow that stores a shard anew if it has dead bytes, on any base store."""

from __future__ import annotations

from zarr_shardstore.format.index import IndexDamageError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.orders import EntryOrder
from zarr_shardstore.format.shard import build_shard, split_shard
from zarr_shardstore.plan.indexes import corrupt, read_indexes
from zarr_shardstore.plan.requests import Delete, Flow, Found, Get, GetSize, Set
from zarr_shardstore.plan.write import KEEP_HINT

__all__ = ["compact_shard"]


def compact_shard(shard: ShardRef, *, order: EntryOrder) -> Flow[None]:
    """Store a shard without its dead bytes, its entries in order; nothing if it has none.

    The caller must hold the shard. Cost: the index and the size; if there are dead bytes, a
    read and a write of the shard.

    Raises
    ------
    CorruptShardError
        If the shard is damaged; nothing was written.
    """
    (index,) = yield from read_indexes([shard])
    if index is None:
        return
    size: int | None
    (size,) = yield [GetSize(shard.key)]
    ids = index.present_ids()
    spec = shard.layout.spec
    if size == int(index.fields[ids, 1].sum()) + spec.index_nbytes and len(ids):
        return
    found: Found
    (found,) = yield [Get(shard.key)]
    if found.value is None:
        return
    try:
        entries = split_shard(found.value, spec.chunks_per_shard, spec.index)
    except IndexDamageError as damage:
        raise corrupt(shard, damage, KEEP_HINT) from damage
    if entries:
        yield [Set(shard.key, build_shard(entries, spec.chunks_per_shard, spec.index, order))]
    else:
        yield [Delete(shard.key)]

"""Compaction: shards below a prefix are stored without dead bytes."""

from __future__ import annotations

from collections.abc import Sequence

from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.orders import EntryOrder
from zarr_shardstore.io.runner import UpdateFlow
from zarr_shardstore.plan.append import seal_shard
from zarr_shardstore.plan.compact import compact_shard
from zarr_shardstore.plan.entries import EntryUpdate
from zarr_shardstore.plan.holding import split_at_sharding
from zarr_shardstore.plan.requests import Flow, UpdateShard
from zarr_shardstore.plan.stack import Stack, through
from zarr_shardstore.store.catalog import StackedKey
from zarr_shardstore.store.key_stream import raise_first
from zarr_shardstore.store.listing import Listing

__all__ = ["compact_below", "compaction_of", "shards_below"]


def compaction_of(*, order: EntryOrder, can_append: bool) -> UpdateFlow:
    """What a driver does for `UpdateShard` instead of an update: it compacts the shard.

    Parameters
    ----------
    can_append
        The base store changes shards in their place, so they may have gaps and journals.
    """

    def flow(
        request: UpdateShard, groups: Sequence[Sequence[EntryUpdate]]
    ) -> Flow[Sequence[Exception | None]]:
        shard, below = request.shard, request.below
        if can_append and not below:
            yield from seal_shard(shard, order=order, max_dead_share=0)
        else:
            one = compact_shard(shard, order=order)
            yield from through(below, one) if below else one
        return [None] * len(groups)

    return flow


def shards_below(
    listing: Listing, prefix: str
) -> Flow[tuple[list[tuple[ShardRef, Stack]], list[ShardStoreError]]]:
    """The shards that may hold keys starting with `prefix`, each with the transformers below it;
    and why others cannot be known."""
    shards: list[tuple[ShardRef, Stack]] = []
    errors: list[ShardStoreError] = []
    stream = yield from listing.stream(prefix)
    for *_, found in (yield from stream.all_located()):
        if isinstance(found, ShardRef):
            shards.append((found, ()))
        elif isinstance(found, StackedKey):
            shards += _shard_of(found)
        elif found is not None:
            errors.append(found)
    return shards, errors


def compact_below(listing: Listing, prefix: str) -> Flow[None]:
    """Ask for an update of each shard that may hold keys starting with `prefix`.

    Raises
    ------
    ShardStoreError
        The first error there was; the other shards are compacted.
    """
    shards, errors = yield from shards_below(listing, prefix)
    for shard, below in shards:  # one by one: a damaged shard stops no other
        try:
            yield [UpdateShard(shard, (), below)]
        except ShardStoreError as error:
            errors.append(error)
    raise_first(errors)


def _shard_of(stacked: StackedKey) -> list[tuple[ShardRef, Stack]]:
    found = split_at_sharding(stacked.array.stack)
    if found is None:
        return []
    sharding, below = found
    shard = sharding.layout.shard_of_key(stacked.key)
    return [] if shard is None else [(shard, below)]

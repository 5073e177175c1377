"""Write flow of the ``append`` strategy: a write costs its chunk and its entry of the index.

For base stores whose files can be changed in their place. What is written into a shard file,
and in which order, is decided by `OpenedShard`; here, when: a shard that is not there is
created with a gap, one that is replaced as a whole is rewritten, one with too many dead bytes
is compacted instead of growing, and one that is full is sealed.

Source: sharding storage transformer draft, "API implementation", set_partial_values.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.orders import EntryOrder
from zarr_shardstore.plan.entries import EntryUpdate
from zarr_shardstore.plan.opened_shard import Bytes, OpenedShard, gap_nbytes
from zarr_shardstore.plan.opening import (
    change_shard,
    live_entries,
    new_values,
    open_shard,
    store_with_gap,
)
from zarr_shardstore.plan.requests import (
    CloseShard,
    Delete,
    Flow,
)
from zarr_shardstore.plan.write import replaces_all_entries, update_shard

__all__ = ["MAX_DEAD_SHARE", "append_to_shard", "seal_shard"]

MAX_DEAD_SHARE = 0.5
"""Of the data of a shard: with more dead bytes it is compacted when it is sealed or must grow."""


def append_to_shard(
    shard: ShardRef, groups: Sequence[Sequence[EntryUpdate]], *, order: EntryOrder
) -> Flow[list[Exception | None]]:
    """As `zarr_shardstore.plan.write.update_shard`, by changes of the file in its place.

    Cost: for entries of n bytes in all, n bytes and 64 for each, at any size of the
    shard. Besides, now and then, the index: when a shard is opened, grows, or is sealed. What
    patches need of old values is read.

    Raises
    ------
    CorruptShardError
        If the index is damaged, or an entry whose value is patched; nothing was written.
    """
    updates = [update for group in groups for update in group]
    if replaces_all_entries(shard, updates):
        return (yield from update_shard(shard, groups, order=order))
    opened = yield from open_shard(shard)
    outcomes, new = yield from new_values(shard, opened, groups)
    if opened is not None and new:
        yield from _store(opened, new, order)
    elif opened is None:
        values = {i: value for i, value in new.items() if value is not None}
        if values:
            yield from _create(shard, values, order)
    return outcomes


def seal_shard(
    shard: ShardRef, *, order: EntryOrder, max_dead_share: float = MAX_DEAD_SHARE
) -> Flow[None]:
    """Take away the gap and the journal of a shard; compact it if it has many dead bytes.

    The caller must hold the shard.

    Parameters
    ----------
    max_dead_share
        Of the data; a shard with no more dead bytes is only trimmed.

    Raises
    ------
    CorruptShardError
        If the index is damaged; nothing was written.
    """
    opened = yield from open_shard(shard)
    if opened is not None:
        yield from _seal(opened, order, max_dead_share)


def _create(shard: ShardRef, values: dict[int, Bytes], order: EntryOrder) -> Flow[None]:
    """Store a new shard, with a gap for the entries that are missing."""
    nbytes = sum(map(len, values.values()))
    n_left = shard.n_grid_entries - len(values)
    gap = gap_nbytes(shard, n_left, nbytes / len(values), nbytes) if n_left > 0 else 0
    yield from store_with_gap(shard, values, order, gap)


def _store(opened: OpenedShard, new: dict[int, Bytes | None], order: EntryOrder) -> Flow[None]:
    """Give entries of a shard new values, or none."""
    shard = opened.shard
    n_present = opened.n_present_with(new)
    if n_present == 0:
        yield [Delete(shard.key)]
        return
    nbytes = sum(len(value) for value in new.values() if value is not None)
    if not opened.fits(nbytes) and _is_mostly_dead(opened, MAX_DEAD_SHARE):
        with suppress(CorruptShardError):  # then all stay where they are
            live = yield from live_entries(opened, without=new)
            live.update((i, v) for i, v in new.items() if v is not None)
            yield from _create(shard, live, order)
            return
    n_full = shard.n_grid_entries
    was_full = opened.n_present >= n_full
    yield from change_shard(opened, opened.change(new))
    # One that was sealed before is being written to again, perhaps because its array grows
    # slice by slice: it waits for flush or close.
    if n_present >= n_full and not was_full and not opened.was_sealed:
        yield from _seal(opened, order, MAX_DEAD_SHARE)


def _seal(opened: OpenedShard, order: EntryOrder, max_dead_share: float) -> Flow[None]:
    shard = opened.shard
    # Where entries are overwritten the place of a missing one is no dead byte.
    may_compact = not opened.is_fixed or max_dead_share == 0
    if may_compact and _is_mostly_dead(opened, max_dead_share):
        with suppress(CorruptShardError):
            live = yield from live_entries(opened)
            yield from store_with_gap(shard, live, order, 0)
            return
    yield from change_shard(opened, opened.trimmed())
    yield [CloseShard(shard.key)]


def _is_mostly_dead(opened: OpenedShard, max_share: float) -> bool:
    # A gap that is smaller than the index cannot be trimmed, so it counts as dead.
    n_index = opened.shard.layout.spec.index_nbytes
    n_left = opened.gap_nbytes if opened.gap_nbytes < n_index else 0
    return opened.dead_nbytes + n_left > max_share * (opened.data_nbytes + n_left)

"""Write flow of the ``append`` strategy: a write costs its chunk and its entry of the index.

For base stores whose files can be changed in their place. What is written into a shard file,
and in which order, is decided by `OpenedShard`; here, when: a shard that is not there is
created with a gap, one that is replaced as a whole is rewritten, one with too many dead bytes
is compacted instead of growing, and one that is full is sealed.

Source: sharding storage transformer draft, "API implementation", set_partial_values.
"""

from __future__ import annotations

from collections.abc import Sequence

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.orders import EntryOrder
from zarr_shardstore.plan.entries import EntryUpdate
from zarr_shardstore.plan.opened_shard import Bytes, OpenedShard, gap_nbytes, page_aligned
from zarr_shardstore.plan.opening import (
    change_shard,
    check_kept,
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

_N_DEAD_INDEXES = 4
"""As large as so many indexes dead bytes may be in any case."""


def append_to_shard(
    shard: ShardRef,
    groups: Sequence[Sequence[EntryUpdate]],
    *,
    order: EntryOrder,
    max_dead_nbytes: int | None = None,
) -> Flow[list[Exception | None]]:
    """As `zarr_shardstore.plan.write.update_shard`, by changes of the file in its place.

    Parameters
    ----------
    max_dead_nbytes
        A change that would leave more dead bytes stores the shard again without them.

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
        yield from _store(opened, new, order, max_dead_nbytes)
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
    gap = 0
    if n_left > 0:
        index_nbytes = shard.layout.spec.index_nbytes
        gap = gap_nbytes(shard, n_left, nbytes / len(values), nbytes)
        gap = page_aligned(nbytes + gap, index_nbytes) - nbytes if gap else 0
    yield from store_with_gap(shard, values, order, gap)


def _store(
    opened: OpenedShard,
    new: dict[int, Bytes | None],
    order: EntryOrder,
    max_dead_nbytes: int | None,
) -> Flow[None]:
    """Give entries of a shard new values, or none."""
    shard, spec = opened.shard, opened.shard.layout.spec
    check_kept(opened, replaced=new)
    n_present = opened.n_present_with(new)
    if n_present == 0:
        yield [Delete(shard.key)]
        return
    nbytes = sum(len(value) for value in new.values() if value is not None)
    must_compact = max_dead_nbytes is not None and opened.dead_with(new) > max_dead_nbytes
    if must_compact or (not opened.fits(nbytes) and _is_mostly_dead(opened, MAX_DEAD_SHARE)):
        live = yield from live_entries(opened, without=new)
        live.update((i, v) for i, v in new.items() if v is not None)
        yield from _create(shard, live, order)
        return
    n_full = opened.n_full
    was_full = opened.n_present >= n_full
    yield from change_shard(opened, opened.change(new))
    # One that was sealed before is being written to again, perhaps because its array grows
    # slice by slice: then it is complete when nothing more can come.
    is_complete = not opened.was_sealed or opened.is_growing or n_present == spec.n_entries
    if n_present >= n_full and not was_full and is_complete:
        yield from _seal(opened, order, MAX_DEAD_SHARE)


def _seal(opened: OpenedShard, order: EntryOrder, max_dead_share: float) -> Flow[None]:
    shard = opened.shard
    try:
        check_kept(opened)
    except CorruptShardError:
        yield [CloseShard(shard.key)]  # as it is
        raise
    if _is_mostly_dead(opened, max_dead_share):
        live = yield from live_entries(opened)
        yield from store_with_gap(shard, live, order, 0)
        return
    yield from change_shard(opened, opened.trimmed())
    yield [CloseShard(shard.key)]


def _is_mostly_dead(opened: OpenedShard, max_share: float) -> bool:
    # A gap that is smaller than the index cannot be trimmed, so it counts as dead.
    n_index = opened.shard.layout.spec.index_nbytes
    n_left = opened.gap_nbytes if opened.gap_nbytes < n_index else 0
    dead_nbytes = opened.dead_nbytes + n_left
    # What a few older indexes take is not worth another file: its entries would lie elsewhere,
    # beside other programs that have read an index of this one.
    if max_share and dead_nbytes <= _N_DEAD_INDEXES * n_index:
        return False
    return dead_nbytes > max_share * (opened.data_nbytes + n_left)

"""Write flow of the ``in_place`` strategy: an entry that is not larger than before keeps its place.

For chunks of one size, that is without compression. The first write of a shard gives each of
its entries a slot, in a fixed order, whether it is there or not::

    ├ slot ┼ slot ┼ (hole) ┼ slot ┼ … ┤ index ┤

so the place of a chunk is known before it is written, and a shard has no dead bytes. Entries of
other sizes are appended, and overwritten where they are not larger than before.

Readers lock such a file, and its writers wait for them. What is overwritten is in the journal
first, because a crash may leave half of it.

Source: sharding storage transformer draft, "Binary shard format", "Fixed order"; ZEP 2,
"Updating chunks".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.grid import n_entries_of
from zarr_shardstore.format.index import MISSING, ShardIndex
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.orders import EntryOrder, order_entries
from zarr_shardstore.plan.append import MAX_DEAD_SHARE
from zarr_shardstore.plan.entries import EntryUpdate
from zarr_shardstore.plan.opened_shard import Bytes, OpenedShard, gap_nbytes
from zarr_shardstore.plan.opening import (
    change_shard,
    live_entries,
    new_values,
    open_shard,
    read_ranges,
    store_with_gap,
)
from zarr_shardstore.plan.ranges import Range
from zarr_shardstore.plan.requests import Delete, Flow, Set, SetWithGaps
from zarr_shardstore.plan.write import replaces_all_entries, update_shard

__all__ = ["change_in_place"]

_MAX_SLOTS_NBYTES = 2**40
"""Of all slots of a shard, most of which may be holes: file systems have limits."""


def change_in_place(
    shard: ShardRef, groups: Sequence[Sequence[EntryUpdate]], *, order: EntryOrder
) -> Flow[list[Exception | None]]:
    """As `zarr_shardstore.plan.write.update_shard`, by overwriting entries.

    Cost: an entry that has a place is written twice, into the journal and there; a new one
    once. The first write into a shard that another strategy made rewrites it.

    Raises
    ------
    CorruptShardError
        If the index is damaged, or an entry whose value is patched; nothing was written.
    """
    if replaces_all_entries(shard, [update for group in groups for update in group]):
        done: list[Exception | None]
        done = yield from _fixed(update_shard(shard, groups, order=order))
        return done
    opened = yield from open_shard(shard)
    outcomes, new = yield from new_values(shard, opened, groups)
    if opened is None:
        values = {i: value for i, value in new.items() if value is not None}
        if values:
            yield from _create(shard, values, order)
    elif new:
        yield from _store(opened, new, order)
    return outcomes


def _fixed(flow: Flow[Any]) -> Flow[Any]:
    """A flow whose shards may be overwritten entry by entry."""
    replies = None
    while True:
        try:
            batch = next(flow) if replies is None else flow.send(replies)
        except StopIteration as stop:
            return stop.value
        replies = yield [
            SetWithGaps(r.key, [(0, [r.value])], is_fixed=True) if isinstance(r, Set) else r
            for r in batch
        ]


def _store(opened: OpenedShard, new: dict[int, Bytes | None], order: EntryOrder) -> Flow[None]:
    shard = opened.shard
    if opened.n_present_with(new) == 0:
        yield [Delete(shard.key)]
        return
    if not opened.is_fixed:
        yield from _rewrite(opened, new, order)
        return
    slot_nbytes = _slot_nbytes(opened, order)
    places: dict[int, tuple[int, int] | None] = {}
    data: list[tuple[int, list[Bytes]]] = []
    overwritten: list[Range] = []
    data_end = opened.data_end
    n_dead = _n_dead(opened, slot_nbytes)
    for i, value in new.items():
        old = opened.entry(i)
        if value is None:
            places[i] = None
            continue
        nbytes = len(value)
        slot = _rank_of(shard.layout.spec.chunks_per_shard, order)[i] * slot_nbytes
        if old is not None and nbytes <= old[1]:
            offset = old[0]
            n_dead += old[1] - nbytes
            overwritten += [Range(offset, offset + nbytes)] if nbytes else []
        elif 0 < slot_nbytes >= nbytes:
            # It may be there, and shorter: then it has this place already.
            offset = int(slot)
            overwritten += [Range(offset, offset + nbytes)] if old is not None else []
        else:
            offset = data_end
            data_end += nbytes
            n_dead += 0 if old is None else old[1]
        places[i] = (offset, nbytes)
        if nbytes:
            data.append((offset, [value]))
    if not opened.fits(data_end - opened.data_end) or n_dead > MAX_DEAD_SHARE * data_end:
        yield from _rewrite(opened, new, order)
        return
    values: list[memoryview] = []
    if overwritten:
        values = yield from read_ranges(shard, overwritten)
    old_data = [(r.start, bytes(v)) for r, v in zip(overwritten, values, strict=True)]
    opened.data_end = data_end
    yield from change_shard(opened, opened.change_at(places, data, old_data))


def _rewrite(opened: OpenedShard, new: Mapping[int, Bytes | None], order: EntryOrder) -> Flow[None]:
    """Store the shard anew, with slots for all entries if they have one size."""
    live = yield from live_entries(opened, without=new)
    live.update((i, value) for i, value in new.items() if value is not None)
    yield from _create(opened.shard, live, order)


def _create(shard: ShardRef, values: Mapping[int, Bytes], order: EntryOrder) -> Flow[None]:
    spec = shard.layout.spec
    sizes = {len(value) for value in values.values()}
    slot_nbytes = max(sizes)
    n_slots_nbytes = spec.n_entries * slot_nbytes
    has_slots = len(sizes) == 1 and 0 < n_slots_nbytes <= _MAX_SLOTS_NBYTES
    if has_slots and spec.index.location == "end":
        rank = _rank_of(spec.chunks_per_shard, order)
        fields = np.full((spec.n_entries, 2), MISSING, dtype=np.uint64)
        ids = sorted(values, key=rank.__getitem__)
        fields[ids, 0] = rank[ids] * slot_nbytes
        fields[ids, 1] = slot_nbytes
        index = ShardIndex(fields).encode(spec.index)
        parts = [(int(rank[i]) * slot_nbytes, [values[i]]) for i in ids]
        yield [SetWithGaps(shard.key, [*parts, (n_slots_nbytes, [index])], is_fixed=True)]
        return
    nbytes = sum(map(len, values.values()))
    n_left = max(0, shard.n_grid_entries - len(values))
    gap = gap_nbytes(shard, n_left, nbytes / len(values), nbytes)
    yield from store_with_gap(shard, values, order, gap, is_fixed=True)


def _slot_nbytes(opened: OpenedShard, order: EntryOrder) -> int:
    """Size of the slots of a shard; 0 if its entries do not lie in slots of this order."""
    # Who comes with another order may use places that are slots of missing entries in this one.
    if opened.slots is None or opened.slots[0] != order:
        opened.slots = order, _find_slot_nbytes(opened, order)
    return opened.slots[1]


def _find_slot_nbytes(opened: OpenedShard, order: EntryOrder) -> int:
    spec = opened.shard.layout.spec
    if spec.index.location == "start" or opened.index_start % spec.n_entries:
        return 0
    if opened.gap_nbytes:  # it may look like slots that are free, but counts as no data
        return 0
    slot_nbytes = opened.index_start // spec.n_entries
    index = opened.index()
    ids = index.present_ids()
    offsets, nbytes = index.fields[ids].T
    slots = _rank_of(spec.chunks_per_shard, order)[ids] * slot_nbytes
    return slot_nbytes if (offsets == slots).all() and (nbytes <= slot_nbytes).all() else 0


def _n_dead(opened: OpenedShard, slot_nbytes: int) -> int:
    """Dead bytes; the slots of missing entries are none."""
    n_missing = opened.shard.layout.spec.n_entries - opened.n_present
    return max(0, opened.dead_nbytes - n_missing * slot_nbytes)


@lru_cache(maxsize=8)
def _rank_of(chunks_per_shard: Coords, order: EntryOrder) -> npt.NDArray[np.intp]:
    """Position of each entry in the order."""
    ids = np.arange(n_entries_of(chunks_per_shard))
    rank = np.empty_like(ids)
    rank[order_entries(ids, chunks_per_shard, order)] = ids
    return rank

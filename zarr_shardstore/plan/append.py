"""Write flow of the ``append`` strategy: a write costs its chunk and its entry of the index.

For base stores whose files can be changed in their place. What is written into a shard file,
and in which order, is decided by `OpenedShard`; here, when: a shard that is not there is
created with a gap, one that is replaced as a whole is rewritten, one with too many dead bytes
is compacted instead of growing, and one that is full is sealed.

Source: sharding storage transformer draft, "API implementation", set_partial_values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zarr_shardstore.format.index import IndexDamageError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.orders import EntryOrder
from zarr_shardstore.format.shard import lay_out
from zarr_shardstore.plan.entries import EntryUpdate, Erase, Put
from zarr_shardstore.plan.opened_shard import Bytes, FileStep, OpenedShard, gap_nbytes
from zarr_shardstore.plan.ranges import Range
from zarr_shardstore.plan.read import corrupt
from zarr_shardstore.plan.requests import (
    ChangeShard,
    CloseShard,
    Delete,
    Flow,
    Found,
    Get,
    OpenShard,
    SetWithGap,
)
from zarr_shardstore.plan.write import apply_updates, replaces_all_entries, update_shard

__all__ = ["MAX_DEAD_SHARE", "append_to_shard", "seal_shard"]

MAX_DEAD_SHARE = 0.5
"""Of the data of a shard: with more dead bytes it is compacted when it is sealed or must grow."""


def append_to_shard(
    shard: ShardRef, groups: Sequence[Sequence[EntryUpdate]], *, order: EntryOrder
) -> Flow[list[Exception | None]]:
    """As `zarr_shardstore.plan.write.update_shard`, by changes of the file in its place.

    Cost: for entries of n bytes in all, n bytes and about 60 for each, at any size of the
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
    opened: OpenedShard | None
    opened = yield from _open(shard)
    current = yield from _read_needed(shard, opened, updates)
    outcomes: list[Exception | None] = []
    new: dict[int, Bytes | None] = {}
    for group in groups:
        changes: dict[int, Bytes | None] = {}
        try:
            apply_updates(shard, group, current, changes)
        except Exception as error:  # also of a transformer: others' updates do not suffer
            outcomes.append(error)
        else:
            outcomes.append(None)
            current.update(changes)
            new.update(changes)
    if opened is None:
        values = {i: value for i, value in new.items() if value is not None}
        if values:
            yield from _create(shard, values, order)
        return outcomes
    new = {i: v for i, v in new.items() if v is not None or opened.entry(i) is not None}
    if new:
        yield from _store(opened, new, order)
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
    opened = yield from _open(shard)
    if opened is not None:
        yield from _seal(opened, order, max_dead_share)


def _open(shard: ShardRef, data_end: int | None = None) -> Flow[OpenedShard | None]:
    try:
        (opened,) = yield [OpenShard(shard, data_end)]
    except IndexDamageError as damage:
        raise corrupt(shard, damage, "; nothing was written") from damage
    return opened  # type: ignore[no-any-return]


def _read_needed(
    shard: ShardRef, opened: OpenedShard | None, updates: Iterable[EntryUpdate]
) -> Flow[dict[int, Bytes | None]]:
    """Stored values of the entries whose new one depends on it."""
    needed: dict[int, bool] = {}
    for update in updates:
        is_independent = isinstance(update, Erase) or (
            isinstance(update, Put) and not update.only_if_missing
        )
        needed.setdefault(update.entry_id, not is_independent)
    places = {
        i: place
        for i, yes in needed.items()
        if yes and opened is not None and (place := opened.entry(i)) is not None
    }
    if not places or opened is None:
        return {}
    index, form = opened.index(), shard.layout.spec.index
    try:
        for i in places:
            index.check_entry(i, opened.size, form)
    except IndexDamageError as damage:
        raise corrupt(shard, damage, "; nothing was written") from damage
    ranges = [Range(offset, offset + nbytes) for offset, nbytes in places.values()]
    founds: list[Found] = yield [Get(shard.key, byte_range) for byte_range in ranges]
    return {i: found.value for i, found in zip(places, founds, strict=True)}


def _create(shard: ShardRef, values: dict[int, Bytes], order: EntryOrder) -> Flow[None]:
    """Store a new shard, with a gap for the entries that are missing."""
    spec = shard.layout.spec
    nbytes = sum(map(len, values.values()))
    n_left = shard.n_grid_entries - len(values)
    gap = gap_nbytes(shard, n_left, nbytes / len(values), nbytes) if n_left > 0 else 0
    parts = lay_out(values, spec.chunks_per_shard, spec.index, order, gap)
    yield [SetWithGap(shard.key, parts.head, parts.tail_offset, parts.tail)]
    if gap:
        data_end = parts.tail_offset - gap
        opened = yield from _open(shard, data_end)
        if opened is not None:
            yield from _change(opened, opened.journal_begun(data_end))


def _store(opened: OpenedShard, new: dict[int, Bytes | None], order: EntryOrder) -> Flow[None]:
    """Give entries of a shard new values, or none."""
    shard = opened.shard
    n_more = sum(v is not None for v in new.values())
    n_gone = sum(opened.entry(i) is not None for i in new)
    n_present = opened.n_present + n_more - n_gone
    if n_present == 0:
        yield [Delete(shard.key)]
        return
    nbytes = sum(len(value) for value in new.values() if value is not None)
    if not opened.fits(nbytes) and _is_mostly_dead(opened, MAX_DEAD_SHARE):
        live = yield from _live_entries(opened, without=new)
        if live is not None:
            live.update((i, v) for i, v in new.items() if v is not None)
            yield from _create(shard, live, order)
            return
    was_full = opened.n_present >= shard.n_grid_entries
    yield from _change(opened, opened.change(new))
    if n_present >= shard.n_grid_entries and not was_full:
        yield from _seal(opened, order, MAX_DEAD_SHARE)


def _seal(opened: OpenedShard, order: EntryOrder, max_dead_share: float) -> Flow[None]:
    shard = opened.shard
    if _is_mostly_dead(opened, max_dead_share):
        live = yield from _live_entries(opened)
        if live:
            spec = shard.layout.spec
            parts = lay_out(live, spec.chunks_per_shard, spec.index, order, 0)
            yield [SetWithGap(shard.key, parts.head, parts.tail_offset, parts.tail)]
            return
    yield from _change(opened, opened.trimmed())
    yield [CloseShard(shard.key)]


def _change(opened: OpenedShard, steps: list[FileStep]) -> Flow[None]:
    try:
        yield [ChangeShard(opened.shard.key, steps)]
    except BaseException:
        opened.is_valid = False  # nobody knows which of the steps were taken
        raise


def _is_mostly_dead(opened: OpenedShard, max_share: float) -> bool:
    # A gap that is smaller than the index cannot be trimmed, so it counts as dead.
    n_index = opened.shard.layout.spec.index_nbytes
    n_left = opened.gap_nbytes if opened.gap_nbytes < n_index else 0
    return opened.dead_nbytes + n_left > max_share * (opened.data_nbytes + n_left)


def _live_entries(
    opened: OpenedShard, without: Iterable[int] = ()
) -> Flow[dict[int, Bytes] | None]:
    """Bytes of the entries; ``None`` if one is damaged: then all stay where they are."""
    index, form = opened.index(), opened.shard.layout.spec.index
    left_out = set(without)
    ids = [i for i in index.present_ids().tolist() if i not in left_out]
    try:
        index.check_entries(opened.size, form)
    except IndexDamageError:
        return None
    (found,) = yield [Get(opened.shard.key, Range(0, opened.data_end))]
    spans = index.fields[ids].tolist()
    return {
        i: found.value[offset : offset + nbytes]
        for i, (offset, nbytes) in zip(ids, spans, strict=True)
    }

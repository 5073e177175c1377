"""Steps of flows that change shard files."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from zarr_shardstore.format.index import MISSING, IndexDamageError, ShardIndex
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.orders import EntryOrder
from zarr_shardstore.format.shard import lay_out
from zarr_shardstore.plan.entries import EntryUpdate, Erase, Put
from zarr_shardstore.plan.indexes import corrupt
from zarr_shardstore.plan.opened_shard import Bytes, FileStep, OpenedShard
from zarr_shardstore.plan.ranges import Range
from zarr_shardstore.plan.requests import ChangeShard, Flow, Found, Get, OpenShard, SetWithGaps
from zarr_shardstore.plan.write import KEEP_HINT, apply_updates

__all__ = [
    "change_shard",
    "check_kept",
    "live_entries",
    "new_values",
    "open_shard",
    "read_ranges",
    "store_with_gap",
]


def open_shard(shard: ShardRef, data_end: int | None = None) -> Flow[OpenedShard | None]:
    """Open a shard to change it in its place; ``None`` if there is none.

    Raises
    ------
    CorruptShardError
        If its index is damaged.
    """
    try:
        (opened,) = yield [OpenShard(shard, data_end)]
    except IndexDamageError as damage:
        raise corrupt(shard, damage, "; nothing was written") from damage
    return opened  # type: ignore[no-any-return]


def store_with_gap(
    shard: ShardRef,
    values: Mapping[int, Bytes],
    order: EntryOrder,
    gap: int,
) -> Flow[None]:
    """Store a shard anew, and a journal that says where its gap of so many bytes begins."""
    spec = shard.layout.spec
    parts = lay_out(values, spec.chunks_per_shard, spec.index, order, gap)
    yield [SetWithGaps(shard.key, parts.with_offsets())]
    if gap:
        data_end = parts.tail_offset - gap
        opened = yield from open_shard(shard, data_end)
        if opened is not None:
            yield from change_shard(opened, opened.journal_begun(data_end))


def new_values(
    shard: ShardRef, opened: OpenedShard | None, groups: Sequence[Sequence[EntryUpdate]]
) -> Flow[tuple[list[Exception | None], dict[int, Bytes | None]]]:
    """What groups of updates make of the entries of a shard; each group whole or not at all.

    Returns
    -------
    outcomes : list
        For each group ``None``, or the error for which it was left out.
    new : dict
        New value by entry id, ``None`` for an entry that will be missing; without entries that
        are missing and stay so.

    Raises
    ------
    CorruptShardError
        If an entry is damaged whose new value depends on the old one.
    """
    updates = [update for group in groups for update in group]
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
    return outcomes, {
        i: value
        for i, value in new.items()
        if value is not None or (opened is not None and opened.entry(i) is not None)
    }


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
    values = yield from read_ranges(
        shard, [Range(offset, offset + nbytes) for offset, nbytes in places.values()]
    )
    return dict(zip(places, values, strict=True))


def read_ranges(shard: ShardRef, ranges: Sequence[Range]) -> Flow[list[memoryview]]:
    """Read ranges of an opened shard that its index says are there.

    Raises
    ------
    CorruptShardError
        If the shard ends before.
    """
    founds: list[Found] = yield [Get(shard.key, wanted, opened=True) for wanted in ranges]
    values: list[memoryview] = []
    for wanted, found in zip(ranges, founds, strict=True):
        if found.value is None or len(found.value) != wanted.stop - wanted.start:
            place = (wanted.start, wanted.stop)
            damage = IndexDamageError(
                "the shard ends before; nothing was written", byte_range=place
            )
            raise corrupt(shard, damage) from damage
        values.append(found.value)
    return values


def check_kept(opened: OpenedShard, replaced: Container[int] = ()) -> None:
    """Refuse a change of a shard that keeps a damaged entry.

    Raises
    ------
    CorruptShardError
        With the first such entry.
    """
    try:
        opened.check_kept(replaced)
    except IndexDamageError as damage:
        raise corrupt(opened.shard, damage, KEEP_HINT) from damage


def change_shard(opened: OpenedShard, steps: list[FileStep]) -> Flow[None]:
    """Take steps that are planned with an opened shard."""
    yield [ChangeShard(opened.shard.key, steps)]


def live_entries(opened: OpenedShard, without: Iterable[int] = ()) -> Flow[dict[int, Bytes]]:
    """Bytes of the entries of a shard, by their ids, but for those `without`.

    Raises
    ------
    CorruptShardError
        If one of them is damaged.
    """
    shard = opened.shard
    fields = opened.index().fields.copy()
    fields[list(without)] = MISSING
    index = ShardIndex(fields)
    try:
        index.check_entries(opened.size, shard.layout.spec.index)
    except IndexDamageError as damage:
        raise corrupt(shard, damage, KEEP_HINT) from damage
    ids = index.present_ids()
    stop = int(fields[ids].sum(axis=1).max(initial=0))
    (data,) = yield from read_ranges(shard, [Range(0, stop)])
    return {
        i: data[offset : offset + nbytes]
        for i, (offset, nbytes) in zip(ids.tolist(), fields[ids].tolist(), strict=True)
    }

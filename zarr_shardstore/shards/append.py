"""Write flow of the ``append`` strategy: a write costs its chunk and its entry of the index.

For base stores whose files can be changed in their place. What is written into a shard file,
and in which order, is decided by `ShardWriter`; here, when: a shard that is not there is
created with a gap, one that is replaced as a whole is rewritten, one with too many dead bytes
is compacted instead of growing, and one that is full is sealed.

Source: sharding storage transformer draft, "API implementation", set_partial_values.

Steps of flows that change shard files.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.index import MISSING, IndexDamageError, ShardIndex
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import Range
from zarr_shardstore.format.shard import EntryOrder, lay_out
from zarr_shardstore.shards.index_reads import corrupt
from zarr_shardstore.shards.requests import (
    ChangeShard,
    CloseShard,
    Delete,
    Flow,
    Found,
    Get,
    OpenShard,
    SetWithGaps,
)
from zarr_shardstore.shards.rewrite import (
    KEEP_HINT,
    apply_updates,
    replaces_all_entries,
    update_shard,
)
from zarr_shardstore.shards.shard_writer import (
    Bytes,
    FileStep,
    ShardWriter,
    gap_nbytes,
    page_aligned,
)
from zarr_shardstore.shards.updates import (
    DeleteEntry,
    EntryUpdate,
    SetEntry,
    nbytes_of,
    replaces_value,
)


def open_shard(shard: ShardRef, data_end: int | None = None) -> Flow[ShardWriter | None]:
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
    shard: ShardRef, opened: ShardWriter | None, groups: Sequence[Sequence[EntryUpdate]]
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
    shard: ShardRef, opened: ShardWriter | None, updates: Iterable[EntryUpdate]
) -> Flow[dict[int, Bytes | None]]:
    """Stored values of the entries whose new one depends on it."""
    needed: dict[int, bool] = {}
    for update in updates:
        needed.setdefault(update.entry_id, not replaces_value(update))
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


def check_kept(opened: ShardWriter, replaced: Container[int] = ()) -> None:
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


def change_shard(opened: ShardWriter, steps: list[FileStep]) -> Flow[None]:
    """Take steps that are planned with an opened shard."""
    yield [ChangeShard(opened.shard.key, steps)]


def live_entries(opened: ShardWriter, without: Iterable[int] = ()) -> Flow[dict[int, Bytes]]:
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
    """As `zarr_shardstore.shards.rewrite.update_shard`, by changes of the file in its place.

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


def fits_inline(
    shard: ShardRef,
    updates: Sequence[EntryUpdate],
    opened: ShardWriter,
    max_dead_nbytes: int | None,
) -> bool:
    """Return whether `append_to_shard` only writes the updates into the gap of an opened shard.

    Then it reads no old value, moves no index, and neither creates, compacts, seals nor deletes the
    shard. Where this is not certain the reply is false.
    """
    if opened.shard != shard or len(updates) >= shard.n_grid_entries:
        return False
    n_added = 0
    removed: set[int] = set()
    replaced: dict[int, Bytes | None] = {}
    for update in updates:
        if opened.entry(update.entry_id) is None:
            n_added += not isinstance(update, DeleteEntry)
            continue
        replaced[update.entry_id] = None
        if isinstance(update, DeleteEntry):
            removed.add(update.entry_id)
        elif not isinstance(update, SetEntry) or update.only_if_missing:
            return False
    n_full = opened.n_full
    return (
        opened.fits(sum(map(nbytes_of, updates)))
        and len(removed) < opened.n_present
        and (opened.n_present >= n_full or opened.n_present + n_added < n_full)
        and (max_dead_nbytes is None or opened.dead_with(replaced) <= max_dead_nbytes)
    )


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
    opened: ShardWriter,
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


def _seal(opened: ShardWriter, order: EntryOrder, max_dead_share: float) -> Flow[None]:
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


def _is_mostly_dead(opened: ShardWriter, max_share: float) -> bool:
    # A gap that is smaller than the index cannot be trimmed, so it counts as dead.
    n_index = opened.shard.layout.spec.index_nbytes
    n_left = opened.gap_nbytes if opened.gap_nbytes < n_index else 0
    dead_nbytes = opened.dead_nbytes + n_left
    # What a few older indexes take is not worth another file: its entries would lie elsewhere,
    # beside other programs that have read an index of this one.
    if max_share and dead_nbytes <= _N_DEAD_INDEXES * n_index:
        return False
    return dead_nbytes > max_share * (opened.data_nbytes + n_left)

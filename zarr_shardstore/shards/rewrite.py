"""Write flows of the ``rewrite`` strategy: read the entries that stay, publish a new shard.

The base store replaces the object in one step, so a reader sees the shard before or after.

1. A shard whose entries are all replaced is not read.
2. Otherwise the whole shard is read, and each entry that stays is checked before it is copied.
3. A group of updates that fails is left out whole, and the commit is planned again without it: it
   may have been what made reading unnecessary.

Source: sharding storage transformer draft, "API implementation", set_partial_values and
erase_values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from zarr_shardstore.errors import CorruptShardError, CorruptValueError
from zarr_shardstore.format.index import IndexDamageError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import Bytes, EntryOrder, build_shard, index_of_shard, split_shard
from zarr_shardstore.shards.index_reads import corrupt, read_indexes, read_whole_shards
from zarr_shardstore.shards.requests import Delete, Exists, Flow, Found, Get, GetSize, Set
from zarr_shardstore.shards.updates import (
    DeleteEntry,
    EntryUpdate,
    MapEntry,
    PatchEntry,
    SetEntry,
    apply_pieces,
    replaces_value,
)

KEEP_HINT = (
    "; nothing was written, because the shard cannot be rewritten without losing it: "
    "erase or overwrite this chunk first"
)


def update_shard(
    shard: ShardRef, groups: Sequence[Sequence[EntryUpdate]], *, order: EntryOrder
) -> Flow[list[Exception | None]]:
    """Commit groups of updates of one shard in one write; each group whole or not at all.

    The caller must have locked the shard: no writer may come between the read and the write.

    Returns
    -------
    list
        For each group ``None``, or the error for which it was left out.

    Cost: if the updates give every entry of the shard a new value, one ``Set`` or one ``Delete``.
    At the edge of an array, if they give one to every entry of the array, also one ``Exists``, and
    one read of the index if there is a shard. Otherwise one read of the whole shard before the
    write. Erasures alone read the index first, and end if there is nothing to erase.

    Raises
    ------
    CorruptShardError
        If an entry that must stay is damaged, or the index is; nothing was written.
    """
    outcomes: list[Exception | None] = [None] * len(groups)
    left = list(range(len(groups)))
    while left:
        failed = yield from _try_update(shard, [groups[i] for i in left], order)
        if failed is None:
            break
        # What the failed group replaces was perhaps not read: plan without it.
        position, error = failed
        outcomes[left.pop(position)] = error
    return outcomes


def _try_update(
    shard: ShardRef, groups: Sequence[Sequence[EntryUpdate]], order: EntryOrder
) -> Flow[tuple[int, Exception] | None]:
    """Commit all groups. If one fails commit none; return its position and its error."""
    updates = [update for group in groups for update in group]
    known, _ = _entries_known_without_reading(updates)
    is_erasure = all(isinstance(update, DeleteEntry) for update in updates)
    if replaces_all_entries(shard, updates) and (yield from _is_replaced_whole(shard, known)):
        old: dict[int, Bytes] = {}
    elif is_erasure and not (yield from _has_any(shard, known.keys())):
        return None
    else:
        old = yield from _read_entries_to_keep(shard, updates)

    new: dict[int, Bytes | None] = {}
    for position, group in enumerate(groups):
        try:
            apply_updates(shard, group, old, new)
        except Exception as error:  # also of a transformer: it fails its own group only
            return position, error
    if not new:
        return None
    entries = {i: v for i, v in {**old, **new}.items() if v is not None}
    spec = shard.layout.spec
    build = partial(build_shard, entries, spec.chunks_per_shard, spec.index, order)
    yield [Set(shard.key, build()) if entries else Delete(shard.key, placeholder=build)]
    return None


def replaces_all_entries(shard: ShardRef, updates: Sequence[EntryUpdate]) -> bool:
    """Whether every entry in the array gets a new value that does not depend on stored ones."""
    if len(updates) < shard.n_grid_entries:  # a number: sets of all entries are large
        return False
    known, must_read = _entries_known_without_reading(updates)
    return not must_read and known.keys() >= set(shard.grid_entries().tolist())


def _entries_known_without_reading(
    updates: Sequence[EntryUpdate],
) -> tuple[dict[int, int | None], bool]:
    """Return the entries whose new value does not depend on the stored one.

    Returns
    -------
    known : dict
        ``None`` by entry id; or, where pieces were written from 0 on, how many bytes: the
        new value is known if the stored one is not longer.
    must_read : bool
        Whether another update depends on stored values.
    """
    known: dict[int, int | None] = {}
    must_read = False
    for update in updates:
        is_known = known.get(update.entry_id, 0) is None
        match update:
            case DeleteEntry() | SetEntry(only_if_missing=False):
                known[update.entry_id] = None
            case PatchEntry() if not is_known:
                nbytes = update.nbytes_from_start
                if nbytes is None:
                    must_read = True
                else:
                    known[update.entry_id] = max(nbytes, known.get(update.entry_id) or 0)
            case SetEntry() | MapEntry() if not is_known:
                must_read = True
    return known, must_read


def _is_replaced_whole(shard: ShardRef, known: dict[int, int | None]) -> Flow[bool]:
    """Whether no stored byte of the shard survives the updates.

    A value written from 0 on keeps the tail of a longer stored one. Behind the edge of the array
    there may be entries: another store has appended to the array, or the array was cut and its
    chunks were kept. If there is a shard its index decides.
    """
    patched = {i: nbytes for i, nbytes in known.items() if nbytes is not None}
    if not patched and len(known) == shard.layout.spec.n_entries:
        return True
    (exists,) = yield [Exists(shard.key)]
    if not exists:
        return True
    try:
        (index,) = yield from read_indexes([shard])
    except (CorruptShardError, CorruptValueError):
        if patched:
            raise
        # With a damaged index no entry can be read, so none is lost. But perhaps only the reply was
        # damaged: read the whole shard.
        try:
            (found,) = yield from read_whole_shards([shard])
            spec = shard.layout.spec
            if found.value is None:
                return True
            index = index_of_shard(found.value, spec.chunks_per_shard, spec.index)
        except (IndexDamageError, CorruptValueError):
            return True
    if index is None:
        return True
    if not known.keys() >= set(index.present_ids().tolist()):
        return False
    stored = {i: index.entry(i) for i in patched}
    return all(e is None or e[1] <= patched[i] for i, e in stored.items())


def _has_any(shard: ShardRef, entry_ids: Iterable[int]) -> Flow[bool]:
    """Whether any of these entries is stored."""
    (index,) = yield from read_indexes([shard])
    return index is not None and any(index.entry(i) is not None for i in entry_ids)


def _read_entries_to_keep(
    shard: ShardRef, updates: Sequence[EntryUpdate]
) -> Flow[dict[int, Bytes]]:
    """Return the stored entries but for those whose first update replaces them, which may be
    damaged."""
    is_replaced: dict[int, bool] = {}
    for update in updates:
        is_replaced.setdefault(update.entry_id, replaces_value(update))
    replaced = [i for i, yes in is_replaced.items() if yes]
    (found,) = yield from read_whole_shards([shard])
    if found.value is None:
        return {}
    spec = shard.layout.spec
    try:
        return dict(split_shard(found.value, spec.chunks_per_shard, spec.index, without=replaced))
    except IndexDamageError as damage:
        hint = KEEP_HINT if damage.entry_id is not None else "; nothing was written"
        raise corrupt(shard, damage, hint) from damage


def apply_updates(
    shard: ShardRef,
    group: Sequence[EntryUpdate],
    old: Mapping[int, Bytes | None],
    new: dict[int, Bytes | None],
) -> None:
    """Add the new values of a group to `new`, by entry id (``None``: erased)."""
    for update in group:
        i = update.entry_id
        before = new[i] if i in new else old.get(i)
        match update:
            case DeleteEntry():
                new[i] = None
            case SetEntry(only_if_missing=True) if before is not None:
                pass
            case SetEntry():
                new[i] = update.value
            case PatchEntry():
                new[i] = apply_pieces(shard.chunk_key(i), before, update.pieces)
            case MapEntry():
                new[i] = update.change(before)


def compact_shard(shard: ShardRef, *, order: EntryOrder) -> Flow[None]:
    """Store a shard without its dead bytes, its entries in order; do nothing if it has none.

    The caller must have locked the shard. Cost: the index and the size; if there are dead bytes, a
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

"""Write flows of the ``rewrite`` strategy: read the entries that stay, publish a new shard.

The base store replaces the object in one step, so a reader sees the shard before or after.

Source: sharding storage transformer draft, "API implementation", set_partial_values and
erase_values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial

from zarr_shardstore.errors import CorruptShardError, CorruptValueError, UnsupportedError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import (
    Bytes,
    EntryOrder,
    IndexDamageError,
    build_shard,
    index_of_shard,
    split_shard,
)
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.index_reads import (
    corrupt,
    read_indexes,
    read_whole_shards,
    read_whole_value,
)
from zarr_shardstore.shards.requests import Delete, EntryUpdate, Flow, PlainValue, Set
from zarr_shardstore.shards.updates import apply_groups, replaced_entries, replaced_first

KEEP_HINT = (
    "; nothing was written, because the shard cannot be rewritten without losing it: "
    "erase or overwrite this chunk first"
)


def rewrite_shard(
    shard: ShardRef, groups: Sequence[Sequence[EntryUpdate]], *, order: EntryOrder
) -> Flow[list[Exception | None]]:
    """Commit groups of updates of one shard in one write; each group whole or not at all.

    Return for each group ``None``, or the error for which it was left out. The shard is locked, or
    the flow runs on an optimistic view (`Backend.optimistic`): no other writer comes between the
    read and the write unnoticed. A damaged index, or a damaged entry that must stay, is an error.

    Cost: one ``Set`` or ``Delete``, if every entry of the shard gets a new value. At the edge of an
    array, if every entry of the array gets one, also one ``Exists``. If it is true, also a read of
    the index. Otherwise the whole shard is read before. Erasures read the index first, and end if
    all entries are missing.
    """
    if shard.layout.n_adopted and shard.is_adopted:
        (exists,) = yield [requests.Exists(shard.key)]
        if exists:
            raise UnsupportedError(
                f"the shard {shard.key!r} is an adopted file, which a rewrite would destroy: write "
                "on local files, with strategy='append' and locking='os'; or reshard the store "
                "into another one, and write there"
            )
    read = partial(_read_entries_to_keep, shard)
    outcomes, old, new = yield from apply_groups(groups, read)
    if old is not None and new:
        entries = {i: v for i, v in {**old, **new}.items() if v is not None}
        build = partial(build_shard, entries, shard.spec, order)
        yield [Set(shard.key, build()) if entries else Delete(shard.key, placeholder=build)]
    return outcomes


def _read_entries_to_keep(
    shard: ShardRef, updates: Sequence[EntryUpdate]
) -> Flow[dict[int, Bytes] | None]:
    """Return the entries that no update replaces first; ``None``: only missing ones are erased."""
    replaced = replaced_entries(shard, updates)
    if replaced is not None and (yield from _is_replaced_whole(shard, replaced)):
        return {}
    if all(isinstance(update, Delete) for _, update in updates):
        (index,) = yield from read_indexes([shard])
        if index is None or all(index.entry(i) is None for i, _ in updates):
            return None
    (found,) = yield from read_whole_shards([shard])
    if found.value is None:
        return {}
    first = [i for i, is_replaced in replaced_first(updates).items() if is_replaced]
    return _split(shard, found.value, first)


def _split(shard: ShardRef, data: Bytes, without: Collection[int] = ()) -> dict[int, Bytes]:
    try:
        return {**split_shard(data, shard.spec, without=without)}
    except IndexDamageError as damage:
        hint = KEEP_HINT if damage.entry_id is not None else "; nothing was written"
        raise corrupt(shard, damage, hint) from damage


def _is_replaced_whole(shard: ShardRef, replaced: dict[int, float]) -> Flow[bool]:
    """Whether no stored byte of the shard survives the updates.

    The index of a stored shard decides about entries beyond the edge of the array: the array may
    have been cut, or another store has appended to it.
    """
    is_certain = min(replaced.values(), default=math.inf) == math.inf
    if is_certain and len(replaced) == shard.spec.n_entries:
        return True
    (exists,) = yield [requests.Exists(shard.key)]
    if not exists:
        return True
    try:
        (index,) = yield from read_indexes([shard])
    except (CorruptShardError, CorruptValueError):
        if not is_certain:
            raise
        # A damaged index loses no readable entry. But perhaps only the reply was damaged: read the
        # whole shard.
        try:
            (found,) = yield from read_whole_shards([shard])
            if found.value is None:
                return True
            index = index_of_shard(found.value, shard.spec)
        except (IndexDamageError, CorruptValueError):
            return True
    if index is None:
        return True
    ids = index.present_ids()
    sizes = zip(ids.tolist(), index.fields[ids, 1].tolist(), strict=True)
    return all(nbytes <= replaced.get(i, -1) for i, nbytes in sizes)


def rewrite_value(
    value: PlainValue, groups: Sequence[Sequence[EntryUpdate]]
) -> Flow[list[Exception | None]]:
    """Commit groups of updates of an object that is no shard, as `rewrite_shard`.

    Cost: one ``Set`` or ``Delete``; if a stored value counts, one ``Get`` before.
    """

    def read(updates: Sequence[EntryUpdate]) -> Flow[dict[int, Bytes | None]]:
        if replaced_first(updates).get(0, True):
            return {}
        return {0: (yield from read_whole_value(value.key)).value}

    outcomes, old, new = yield from apply_groups(groups, read)
    if new and new[0] is not None:
        yield [Set(value.key, new[0])]
    elif new and (old or {}).get(0, b"") is not None:
        stored = [g for g, error in zip(groups, outcomes, strict=True) if error is None]
        changes = [u for group in stored for _, u in group if isinstance(u, requests.Modify)]
        placeholders = [u.placeholder for u in changes if u.placeholder is not None]
        yield [Delete(value.key, placeholders[0] if placeholders else None)]
    return outcomes


def compact_shard(shard: ShardRef, *, order: EntryOrder) -> Flow[None]:
    """Store a shard without its dead bytes, its entries in order, as `rewrite_shard`.

    A damaged shard, and an adopted file, stays as it is. Cost: the index and the size; if there are
    dead bytes, a read and a write of the shard.
    """
    (index,) = yield from read_indexes([shard])
    if index is None or shard.is_adopted:
        return
    size: int | None
    (size,) = yield [requests.GetSize(shard.key)]
    spec = shard.spec
    if size is not None and index.is_packed(size, spec) and len(index.present_ids()):
        return
    (found,) = yield from read_whole_shards([shard])
    if found.value is None:
        return
    entries = _split(shard, found.value)
    build = partial(build_shard, entries, spec, order)
    yield [Set(shard.key, build()) if entries else Delete(shard.key, placeholder=build)]

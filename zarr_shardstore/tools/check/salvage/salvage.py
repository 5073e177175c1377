"""Salvage of one shard: the kinds of evidence, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import consolidated_index, layouts, shard_format, walks
from zarr_shardstore.tools.check.objects import ArrayChecker, is_sound, specs_of_index
from zarr_shardstore.tools.check.salvage import indexes
from zarr_shardstore.tools.check.salvage.damaged_shard import (
    ORDERS,
    DamagedShard,
    Index,
    Salvage,
    Spec,
    orders_of,
)

_MAX_FETCHED = 1 << 17
"""Chunks of a shard with hardly any index that a replica is asked for."""

_MAX_LOST = 1 << 16
"""Entries that are named as lost for a shard of fewer bytes than entries."""

_MAX_OLDER = 16
"""Older indexes of one shard; each lies before more data than the ones before it."""

_MAX_OTHERS = 256
"""Other shards of the array whose indexes are read."""


def salvage(
    checker: ArrayChecker,
    shard: layouts.ShardRef,
    data: memoryview,
    *,
    guesses: bool,
    order: shard_format.EntryOrder | None = None,
    copy: consolidated_index.IndexCopy | None = None,
    is_current: bool = False,
) -> Salvage:
    """Return the whole chunks of a shard: with `guesses` also without a valid index.

    The `copy` is from the consolidated index; it `is_current` if the shard still has its version.
    With an `order` a shard without a valid index counts as full and written in this order.
    """
    spec = shard.spec
    if spec.n_entries > max(_MAX_LOST, len(data)):  # a document of a few bytes may declare millions
        text = f"of its index of {spec.n_entries} entries hardly anything is there"
        is_small = shard.n_grid_entries <= _MAX_FETCHED
        return Salvage(lost=shard.entries_of().tolist() if is_small else [], text=text)
    damaged = DamagedShard(checker, shard, data)
    for index, form in _valid_indexes(spec, data):
        if form.index.checksum or form != spec or damaged.is_in_place(index.fields):
            found = damaged.through(index, form)
            if guesses and form.index.checksum and found.lost:
                damaged.add_moved(found, index, form)
            return found
    if not guesses:
        return Salvage(lost=shard.entries_of().tolist(), text="it has no valid index")
    if copy is not None and _is_copy_of(damaged, copy, is_current):
        found = damaged.through(copy.index, spec)
        found.text = "its index is damaged, and comes from the consolidated index"
        found.text += "" if is_current else ": chunks that were erased since may be back"
        return found
    right = indexes.corrected_index(damaged)
    if right is not None:
        found = damaged.through(right, spec)
        found.text = "its index was damaged, and is put right by its checksum"
        return found
    return _without_index(damaged, order)


def _valid_indexes(spec: Spec, data: memoryview) -> Iterator[tuple[Index, Spec]]:
    """Yield indexes with a right checksum or without a contradiction, the declared form first. An
    index of the declared form with entries out of the bounds comes last."""
    doubtful = []
    for new in specs_of_index(spec):
        try:
            index = shard_format.index_of_shard(data, new)
        except shard_format.IndexDamageError:
            continue
        is_some = bool(index.fields[:, 1].all())  # zeros are of a gap before a cut index
        is_packed = is_some and index.is_packed(len(data), new)
        is_whole = new.index.checksum or new == spec or is_packed
        if is_whole and is_sound(index, new, len(data)):
            yield index, new
        elif new == spec:
            doubtful.append((index, new))
    yield from doubtful


def _is_copy_of(shard: DamagedShard, copy: consolidated_index.IndexCopy, is_current: bool) -> bool:
    """Whether an index belongs to the shard: by its version, by the stored checksum, or because
    all frames, of distinct sizes, are at the places of its entries."""
    if copy.size != len(shard.data) or shard.index_start < 0:
        return False
    stored = bytes(shard.data[shard.index_start :][: shard.spec.index_nbytes])
    encoded = copy.index.encode(shard.spec.index)
    n = shard_format.CHECKSUM_NBYTES
    if shard.spec.index.checksum and encoded[-n:] == stored[-n:]:
        return True
    places = copy.index.fields[copy.index.present_ids()].tolist()
    has_sizes = len({nbytes for _, nbytes in places}) == len(places) > 1
    frames = [[start, stop - start] for start, stop in shard.frames]
    return is_current or (shard.is_proving and has_sizes and sorted(places) == frames)


def _without_index(shard: DamagedShard, order: shard_format.EntryOrder | None) -> Salvage:
    """Return the chunks that single entries, older indexes and the order name."""
    found, texts = Salvage(), ["it has no valid index"]
    missing: set[int] = set()
    named = None
    if shard.at_end and len(shard.data) >= shard.spec.index_nbytes:
        fields = shard.fields_at(shard.index_start, shard.n)
        if shard.is_in_place(fields):
            named = indexes.named_by(shard, shard.index_start, fields)
    text = "its damaged index"
    if named is None:
        named = indexes.named_by_cut_index(shard)
        text = "a cut index, perhaps an older index,"
    if named is not None:
        found.entries, missing = named
        texts.append(f"entries of {text} name {len(found.entries)} chunks")
    in_grid = set(shard.shard.entries_of().tolist())
    known = found.entries.keys() | missing
    for index in islice(indexes.older_indexes(shard), _MAX_OLDER):
        older = shard.through(index, shard.spec, without=known)
        found.older += older.entries
        found.entries |= older.entries
        if older.entries:  # otherwise it may be one of another shard, inside a chunk
            known = set(range(shard.n)).difference(older.lost)
        if in_grid <= known:
            break
    if found.older:
        texts.append(
            f"an older index names {len(found.older)} chunks: older values of some may be back"
        )
    if len(in_grid) == 1 and shard.frames == [(shard.first, shard.data_stop)]:
        order = order or "C"  # of a single chunk there is only one order
    if order is not None:
        ordered = named_by_order(shard, order)
        if not ordered:
            texts.append("its bytes are not those of its chunks in any order")
        elif any(ordered.get(i, value) != value for i, value in found.entries.items()):
            texts.append(f"they are not in the order {order!r}")
        else:
            n_new = len(ordered.keys() - found.entries.keys())
            found.entries = {**ordered, **found.entries}
            texts.append(f"the order names {n_new} chunks")
    found.lost = sorted(in_grid - found.entries.keys())  # damage may look like a missing entry
    n_chunks = len(shard.frames)
    if shard.exact and not shard.is_proving:
        n_chunks = n_chunks or (len(shard.data) - shard.first) // shard.exact
    found.n_unnamed = max(0, min(n_chunks - len(found.entries), len(found.lost)))
    found.text = "; ".join(texts)
    return found


def named_by_order(shard: DamagedShard, order: shard_format.EntryOrder) -> dict[int, memoryview]:
    """Return the whole chunks before the first gap of a shard that was full; none, if an uncut
    shard has more or fewer frames than chunks."""
    in_grid: npt.NDArray[np.intp] = shard.shard.entries_of()
    ids, at, places, n = in_grid, shard.first, shard.frames, len(shard.frames)
    is_cut = not n or places[-1][1] != shard.data_stop
    if shard.exact and (is_cut or shard.is_proving):
        n = -(-(shard.data_stop - at) // shard.exact)
        places = [(at + i * shard.exact, at + (i + 1) * shard.exact) for i in range(shard.n)]
    if n == shard.n:  # some writers also store chunks outside the grid
        ids = np.arange(n)
    elif n > len(ids) or (n < len(ids) and not is_cut):
        return {}
    inside = set(in_grid.tolist())
    whole: dict[int, memoryview] = {}
    ordered = shard_format.order_entries(ids, shard.spec.chunks_per_shard, order)
    for i, (start, stop) in zip(ordered.tolist(), places, strict=False):
        if start != at:
            break
        if i in inside and shard.is_whole("", start, stop - start):
            whole[i] = shard.data[start:stop]
        at = stop
    return whole


def order_of_others(checker: ArrayChecker) -> tuple[int, shard_format.EntryOrder | None]:
    """Return the number of the first whole shards with two chunks or more, and their common order.
    It is no proof for another shard."""
    orders, n_whole = list(ORDERS), 0
    grid, run = checker.grid, checker.base.run
    listed = walks.walk(run, grid)
    found = (s for some in listed for s in walks.try_read(run, grid, some))
    with suppress(OSError):
        for stored in islice(found, _MAX_OTHERS):
            index = stored.decoded
            if index is not None and len(ids := index.present_ids()) > 1:
                n_whole += 1
                ids = ids[np.argsort(index.fields[ids, 0], kind="stable")]
                these = orders_of(ids, grid.boxes.lengths(stored.coords))
                orders = [order for order in orders if order in these]
    return n_whole, orders[0] if n_whole and orders else None


def advice(n_unnamed: int, n_others: int, order: shard_format.EntryOrder | None) -> str:
    """Return what a user can do for chunks without a key."""
    text = f"{n_unnamed} entries seem whole, and nothing says which chunks they are: "
    if order is None:
        return f"{text}if the shard was full, tell the order in which it was written"
    text += "if the shard was full, and of the program that wrote "
    return f"{text}the {n_others} others of the array, they are in the order {order!r}"

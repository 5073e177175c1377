"""Write flow of the ``append`` strategy: a write costs its chunk and its entry of the index.

`ShardWriter` plans the steps of a change in a shard file. The flow decides between changes:

1. A shard that is not there is created with a gap for the entries to come.
2. Updates that replace all entries rewrite the shard, as the other strategy does.
3. Updates that fit the gap are written into it. If they do not fit, the file grows.
4. A shard with too many dead bytes is stored again without them instead of growing.
5. A shard is sealed when it becomes full: gap and journal are removed.
6. An adopted file is neither stored again nor deleted: it only grows.

Source: sharding storage transformer draft, "API implementation", set_partial_values.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import Range, plan_spans
from zarr_shardstore.format.shard import Bytes, EntryOrder, IndexDamageError, lay_out
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.index_reads import corrupt
from zarr_shardstore.shards.requests import EntryUpdate, Flow
from zarr_shardstore.shards.rewrite import KEEP_HINT, rewrite_shard
from zarr_shardstore.shards.shard_writer import ShardWriter, start_of_index
from zarr_shardstore.shards.updates import (
    apply_groups,
    replaced_entries,
    replaced_first,
)

MAX_DEAD_SHARE = 0.5
"""Of the data of a shard: with more dead bytes it is compacted when it is sealed or must grow."""

_N_DEAD_INDEXES = 4
"""Dead bytes of so many indexes are always allowed."""

_NOTHING_WRITTEN = "; nothing was written"


def append_to_shard(
    shard: ShardRef,
    groups: Sequence[Sequence[EntryUpdate]],
    *,
    order: EntryOrder,
    max_dead_nbytes: int | None = None,
    max_dead_share: float = MAX_DEAD_SHARE,
) -> Flow[list[Exception | None]]:
    """Commit groups of updates in the file of a shard, as `rewrite_shard`.

    A change that would leave more than `max_dead_nbytes` dead bytes stores the shard again without
    them. So does one that does not fit the gap, or fills the shard, if more than `max_dead_share`
    of the data is dead.

    Cost: the bytes of the entries, and 64 for each, at any size of the shard. Also the index, when
    a shard is opened, grows, or is sealed. Patches read the old values.
    """
    of_one = groups[0] if len(groups) == 1 else None
    updates = of_one or [update for group in groups for update in group]
    if replaced_entries(shard, updates) is not None and not shard.is_adopted:
        return (yield from rewrite_shard(shard, groups, order=order))
    writer = yield from _open(shard)

    def read(updates: Sequence[EntryUpdate]) -> Flow[dict[int, Bytes]]:
        """Read the values on which the first updates depend."""
        if writer is None:
            return {}
        replaced = replaced_first(updates)
        ids = [i for i, yes in replaced.items() if not yes and writer.entry(i) is not None]
        return (yield from _read_entries(writer, ids)) if ids else {}

    outcomes, _, new = yield from apply_groups(groups, read)
    values = {i: value for i, value in new.items() if value is not None}
    if writer is not None:
        new = {i: v for i, v in new.items() if v is not None or writer.entry(i) is not None}
        if new:
            yield from _change(writer, new, order, max_dead_nbytes, max_dead_share)
    elif values:
        yield from _store(shard, values, order)
    return outcomes


def seal_shard(
    shard: ShardRef, *, order: EntryOrder, max_dead_share: float = MAX_DEAD_SHARE
) -> Flow[None]:
    """Remove the gap and the journal of a locked shard; compact it if too much of it is dead."""
    writer = yield from _open(shard, to_seal=True)
    if writer is not None:
        yield from _seal(writer, order, max_dead_share)


def _open(
    shard: ShardRef, data_end: int | None = None, *, to_seal: bool = False
) -> Flow[ShardWriter | None]:
    try:
        (writer,) = yield [requests.OpenShard(shard, data_end, to_seal)]
    except IndexDamageError as damage:
        raise corrupt(shard, damage, _NOTHING_WRITTEN) from damage
    return writer  # type: ignore[no-any-return]


def _read_entries(
    writer: ShardWriter, ids: Sequence[int], *, at_once: bool = False
) -> Flow[dict[int, Bytes]]:
    """Return the stored values of entries that are present; `at_once` reads what lies between."""
    shard, size = writer.shard, writer.size
    try:
        places = writer.index().entries(ids, size, shard.spec)
    except IndexDamageError as damage:
        raise corrupt(shard, damage, _NOTHING_WRITTEN) from damage
    ranges = [(offset, offset + nbytes) for offset, nbytes in filter(None, places)]
    limit = size if at_once else 0
    spans = plan_spans(ranges, max_gap_bytes=limit, max_coalesced_bytes=limit)
    founds = yield [requests.Get(shard.key, Range(s.start, s.stop), opened=True) for s in spans]
    values: dict[int, Bytes] = dict.fromkeys(ids, b"")
    for span, found in zip(spans, founds, strict=True):
        if found.value is None or len(found.value) != span.stop - span.start:
            cut = IndexDamageError("the shard ends before", byte_range=(span.start, span.stop))
            raise corrupt(shard, cut, _NOTHING_WRITTEN) from cut
        for member in span.members:
            start, stop = ranges[member]
            values[ids[member]] = found.value[start - span.start : stop - span.start]
    return values


def _read_live_entries(writer: ShardWriter, without: Container[int] = ()) -> Flow[dict[int, Bytes]]:
    ids = [i for i in writer.index().present_ids().tolist() if i not in without]
    return (yield from _read_entries(writer, ids, at_once=True))


# ------------------------------------------------------------------------------- writes


def _change(
    writer: ShardWriter,
    new: dict[int, Bytes | None],
    order: EntryOrder,
    max_dead_nbytes: int | None,
    max_dead_share: float,
) -> Flow[None]:
    """Give entries of a shard new values, or none."""
    shard, spec = writer.shard, writer.shard.spec
    if writer.damaged:
        _check_kept(writer, replaced=new)
    n_gone = sum(writer.entry(i) is not None for i in new)
    n_present = writer.n_present - n_gone + sum(value is not None for value in new.values())
    if n_present == 0 and not shard.is_adopted:
        yield [requests.Delete(shard.key)]
        return
    nbytes = sum(len(value) for value in new.values() if value is not None)
    must_compact = max_dead_nbytes is not None and writer.dead_with(new) > max_dead_nbytes
    must_compact = must_compact or (
        not writer.fits(nbytes) and _is_mostly_dead(writer, max_dead_share)
    )
    if must_compact and not shard.is_adopted:
        live = yield from _read_live_entries(writer, without=new)
        live.update((i, v) for i, v in new.items() if v is not None)
        yield from _store(shard, live, order)
        return
    n_full = writer.n_full
    was_full = writer.n_present >= n_full
    yield [requests.ChangeShard(shard.key, writer.change(new))]
    # A sealed shard that is written again, perhaps because its array grows slice by slice, is full
    # when no entry is missing.
    is_full = not writer.was_sealed or writer.growing or n_present == spec.n_entries
    if n_present >= n_full and not was_full and is_full:
        yield from _seal(writer, order, max_dead_share)


def _store(
    shard: ShardRef, values: Mapping[int, Bytes], order: EntryOrder, *, has_gap: bool = True
) -> Flow[None]:
    """Store a whole shard, with a gap for the missing entries, and a journal of its start."""
    spec = shard.spec
    nbytes = sum(map(len, values.values()))
    n_left = shard.n_grid_entries - len(values)
    gap = 0
    if has_gap and n_left > 0 and spec.index.location == "end":
        expected = n_left * (nbytes / len(values))
        gap = start_of_index(nbytes, spec.index_nbytes, expected, nbytes) - nbytes
    parts = lay_out(values, spec, order, gap)
    yield [requests.SetWithGaps(shard.key, parts)]
    if gap:
        data_end = parts[-1][0] - gap
        writer = yield from _open(shard, data_end)
        if writer is not None:
            yield [requests.ChangeShard(shard.key, writer.journal_begun(data_end))]


def _seal(writer: ShardWriter, order: EntryOrder, max_dead_share: float) -> Flow[None]:
    shard = writer.shard
    try:
        _check_kept(writer)
    except CorruptShardError:
        yield [requests.ChangeShard(shard.key, (), closes=True)]  # as it is
        raise
    if _is_mostly_dead(writer, max_dead_share) and not shard.is_adopted:
        live = yield from _read_live_entries(writer)
        yield from _store(shard, live, order, has_gap=False)
        return
    yield [requests.ChangeShard(shard.key, writer.trimmed(), closes=True)]


def _check_kept(writer: ShardWriter, replaced: Container[int] = ()) -> None:
    """Refuse to change a shard with an entry that leaves the data and is not replaced."""
    for entry_id in sorted(writer.damaged):
        if entry_id not in replaced:
            try:
                writer.index().check_entry(entry_id, writer.size, writer.shard.spec)
            except IndexDamageError as damage:
                raise corrupt(writer.shard, damage, KEEP_HINT) from damage


def _is_mostly_dead(writer: ShardWriter, max_share: float) -> bool:
    # A gap that is smaller than the index cannot be trimmed, so it counts as dead.
    n_index = writer.shard.spec.index_nbytes
    n_left = writer.gap_nbytes if writer.gap_nbytes < n_index else 0
    dead_nbytes = writer.dead_nbytes + n_left
    # A few older indexes do not justify another file: other programs may have read an index of
    # this one.
    if max_share and dead_nbytes <= _N_DEAD_INDEXES * n_index:
        return False
    return dead_nbytes > max_share * (writer.data_nbytes + n_left)

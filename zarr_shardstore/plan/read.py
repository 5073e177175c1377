"""Read flows: at most two rounds of requests, however many chunks of however many shards.

Round 1 asks for the index of each shard once, round 2 for the coalesced spans of the entries
found there. Behind a network some shards are read whole in round 1, if their index is not known.
Where a shard was replaced between the rounds, or its bytes contradict its index, the shard is
asked again, and at last read whole in one request: that one is before or after the write, and
shows whether the shard is damaged.

Source: sharding storage transformer draft, "API implementation", get_partial_values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zarr_shardstore.format.index import IndexDamageError, ShardIndex
from zarr_shardstore.format.layout import ChunkRef, ShardRef
from zarr_shardstore.format.shard import index_of_shard
from zarr_shardstore.plan.indexes import corrupt
from zarr_shardstore.plan.ranges import ByteRange, Range, resolve_range
from zarr_shardstore.plan.requests import Flow, FoundIndex, Get, GetIndex, GetSize, Request
from zarr_shardstore.plan.spans import Span, merge_spans, plan_spans
from zarr_shardstore.plan.whole_shards import (
    MAX_UNWANTED_NBYTES_AT_ONCE,
    are_worth_whole,
    read_whole_shards,
)

__all__ = [
    "EntryRead",
    "ReadOptions",
    "read_entries",
]

_N_ATTEMPTS_IN_TWO_ROUNDS = 2

_MAX_GAP_FACTOR = 16
"""How much longer gaps may be that are read along to spare a round: 64 KiB where 4 KiB are read to
spare a request. At 100 MB/s they take 0.7 ms, a 64th of a round trip of 40 ms."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How much one read asks for at once.

    Parameters
    ----------
    max_gap_bytes
        Unwanted bytes between two ranges that are read along. 4 KiB, a page of a file
        system, costs less than a request anywhere; with 1 MiB more was lost than won.
    max_coalesced_bytes
        Largest span of more than one range, and shard that is read whole (before compression).
    max_shards_at_once
        Shards that are read in the same two rounds; ``None``: all.
    max_requests_at_once
        Requests that are under way at a time, where a round of them takes long: some shards are
        read whole, and gaps of up to 16 `max_gap_bytes` are read along to spare a round, 4 MiB
        of them in a read.
    """

    max_gap_bytes: int = 4 * 1024
    max_coalesced_bytes: int = 16 * 1024 * 1024
    max_shards_at_once: int | None = None
    max_requests_at_once: int | None = None


class EntryRead(NamedTuple):
    """Ask for the value of a chunk, or for a range of it."""

    chunk: ChunkRef
    byte_range: ByteRange | None = None


@dataclass(slots=True)
class _ShardRead:
    """Spans of one shard: which reads they serve, and the state it must be in."""

    shard: ShardRef
    index: ShardIndex
    found: FoundIndex
    wanted: list[tuple[int, int]]
    owners: list[int]
    spans: list[Span]


def read_entries(reads: Sequence[EntryRead], options: ReadOptions) -> Flow[list[memoryview | None]]:
    """Read values of chunks; ``None`` where a chunk is missing.

    Cost: one index request for each shard, then one request for each span, or one request for a
    whole shard; a chunk that was asked for twice is read once if the ranges touch.

    Raises
    ------
    SpecError
        If a byte range has a negative number.
    CorruptShardError
        If an index, or an entry that was asked for, is damaged. Others do not matter.
    """
    for read in reads:
        if read.byte_range is not None:
            resolve_range(read.byte_range, 0)  # an error, whatever is there
    values: list[memoryview | None] = [None] * len(reads)
    by_shard: dict[str, list[int]] = {}
    for i, read in enumerate(reads):
        by_shard.setdefault(read.chunk.shard.key, []).append(i)
    groups = list(by_shard.values())
    n_at_once = options.max_shards_at_once or len(groups) or 1
    for first in range(0, len(groups), n_at_once):
        yield from _read_groups(reads, groups[first : first + n_at_once], values, options)
    return values


def _read_groups(
    reads: Sequence[EntryRead],
    pending: list[list[int]],
    values: list[memoryview | None],
    options: ReadOptions,
) -> Flow[None]:
    """Fill `values` for some groups of reads, each of one shard."""
    for attempt in range(_N_ATTEMPTS_IN_TWO_ROUNDS):
        shards = [reads[group[0]].chunk.shard for group in pending]
        is_again = attempt > 0
        whole = [False] * len(shards)
        if options.max_requests_at_once is not None and not is_again:
            wanted = [(s, _n_wanted(reads, g)) for s, g in zip(shards, pending, strict=True)]
            whole = are_worth_whole(wanted, options.max_coalesced_bytes)
        replies: list[FoundIndex] = yield [
            GetIndex(shard, settled=is_again, fresh=is_again, whole=is_worth)
            for shard, is_worth in zip(shards, whole, strict=True)
        ]
        pending = yield from _read_spans(reads, pending, replies, values, options)
        if not pending:
            return
    yield from _read_whole(reads, pending, values)


def _read_spans(
    reads: Sequence[EntryRead],
    pending: list[list[int]],
    indexes: list[FoundIndex],
    values: list[memoryview | None],
    options: ReadOptions,
) -> Flow[list[list[int]]]:
    """Fill `values`; return the groups of reads whose shard must be asked again."""
    shards = [reads[group[0]].chunk.shard for group in pending]
    again: list[list[int]] = []
    planned: list[_ShardRead] = []
    doubtful: list[tuple[ShardRef, FoundIndex]] = []  # no bytes are read that tell the version
    for shard, group, found in zip(shards, pending, indexes, strict=True):
        for i in group:
            values[i] = None
        if found.damage is not None:
            again.append(group)
            continue
        wanted: _ShardRead | None = None
        try:
            if found.value is not None and found.decoded is not None:
                _take(found.value, found.decoded, reads, group, values)
            elif found.decoded is not None:
                wanted = _plan_shard(shard, found.decoded, found, reads, group, values, options)
        except IndexDamageError:
            again.append(group)
            continue
        if wanted is not None and wanted.spans:
            planned.append(wanted)
        elif found.is_remembered:
            doubtful.append((shard, found))
    if not planned and not doubtful:
        return again
    _spare_rounds(planned, options)
    span_reads = [(read, span) for read in planned for span in read.spans]
    batch: list[Request] = [Get(r.shard.key, Range(s.start, s.stop)) for r, s in span_reads]
    batch += [GetIndex(shard) for shard, _ in doubtful]
    try:
        replies = yield batch
    except Exception:
        yield from _blame_entries(span_reads, reads)
        raise
    moved: set[str] = set()
    for (shard, before), now in zip(doubtful, replies[len(span_reads) :], strict=True):
        is_gone = before.decoded is None and now.decoded is None and now.damage is None
        if not is_gone and now.version != before.version:
            moved.add(shard.key)
    for (read, span), found in zip(span_reads, replies, strict=False):
        data = found.value
        is_same = found.version == read.found.version
        if not is_same or data is None or len(data) != span.stop - span.start:
            moved.add(read.shard.key)
        else:
            for member in span.members:
                start, stop = read.wanted[member]
                values[read.owners[member]] = data[start - span.start : stop - span.start]
    again += [g for s, g in zip(shards, pending, strict=True) if s.key in moved]
    return again


def _plan_shard(
    shard: ShardRef,
    index: ShardIndex,
    found: FoundIndex,
    reads: Sequence[EntryRead],
    group: list[int],
    values: list[memoryview | None],
    options: ReadOptions,
) -> _ShardRead:
    """Spans that the reads of one shard need; values that need none are filled in."""
    wanted: list[tuple[int, int]] = []
    owners: list[int] = []
    form = shard.layout.spec.index
    ids = [reads[i].chunk.entry_id for i in group]
    for i, entry in zip(group, index.entries(ids, found.size, form), strict=True):
        if entry is None:
            continue
        offset, nbytes = entry
        start, stop = resolve_range(reads[i].byte_range, nbytes)
        if start == stop:
            values[i] = memoryview(b"")
        else:
            wanted.append((offset + start, offset + stop))
            owners.append(i)
    spans = plan_spans(
        wanted,
        max_gap_bytes=options.max_gap_bytes,
        max_coalesced_bytes=options.max_coalesced_bytes,
    )
    return _ShardRead(shard, index, found, wanted, owners, spans)


def _spare_rounds(planned: list[_ShardRead], options: ReadOptions) -> None:
    """Read more of the gaps along, if the spans are more than can be asked for at once."""
    n = options.max_requests_at_once
    if n is None or sum(len(read.spans) for read in planned) <= n:
        return
    merged = merge_spans(
        [read.spans for read in planned],
        n,
        max_gap_bytes=_MAX_GAP_FACTOR * options.max_gap_bytes,
        max_unwanted_bytes=MAX_UNWANTED_NBYTES_AT_ONCE,
        max_coalesced_bytes=options.max_coalesced_bytes,
    )
    for read, spans in zip(planned, merged, strict=True):
        read.spans = spans


def _blame_entries(
    span_reads: list[tuple[_ShardRead, Span]], reads: Sequence[EntryRead]
) -> Flow[None]:
    """After a failed round 2: raise `CorruptShardError` if an entry is what made it fail.

    A damaged entry may ask for a range that a base store refuses, or for more memory than
    there is; only the size of the shard tells that from a failure of the base store.
    """
    sizes: list[int | None] = yield [GetSize(read.shard.key) for read, _ in span_reads]
    for (read, span), size in zip(span_reads, sizes, strict=True):
        if size is None:
            continue
        for member in span.members:
            entry_id = reads[read.owners[member]].chunk.entry_id
            try:
                read.index.check_entry(entry_id, size, read.shard.layout.spec.index)
            except IndexDamageError as damage:
                raise corrupt(read.shard, damage) from damage


def _read_whole(
    reads: Sequence[EntryRead], pending: list[list[int]], values: list[memoryview | None]
) -> Flow[None]:
    """Fill `values` from whole shards, each read in one request."""
    shards = [reads[group[0]].chunk.shard for group in pending]
    replies = yield from read_whole_shards(shards)
    for shard, group, found in zip(shards, pending, replies, strict=True):
        spec = shard.layout.spec
        for i in group:
            values[i] = None
        if found.value is None:
            continue
        try:
            index = index_of_shard(found.value, spec.chunks_per_shard, spec.index)
            _take(found.value, index, reads, group, values)
        except IndexDamageError as damage:
            raise corrupt(shard, damage) from damage


def _take(
    value: memoryview,
    index: ShardIndex,
    reads: Sequence[EntryRead],
    group: list[int],
    values: list[memoryview | None],
) -> None:
    """Fill `values` for one group of reads from the bytes of its whole shard."""
    form = reads[group[0]].chunk.shard.layout.spec.index
    entries = index.entries([reads[i].chunk.entry_id for i in group], len(value), form)
    for i, entry in zip(group, entries, strict=True):
        if entry is not None:
            offset, nbytes = entry
            start, stop = resolve_range(reads[i].byte_range, nbytes)
            values[i] = value[offset + start : offset + stop]


def _n_wanted(reads: Sequence[EntryRead], group: list[int]) -> int:
    """Chunks of one shard that are wanted as a whole."""
    return len({reads[i].chunk.entry_id for i in group if reads[i].byte_range is None})

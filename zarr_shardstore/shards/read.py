"""Read flows: at most two rounds of requests, however many chunks of however many shards.

Round 1 asks for the index of each shard once, round 2 for the coalesced spans of the entries
found there. Behind a network some shards are read whole in round 1, if their index is not known.
Where a shard was replaced between the rounds, or its bytes contradict its index, the shard is
asked again, and at last read whole in one request: that one is before or after the write, and
shows whether the shard is damaged.

Source: sharding storage transformer draft, "API implementation", get_partial_values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zarr_shardstore.format.index import IndexDamageError, ShardIndex
from zarr_shardstore.format.layout import ChunkRef, ShardRef
from zarr_shardstore.format.ranges import (
    ByteRange,
    Range,
    Span,
    column_of_ranges,
    merge_spans,
    plan_spans,
    resolve_range,
)
from zarr_shardstore.format.shard import index_of_shard
from zarr_shardstore.shards.index_reads import (
    MAX_UNWANTED_NBYTES_AT_ONCE,
    are_worth_whole,
    corrupt,
    read_whole_shards,
)
from zarr_shardstore.shards.requests import Flow, FoundIndex, Get, GetIndex, GetSize, Request

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
        Says how many shards are read in the same two rounds; ``None``: all.
    max_requests_at_once
        Requests that are under way at a time, where a round of them takes long: some shards are
        read whole, and gaps of up to 16 `max_gap_bytes` are read along to spare a round, 4 MiB
        of them in a read.
    """

    max_gap_bytes: int = 4 * 1024
    max_coalesced_bytes: int = 16 * 1024 * 1024
    max_shards_at_once: Callable[[], int] | None = None
    max_requests_at_once: int | None = None


class EntryRead(NamedTuple):
    """Ask for the value of a chunk, or for a range of it."""

    chunk: ChunkRef
    byte_range: ByteRange | None = None


@dataclass(slots=True)
class ShardReads:
    """What one read wants of a shard, in columns.

    Parameters
    ----------
    positions
        Which of the values of the read they are.
    entry_ids
        Of which chunks; one may be there more than once.
    byte_ranges
        Of the values; ``None``: all of each.
    """

    shard: ShardRef
    positions: list[int]
    entry_ids: list[int]
    byte_ranges: list[ByteRange | None] | None

    @classmethod
    def of(cls, shard: ShardRef, byte_ranges: Sequence[ByteRange | None] | None) -> ShardReads:
        """None yet, of a read that wants those ranges, or whole values."""
        return cls(shard, [], [], None if byte_ranges is None else [])

    def add(self, position: int, entry_id: int, byte_range: ByteRange | None) -> None:
        """One more."""
        self.positions.append(position)
        self.entry_ids.append(entry_id)
        if self.byte_ranges is not None:
            self.byte_ranges.append(byte_range)

    def n_wanted(self) -> int:
        """Chunks that are wanted as a whole."""
        if self.byte_ranges is None:
            return len(set(self.entry_ids))
        pairs = zip(self.entry_ids, self.byte_ranges, strict=True)
        return len({entry_id for entry_id, byte_range in pairs if byte_range is None})

    def ranges_in(
        self, entries: Sequence[tuple[int, int] | None]
    ) -> Iterator[tuple[int, int, int]]:
        """Row, first byte and end of each that is there, from offset and nbytes of each entry."""
        if self.byte_ranges is None:
            for row, entry in enumerate(entries):
                if entry is not None:
                    yield row, entry[0], entry[0] + entry[1]
            return
        for row, (entry, byte_range) in enumerate(zip(entries, self.byte_ranges, strict=True)):
            if entry is not None:
                start, stop = resolve_range(byte_range, entry[1])
                yield row, entry[0] + start, entry[0] + stop


@dataclass(slots=True)
class _Planned:
    """Spans of one shard, and the state it must be in."""

    reads: ShardReads
    index: ShardIndex
    found: FoundIndex
    wanted: list[tuple[int, int]]
    """Bytes that the spans are made of."""
    rows: list[int]
    """Of the reads, one for each of them."""
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
    byte_ranges = column_of_ranges([read.byte_range for read in reads])
    by_shard: dict[str, ShardReads] = {}
    for i, ((_, shard, entry_id), byte_range) in enumerate(reads):
        group = by_shard.get(shard.key)
        if group is None:
            group = by_shard[shard.key] = ShardReads.of(shard, byte_ranges)
        group.add(i, entry_id, byte_range)
    return (yield from read_shards(list(by_shard.values()), len(reads), options))


def read_shards(
    groups: Sequence[ShardReads], n_values: int, options: ReadOptions
) -> Flow[list[memoryview | None]]:
    """As `read_entries`, of reads whose shards are known; each shard is in one group."""
    values: list[memoryview | None] = [None] * n_values
    first, max_at_once = 0, options.max_shards_at_once
    while first < len(groups):
        n_at_once = len(groups) if max_at_once is None else max_at_once()
        yield from _read_groups(groups[first : first + n_at_once], values, options)
        first += n_at_once
    return values


def _read_groups(
    pending: Sequence[ShardReads], values: list[memoryview | None], options: ReadOptions
) -> Flow[None]:
    """Fill `values` for some groups of reads, each of one shard."""
    for attempt in range(_N_ATTEMPTS_IN_TWO_ROUNDS):
        is_again = attempt > 0
        whole = [False] * len(pending)
        if options.max_requests_at_once is not None and not is_again:
            wanted = [(reads.shard, reads.n_wanted()) for reads in pending]
            whole = are_worth_whole(wanted, options.max_coalesced_bytes)
        replies: list[FoundIndex] = yield [
            GetIndex(reads.shard, consistent=is_again, revalidate=is_again, with_data=is_worth)
            for reads, is_worth in zip(pending, whole, strict=True)
        ]
        pending = yield from _read_spans(pending, replies, values, options)
        if not pending:
            return
    yield from _read_whole(pending, values)


def _read_spans(
    pending: Sequence[ShardReads],
    indexes: list[FoundIndex],
    values: list[memoryview | None],
    options: ReadOptions,
) -> Flow[list[ShardReads]]:
    """Fill `values`; return the groups of reads whose shard must be asked again."""
    again: list[ShardReads] = []
    planned: list[_Planned] = []
    doubtful: list[tuple[ShardRef, FoundIndex]] = []  # no bytes are read that tell the version
    for reads, found in zip(pending, indexes, strict=True):
        for i in reads.positions:
            values[i] = None
        if found.damage is not None:
            again.append(reads)
            continue
        plan: _Planned | None = None
        try:
            if found.value is not None and found.decoded is not None:
                _take(found.value, found.decoded, reads, values)
            elif found.decoded is not None:
                plan = _plan_shard(reads, found.decoded, found, values, options)
        except IndexDamageError:
            again.append(reads)
            continue
        if plan is not None and plan.spans:
            planned.append(plan)
        elif found.is_unverified:
            doubtful.append((reads.shard, found))
    if not planned and not doubtful:
        return again
    _spare_rounds(planned, options)
    span_reads = [(plan, span) for plan in planned for span in plan.spans]
    batch: list[Request] = [
        Get(plan.reads.shard.key, Range(span.start, span.stop)) for plan, span in span_reads
    ]
    batch += [GetIndex(shard) for shard, _ in doubtful]
    try:
        replies = yield batch
    except Exception:
        yield from _blame_entries(span_reads)
        raise
    moved: set[str] = set()
    for (shard, before), now in zip(doubtful, replies[len(span_reads) :], strict=True):
        is_gone = before.decoded is None and now.decoded is None and now.damage is None
        if not is_gone and now.version != before.version:
            moved.add(shard.key)
    for (plan, span), found in zip(span_reads, replies, strict=False):
        data = found.value
        is_same = found.version == plan.found.version
        if not is_same or data is None or len(data) != span.stop - span.start:
            moved.add(plan.reads.shard.key)
        else:
            for member in span.members:
                start, stop = plan.wanted[member]
                position = plan.reads.positions[plan.rows[member]]
                values[position] = data[start - span.start : stop - span.start]
    again += [reads for reads in pending if reads.shard.key in moved]
    return again


def _plan_shard(
    reads: ShardReads,
    index: ShardIndex,
    found: FoundIndex,
    values: list[memoryview | None],
    options: ReadOptions,
) -> _Planned:
    """Spans that the reads of one shard need; values that need none are filled in."""
    wanted: list[tuple[int, int]] = []
    rows: list[int] = []
    entries = index.entries(reads.entry_ids, found.size, reads.shard.layout.spec.index)
    for row, start, stop in reads.ranges_in(entries):
        if start == stop:
            values[reads.positions[row]] = memoryview(b"")
        else:
            wanted.append((start, stop))
            rows.append(row)
    spans = plan_spans(
        wanted,
        max_gap_bytes=options.max_gap_bytes,
        max_coalesced_bytes=options.max_coalesced_bytes,
    )
    return _Planned(reads, index, found, wanted, rows, spans)


def _spare_rounds(planned: list[_Planned], options: ReadOptions) -> None:
    """Read more of the gaps along, if the spans are more than can be asked for at once."""
    n = options.max_requests_at_once
    if n is None or sum(len(plan.spans) for plan in planned) <= n:
        return
    merged = merge_spans(
        [plan.spans for plan in planned],
        n,
        max_gap_bytes=_MAX_GAP_FACTOR * options.max_gap_bytes,
        max_unwanted_bytes=MAX_UNWANTED_NBYTES_AT_ONCE,
        max_coalesced_bytes=options.max_coalesced_bytes,
    )
    for plan, spans in zip(planned, merged, strict=True):
        plan.spans = spans


def _blame_entries(span_reads: list[tuple[_Planned, Span]]) -> Flow[None]:
    """After a failed round 2: raise `CorruptShardError` if an entry is what made it fail.

    A damaged entry may ask for a range that a base store refuses, or for more memory than
    there is; only the size of the shard tells that from a failure of the base store.
    """
    sizes: list[int | None] = yield [GetSize(plan.reads.shard.key) for plan, _ in span_reads]
    for (plan, span), size in zip(span_reads, sizes, strict=True):
        if size is None:
            continue
        shard = plan.reads.shard
        for member in span.members:
            entry_id = plan.reads.entry_ids[plan.rows[member]]
            try:
                plan.index.check_entry(entry_id, size, shard.layout.spec.index)
            except IndexDamageError as damage:
                raise corrupt(shard, damage) from damage


def _read_whole(pending: Sequence[ShardReads], values: list[memoryview | None]) -> Flow[None]:
    """Fill `values` from whole shards, each read in one request."""
    replies = yield from read_whole_shards([reads.shard for reads in pending])
    for reads, found in zip(pending, replies, strict=True):
        spec = reads.shard.layout.spec
        for i in reads.positions:
            values[i] = None
        if found.value is None:
            continue
        try:
            index = index_of_shard(found.value, spec.chunks_per_shard, spec.index)
            _take(found.value, index, reads, values)
        except IndexDamageError as damage:
            raise corrupt(reads.shard, damage) from damage


def _take(
    value: memoryview, index: ShardIndex, reads: ShardReads, values: list[memoryview | None]
) -> None:
    """Fill `values` for the reads of one shard from its bytes."""
    entries = index.entries(reads.entry_ids, len(value), reads.shard.layout.spec.index)
    for row, start, stop in reads.ranges_in(entries):
        values[reads.positions[row]] = value[start:stop]

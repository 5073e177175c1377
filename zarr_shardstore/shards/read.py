"""Reads of chunks: at most two rounds of requests, for any number of chunks and shards.

1. Round 1 asks for the index of each shard. A cached index takes no request, and is *unverified*.
   Over a network, a shard of which much is wanted is read whole, if its index is not cached.
2. Round 2 asks for the entries, in coalesced spans. Each reply must be as long as its span and
   have the version of the index. An unverified index is revalidated if no entry is read.
3. A shard that was replaced between the rounds, or has a damaged index, is read so once more.
   These reads wait for a writer in place, and revalidate the index.
4. After that the shard is read whole, in one request: its bytes before or after a write. Only these
   show that a shard is damaged (`CorruptShardError`).

Source: sharding storage transformer draft, "API implementation", get_partial_values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from zarr_shardstore.format.layout import ChunkRef, ShardRef
from zarr_shardstore.format.ranges import (
    ByteRange,
    Range,
    Span,
    merge_spans,
    plan_spans,
    resolve_range,
)
from zarr_shardstore.format.shard import IndexDamageError, ShardIndex, index_of_shard
from zarr_shardstore.shards.index_reads import corrupt, read_whole_shards
from zarr_shardstore.shards.requests import Flow, FoundIndex, Get, GetIndex, GetSize, Request

_EMPTY = memoryview(b"")

_MAX_GAP_FACTOR = 16
"""Ratio of the gaps that are read along to save a round, and those that save a request: 64 KiB
take 0.7 ms at 100 MB/s."""

_MAX_UNWANTED_NBYTES = 512 * 1024
"""In one shard that is read whole although most of it is unwanted: 10 ms at 50 MB/s."""

_MAX_UNWANTED_NBYTES_OF_READ = 4 * 1024 * 1024
"""In all such shards of a read, or in its gaps: the time of a round trip at 1 Gbit/s."""

_MIN_WANTED = 1 / 16
"""Least part of the chunks of such a shard: scattered reads pay for the wanted chunks only."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Limits of the requests of one read."""

    max_gap_bytes: int = 4 * 1024
    """Unwanted bytes between two ranges that are read along: a page of a file system."""
    max_coalesced_bytes: int = 16 * 1024 * 1024
    """Largest span of more than one range, and largest shard that is read whole, before
    compression."""
    max_shards_at_once: Callable[[], int] | None = None
    """Number of shards that are now read in the same two rounds; ``None``: all."""
    max_requests_at_once: int | None = None
    """Number of concurrent requests over a network; ``None``: no network. To save a round, some
    shards are read whole, and longer gaps along."""


@dataclass(slots=True)
class ShardReads:
    """Reads of entries of one shard."""

    shard: ShardRef
    column: Sequence[ByteRange | None] | None
    """Range of each value of the whole read; ``None``: all of each value."""
    positions: list[int] = field(default_factory=list)
    """Position of each value in the whole read."""
    entry_ids: list[int] = field(default_factory=list)
    """Entry of each value; an entry may be there more than once."""

    def __len__(self) -> int:
        return len(self.entry_ids)

    def byte_ranges(self) -> list[ByteRange | None] | None:
        """Return the range of each value; ``None``: all are whole."""
        return None if self.column is None else [self.column[i] for i in self.positions]

    def ranges(self, index: ShardIndex, shard_nbytes: int | None) -> list[tuple[int, int] | None]:
        """Return the bytes of each value, checked against `shard_nbytes`; ``None``: missing."""
        entries = index.entries(self.entry_ids, shard_nbytes, self.shard.spec)
        ranges = [None if entry is None else (entry[0], entry[0] + entry[1]) for entry in entries]
        if self.column is not None:
            for row, entry in enumerate(entries):
                if entry is not None:
                    start, stop = resolve_range(self.column[self.positions[row]], entry[1])
                    ranges[row] = (entry[0] + start, entry[0] + stop)
        return ranges


@dataclass(slots=True)
class _ShardPlan:
    """Spans of one shard, which must have the version of its index."""

    reads: ShardReads
    found: FoundIndex
    ranges: list[tuple[int, int]]
    """Bytes of the shard that each value is."""
    spans: list[Span]


def read_entries(
    chunks: Sequence[ChunkRef],
    options: ReadOptions,
    byte_ranges: Sequence[ByteRange | None] | None = None,
) -> Flow[list[memoryview | None]]:
    """Read values of chunks, or ranges; ``None`` if missing. Only wanted entries are checked."""
    by_shard: dict[str, ShardReads] = {}
    for i, (_, shard, entry_id) in enumerate(chunks):
        group = by_shard.get(shard.key)
        if group is None:
            group = by_shard[shard.key] = ShardReads(shard, byte_ranges)
        group.positions.append(i)
        group.entry_ids.append(entry_id)
    return (yield from read_groups(list(by_shard.values()), len(chunks), options))


def read_groups(
    groups: Sequence[ShardReads], n_values: int, options: ReadOptions
) -> Flow[list[memoryview | None]]:
    """Read as `read_entries`, with the reads grouped already; each shard is in one group."""
    values: list[memoryview | None] = [None] * n_values
    first, max_at_once = 0, options.max_shards_at_once
    while first < len(groups):
        n_at_once = max_at_once() if max_at_once is not None and len(groups) > 1 else len(groups)
        pending = groups[first : first + n_at_once]
        yield from _read_in_two_rounds(pending, values, options)
        first += n_at_once
    return values


def _read_in_two_rounds(
    pending: Sequence[ShardReads], values: list[memoryview | None], options: ReadOptions
) -> Flow[None]:
    """Fill `values` for some groups of reads, each of one shard."""
    for is_again in (False, True):
        with_data = [False] * len(pending)
        if options.max_requests_at_once is not None and not is_again:
            with_data = _choose_whole_shards(pending, options.max_coalesced_bytes)
        replies: list[FoundIndex] = yield [
            GetIndex(reads.shard, consistent=is_again, revalidate=is_again, with_data=is_whole)
            for reads, is_whole in zip(pending, with_data, strict=True)
        ]
        pending = yield from _read_spans(pending, replies, values, options)
        if not pending:
            return
        for reads in pending:
            for i in reads.positions:
                values[i] = None  # the entry may be missing by now
    founds = yield from read_whole_shards([reads.shard for reads in pending])
    for reads, found in zip(pending, founds, strict=True):
        if found.value is not None:
            try:
                index = index_of_shard(found.value, reads.shard.spec)
                _cut_values(found.value, index, reads, values)
            except IndexDamageError as damage:
                raise corrupt(reads.shard, damage) from damage


def _choose_whole_shards(groups: Sequence[ShardReads], max_nbytes: int) -> list[bool]:
    """Choose the uncached shards to read whole: most chunks are wanted, or the others are small."""
    unwanted_left = _MAX_UNWANTED_NBYTES_OF_READ
    chosen: list[bool] = []
    for reads in groups:
        shard, byte_ranges = reads.shard, reads.byte_ranges() or repeat(None)
        n_wanted = len({i for i, r in zip(reads.entry_ids, byte_ranges, strict=False) if r is None})
        chunk_nbytes, spec = shard.layout.chunk_nbytes, shard.spec
        # All entries count: a shard of an array that has shrunk may hold entries outside it.
        is_small = chunk_nbytes is not None and spec.n_entries * chunk_nbytes <= max_nbytes
        # Without a checksum a truncated reply may pass for the whole shard.
        if chunk_nbytes is None or not is_small or not spec.index.checksum:
            chosen.append(False)
            continue
        n_entries = shard.n_grid_entries
        unwanted = (n_entries - n_wanted) * chunk_nbytes
        are_several = n_wanted > 1 and n_wanted >= _MIN_WANTED * n_entries
        is_little = are_several and unwanted <= min(_MAX_UNWANTED_NBYTES, unwanted_left)
        is_most = 2 * n_wanted > n_entries
        if is_little and not is_most:
            unwanted_left -= unwanted
        chosen.append(is_little or is_most)
    return chosen


def _read_spans(
    pending: Sequence[ShardReads],
    indexes: Sequence[FoundIndex],
    values: list[memoryview | None],
    options: ReadOptions,
) -> Flow[list[ShardReads]]:
    """Fill `values` by round 2; return the groups whose shard must be read again."""
    plans: list[_ShardPlan] = []
    unverified: list[tuple[ShardReads, FoundIndex]] = []  # no bytes are read that have the version
    replaced: set[str] = set()
    for reads, found in zip(pending, indexes, strict=True):
        if found.damage is not None:
            replaced.add(reads.shard.key)
            continue
        try:
            plan = _cut_or_plan(reads, found, values, options)
        except IndexDamageError:
            replaced.add(reads.shard.key)
            continue
        if plan is not None:
            plans.append(plan)
        elif found.is_unverified:
            unverified.append((reads, found))
    if plans or unverified:
        if options.max_requests_at_once is not None:
            merged = _merged([plan.spans for plan in plans], options)
            for plan, spans in zip(plans, merged, strict=True):
                plan.spans = spans
        span_reads = [(plan, span) for plan in plans for span in plan.spans]
        batch: list[Request] = [
            Get(plan.reads.shard.key, Range(span.start, span.stop)) for plan, span in span_reads
        ]
        batch += [GetIndex(reads.shard) for reads, _ in unverified]
        try:
            replies = yield batch
        except Exception:
            yield from _blame_entries(span_reads)
            raise
        for (plan, span), found in zip(span_reads, replies, strict=False):
            data, version = found.value, plan.found.version
            if found.version != version or data is None or len(data) != span.stop - span.start:
                replaced.add(plan.reads.shard.key)
                continue
            for member in span.members:
                start, stop = plan.ranges[member]
                values[plan.reads.positions[member]] = data[start - span.start : stop - span.start]
        for (reads, before), now in zip(unverified, replies[len(span_reads) :], strict=True):
            is_gone = before.decoded is None and now.decoded is None and now.damage is None
            if not is_gone and now.version != before.version:
                replaced.add(reads.shard.key)
    return [reads for reads in pending if reads.shard.key in replaced]


def _merged(spans: Sequence[list[Span]], options: ReadOptions) -> Sequence[list[Span]]:
    """Join spans of the shards of a read over a network, so that it takes one round if possible."""
    if options.max_requests_at_once is None:
        return spans
    return merge_spans(
        spans,
        options.max_requests_at_once,
        max_gap_bytes=_MAX_GAP_FACTOR * options.max_gap_bytes,
        max_unwanted_bytes=_MAX_UNWANTED_NBYTES_OF_READ,
        max_coalesced_bytes=options.max_coalesced_bytes,
    )


def price_of(
    groups: Sequence[ShardReads], indexes: Sequence[FoundIndex], options: ReadOptions
) -> tuple[int, int]:
    """Return the requests of one read whose indexes are known, and the bytes of its values."""
    ranges = [
        [*filter(None, reads.ranges(found.decoded, None))]
        for reads, found in zip(groups, indexes, strict=True)
        if found.decoded is not None
    ]
    max_gap, most = options.max_gap_bytes, options.max_coalesced_bytes
    spans = [plan_spans(each, max_gap_bytes=max_gap, max_coalesced_bytes=most) for each in ranges]
    n_requests = sum(map(len, _merged(spans, options)))
    return n_requests, sum(stop - start for each in ranges for start, stop in each)


def _cut_or_plan(
    reads: ShardReads, found: FoundIndex, values: list[memoryview | None], options: ReadOptions
) -> _ShardPlan | None:
    """Cut the values out of a whole shard, or plan the spans of one; ``None``: all is read."""
    if found.decoded is None:
        return None
    if found.value is not None:
        _cut_values(found.value, found.decoded, reads, values)
        return None
    ranges = reads.ranges(found.decoded, found.size)
    for position, wanted in zip(reads.positions, ranges, strict=True):
        if wanted is not None:
            values[position] = _EMPTY  # until round 2, if there are bytes
    wanted_or_empty = [wanted or (0, 0) for wanted in ranges]
    spans = plan_spans(
        wanted_or_empty,
        max_gap_bytes=options.max_gap_bytes,
        max_coalesced_bytes=options.max_coalesced_bytes,
    )
    return _ShardPlan(reads, found, wanted_or_empty, spans) if spans else None


def _blame_entries(span_reads: Sequence[tuple[_ShardPlan, Span]]) -> Flow[None]:
    """After a failed round 2: raise `CorruptShardError` if an entry made it fail.

    A base store may refuse the range of a damaged entry. The size of the shard shows that.
    """
    sizes: list[int | None] = yield [GetSize(plan.reads.shard.key) for plan, _ in span_reads]
    for (plan, span), size in zip(span_reads, sizes, strict=True):
        if size is None:
            continue
        shard, index = plan.reads.shard, plan.found.decoded
        assert index is not None, "it has spans"
        for member in span.members:
            try:
                index.check_entry(plan.reads.entry_ids[member], size, shard.spec)
            except IndexDamageError as damage:
                raise corrupt(shard, damage) from damage


def _cut_values(
    data: memoryview, index: ShardIndex, reads: ShardReads, values: list[memoryview | None]
) -> None:
    """Fill `values` from the bytes of a whole shard."""
    for position, wanted in zip(reads.positions, reads.ranges(index, len(data)), strict=True):
        if wanted is not None:
            values[position] = data[wanted[0] : wanted[1]]

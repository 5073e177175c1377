"""Read flows: two rounds of requests, however many chunks of however many shards.

Round 1 asks for the index of each shard once, round 2 for the coalesced spans of the entries
found there. Where a shard was replaced between the rounds, or its bytes contradict its index,
the shard is asked again, and at last read whole in one request: that one is before or after
the write, and shows whether the shard is damaged.

Source: sharding storage transformer draft, "API implementation", get_partial_values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.index import IndexDamageError, ShardIndex
from zarr_shardstore.format.layout import ChunkRef, ShardRef
from zarr_shardstore.format.shard import index_of_shard
from zarr_shardstore.plan.indexes import corrupt
from zarr_shardstore.plan.ranges import ByteRange, Range, resolve_range
from zarr_shardstore.plan.requests import Flow, Found, FoundIndex, Get, GetIndex, GetSize, Request
from zarr_shardstore.plan.spans import Span, plan_spans

__all__ = [
    "EntryRead",
    "ReadOptions",
    "read_entries",
    "read_whole_shards",
]

_N_ATTEMPTS_IN_TWO_ROUNDS = 2

_N_ATTEMPTS_IN_ONE_PIECE = 2
"""To read a whole shard, if a reply is shorter than the shard."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How much one read asks for at once.

    Parameters
    ----------
    max_gap_bytes
        Unwanted bytes between two ranges that are read along. 4 KiB, a page of a file
        system, costs less than a request anywhere; with 1 MiB more was lost than won.
    max_coalesced_bytes
        Largest span of more than one range.
    max_shards_at_once
        Shards that are read in the same two rounds; ``None``: all.
    """

    max_gap_bytes: int = 4 * 1024
    max_coalesced_bytes: int = 16 * 1024 * 1024
    max_shards_at_once: int | None = None


@dataclass(frozen=True, slots=True)
class EntryRead:
    """Ask for the value of a chunk, or for a range of it."""

    chunk: ChunkRef
    byte_range: ByteRange | None = None


@dataclass(slots=True)
class _SpanRead:
    """A span of one shard: which reads it serves, and the state it must be in."""

    shard: ShardRef
    index: ShardIndex
    found: FoundIndex
    span: Span
    wanted: list[tuple[int, int]]
    owners: list[int]


def read_whole_shards(shards: Sequence[ShardRef]) -> Flow[list[Found]]:
    """Read whole shards, each in one request, and see that nothing is cut off.

    The last bytes of a reply that is too short are no index, but may pass for one: zeros say that
    all entries are empty, ``0xff`` that they are missing. A checksum finds that, and so do the
    entries if the index is at the start, or if the last one ends where the index begins, as in
    all shards that are not being appended to. For others a base store that does not tell the
    size with the reply is asked for it, in a second round.

    Raises
    ------
    CorruptShardError
        If a reply is shorter or longer than its shard, also when it is asked for again.
    """
    founds: list[Found] = [Found(None, None)] * len(shards)
    left: list[int] = list(range(len(shards)))
    for n_left in reversed(range(_N_ATTEMPTS_IN_ONE_PIECE)):
        replies = yield [Get(shards[i].key, settled=True) for i in left]
        for i, found in zip(left, replies, strict=True):
            founds[i] = found
        unknown = [i for i in left if _may_be_cut_off(shards[i], founds[i])]
        if unknown:
            sizes: list[int | None] = yield [GetSize(shards[i].key) for i in unknown]
            for i, size in zip(unknown, sizes, strict=True):
                founds[i] = founds[i]._replace(size=size)
        left = [i for i in left if not _is_whole(founds[i])]
        if not left:
            break
        if not n_left:
            value, size = founds[left[0]].value, founds[left[0]].size
            n_read = 0 if value is None else len(value)
            raise CorruptShardError(
                f"it has {size} bytes, and reading all of it gave {n_read}",
                shard_key=shards[left[0]].key,
            )
    return founds


def read_entries(reads: Sequence[EntryRead], options: ReadOptions) -> Flow[list[memoryview | None]]:
    """Read values of chunks; ``None`` where a chunk is missing.

    Cost: one index request for each shard, then one request for each span; a chunk that was
    asked for twice is read once if the ranges touch.

    Raises
    ------
    SpecError
        If a byte range has a negative number.
    CorruptShardError
        If an index, or an entry that was asked for, is damaged. Others do not matter.
    """
    for read in reads:
        resolve_range(read.byte_range, 0)
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
        replies: list[FoundIndex] = yield [
            GetIndex(shard, settled=is_again, fresh=is_again) for shard in shards
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
    span_reads: list[_SpanRead] = []
    doubtful: list[tuple[ShardRef, FoundIndex]] = []  # no bytes are read that tell the version
    for shard, group, found in zip(shards, pending, indexes, strict=True):
        for i in group:
            values[i] = None
        if found.damage is not None:
            again.append(group)
            continue
        spans: list[_SpanRead] = []
        try:
            if found.decoded is not None:
                spans = _plan_shard(shard, found.decoded, found, reads, group, values, options)
        except IndexDamageError:
            again.append(group)
            continue
        span_reads += spans
        if found.is_remembered and not spans:
            doubtful.append((shard, found))
    if not span_reads and not doubtful:
        return again
    batch: list[Request] = [Get(s.shard.key, Range(s.span.start, s.span.stop)) for s in span_reads]
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
    for s, found in zip(span_reads, replies, strict=False):
        data = found.value
        is_same = found.version == s.found.version
        if not is_same or data is None or len(data) != s.span.stop - s.span.start:
            moved.add(s.shard.key)
        else:
            for member in s.span.members:
                start, stop = s.wanted[member]
                values[s.owners[member]] = data[start - s.span.start : stop - s.span.start]
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
) -> list[_SpanRead]:
    """Spans that the reads of one shard need; values that need none are filled in."""
    wanted: list[tuple[int, int]] = []
    owners: list[int] = []
    for i in group:
        entry = index.entry(reads[i].chunk.entry_id)
        if entry is None:
            continue
        if found.size is not None:
            index.check_entry(reads[i].chunk.entry_id, found.size, shard.layout.spec.index)
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
    return [_SpanRead(shard, index, found, span, wanted, owners) for span in spans]


def _blame_entries(span_reads: list[_SpanRead], reads: Sequence[EntryRead]) -> Flow[None]:
    """After a failed round 2: raise `CorruptShardError` if an entry is what made it fail.

    A damaged entry may ask for a range that a base store refuses, or for more memory than
    there is; only the size of the shard tells that from a failure of the base store.
    """
    sizes: list[int | None] = yield [GetSize(s.shard.key) for s in span_reads]
    for s, size in zip(span_reads, sizes, strict=True):
        if size is None:
            continue
        for member in s.span.members:
            entry_id = reads[s.owners[member]].chunk.entry_id
            try:
                s.index.check_entry(entry_id, size, s.shard.layout.spec.index)
            except IndexDamageError as damage:
                raise corrupt(s.shard, damage) from damage


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
            for i in group:
                entry_id = reads[i].chunk.entry_id
                index.check_entry(entry_id, len(found.value), spec.index)
                entry = index.entry(entry_id)
                if entry is not None:
                    offset, nbytes = entry
                    start, stop = resolve_range(reads[i].byte_range, nbytes)
                    values[i] = found.value[offset + start : offset + stop]
        except IndexDamageError as damage:
            raise corrupt(shard, damage) from damage


def _may_be_cut_off(shard: ShardRef, found: Found) -> bool:
    spec = shard.layout.spec
    if found.value is None or found.size is not None:
        return False
    if spec.index.checksum or spec.index.location == "start":
        return False
    try:
        index = index_of_shard(found.value, spec.chunks_per_shard, spec.index)
    except IndexDamageError:
        return True
    offsets, nbytes = index.fields[index.present_ids()].T
    data_nbytes = len(found.value) - spec.index_nbytes
    # A sum may wrap: such an entry is found to leave the shard when it is used.
    return not len(offsets) or int((offsets + nbytes).max()) != data_nbytes


def _is_whole(found: Found) -> bool:
    return found.value is None or found.size is None or found.size == len(found.value)

"""Requests for chunks while a batch is open: the write buffer comes before the base store.

Each flow looks into the buffer *before* it asks the base store. A value that is flushed in between
is then found in the base store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zarr_shardstore.format.layout import ChunkRef, ShardRef
from zarr_shardstore.format.ranges import resolve_range
from zarr_shardstore.operations.write_buffer import BufferedUpdate, WriteBuffer
from zarr_shardstore.shards.read import EntryRead, ReadOptions, read_entries
from zarr_shardstore.shards.requests import Exists, Flow, Found, Get, GetSize, Request, UpdateShard
from zarr_shardstore.shards.sharding import (
    ShardingTransformer,
    entry_update,
    perform_on_chunks,
    split_at_sharding,
)
from zarr_shardstore.shards.stack import Parts, Stack, ValueTransformer, gather_replies
from zarr_shardstore.shards.updates import EntryUpdate, SetEntry


def perform_buffered(
    requests: Sequence[Request],
    chunks: Sequence[ChunkRef],
    reading: ReadOptions,
    buffer: WriteBuffer,
    below: Stack = (),
) -> Flow[list[Any]]:
    """Reply to requests for chunks as `perform_on_chunks`; buffer the updates among them.

    Cost: none for buffered chunks and for whole new values. Pieces, and values that are only
    stored if there is none, read the entries that are not buffered.
    """
    buffered: dict[int, Any] = {}
    reads: list[int] = []
    updates: dict[ShardRef, list[EntryUpdate]] = {}
    for i, (request, chunk) in enumerate(zip(requests, chunks, strict=True)):
        if not isinstance(request, Get | GetSize | Exists):
            updates.setdefault(chunk.shard, []).append(entry_update(request, chunk.entry_id))
            continue
        update = buffer.find(chunk.shard, chunk.entry_id)
        if update is None:
            reads.append(i)
        else:
            buffered[i] = _reply(request, update)
    parts: Parts = [
        ((), _buffer_updates(shard, changes, reading, buffer, below))
        for shard, changes in updates.items()
    ]
    if reads:
        flow = perform_on_chunks([requests[i] for i in reads], [chunks[i] for i in reads], reading)
        parts.append((reads, flow))
    replies = yield from gather_replies(len(requests), parts)
    for i, reply in buffered.items():
        replies[i] = reply
    return replies


def _buffer_updates(
    shard: ShardRef,
    updates: Sequence[EntryUpdate],
    reading: ReadOptions,
    buffer: WriteBuffer,
    below: Stack,
) -> Flow[tuple[()]]:
    """Buffer updates of one shard, all or none; if no batch is open, commit them.

    Raises
    ------
    SpecError
        If a piece starts outside its value.
    CorruptShardError
        If a stored value is needed, and is damaged.
    """
    while buffer.is_open:
        n_commits = buffer.n_commits(shard)
        ids = buffer.entries_to_read(shard, updates)
        values: Sequence[memoryview | None] = []
        if ids:
            chunks = [ChunkRef(shard.chunk_key(i), shard, i) for i in ids]
            values = yield from read_entries([EntryRead(chunk) for chunk in chunks], reading)
        if buffer.put(shard, below, updates, dict(zip(ids, values, strict=True)), n_commits):
            return ()
    yield [UpdateShard(shard, tuple(updates))]
    return ()


def commit_with_buffered(
    shard: ShardRef,
    groups: Sequence[Sequence[EntryUpdate]],
    commit: Callable[[ShardRef, Sequence[Sequence[EntryUpdate]]], Flow[list[Exception | None]]],
    buffer: WriteBuffer,
) -> Flow[Sequence[Exception | None]]:
    """Commit the buffered updates of a shard, then groups of updates, in one write.

    The caller holds the lock of the shard.
    """
    buffered = buffer.take(shard) if buffer.is_active else None
    if buffered is None:
        if not any(groups):
            return [None] * len(groups)
        try:
            return (yield from commit(shard, groups))
        finally:
            if buffer.is_active:
                buffer.count_commit(shard)
    try:
        error, *outcomes = yield from commit(shard, [tuple(buffered.snapshot.values()), *groups])
        if error is not None:
            raise error
    except BaseException as error:
        buffer.restore(buffered, error)
        raise
    buffer.stored(buffered)
    return outcomes


@dataclass(frozen=True, slots=True)
class BufferedSharding(ShardingTransformer):
    """A sharding in front of which updates are buffered.

    Parameters
    ----------
    buffer : WriteBuffer
        The buffer of the store.
    below : Stack
        Transformers below the sharding.
    """

    buffer: WriteBuffer
    below: Stack

    def on_chunks(self, requests: Sequence[Request], chunks: Sequence[ChunkRef]) -> Flow[list[Any]]:
        """Reply to requests for chunks as `perform_buffered`."""
        return perform_buffered(requests, chunks, self.reading, self.buffer, self.below)


def with_buffer(stack: Stack, buffer: WriteBuffer) -> Stack:
    """Return a stack whose sharding is buffered.

    A stack without a sharding is returned as it is, and one in which a transformer below the
    sharding may give shards other keys.
    """
    found = split_at_sharding(stack)
    if found is None:
        return stack
    sharding, below = found
    if not all(isinstance(transformer, ValueTransformer) for transformer in below):
        return stack
    above = stack[: len(stack) - len(below) - 1]
    return (*above, BufferedSharding(sharding.layout, sharding.reading, buffer, below), *below)


def _reply(request: Request, update: BufferedUpdate) -> Any:
    value = memoryview(update.value) if isinstance(update, SetEntry) else None
    match request:
        case Exists():
            return value is not None
        case GetSize():
            return None if value is None else len(value)
        case Get(_, byte_range):
            start, stop = resolve_range(byte_range, len(value or b""))
            return Found(None if value is None else value[start:stop], None)
    raise AssertionError(f"{request!r} is an update")

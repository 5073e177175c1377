"""Requests for chunks, commits and flushes while a batch is open.

Each flow looks into the write buffer *before* it asks the base store. A value that is flushed in
between is then found in the base store. To flush a shard is to commit no update of it: each commit
takes along what is buffered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from zarr_shardstore.arrays.catalog import Catalog, TransformedKey
from zarr_shardstore.errors import ShardConflictError, ShardStoreError
from zarr_shardstore.format.layout import ArrayLayout, ChunkRef, ShardRef
from zarr_shardstore.format.ranges import resolve_range
from zarr_shardstore.metadata.documents import Node
from zarr_shardstore.operations.write_buffer import WriteBuffer
from zarr_shardstore.shards import requests, stack
from zarr_shardstore.shards.read import ReadOptions, read_entries
from zarr_shardstore.shards.requests import EntryUpdate, Flow, Request, UpdateShard
from zarr_shardstore.shards.stack import Stack
from zarr_shardstore.shards.updates import replaces_value


def perform_buffered(
    asked: Sequence[Request],
    chunks: Sequence[ChunkRef],
    reading: ReadOptions,
    buffer: WriteBuffer,
) -> Flow[list[Any]]:
    """Reply to requests for chunks as `perform_on_chunks`; buffer the updates among them.

    Updates of a shard that depend on a stored value are committed. Cost: none for buffered chunks
    and for whole new values.
    """
    replies: list[Any] = [None] * len(asked)
    left: list[int] = []
    writes: dict[ShardRef, list[int]] = {}
    for i, (request, chunk) in enumerate(zip(asked, chunks, strict=True)):
        if not isinstance(request, requests.Get | requests.GetSize | requests.Exists):
            writes.setdefault(chunk.shard, []).append(i)
        elif (update := buffer.find(chunk.shard, chunk.entry_id)) is not None:
            replies[i] = _reply(request, update)
        else:
            left.append(i)
    for shard, positions in writes.items():
        updates: list[Any] = [(chunks[i].entry_id, asked[i]) for i in positions]
        if not buffer.put(shard, updates):
            left += positions
    if left:
        flow = stack.perform_on_chunks([asked[i] for i in left], [chunks[i] for i in left], reading)
        for i, reply in zip(left, (yield from flow), strict=True):
            replies[i] = reply
    return replies


def commit_with_buffered(
    shard: ShardRef,
    groups: Sequence[Sequence[EntryUpdate]],
    commit: Callable[[ShardRef, Sequence[Sequence[EntryUpdate]]], Flow[list[Exception | None]]],
    buffer: WriteBuffer,
) -> Flow[Sequence[Exception | None]]:
    """Commit the buffered updates of a locked shard, then groups of updates, in one write.

    Groups that may wait are buffered instead: no other commit comes between the read of a stored
    value and the buffer.
    """
    if buffer.is_active and groups and all(map(_may_wait, groups)):
        outcomes = yield from _buffer_groups(shard, groups, buffer)
        groups = groups[len(outcomes) :]
        left = (yield from commit(shard, groups)) if groups else ()
        return [*outcomes, *left]
    buffered = buffer.take(shard) if buffer.is_active else None
    if buffered is None:
        return (yield from commit(shard, groups)) if any(groups) else [None] * len(groups)
    try:
        error, *outcomes = yield from commit(shard, [[*buffered.snapshot.items()], *groups])
        if error is not None:
            raise error
    except BaseException as error:
        buffer.end_commit(buffered, error)
        raise
    buffer.end_commit(buffered)
    return outcomes


def _may_wait(group: Sequence[EntryUpdate]) -> bool:
    return any(isinstance(update, requests.Modify) for _, update in group) and all(
        update.may_wait if isinstance(update, requests.Modify) else replaces_value(update)
        for _, update in group
    )


def _buffer_groups(
    shard: ShardRef, groups: Sequence[Sequence[EntryUpdate]], buffer: WriteBuffer
) -> Flow[list[Exception | None]]:
    """Buffer groups of updates; return the outcomes of the first ones, until a batch has ended."""
    ids = {i for group in groups for i, u in group if isinstance(u, requests.Modify)}
    left = [i for i in sorted(ids) if buffer.find(shard, i) is None]
    chunks = [ChunkRef(shard.chunk_key(i), shard, i) for i in left]
    stored = dict(zip(left, (yield from read_entries(chunks, ReadOptions())), strict=True))
    outcomes: list[Exception | None] = []
    for group in groups:
        try:
            if not buffer.put(shard, group, stored):
                break
        except Exception as error:
            outcomes.append(error)
        else:
            outcomes.append(None)
    return outcomes


def with_buffer(plain: Stack, buffer: WriteBuffer) -> Stack:
    """Return a stack whose sharding is buffered.

    A stack without a sharding is returned as it is, and one in which a transformer below the
    sharding may give shards other keys.
    """
    found = stack.split_at_sharding(plain)
    if found is None:
        return plain
    sharding, below = found
    if not all(isinstance(transformer, stack.ValueTransformer) for transformer in below):
        return plain
    above = plain[: len(plain) - len(below) - 1]
    on_chunks = partial(perform_buffered, buffer=buffer)
    return (*above, replace(sharding, on_chunks=on_chunks), *below)


def _reply(request: Request, update: requests.Set | requests.Delete) -> Any:
    value = memoryview(update.value) if isinstance(update, requests.Set) else None
    match request:
        case requests.Exists():
            return value is not None
        case requests.GetSize():
            return None if value is None else len(value)
        case requests.Get(_, byte_range):
            start, stop = resolve_range(byte_range, len(value or b""))
            return requests.Found(None if value is None else value[start:stop], None)
    raise AssertionError(f"{request!r} is an update")


class Flusher:
    """Flows that flush the write buffer of one store; what is not stored stays buffered."""

    def __init__(self, catalog: Catalog, buffer: WriteBuffer) -> None:
        self.catalog = catalog
        self.buffer = buffer

    def flush(self, shard_keys: Sequence[str]) -> Flow[dict[str, Exception]]:
        """Store the updates of shards; return errors by shard key: none stops another shard."""
        failures: dict[str, Exception] = {}
        left = yield from self._commits(shard_keys, failures)
        while left:
            try:
                yield [*left]
                break
            except Exception as error:
                # The driver may not have begun the commits that did not fail themselves.
                found = [(commit, self.buffer.get(commit.shard.key)) for commit in left]
                failed = {c.shard.key: b.error for c, b in found if b is not None and b.error}
                left = [c for c, b in found if b is not None and not b.error]
                if left and not failed:
                    failed[left.pop(0).shard.key] = error
                failures |= failed
        return failures

    def flush_due(self) -> Flow[None]:
        """Flush full shards, and the largest if the buffer is larger than its limit."""
        yield from self.flush_shards(self.buffer.due())

    def flush_below(self, prefix: str) -> Flow[None]:
        """Flush the arrays that may have chunk keys that start with `prefix`."""
        yield from self.flush_arrays(
            lambda layout: layout.prefix.startswith(prefix) or prefix.startswith(layout.prefix)
        )

    def flush_array(self, node: Node, later: ArrayLayout | None = None) -> Flow[None]:
        """Flush an array, before its document changes, unless chunks keep their entries `later`."""
        yield from self.flush_arrays(
            lambda layout: (
                layout.prefix == node.chunk_prefix
                and not (later is not None and layout.has_same_entries(later))
            )
        )

    def flush_arrays(self, is_wanted: Callable[[ArrayLayout], bool]) -> Flow[None]:
        """Flush the arrays with wanted layouts."""
        if self.buffer.is_active:
            layouts = self.buffer.layouts()
            yield from self.flush_shards([key for key in layouts if is_wanted(layouts[key])])

    def flush_shards(self, shard_keys: Sequence[str]) -> Flow[None]:
        """Flush shards; raise the first error, with a note of how many there are."""
        failures = (yield from self.flush(shard_keys)) if shard_keys else {}
        for key, error in failures.items():
            others = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            error.add_note(
                f"when the batch stored the shard {key!r}{others}; their values are still "
                "buffered, and are tried again when the batch ends"
            )
            raise error

    def _commits(
        self, shard_keys: Sequence[str], failures: dict[str, Exception]
    ) -> Flow[list[UpdateShard]]:
        """Return commits of shards whose arrays are still declared as they were."""
        try:
            found = yield from self.catalog.shards_of(shard_keys)
        except Exception as error:
            failures |= dict.fromkeys(shard_keys, error)
            return []
        commits: list[UpdateShard] = []
        for key, now in zip(shard_keys, found, strict=True):
            buffered = self.buffer.get(key)
            if buffered is None:
                continue
            buffered.error = None
            layout, commit = buffered.shard.layout, None
            match now:
                case ShardStoreError():
                    failures[key] = now
                    continue
                case ShardRef() if layout.has_same_entries(now.layout):
                    commit = UpdateShard(now, ())
                case TransformedKey(_, array) if split := stack.split_at_sharding(array.stack):
                    if layout.has_same_entries(split[0].layout):
                        commit = UpdateShard(buffered.shard, (), split[1])
                case None if not buffered.has_values:  # the array was removed, as was wanted
                    self.buffer.forget(buffered)
                    continue
            if commit is not None:
                commits.append(commit)
                continue
            failures[key] = ShardConflictError(
                f"shard {key!r}: another store removed the array {layout.path!r}, or declared it "
                "anew, while a batch buffered values of it; write them again if they are still "
                "wanted"
            )
        return commits

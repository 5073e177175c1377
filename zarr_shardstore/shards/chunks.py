"""Requests for chunks, answered from what is held back first; listings that know of it too.

Flows that stand between operations and the base store while a batch is open. Each looks at
what is held *before* it asks the base store: what is published in between is then seen there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.index import MISSING, ShardIndex
from zarr_shardstore.format.layout import ChunkRef, ShardRef
from zarr_shardstore.format.ranges import resolve_range
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.shards.index_reads import try_read_indexes
from zarr_shardstore.shards.pending import Final, Pending, PendingShards
from zarr_shardstore.shards.read import EntryRead, ReadOptions, read_entries
from zarr_shardstore.shards.requests import (
    Exists,
    Flow,
    Found,
    Get,
    GetSize,
    ListDir,
    ListPrefix,
    Request,
    UpdateShard,
)
from zarr_shardstore.shards.sharding import (
    WRITE_FLOWS,
    ShardingTransformer,
    WriteStrategy,
    entry_update,
    perform_on_chunks,
)
from zarr_shardstore.shards.stack import (
    ReadOnlyTransformer,
    Stack,
    ValueTransformer,
    gather,
    run_above,
)
from zarr_shardstore.shards.updates import EntryUpdate, SetEntry

_SHARDS_PER_ROUND = 64
"""Shards whose indexes are read at once for a listing."""


def perform_or_hold(
    requests: Sequence[Request],
    chunks: Sequence[ChunkRef],
    reading: ReadOptions,
    pending: PendingShards,
    below: Stack = (),
) -> Flow[list[Any]]:
    """As `perform_on_chunks`; while a batch is open, updates are held and reads see them.

    Cost: none for what is held, and for whole new values. Pieces, and values that are only
    stored if there is none, read the entries whose value is not held.
    """
    if not pending:
        return (yield from perform_on_chunks(requests, chunks, reading))
    replies: list[Any] = [None] * len(requests)
    passed: list[int] = []
    updates: dict[ShardRef, list[EntryUpdate]] = {}
    for i, (request, chunk) in enumerate(zip(requests, chunks, strict=True)):
        if not isinstance(request, Get | GetSize | Exists):
            updates.setdefault(chunk.shard, []).append(entry_update(request, chunk.entry_id))
            continue
        held = pending.find(chunk.shard, chunk.entry_id)
        if held is None:
            passed.append(i)
        else:
            replies[i] = _reply(request, held)
    flows: list[Flow[Any]] = [
        hold_updates(shard, parts, reading, pending, below) for shard, parts in updates.items()
    ]
    if passed:
        flows.append(
            perform_on_chunks([requests[i] for i in passed], [chunks[i] for i in passed], reading)
        )
    results = yield from gather(flows)
    if passed:
        for i, reply in zip(passed, results[-1], strict=True):
            replies[i] = reply
    return replies


def hold_updates(
    shard: ShardRef,
    updates: Sequence[EntryUpdate],
    reading: ReadOptions,
    pending: PendingShards,
    below: Stack = (),
) -> Flow[None]:
    """Hold updates of one shard, all or none; without an open batch, commit them.

    Raises
    ------
    SpecError
        If a piece starts outside its value.
    CorruptShardError
        If a stored value is needed, and is damaged.
    """
    while True:
        with pending.watching(shard.key) as watch:
            ids = pending.to_read(shard, updates)
            stored: dict[int, memoryview | None] = {}
            if ids:
                chunks = [ChunkRef(shard.chunk_key(i), shard, i) for i in ids]
                values = yield from read_entries([EntryRead(chunk) for chunk in chunks], reading)
                stored = dict(zip(ids, values, strict=True))
            outcome = pending.hold(shard, below, updates, stored, watch)
        if outcome == "closed":
            yield [UpdateShard(shard, tuple(updates))]
            return
        if outcome == "held":
            return


def update_with_held(
    shard: ShardRef,
    groups: Sequence[Sequence[EntryUpdate]],
    pending: PendingShards,
    *,
    order: EntryOrder,
    strategy: WriteStrategy = "rewrite",
    max_dead_nbytes: int | None = None,
) -> Flow[Sequence[Exception | None]]:
    """As the flow of the strategy, and what is held of the shard is committed before the groups."""
    commit = partial(WRITE_FLOWS[strategy], order=order)
    if strategy == "append":
        commit = partial(commit, max_dead_nbytes=max_dead_nbytes)
    taken = pending.take(shard)
    if taken is None:
        if not any(groups):
            return [None] * len(groups)
        return (yield from commit(shard, groups))
    try:
        of_held, *outcomes = yield from commit(shard, [taken.updates, *groups])
        if of_held is not None:
            raise of_held
    except BaseException as error:
        pending.put_back(taken, error)
        raise
    pending.committed(taken)
    return outcomes


# ----------------------------------------------------------------- stacks


@dataclass(frozen=True, slots=True)
class HoldingTransformer(ShardingTransformer):
    """A sharding whose updates are held while a batch is open.

    Parameters
    ----------
    pending : PendingShards
        Where they are held.
    below : Stack
        What the shards lie on.
    """

    pending: PendingShards
    below: Stack

    def on_chunks(self, requests: Sequence[Request], chunks: Sequence[ChunkRef]) -> Flow[list[Any]]:
        """As `perform_or_hold`."""
        return perform_or_hold(requests, chunks, self.reading, self.pending, self.below)

    def read_indexes(self, shards: Sequence[ShardRef]) -> Flow[list[ShardIndex | None]]:
        """Indexes as they would be if what is held were published."""
        indexes: list[ShardIndex | None] = []
        for index in (yield from read_indexes_with_held(shards, self.pending)):
            if isinstance(index, CorruptShardError):
                raise index
            indexes.append(index)
        return indexes


def split_at_sharding(stack: Stack) -> tuple[ShardingTransformer, Stack] | None:
    """The sharding of a stack, and what lies below it; ``None`` if nothing can be sharded."""
    if any(isinstance(transformer, ReadOnlyTransformer) for transformer in stack):
        return None
    for i, transformer in enumerate(stack):
        if isinstance(transformer, ShardingTransformer):
            return transformer, stack[i + 1 :]
    return None


def with_held(stack: Stack, pending: PendingShards) -> Stack:
    """A stack whose sharding holds updates.

    Not where a transformer below it may give shards other keys: those are written at once.
    """
    found = split_at_sharding(stack) if pending else None
    if found is None:
        return stack
    sharding, below = found
    if not all(isinstance(transformer, ValueTransformer) for transformer in below):
        return stack
    above = stack[: len(stack) - len(below) - 1]
    return (*above, HoldingTransformer(sharding.layout, sharding.reading, pending, below), *below)


# ---------------------------------------------------------------- listings


def read_indexes_with_held(
    shards: Sequence[ShardRef],
    pending: PendingShards,
    versions: Sequence[object] | None = None,
) -> Flow[list[ShardIndex | CorruptShardError | None]]:
    """As `try_read_indexes`, as they would be if what is held were published; for listings."""
    if not pending:
        return (yield from try_read_indexes(shards, versions, cache=False))
    held = [pending.entries(shard) for shard in shards]
    indexes = yield from try_read_indexes(shards, versions, cache=False)
    return [
        index if isinstance(index, CorruptShardError) else overlaid_index(shard, index, entries)
        for shard, index, entries in zip(shards, indexes, held, strict=True)
    ]


def overlaid_index(
    shard: ShardRef, index: ShardIndex | None, entries: Mapping[int, Final]
) -> ShardIndex | None:
    """The index with the sizes of held values; it does not say where these are.

    ``None`` if there would be no shard.
    """
    if not entries:
        return index
    n_entries = shard.layout.spec.n_entries
    fields = np.full((n_entries, 2), MISSING, np.uint64) if index is None else index.fields.copy()
    for i, final in entries.items():
        fields[i] = (0, len(final.value)) if isinstance(final, SetEntry) else MISSING
    overlaid = ShardIndex(fields)
    return overlaid if len(overlaid.present_ids()) else None


def list_names(directories: Sequence[str], pending: PendingShards) -> Flow[list[list[str]]]:
    """Names in directories of the base store as they would be if all were published.

    Cost: where all that is held of a shard are erasures, a read of its index; and if nothing
    remains of one, the directory is listed recursively.
    """
    if not pending:
        return (yield [ListDir(directory) for directory in directories])
    held = [pending.pending(directory) for directory in directories]
    erased = {p.shard.key: p for ps in held for p in ps if not p.has_values}
    gone = yield from _emptied(list(erased.values()))
    is_recursive = [any(p.shard.key in gone for p in ps) for ps in held]
    listings = yield [
        ListPrefix(directory) if yes else ListDir(directory)
        for directory, yes in zip(directories, is_recursive, strict=True)
    ]
    names: list[list[str]] = []
    for directory, yes, ps, listed in zip(directories, is_recursive, held, listings, strict=True):
        keys = [key for key in listed if key not in gone] if yes else []
        keys += [p.shard.key for p in ps if p.has_values]
        below = [key[len(directory) :].partition("/")[0] for key in keys]
        names.append(list(dict.fromkeys(below if yes else listed + below)))
    return names


def _emptied(erased: Sequence[Pending]) -> Flow[set[str]]:
    """Keys of the shards that the held erasures would remove."""
    gone: set[str] = set()
    for first in range(0, len(erased), _SHARDS_PER_ROUND):
        part = erased[first : first + _SHARDS_PER_ROUND]
        flows = [run_above(p.below, try_read_indexes([p.shard])) for p in part]
        for p, (index,) in zip(part, (yield from gather(flows)), strict=True):
            if isinstance(index, ShardIndex) and overlaid_index(p.shard, index, p.entries) is None:
                gone.add(p.shard.key)
    return gone


# ----------------------------------------------------------------- details


def _reply(request: Request, held: Final) -> Any:
    value = memoryview(held.value) if isinstance(held, SetEntry) else None
    match request:
        case Exists():
            return value is not None
        case GetSize():
            return None if value is None else len(value)
        case Get(_, byte_range):
            start, stop = resolve_range(byte_range, len(value or b""))
            return Found(None if value is None else value[start:stop], None)
    raise AssertionError(f"{request!r} is an update")

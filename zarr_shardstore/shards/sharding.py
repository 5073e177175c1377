"""The ``sharding`` transformer: requests for chunks become requests for shards.

Source: sharding storage transformer draft, "API implementation".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from zarr_shardstore.format.layout import ArrayLayout, ChunkRef, ShardRef
from zarr_shardstore.format.ranges import column_of_ranges
from zarr_shardstore.metadata.transformer_list import parse_sharding
from zarr_shardstore.shards.index_reads import read_indexes
from zarr_shardstore.shards.read import ReadOptions, read_entries
from zarr_shardstore.shards.requests import (
    Delete,
    Exists,
    Flow,
    Found,
    Get,
    GetSize,
    Modify,
    Request,
    Set,
    SetIfNotExists,
    SetPartial,
    UpdateShard,
)
from zarr_shardstore.shards.shard_listing import ListedKeys
from zarr_shardstore.shards.stack import (
    ArrayContext,
    Parts,
    ReadOnlyTransformer,
    Stack,
    gather_replies,
)
from zarr_shardstore.shards.updates import DeleteEntry, EntryUpdate, MapEntry, PatchEntry, SetEntry

WriteStrategy: TypeAlias = Literal["rewrite", "append"]

Strategy: TypeAlias = Literal["auto", "rewrite", "append"]
"""The option of a store: ``"auto"`` is ``"append"`` if the base store can append."""


def perform_on_chunks(
    requests: Sequence[Request], chunks: Sequence[ChunkRef], reading: ReadOptions
) -> Flow[list[Any]]:
    """Reply to requests for chunks, also of several arrays.

    Cost: two rounds for all reads, as `read_entries`; one round for the sizes; one
    `UpdateShard` for each shard that changes. All three share their rounds.
    """
    reads: list[int] = []
    sizes: list[int] = []
    updates: list[int] = []
    for i, request in enumerate(requests):
        match request:
            case Get():
                reads.append(i)
            case GetSize() | Exists():
                sizes.append(i)
            case _:
                updates.append(i)
    parts: Parts = []
    kinds = ((reads, partial(_read_values, reading)), (sizes, _read_sizes), (updates, _update))
    for positions, perform in kinds:
        if positions:
            of_kind = [requests[i] for i in positions], [chunks[i] for i in positions]
            parts.append((positions, perform(*of_kind)))
    return (yield from gather_replies(len(requests), parts))


def _read_values(
    reading: ReadOptions, requests: Sequence[Any], chunks: Sequence[ChunkRef]
) -> Flow[list[Found]]:
    ranges = column_of_ranges([request.byte_range for request in requests])
    values = yield from read_entries(chunks, reading, ranges)
    return [Found(value, None) for value in values]


def _read_sizes(
    requests: Sequence[Request], chunks: Sequence[ChunkRef]
) -> Flow[list[int | bool | None]]:
    """Reply to `GetSize` and `Exists`, from indexes alone."""
    shards = list({chunk.shard.key: chunk.shard for chunk in chunks}.values())
    indexes = yield from read_indexes(shards)
    by_key = {shard.key: index for shard, index in zip(shards, indexes, strict=True)}
    replies: list[int | bool | None] = []
    for request, chunk in zip(requests, chunks, strict=True):
        index = by_key[chunk.shard.key]
        entry = None if index is None else index.entry(chunk.entry_id)
        if isinstance(request, Exists):
            replies.append(entry is not None)
        else:
            replies.append(None if entry is None else entry[1])
    return replies


def _update(requests: Sequence[Request], chunks: Sequence[ChunkRef]) -> Flow[list[None]]:
    yield shard_updates(requests, chunks)
    return [None] * len(requests)


def shard_updates(requests: Sequence[Request], chunks: Sequence[ChunkRef]) -> list[Request]:
    """Return one `UpdateShard` for each shard that requests for chunks change."""
    updates: dict[ShardRef, list[EntryUpdate]] = {}
    for request, chunk in zip(requests, chunks, strict=True):
        updates.setdefault(chunk.shard, []).append(entry_update(request, chunk.entry_id))
    return [UpdateShard(shard, tuple(parts)) for shard, parts in updates.items()]


def entry_update(request: Request, entry_id: int) -> EntryUpdate:
    """Return the update of an entry that a request for its chunk asks for."""
    match request:
        case Set(_, value):
            return SetEntry(entry_id, value)
        case SetIfNotExists(_, value):
            return SetEntry(entry_id, value, only_if_missing=True)
        case SetPartial(_, pieces):
            return PatchEntry(entry_id, pieces)
        case Modify(_, change):
            return MapEntry(entry_id, change)
        case Delete():
            return DeleteEntry(entry_id)
    raise TypeError(f"a transformer does not perform {request!r}")


def _pass_on(requests: list[Request]) -> Flow[list[Any]]:
    return (yield requests)


@dataclass(frozen=True, slots=True)
class ShardingTransformer:
    """The transformer that packs the chunks of one array into shards."""

    layout: ArrayLayout
    reading: ReadOptions
    on_chunks: Callable[[Sequence[Request], Sequence[ChunkRef], ReadOptions], Flow[list[Any]]] = (
        perform_on_chunks
    )
    """Replies to requests for chunks, as `perform_on_chunks`."""

    def perform(self, requests: Sequence[Request]) -> Flow[list[Any]]:
        """Reply to requests for chunks; relay those for keys that are no chunk keys."""
        chunks = {i: c for i, r in enumerate(requests) if (c := self.chunk_of(r)) is not None}
        if len(chunks) == len(requests):
            return (yield from self.on_chunks(requests, list(chunks.values()), self.reading))
        others = [i for i in range(len(requests)) if i not in chunks]
        parts: Parts = [(others, _pass_on([requests[i] for i in others]))]
        if chunks:
            of_chunks = [requests[i] for i in chunks]
            parts.append(
                (list(chunks), self.on_chunks(of_chunks, list(chunks.values()), self.reading))
            )
        return (yield from gather_replies(len(requests), parts))

    def keys_above(self, keys: Sequence[str]) -> Flow[list[tuple[str, int | None]]]:
        """Return the keys of the chunks in shards, with their sizes; other keys as they are."""
        layout = self.layout
        shards = [
            layout.shard_of_key(key) if key.startswith(layout.prefix) else None for key in keys
        ]
        found = [shard for shard in shards if shard is not None]
        indexes = yield from read_indexes(found)
        listed = ListedKeys("", [(k, None) for k, s in zip(keys, shards, strict=True) if s is None])
        listed.shards = [(s, i) for s, i in zip(found, indexes, strict=True) if i is not None]
        return list(listed.sizes())

    def chunk_of(self, request: Request) -> ChunkRef | None:
        """Return the chunk of a request; ``None``: its key is that of another transformer."""
        assert not isinstance(request, UpdateShard), "the driver performs these"
        key: str = request.key  # type: ignore[union-attr]
        if not key.startswith(self.layout.prefix):
            return None
        coords = self.layout.coords_of(key)
        return None if coords is None else self.layout.chunk(coords, key)


def split_at_sharding(stack: Stack) -> tuple[ShardingTransformer, Stack] | None:
    """Return the sharding of a stack, and what lies below it; ``None`` if nothing is sharded."""
    if any(isinstance(transformer, ReadOnlyTransformer) for transformer in stack):
        return None
    for i, transformer in enumerate(stack):
        if isinstance(transformer, ShardingTransformer):
            return transformer, stack[i + 1 :]
    return None


def sharding(configuration: Mapping[str, Any], array: ArrayContext) -> ShardingTransformer:
    """Make the transformer ``sharding`` of metadata."""
    spec = parse_sharding(configuration, len(array.grid_shape))
    layout = ArrayLayout(
        array.path,
        array.prefix,
        array.encoding,
        array.grid_shape,
        spec,
        array.index_key,
        array.chunk_nbytes,
    )
    return ShardingTransformer(layout, array.reading)

"""The ``sharding`` transformer: requests for chunks become requests for shards.

Source: sharding storage transformer draft, "API implementation".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    ReadOnlyTransformer,
    Stack,
    by_kind,
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
    kinds = [_FLOWS.get(type(request), _update) for request in requests]
    pairs = list(zip(requests, chunks, strict=True))
    return (yield from by_kind(pairs, kinds, lambda flow, part: flow(part, reading)))


_Pairs: TypeAlias = Sequence[tuple[Any, ChunkRef]]


def _read_values(pairs: _Pairs, reading: ReadOptions) -> Flow[list[Found]]:
    ranges = column_of_ranges([request.byte_range for request, _ in pairs])
    values = yield from read_entries([chunk for _, chunk in pairs], reading, ranges)
    return [Found(value, None) for value in values]


def _read_sizes(pairs: _Pairs, _: ReadOptions) -> Flow[list[int | bool | None]]:
    """Reply to `GetSize` and `Exists`, from indexes alone."""
    shards = list({chunk.shard: None for _, chunk in pairs})
    indexes = dict(zip(shards, (yield from read_indexes(shards)), strict=True))
    replies: list[int | bool | None] = []
    for request, chunk in pairs:
        index = indexes[chunk.shard]
        entry = None if index is None else index.entry(chunk.entry_id)
        if isinstance(request, Exists):
            replies.append(entry is not None)
        else:
            replies.append(None if entry is None else entry[1])
    return replies


def _update(pairs: _Pairs, _: ReadOptions) -> Flow[list[None]]:
    yield shard_updates(pairs)
    return [None] * len(pairs)


_FLOWS: Mapping[type, Callable[[_Pairs, ReadOptions], Flow[list[Any]]]] = {
    Get: _read_values,
    GetSize: _read_sizes,
    Exists: _read_sizes,
}


def shard_updates(pairs: Iterable[tuple[Any, ChunkRef]]) -> list[Request]:
    """Return one `UpdateShard` for each shard that requests for its chunks change."""
    updates: dict[ShardRef, list[EntryUpdate]] = {}
    for request, chunk in pairs:
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
        chunks = [self.chunk_of(request) for request in requests]

        def perform(is_chunk: bool, part: list[Request]) -> Flow[list[Any]]:
            if not is_chunk:
                return (yield part)
            of_part = [chunk for chunk in chunks if chunk is not None]
            return (yield from self.on_chunks(part, of_part, self.reading))

        are_chunks = [chunk is not None for chunk in chunks]
        return (yield from by_kind(requests, are_chunks, perform))

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

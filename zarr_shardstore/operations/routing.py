"""Requests for any keys: the owner of each key, which replies to its requests.

::

    key ──▶ owner ──┬─ a chunk of a sharding ──────── the write buffer, then its shard
                    ├─ a key above a stack ────────── the transformers of its array
                    ├─ a chunk outside the grid ───── no request: it is missing
                    └─ anything else ──────────────── the base store
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

from zarr_shardstore.arrays.catalog import Catalog, InvalidChunkKey, TransformedKey
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.keys import check_key
from zarr_shardstore.format.layout import ChunkRef, shard_coords_of
from zarr_shardstore.metadata.documents import Node, directory_of_v2_consolidated, node_of_document
from zarr_shardstore.operations.buffered import Flusher, perform_buffered, with_buffer
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.requests import Exists, Flow, Get, GetSize, Request, ValueRequest, relay
from zarr_shardstore.shards.sharding import ShardingTransformer, perform_on_chunks
from zarr_shardstore.shards.stack import Parts, Stack, gather_replies, handle

Owner: TypeAlias = "ChunkRef | TransformedKey | InvalidChunkKey | None"
"""The chunk or transformed key that a key names; ``None``: the key passes through."""


class Router:
    """Finds the owners of keys, and routes requests to them."""

    def __init__(self, flusher: Flusher, reading: ReadOptions) -> None:
        self.flusher = flusher
        self.catalog = flusher.catalog
        self.arrays = flusher.arrays
        self.buffer = flusher.buffer
        self._reading = reading

    def owners(self, keys: Sequence[str]) -> Flow[list[Owner]]:
        """Return the owners of keys, also in an array whose document this store has just erased."""
        owners = yield from self.catalog.chunks_of(keys)
        if self.arrays.erased:
            for i, key in enumerate(keys):
                if owners[i] is None:
                    owners[i] = self.catalog.chunk_without_document(key)
        return owners

    def writable(self, writes: Sequence[ValueRequest]) -> Flow[list[Owner]]:
        """Return the owners of keys to be stored; refuse a key in an array that is no chunk key."""
        owners = yield from self.catalog.chunks_of([write.key for write in writes])
        for owner in owners:
            if isinstance(owner, InvalidChunkKey):
                raise SpecError(owner.message)
        return owners

    def perform(self, requests: Sequence[Request], owners: Sequence[Owner]) -> Flow[list[Any]]:
        """Reply to requests for keys, in shared rounds. Keys outside a grid get ``None``."""
        is_buffered = self.buffer.is_active
        chunks: list[int] = []
        others: list[int] = []
        stacks: dict[Node, tuple[Stack, list[int]]] = {}
        for i, owner in enumerate(owners):
            if isinstance(owner, ChunkRef):
                chunks.append(i)
            elif isinstance(owner, TransformedKey):
                array = owner.array
                stacks.setdefault(array.node, (array.stack, []))[1].append(i)
            elif owner is None or not owner.is_outside:
                others.append(i)
        parts: Parts = []
        if chunks:
            refs = [owner for owner in owners if isinstance(owner, ChunkRef)]
            of_chunks = [requests[i] for i in chunks]
            if is_buffered:
                flow = perform_buffered(of_chunks, refs, self._reading, self.buffer)
            else:
                flow = perform_on_chunks(of_chunks, refs, self._reading)
            parts.append((chunks, flow))
        if others:
            parts.append((others, relay([requests[i] for i in others])))
        for whole_stack, positions in stacks.values():
            stack = with_buffer(whole_stack, self.buffer) if is_buffered else whole_stack
            parts.append((positions, handle(stack, [requests[i] for i in positions])))
        replies = yield from gather_replies(len(requests), parts)
        if is_buffered and not all(isinstance(r, Get | GetSize | Exists) for r in requests):
            yield from self.flusher.flush_due()
        return replies


def is_document(key: str) -> bool:
    """Whether the view of a key may differ from its stored value."""
    return node_of_document(key) is not None or directory_of_v2_consolidated(key) is not None


def shard_ids(catalog: Catalog, keys: Sequence[str]) -> Flow[Sequence[Hashable]]:
    """Return an id for each key: chunks of one shard have equal ids.

    Keys of other arrays than that of the first have ids of their own. The ids are a hint for
    callers that write whole shards together. Cost: none, or one document.
    """
    (owner,) = yield from catalog.chunks_of(keys[:1])
    ids: list[Hashable] = [None] * len(keys)
    for reads in catalog.arrays.current().reads_by_shard(keys):  # its array has a table now
        for i in reads.positions:
            ids[i] = reads.shard.key
    stack = owner.array.stack if isinstance(owner, TransformedKey) else ()
    layouts = [each.layout for each in stack if isinstance(each, ShardingTransformer)]
    for i, key in enumerate(keys):
        if ids[i] is None:
            check_key(key)
            ids[i] = key
            if layouts and key.startswith(layouts[0].prefix):
                coords = layouts[0].coords_of(key)
                if coords is not None:
                    ids[i] = shard_coords_of(coords, layouts[0].spec.chunks_per_shard)
    return ids

"""Requests for keys of whatever arrays: what each key names, and who answers it.

::

    key ──▶ owner ──┬─ a chunk of a sharding ──────── the write buffer, then its shard
                    ├─ a key above a stack ────────── the transformers of its array
                    ├─ a chunk outside the grid ───── nobody: it is missing
                    └─ anything else ──────────────── the base store

Which chunks share a shard, told from their keys alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

from zarr_shardstore.arrays.array_cache import ArrayCache
from zarr_shardstore.arrays.catalog import Catalog, InvalidChunkKey, TransformedKey
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.grid import shard_coords_of
from zarr_shardstore.format.keys import Coords, check_key
from zarr_shardstore.format.layout import ChunkRef
from zarr_shardstore.metadata.consolidated import directory_of_v2_consolidated
from zarr_shardstore.metadata.documents import Node, node_of_document
from zarr_shardstore.operations.batch import WriteBuffer
from zarr_shardstore.operations.buffered import perform_buffered, with_buffer
from zarr_shardstore.operations.flush import Flusher
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.requests import Exists, Flow, Get, GetSize, Request, relay
from zarr_shardstore.shards.sharding import ShardingTransformer, perform_on_chunks
from zarr_shardstore.shards.stack import Stack, gather, handle

Owner: TypeAlias = "ChunkRef | TransformedKey | InvalidChunkKey | None"
"""What a key names; ``None``: it passes through."""


class Router:
    """Finds what keys name, and hands requests for them to whoever answers."""

    def __init__(
        self,
        catalog: Catalog,
        arrays: ArrayCache,
        flusher: Flusher,
        buffer: WriteBuffer,
        reading: ReadOptions,
    ) -> None:
        self.reading = reading
        self._catalog = catalog
        self._arrays = arrays
        self._flusher = flusher
        self._buffer = buffer

    def owners(self, keys: Sequence[str]) -> Flow[list[Owner]]:
        """What keys name; also chunks of an array whose document this store has just erased."""
        owners = yield from self._catalog.chunks_of(keys)
        if self._arrays.has_erased:
            for i, key in enumerate(keys):
                if owners[i] is None:
                    owners[i] = self._catalog.chunk_without_document(key)
        return owners

    def writable(self, keys: Sequence[str]) -> Flow[list[Owner]]:
        """What keys name whose values are about to be stored.

        Raises
        ------
        SpecError
            If a key in an array is no chunk key of it.
        """
        owners = yield from self._catalog.chunks_of(keys)
        for owner in owners:
            if isinstance(owner, InvalidChunkKey):
                raise SpecError(owner.message)
        return owners

    def perform(self, requests: Sequence[Request], owners: Sequence[Owner]) -> Flow[list[Any]]:
        """Reply to requests for keys, of whatever array, side by side. Misfits get ``None``."""
        stacks: dict[Node, tuple[Stack, list[int]]] = {}
        chunks: list[int] = []
        others: list[int] = []
        for i, owner in enumerate(owners):
            if isinstance(owner, ChunkRef):
                chunks.append(i)
            elif isinstance(owner, TransformedKey):
                array = owner.array
                stacks.setdefault(array.node, (array.stack, []))[1].append(i)
            elif not _is_outside(owner):
                others.append(i)
        is_buffered = self._buffer.is_active
        parts: list[tuple[list[int], Flow[list[Any]]]] = []
        if chunks:
            refs = [owner for owner in owners if isinstance(owner, ChunkRef)]
            of_chunks = [requests[i] for i in chunks]
            if is_buffered:
                flow = perform_buffered(of_chunks, refs, self.reading, self._buffer)
            else:
                flow = perform_on_chunks(of_chunks, refs, self.reading)
            parts.append((chunks, flow))
        if others:
            parts.append((others, relay([requests[i] for i in others])))
        for whole_stack, positions in stacks.values():
            stack = with_buffer(whole_stack, self._buffer) if is_buffered else whole_stack
            parts.append((positions, handle(stack, [requests[i] for i in positions])))
        replies: list[Any] = [None] * len(requests)
        results = yield from gather([flow for _, flow in parts])
        for (positions, _), result in zip(parts, results, strict=True):
            for i, reply in zip(positions, result, strict=True):
                replies[i] = reply
        if is_buffered and not all(isinstance(r, Get | GetSize | Exists) for r in requests):
            yield from self._flusher.flush_due()
        return replies


def is_document(key: str) -> bool:
    """Whether the view shows something else than what is stored."""
    return node_of_document(key) is not None or directory_of_v2_consolidated(key) is not None


def _is_outside(owner: Owner) -> bool:
    """Whether the key is one of a chunk outside the array: it is missing, whatever is stored."""
    return isinstance(owner, InvalidChunkKey) and owner.is_outside


def shard_ids(catalog: Catalog, keys: Sequence[str]) -> Flow[Sequence[Hashable]]:
    """Which keys are chunks of one shard, by the array of the first: equal ids mean so.

    For a caller that wants to hand over whole shards; what is written and read does not depend
    on it. Cost: none, or one document.
    """
    (owner,) = yield from catalog.chunks_of(keys[:1])
    ids: list[Hashable] = [None] * len(keys)
    for reads in catalog.arrays.current().reads_by_shard(keys):  # its array has a table now
        for i in reads.positions:
            ids[i] = reads.shard.key
    left = [i for i, shard_id in enumerate(ids) if shard_id is None]
    for i in left:
        check_key(keys[i])
    for i, shard_id in zip(left, _shard_ids(owner, [keys[i] for i in left]), strict=True):
        ids[i] = shard_id
    return ids


def _shard_ids(
    owner: ChunkRef | TransformedKey | InvalidChunkKey | None, keys: Sequence[str]
) -> Sequence[Hashable]:
    """Shard coordinates of the keys of one array, in which `owner` is; other keys as they are."""
    coords_of: Callable[[str], Coords | None]
    if isinstance(owner, ChunkRef):
        layout = owner.shard.layout
        coords_of, prefix = layout.coords_of, layout.prefix
        chunks_per_shard = layout.spec.chunks_per_shard
    elif isinstance(owner, TransformedKey):
        coords_of, prefix = owner.array.coords_of, owner.array.node.chunk_prefix
        shardings = [t for t in owner.array.stack if isinstance(t, ShardingTransformer)]
        if not shardings:
            return keys
        chunks_per_shard = shardings[0].layout.spec.chunks_per_shard
    else:
        return keys
    ids: list[Hashable] = []
    for key in keys:
        coords = coords_of(key) if key.startswith(prefix) else None
        ids.append(key if coords is None else shard_coords_of(coords, chunks_per_shard))
    return ids

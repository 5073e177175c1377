"""Upkeep of stored shards: compaction and consolidation, as flows.

Compaction stores shards again without dead bytes. Consolidation stores a copy of the indexes of all
shards of an array in one object.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from zarr_shardstore.arrays.array_cache import ArrayCache, read_documents
from zarr_shardstore.arrays.catalog import Catalog, TransformedKey
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardStoreError, SpecError
from zarr_shardstore.format.consolidated_index import (
    CONSOLIDATED_INDEX_NAME,
    ConsolidatedIndexWriter,
    declares_consolidated_index,
    with_consolidated_index,
)
from zarr_shardstore.format.keys import DRAFT_DATA_ROOT, check_prefix
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.io.driver import UpdateFlow
from zarr_shardstore.metadata.documents import Node, document_key, dump_document, parse_json
from zarr_shardstore.operations.buffered import Flusher
from zarr_shardstore.operations.listing import Listing, raise_first
from zarr_shardstore.shards.append import seal_shard
from zarr_shardstore.shards.index_reads import index_nbytes_of, rounds_of
from zarr_shardstore.shards.requests import Flow, Recorded, RecordIndex, Set, UpdateShard
from zarr_shardstore.shards.rewrite import compact_shard
from zarr_shardstore.shards.shard_listing import KeyPages
from zarr_shardstore.shards.sharding import split_at_sharding
from zarr_shardstore.shards.stack import Stack, run_above
from zarr_shardstore.shards.updates import EntryUpdate


def compaction_of(*, order: EntryOrder, can_append: bool) -> UpdateFlow:
    """Return a commit flow for a driver that compacts the shard of each `UpdateShard`.

    Where the base store can append, shards may have gaps and journals.
    """

    def flow(
        request: UpdateShard, groups: Sequence[Sequence[EntryUpdate]]
    ) -> Flow[Sequence[Exception | None]]:
        shard, below = request.shard, request.below
        if can_append and not below:
            yield from seal_shard(shard, order=order, max_dead_share=0)
        else:
            one = compact_shard(shard, order=order)
            yield from run_above(below, one) if below else one
        return [None] * len(groups)

    return flow


def shards_below(
    listing: Listing, prefix: str
) -> Flow[tuple[list[tuple[ShardRef, Stack]], list[ShardStoreError]]]:
    """Return the shards that may hold keys starting with `prefix`, with the transformers below.

    Also return the errors of arrays whose shards cannot be known.
    """
    shards: list[tuple[ShardRef, Stack]] = []
    errors: list[ShardStoreError] = []
    stream = yield from listing.stream(prefix)
    for *_, found in (yield from stream.all_located()):
        if isinstance(found, ShardStoreError):
            errors.append(found)
        elif (shard := _shard_of(found)) is not None:
            shards.append(shard)
    return shards, errors


def compact_below(listing: Listing, prefix: str) -> Flow[None]:
    """Compact each shard that may hold keys starting with `prefix`, by a driver for that.

    The first error is raised when the other shards are compacted.
    """
    shards, errors = yield from shards_below(listing, prefix)
    for shard, below in shards:  # one by one: a damaged shard stops no other
        try:
            yield [UpdateShard(shard, (), below)]
        except ShardStoreError as error:
            errors.append(error)
    raise_first(errors)


def _shard_of(found: ShardRef | TransformedKey | None) -> tuple[ShardRef, Stack] | None:
    """Return the shard that a base key names, and the transformers below it."""
    if isinstance(found, ShardRef):
        return found, ()
    split = None if found is None else split_at_sharding(found.array.stack)
    if found is None or split is None:
        return None
    shard = split[0].layout.shard_of_key(found.key)
    return None if shard is None else (shard, split[1])


# -------------------------------------------------------------- consolidation


@dataclass(slots=True)
class _IndexedArray:
    """The recorded indexes of one array."""

    layout: ArrayLayout
    writer: ConsolidatedIndexWriter
    young: list[ShardRef] = field(default_factory=list)

    def take(self, shard: ShardRef, found: Recorded) -> None:
        if found == "young":
            self.young.append(shard)
        elif found is not None:
            self.writer.add(shard.key[len(self.layout.prefix) :], found)


def consolidate_below(
    catalog: Catalog, array_cache: ArrayCache, flusher: Flusher, path: str
) -> Flow[list[str]]:
    """Consolidate the indexes of the sharded arrays at or below a path; return their paths.

    Cost: a listing, the index of each shard; for each array a write of the consolidated index; a
    read and a write of its document, if that does not declare it yet. A bad document is raised
    when the other arrays are consolidated.
    """
    path = check_prefix(path).strip("/")
    errors: list[ShardStoreError] = []
    arrays: dict[ArrayLayout, _IndexedArray] = {}
    directories = [f"{path}/", f"{DRAFT_DATA_ROOT}{path}/"] if path else [""]
    for directory in directories:
        yield from flusher.flush_below(directory)
    pages = KeyPages(directories)
    while pages.has_more:
        page = yield from pages.next_page()
        shards: list[ShardRef] = []
        for found in (yield from catalog.shards_of(page)):
            if isinstance(found, ShardStoreError):
                errors.append(found)
            elif (shard := _shard_of(found)) is not None and not shard[1]:
                shards.append(shard[0])
        yield from _record(shards, arrays)
    paths: list[str] = []
    for array in arrays.values():
        yield from _record_young(array)
        nodes = yield from _nodes_of(array.layout, array_cache)
        if nodes and len(array.writer):
            yield from _store(array, nodes, array_cache)
            paths.append(array.layout.path)
    raise_first(errors)
    if path and not paths:
        raise SpecError(f"there is no sharded array with a stored shard at or below {path!r}")
    return sorted(set(paths))


def _record(shards: Sequence[ShardRef], arrays: dict[ArrayLayout, _IndexedArray]) -> Flow[None]:
    for part in rounds_of(shards, index_nbytes_of):
        replies: list[Recorded] = yield [RecordIndex(shard) for shard in part]
        for shard, found in zip(part, replies, strict=True):
            layout = shard.layout
            if layout not in arrays:
                arrays[layout] = _IndexedArray(layout, ConsolidatedIndexWriter(layout.spec))
            arrays[layout].take(shard, found)


def _record_young(array: _IndexedArray) -> Flow[None]:
    """Record again the shards that had just changed; leave out those that still change."""
    young, array.young = array.young, []
    if young:
        (first,) = yield [RecordIndex(young[0], waits=True)]
        array.take(young[0], first)
        yield from _record(young[1:], {array.layout: array})


def _nodes_of(layout: ArrayLayout, array_cache: ArrayCache) -> Flow[list[Node]]:
    """Return the places of the documents of an array; none if only an option declares it."""
    if layout.encoding.style == "draft":
        nodes = [Node("draft", layout.path)]
    else:
        nodes = [Node("v3", layout.path), Node("v2", layout.path)]
    states = yield from array_cache.lookup(nodes)
    found = []
    for node in nodes:
        array = states[node]
        split = split_at_sharding(array.stack) if isinstance(array, StoredArray) else None
        if split is not None and split[0].layout == layout:
            found.append(node)
    return found


def _store(array: _IndexedArray, nodes: Sequence[Node], array_cache: ArrayCache) -> Flow[None]:
    """Store the consolidated index, then declare it in the documents for readers."""
    data = array.writer.encode(int(time.time()))
    yield [Set(array.layout.prefix + CONSOLIDATED_INDEX_NAME, data)]
    keys = [document_key(node) for node in nodes]
    replies = yield from read_documents(keys)
    for node, key, reply in zip(nodes, keys, replies, strict=True):
        doc = None if reply.value is None else parse_json(reply.value)
        if doc is None or declares_consolidated_index(doc):
            continue
        stored = dump_document(with_consolidated_index(doc))
        try:
            yield [Set(key, stored)]
        finally:
            array_cache.documents_changed(node, array_cache.read(node, stored))

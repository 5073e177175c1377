"""Upkeep of stored shards: compaction and consolidation, as flows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from zarr_shardstore.arrays.array_cache import ArrayCache
from zarr_shardstore.arrays.catalog import TransformedKey, flat_nodes, layouts_of
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
from zarr_shardstore.metadata.documents import Node, document_key, dump_document, parse_json
from zarr_shardstore.operations.listing import Listing, raise_first
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.append import seal_shard
from zarr_shardstore.shards.index_reads import rounds_of
from zarr_shardstore.shards.requests import EntryUpdate, Flow, Set
from zarr_shardstore.shards.rewrite import compact_shard
from zarr_shardstore.shards.stack import InCommit, Stack, run_through


def commit_compaction(
    request: requests.UpdateShard,
    groups: Sequence[Sequence[EntryUpdate]],
    *,
    arrays: ArrayCache,
    order: EntryOrder,
    can_append: bool,
) -> Flow[Sequence[Exception | None]]:
    """Compact the shard of a request, as the update flow of a driver for that."""
    shard = request.shard
    assert isinstance(shard, ShardRef)
    yield from arrays.confirm(layouts_of([shard]))
    if can_append and not request.below:  # there may be a gap and a journal
        yield from seal_shard(shard, order=order, max_dead_share=0)
    else:
        yield from run_through((*request.below, InCommit()), compact_shard(shard, order=order))
    return [None] * len(groups)


def shards_below(
    listing: Listing, prefix: str
) -> Flow[tuple[list[tuple[ShardRef, Stack]], list[ShardStoreError]]]:
    """Return shards that may hold keys with a prefix, the transformers below each, and errors."""
    shards: list[tuple[ShardRef, Stack]] = []
    errors: list[ShardStoreError] = []
    stream = yield from listing.stream(prefix)
    for *_, found in (yield from stream.all_located()):
        match found:
            case ShardStoreError():
                errors.append(found)  # a bad document: the shards of its array are unknown
            case ShardRef():
                shards.append((found, ()))
            case TransformedKey(key, array):
                layout, below = array.sharding
                shard = None if layout is None else layout.shard_of_key(key)
                if shard is not None:
                    shards.append((shard, below))
    return shards, [*stream.errors, *errors]


def compact_below(listing: Listing, prefix: str) -> Flow[None]:
    """Compact, by a driver for that, the shards of a prefix; then raise the first error."""
    shards, errors = yield from shards_below(listing, prefix)
    for shard, below in shards:  # one by one: a damaged shard stops no other
        try:
            yield [requests.UpdateShard(shard, (), below)]
        except ShardStoreError as error:
            errors.append(error)
    raise_first(errors)


# -------------------------------------------------------------- consolidation


def consolidate_below(listing: Listing, array_cache: ArrayCache, path: str) -> Flow[list[str]]:
    """Consolidate the indexes of the sharded arrays at or below a path; return their paths.

    Cost: a listing, and the index of each shard; for each array a write, and a read and a write of
    its document that does not declare the index yet. Errors are raised at the end.
    """
    path = check_prefix(path).strip("/")
    shards: list[ShardRef] = []
    errors: list[ShardStoreError] = []
    for directory in [f"{path}/", f"{DRAFT_DATA_ROOT}{path}/"] if path else [""]:
        found, errors_there = yield from shards_below(listing, directory)
        shards += [shard for shard, below in found if not below]
        errors += errors_there
    layouts = dict.fromkeys(shard.layout for shard in shards)
    writers = {layout: ConsolidatedIndexWriter(layout.spec) for layout in layouts}
    young = yield from _record([requests.RecordIndex(shard) for shard in shards], writers)
    # Shards that had just changed are recorded again; those that still change are left out.
    yield from _record([requests.RecordIndex(shard, waits=True) for shard in young[:1]], writers)
    yield from _record([requests.RecordIndex(shard) for shard in young[1:]], writers)
    paths: list[str] = []
    for layout, writer in writers.items():
        nodes = yield from _nodes_of(layout, array_cache)
        if nodes and len(writer):
            yield [Set(layout.prefix + CONSOLIDATED_INDEX_NAME, writer.encode(int(time.time())))]
            yield from _declare(nodes, array_cache)
            paths.append(layout.path)
    raise_first(errors)
    if path and not paths:
        raise SpecError(f"there is no sharded array with a stored shard at or below {path!r}")
    return sorted(set(paths))


def _record(
    wanted: Sequence[requests.RecordIndex], writers: dict[ArrayLayout, ConsolidatedIndexWriter]
) -> Flow[list[ShardRef]]:
    """Add the indexes of shards to the consolidated ones; return the shards that are young."""
    young: list[ShardRef] = []
    for part in rounds_of(wanted, lambda request: request.shard.spec.index_nbytes):
        replies: list[requests.Recorded] = yield [*part]
        for request, found in zip(part, replies, strict=True):
            layout, key = request.shard.layout, request.shard.key
            if found == "young":
                young.append(request.shard)
            elif found is not None:
                writers[layout].add(key[len(layout.prefix) :], found)
    return young


def _nodes_of(layout: ArrayLayout, array_cache: ArrayCache) -> Flow[list[Node]]:
    """Return the places of the documents of an array; none if only an option declares it."""
    is_draft = layout.encoding.style == "draft"
    nodes = [Node("draft", layout.path)] if is_draft else flat_nodes(layout.path)
    states = yield from array_cache.lookup(nodes)
    arrays = {n: a for n, a in states.items() if isinstance(a, StoredArray)}
    return [n for n in nodes if n in arrays and arrays[n].sharding[0] == layout]


def _declare(nodes: Sequence[Node], array_cache: ArrayCache) -> Flow[None]:
    """Declare a stored consolidated index in the documents for readers; another writer may change
    these meanwhile."""
    for node in nodes:
        declared: list[dict[str, Any]] = []

        def change(stored: Any, declared: Any = declared) -> Any:
            doc = parse_json(stored)
            declared.clear()
            if doc is None or declares_consolidated_index(doc):
                return stored
            declared.append(with_consolidated_index(doc))
            return dump_document(declared[0])

        try:
            yield from requests.relay([requests.Modify(document_key(node), change)])
        finally:
            if declared:
                array_cache.documents_changed(node, array_cache.reader.read(node, declared[0]))

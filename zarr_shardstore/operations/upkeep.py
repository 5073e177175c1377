"""Compaction: shards below a prefix are stored without dead bytes.

Consolidation: the indexes of all shards of an array are stored once more, in one object.
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
from zarr_shardstore.operations.flush import Flusher
from zarr_shardstore.operations.listing import Listing, raise_first
from zarr_shardstore.shards.append import seal_shard
from zarr_shardstore.shards.requests import Flow, Recorded, RecordIndex, Set, UpdateShard
from zarr_shardstore.shards.rewrite import compact_shard
from zarr_shardstore.shards.shard_listing import KeyPages
from zarr_shardstore.shards.sharding import split_at_sharding
from zarr_shardstore.shards.stack import Stack, run_above
from zarr_shardstore.shards.updates import EntryUpdate


def compaction_of(*, order: EntryOrder, can_append: bool) -> UpdateFlow:
    """What a driver does for `UpdateShard` instead of an update: it compacts the shard.

    Parameters
    ----------
    can_append
        The base store changes shards in their place, so they may have gaps and journals.
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
    """The shards that may hold keys starting with `prefix`, each with the transformers below it;
    and why others cannot be known."""
    shards: list[tuple[ShardRef, Stack]] = []
    errors: list[ShardStoreError] = []
    stream = yield from listing.stream(prefix)
    for *_, found in (yield from stream.all_located()):
        if isinstance(found, ShardRef):
            shards.append((found, ()))
        elif isinstance(found, TransformedKey):
            shards += _shard_of(found)
        elif found is not None:
            errors.append(found)
    return shards, errors


def compact_below(listing: Listing, prefix: str) -> Flow[None]:
    """Ask for an update of each shard that may hold keys starting with `prefix`.

    Raises
    ------
    ShardStoreError
        The first error there was; the other shards are compacted.
    """
    shards, errors = yield from shards_below(listing, prefix)
    for shard, below in shards:  # one by one: a damaged shard stops no other
        try:
            yield [UpdateShard(shard, (), below)]
        except ShardStoreError as error:
            errors.append(error)
    raise_first(errors)


def _shard_of(stacked: TransformedKey) -> list[tuple[ShardRef, Stack]]:
    found = split_at_sharding(stacked.array.stack)
    if found is None:
        return []
    sharding, below = found
    shard = sharding.layout.shard_of_key(stacked.key)
    return [] if shard is None else [(shard, below)]


_SHARDS_PER_ROUND = 64

_NBYTES_PER_ROUND = 16 * 1024 * 1024
"""Of indexes in memory."""


@dataclass(slots=True)
class _IndexedArray:
    """What was recorded of one array."""

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
    read and a write of its document, if that does not declare it yet.

    Raises
    ------
    SpecError
        If there is a path, and no sharded array with a stored shard.
    ShardStoreError
        If the document of an array is bad; the other arrays are consolidated.
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
        for key, found in zip(page, (yield from catalog.shards_of(page)), strict=True):
            shard = _shard_of_key(key, found)
            if isinstance(found, ShardStoreError):
                errors.append(found)
            elif shard is not None:
                shards.append(shard)
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


def _shard_of_key(
    key: str, found: ShardRef | TransformedKey | ShardStoreError | None
) -> ShardRef | None:
    """The shard that a base key names, if its index can be read without other transformers."""
    if isinstance(found, ShardRef):
        return found
    if isinstance(found, TransformedKey):
        split = split_at_sharding(found.array.stack)
        if split is not None and not split[1]:
            return split[0].layout.shard_of_key(key)
    return None


def _record(shards: Sequence[ShardRef], arrays: dict[ArrayLayout, _IndexedArray]) -> Flow[None]:
    left = list(shards)
    while left:
        nbytes = left[0].layout.spec.index_nbytes
        n = max(1, min(_SHARDS_PER_ROUND, _NBYTES_PER_ROUND // nbytes))
        part, left = left[:n], left[n:]
        replies: list[Recorded] = yield [RecordIndex(shard) for shard in part]
        for shard, found in zip(part, replies, strict=True):
            layout = shard.layout
            if layout not in arrays:
                arrays[layout] = _IndexedArray(layout, ConsolidatedIndexWriter(layout.spec))
            arrays[layout].take(shard, found)


def _record_young(array: _IndexedArray) -> Flow[None]:
    """Once more those that had changed just before; what still changes is left out."""
    young, array.young = array.young, []
    if young:
        (first,) = yield [RecordIndex(young[0], waits=True)]
        array.take(young[0], first)
        yield from _record(young[1:], {array.layout: array})


def _nodes_of(layout: ArrayLayout, array_cache: ArrayCache) -> Flow[list[Node]]:
    """Places of the documents that describe the array; none, if only an option does."""
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
    """Store the consolidated index, then declare it in the documents: readers of these find it."""
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

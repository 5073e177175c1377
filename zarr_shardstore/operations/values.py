"""Reads, writes and erasures of values by key, and the choice of the write strategy.

Each takes keys as zarr spells them, and makes requests to the base store. The public stores only
convert arguments and choose the driver.

Source: sharding storage transformer draft, "API implementation"; of erase_prefix: a prefix that
contains a part of the chunk-grid key is translated to the shards that it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

from zarr_shardstore.arrays.array_cache import (
    ArrayCache,
    Generation,
    complete_documents,
    read_documents,
)
from zarr_shardstore.arrays.catalog import Catalog, InvalidChunkKey
from zarr_shardstore.arrays.metadata_view import MetadataView
from zarr_shardstore.arrays.policy import ShardingPolicy
from zarr_shardstore.arrays.stored_array import ArrayReader, StoredArray
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import items_of
from zarr_shardstore.format.keys import check_key, check_prefix
from zarr_shardstore.format.layout import ChunkRef, ShardRef
from zarr_shardstore.format.ranges import ByteRange, Range, column_of_ranges, resolve_range
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.metadata.declaration import Native
from zarr_shardstore.metadata.documents import directory_of_v2_consolidated, node_of_document
from zarr_shardstore.operations.batch import WriteBuffer
from zarr_shardstore.operations.buffered import Flusher, commit_with_buffered
from zarr_shardstore.operations.listing import Listing, raise_first
from zarr_shardstore.operations.routing import Owner, Router, is_document
from zarr_shardstore.shards.append import append_to_shard, fits_inline
from zarr_shardstore.shards.read import ReadOptions, read_shards
from zarr_shardstore.shards.requests import (
    Delete,
    DeletePrefix,
    Exists,
    Flow,
    Found,
    Get,
    GetSize,
    Request,
    Set,
    SetIfNotExists,
    SetPartial,
    UpdateShard,
    ValueRequest,
)
from zarr_shardstore.shards.rewrite import update_shard as rewrite_shard
from zarr_shardstore.shards.shard_listing import GridDirectory
from zarr_shardstore.shards.shard_writer import ShardWriter
from zarr_shardstore.shards.sharding import WriteStrategy, shard_updates
from zarr_shardstore.shards.stack import run_above
from zarr_shardstore.shards.updates import (
    DeleteEntry,
    EntryUpdate,
    Piece,
    apply_pieces,
    check_pieces,
)

Value: TypeAlias = bytes | memoryview


_ERASURES_AT_ONCE = 1 << 18
"""Erasures of entries in memory: about 25 MB."""


class Operations:
    """Operations on one base store, without the base store.

    `refuse_links` raises `SpecError` if a prefix leads through a link of the base store.
    """

    def __init__(
        self,
        policy: ShardingPolicy,
        *,
        native: Native,
        reading: ReadOptions,
        order: EntryOrder,
        strategy: WriteStrategy,
        max_dead_nbytes: int | None,
        refuse_links: Callable[[str], None],
    ) -> None:
        self._reading = reading
        self._strategy = strategy
        self._rewrite = partial(rewrite_shard, order=order)
        self._commit = self._rewrite
        if strategy == "append":
            self._commit = partial(append_to_shard, order=order, max_dead_nbytes=max_dead_nbytes)
        self._max_dead_nbytes = max_dead_nbytes
        reader = ArrayReader(native, reading)
        self.arrays = ArrayCache(policy, reader)
        self.catalog = Catalog(policy, self.arrays)
        self.buffer = WriteBuffer()
        self.flusher = Flusher(self.catalog, self.arrays, self.buffer)
        self.listing = Listing(self.catalog, self.flusher)
        self._router = Router(self.flusher, reading)
        self._refuse_links = refuse_links
        self._view = MetadataView(policy, reader)

    def update_shard(
        self, request: UpdateShard, groups: Sequence[Sequence[EntryUpdate]]
    ) -> Flow[Sequence[Exception | None]]:
        """Commit groups of updates of one shard by the write strategy; for the driver."""
        # Transformers below a sharding know whole shards only.
        commit = self._rewrite if request.below else self._commit
        flow = commit_with_buffered(request.shard, groups, commit, self.buffer)
        return run_above(request.below, flow) if request.below else flow

    def fits_inline(
        self, request: UpdateShard, updates: Sequence[EntryUpdate], opened: ShardWriter
    ) -> bool:
        """Whether `update_shard` only writes these updates into the gap of an opened shard."""
        return (
            self._strategy == "append"
            and not request.below
            and not (self.buffer.is_active and self.buffer.get(request.shard.key))
            and fits_inline(request.shard, updates, opened, self._max_dead_nbytes)
        )

    # --------------------------------------------------------------- reads

    def get_many(
        self, key_ranges: Sequence[tuple[str, ByteRange | None]]
    ) -> Flow[list[memoryview | None]]:
        """Return values, or ranges of them; ``None`` for a missing key.

        Cost: two rounds if the documents of the arrays are cached.
        """
        keys = [key for key, _ in key_ranges]
        byte_ranges = column_of_ranges([byte_range for _, byte_range in key_ranges])
        if not self.buffer.is_active:  # usually: a shorter way
            groups = self.catalog.reads_by_shard(keys, byte_ranges)
            if groups is not None:
                return (yield from read_shards(groups, len(keys), self._reading))
        generation = self.arrays.current()
        owners = yield from self._router.owners(keys)
        documents = [
            i
            for i, key in enumerate(keys)
            if not isinstance(owners[i], ChunkRef) and is_document(key)
        ]
        requests = [Get(key, byte_range) for key, byte_range in key_ranges]
        for i in documents:
            requests[i] = Get(keys[i])  # its view is another one
        founds: list[Found | None] = yield from self._router.perform(requests, owners)
        values = [None if found is None else found.value for found in founds]
        whole = yield from complete_documents(
            [keys[i] for i in documents], [founds[i] or Found(None, None) for i in documents]
        )
        for i, found in zip(documents, whole, strict=True):
            byte_range = key_ranges[i][1]
            values[i] = self._document_to_user(keys[i], found.value, byte_range, generation)
        return values

    def get(self, key: str, byte_range: ByteRange | None = None) -> Flow[memoryview | None]:
        """Return one value, or a range of it; ``None`` if the key is missing."""
        (value,) = yield from self.get_many([(key, byte_range)])
        return value

    def exists(self, key: str) -> Flow[bool]:
        """Whether there is a value; for a chunk, by one read of its shard's index."""
        check_key(key)
        return bool((yield from self._ask(Exists(key))))

    def get_size(self, key: str) -> Flow[int | None]:
        """Return the size of a value in bytes; ``None`` if there is none. No chunk is read."""
        check_key(key)
        if is_document(key):
            value = yield from self.get(key)
            return None if value is None else len(value)
        size: int | None = yield from self._ask(GetSize(key))
        return size

    def _ask(self, request: Exists | GetSize) -> Flow[Any]:
        owners = yield from self._router.owners([request.key])
        (reply,) = yield from self._router.perform([request], owners)
        return reply

    def get_total_size(self, prefix: str) -> Flow[int]:
        """Return the sum of the sizes of all values whose key starts with `prefix`, in bytes."""
        total = 0
        stream = yield from self.listing.stream(prefix)
        while stream.has_more:
            for key, size in (yield from stream.next_round()).sizes():
                if size is None:
                    size = yield from self.get_size(key)
                total += size or 0
        raise_first(stream.errors)
        return total

    # -------------------------------------------------------------- writes

    def set_many(
        self, items: Iterable[tuple[str, Value]], *, only_if_missing: bool = False
    ) -> Flow[None]:
        """Store whole values; those of one shard are committed together.

        If a key is not valid, or not for its array, no value of the call is written.
        """
        request = SetIfNotExists if only_if_missing else Set
        sets = [request(key, value) for key, value in items]
        if (yield from self._write_cached(sets)):
            return
        values: list[ValueRequest] = []
        documents: list[Set | SetIfNotExists] = []
        for each in sets:
            check_key(each.key)
            (documents if is_document(each.key) else values).append(each)
        for each in documents:  # first: they say which of the other keys are chunks
            yield from self._set_document(each.key, memoryview(each.value), only_if_missing)
        owners = yield from self._router.writable(values)
        yield from self._router.perform(values, owners)

    def set_partial_values(self, key_start_values: Iterable[tuple[str, int, Value]]) -> Flow[None]:
        """Write pieces into values; each shard is committed once.

        If pieces of one value overlap, or a key is not valid, nothing is written. If a piece starts
        behind the end of its value, nothing of its shard is written.
        """
        pieces: dict[str, list[Piece]] = {}
        for key, start, value in key_start_values:
            check_key(key)
            pieces.setdefault(key, []).append((start, value))
        patches = [SetPartial(key, check_pieces(key, parts)) for key, parts in pieces.items()]
        owners = yield from self._router.writable(patches)
        requests: list[SetPartial] = []
        chunk_owners: list[Owner] = []
        for owner, patch in zip(owners, patches, strict=True):
            if owner is None:  # perhaps a document: what is changed is what readers see
                old = yield from self.get(patch.key)
                new = apply_pieces(patch.key, old, patch.pieces)
                yield from self.set_many([(patch.key, new)])
            else:
                requests.append(patch)
                chunk_owners.append(owner)
        yield from self._router.perform(requests, chunk_owners)

    def set_or_erase(self, items: Iterable[tuple[str, Value | None]]) -> Flow[None]:
        """Store values, then erase those that are ``None``; each shard is committed once.

        If a key is not valid, or not for its array, no value of the call is written.
        """
        items = sorted(items, key=lambda item: item[1] is None)  # erasures last
        changes = [Delete(key) if value is None else Set(key, value) for key, value in items]
        if (yield from self._write_cached(changes)):
            return
        for change in changes:
            check_key(change.key)
            if is_document(change.key):
                raise SpecError(f"key {change.key!r} is a document: store or erase it by itself")
        sets = [change for change in changes if isinstance(change, Set)]
        owners = yield from self._router.writable(sets)
        erased = [change.key for change in changes if isinstance(change, Delete)]
        erasures, erased_owners = yield from self._erasures(erased)
        yield from self._router.perform([*sets, *erasures], [*owners, *erased_owners])

    def _write_cached(self, requests: Sequence[ValueRequest]) -> Flow[bool]:
        """Write chunks of cached arrays, outside of batches; false if there are other keys."""
        if self.buffer.is_active:
            return False
        chunk_of = self.arrays.current().chunk_of
        chunks = [chunk for each in requests if (chunk := chunk_of(each.key)) is not None]
        if len(chunks) < len(requests):
            return False
        yield shard_updates(requests, chunks)
        return True

    # ------------------------------------------------------------- erasures

    def erase_values(self, keys: Iterable[str]) -> Flow[None]:
        """Erase values; those of one shard together. A missing key is no error."""
        requests, owners = yield from self._erasures(keys)
        nodes = [node for request in requests if (node := node_of_document(request.key))]
        arrays = yield from self.arrays.lookup(nodes)
        try:
            if nodes and self.buffer.is_active:
                # An array is flushed while its document still says where its chunks are.
                others = [i for i, request in enumerate(requests) if not is_document(request.key)]
                yield from self._router.perform(
                    [requests[i] for i in others], [owners[i] for i in others]
                )
                for node in nodes:
                    yield from self.flusher.flush_array(node)
                requests = [request for request in requests if is_document(request.key)]
                owners = [None] * len(requests)
            yield from self._router.perform(requests, owners)
        finally:
            for node in nodes:
                array = arrays[node]
                self.arrays.document_erased(node, array if isinstance(array, StoredArray) else None)

    def erase_prefix(self, prefix: str) -> Flow[None]:
        """Erase all values whose key starts with `prefix`; whole directories are relayed."""
        prefix = check_prefix(prefix)
        if prefix and not prefix.endswith("/"):
            yield from self._erase_listed(prefix)
            return
        self._refuse_links(prefix.removesuffix("/"))
        directory = yield from self.catalog.directory_of(prefix)
        match directory:
            case GridDirectory():
                is_inside_grid = bool(directory.leading)
            case StoredArray():
                is_inside_grid = directory.is_inside_grid(prefix)
            case None:
                is_inside_grid = self.listing.is_translated_without_metadata(prefix)
        if is_inside_grid:
            yield from self._erase_listed(prefix)
            return
        yield from self.flusher.flush_orphans(prefix)
        try:
            yield [DeletePrefix(prefix)]
            self.buffer.drop(prefix)
        finally:
            if directory is None:  # otherwise there are no documents below
                self.arrays.documents_changed(below=prefix)

    def _erasures(self, keys: Iterable[str]) -> Flow[tuple[list[Delete], list[Owner]]]:
        """Return the requests that erase values, and the owners of their keys."""
        keys = items_of("keys", keys)
        for key in keys:
            check_key(key)
        keys = list(dict.fromkeys(keys))
        owners = yield from self._router.owners(keys)
        invalid = [
            key
            for key, owner in zip(keys, owners, strict=True)
            if isinstance(owner, InvalidChunkKey) and not owner.is_outside
        ]
        objects: set[str] = set()
        if invalid:
            # LocalStore erases a whole directory if a key names one. Here that would be a
            # directory of shards, which are not the chunks below the key. Only objects can be read.
            founds: list[Found] = yield [Get(key, Range(0, 1)) for key in invalid]
            objects = {k for k, f in zip(invalid, founds, strict=True) if f.value is not None}
        erased: list[tuple[Delete, Owner]] = []
        for key, owner in zip(keys, owners, strict=True):
            if not isinstance(owner, InvalidChunkKey):
                erased.append((Delete(key), owner))
            elif key in objects:
                erased.append((Delete(key), None))
        return [request for request, _ in erased], [owner for _, owner in erased]

    def _erase_listed(self, prefix: str) -> Flow[None]:
        """Erase below a prefix that cuts directories or shards.

        Cost: a listing. The indexes of arrays with other transformers are read, of others none.
        """
        self._refuse_links(prefix)
        stream = yield from self.listing.stream(prefix)
        shards, keys = yield from stream.all_shards_and_keys()
        raise_first(stream.errors)  # so far nothing was erased
        yield from _erase_in_shards(shards, prefix)
        yield from self.erase_values(keys)

    # ----------------------------------------------------------- documents

    def _document_to_user(
        self,
        key: str,
        data: memoryview | None,
        byte_range: ByteRange | None,
        generation: Generation,
    ) -> memoryview | None:
        """Return a stored document as users see it, and cache its array."""
        node = node_of_document(key)
        if data is None:
            if node is not None:
                generation.drop(node)
            return None
        if node is None:
            value = self._view.directory_to_user(directory_of_v2_consolidated(key) or "", data)
        else:
            value, array = self._view.to_user(node, data)
            generation.put(node, array)
        start, stop = resolve_range(byte_range, len(value))
        return value[start:stop]

    def _set_document(self, key: str, data: memoryview, only_if_missing: bool) -> Flow[None]:
        (found,) = yield from read_documents([key])
        if only_if_missing and found.value is not None:
            return
        request = SetIfNotExists if only_if_missing else Set
        node = node_of_document(key)
        if node is None:
            directory = directory_of_v2_consolidated(key) or ""
            yield [request(key, (yield from self._view.directory_to_store(directory, data)))]
            return
        if found.value is None:
            yield from self.flusher.flush_array(node)  # the view looks for stored chunks
        stored, array, is_changed = yield from self._view.to_store(node, data, found.value)
        if is_changed:
            yield from self.flusher.flush_changed(node, found.value, array)
        is_certain = False
        try:
            yield [request(key, stored)]
            is_certain = not only_if_missing  # otherwise another writer may have been first
        finally:
            if is_changed or not is_certain:
                self.arrays.documents_changed(node, array if is_certain else None)
            else:
                self.arrays.current().put(node, array)


def _erase_in_shards(shards: Sequence[ShardRef], prefix: str) -> Flow[None]:
    """Erase the chunks whose keys start with `prefix`; each shard is written once."""
    updates: list[Request] = []
    n_erasures = 0
    for shard in shards:
        erasures = tuple(map(DeleteEntry, shard.entries_with(prefix).tolist()))
        if erasures:
            updates.append(UpdateShard(shard, erasures))
            n_erasures += len(erasures)
        if n_erasures > _ERASURES_AT_ONCE:
            yield updates
            updates, n_erasures = [], 0
    if updates:
        yield updates

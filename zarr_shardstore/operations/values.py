"""The operations of the draft's abstract store interface, as flows.

Each takes keys as zarr spells them, and makes requests to the base store. The public stores only
convert arguments and choose the driver.

Source: sharding storage transformer draft, "API implementation".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

from zarr_shardstore.arrays.array_cache import (
    ArrayCache,
    Generation,
    complete_documents,
    read_documents,
)
from zarr_shardstore.arrays.catalog import Catalog
from zarr_shardstore.arrays.metadata_view import MetadataView
from zarr_shardstore.arrays.policy import NewArrays
from zarr_shardstore.arrays.stored_array import ArrayReader
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.keys import check_key
from zarr_shardstore.format.layout import ChunkRef
from zarr_shardstore.format.ranges import ByteRange, column_of_ranges, resolve_range
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.metadata.consolidated import directory_of_v2_consolidated
from zarr_shardstore.metadata.declaration import Native
from zarr_shardstore.metadata.documents import node_of_document
from zarr_shardstore.operations.buffered import commit_with_buffered
from zarr_shardstore.operations.erase import Eraser
from zarr_shardstore.operations.flush import Flusher
from zarr_shardstore.operations.listing import Listing, raise_first
from zarr_shardstore.operations.routing import Owner, Router, is_document
from zarr_shardstore.operations.write_buffer import WriteBuffer
from zarr_shardstore.shards.append import append_to_shard, fits_inline
from zarr_shardstore.shards.read import EntryRead, ReadOptions, read_entries, read_shards
from zarr_shardstore.shards.requests import (
    Delete,
    Exists,
    Flow,
    Found,
    Get,
    GetSize,
    Set,
    SetIfNotExists,
    SetPartial,
    UpdateShard,
)
from zarr_shardstore.shards.rewrite import update_shard as rewrite_shard
from zarr_shardstore.shards.shard_writer import ShardWriter
from zarr_shardstore.shards.sharding import WriteStrategy, perform_on_chunks
from zarr_shardstore.shards.stack import run_above
from zarr_shardstore.shards.updates import EntryUpdate, Piece, apply_pieces, check_pieces

Value: TypeAlias = bytes | memoryview


class Operations:
    """Operations on one base store, without the base store.

    Parameters
    ----------
    new_arrays : NewArrays
        Sharding and declaration of new arrays.
    native : Native
        View of native sharded arrays.
    reading : ReadOptions
        Coalescing.
    order : EntryOrder
        Order in which the entries of a shard are written.
    strategy : WriteStrategy
        Write strategy.
    max_dead_nbytes : int, optional
        Dead bytes that a shard file may have.
    refuse_links
        Raises `SpecError` if a prefix leads through a link of the base store.
    """

    def __init__(
        self,
        new_arrays: NewArrays,
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
        self.arrays = ArrayCache(new_arrays.policy, reader)
        self.catalog = Catalog(new_arrays.policy, self.arrays)
        self.buffer = WriteBuffer()
        self.flusher = Flusher(self.catalog, self.arrays, self.buffer)
        self.listing = Listing(self.catalog, self.flusher)
        self._router = Router(self.flusher, reading)
        self._eraser = Eraser(self._router, self.listing, refuse_links)
        self._view = MetadataView(new_arrays, reader)

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
        chunks = [owner for owner in owners if isinstance(owner, ChunkRef)]
        if len(chunks) == len(keys) and not self.buffer.is_active:
            pairs = zip(chunks, key_ranges, strict=True)
            reads = [EntryRead(chunk, byte_range) for chunk, (_, byte_range) in pairs]
            return (yield from read_entries(reads, self._reading))
        # The key of a chunk is no document: only other keys are parsed.
        are_documents = [
            not isinstance(owner, ChunkRef) and is_document(key)
            for owner, (key, _) in zip(owners, key_ranges, strict=True)
        ]
        requests = [
            Get(key, None if yes else byte_range)
            for yes, (key, byte_range) in zip(are_documents, key_ranges, strict=True)
        ]
        founds: list[Found | None] = yield from self._router.perform(requests, owners)
        documents = [(i, f) for i, f in enumerate(founds) if are_documents[i] and f is not None]
        if documents:
            keys = [key_ranges[i][0] for i, _ in documents]
            whole = yield from complete_documents(keys, [found for _, found in documents])
            for (i, _), found in zip(documents, whole, strict=True):
                founds[i] = found
        values = [None if found is None else found.value for found in founds]
        if any(are_documents):
            for i, (key, byte_range) in enumerate(key_ranges):
                if are_documents[i]:
                    values[i] = self._document_to_user(key, values[i], byte_range, generation)
        return values

    def get(self, key: str, byte_range: ByteRange | None = None) -> Flow[memoryview | None]:
        """Return one value, or a range of it; ``None`` if the key is missing."""
        (value,) = yield from self.get_many([(key, byte_range)])
        return value

    def exists(self, key: str) -> Flow[bool]:
        """Whether there is a value; for a chunk, by one read of its shard's index."""
        check_key(key)
        owners = yield from self._router.owners([key])
        (is_there,) = yield from self._router.perform([Exists(key)], owners)
        return bool(is_there)

    def get_size(self, key: str) -> Flow[int | None]:
        """Return the size of a value in bytes; ``None`` if there is none. No chunk is read."""
        check_key(key)
        if is_document(key):
            value = yield from self.get(key)
            return None if value is None else len(value)
        owners = yield from self._router.owners([key])
        size: int | None
        (size,) = yield from self._router.perform([GetSize(key)], owners)
        return size

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

        Raises
        ------
        SpecError
            If a key is not valid, or not for its array; no value of the call was written.
        """
        request = SetIfNotExists if only_if_missing else Set
        items = list(items)
        chunks = self._cached_chunks([key for key, _ in items])
        if chunks is not None:
            sets = [request(key, value) for key, value in items]
            yield from perform_on_chunks(sets, chunks, self._reading)
            return
        values: list[tuple[str, Value]] = []
        documents: list[tuple[str, Value]] = []
        for key, value in items:
            check_key(key)
            (documents if is_document(key) else values).append((key, value))
        for key, value in documents:  # first: they say which of the other keys are chunks
            yield from self._set_document(key, memoryview(value), only_if_missing)
        owners = yield from self._router.writable([key for key, _ in values])
        yield from self._router.perform([request(key, value) for key, value in values], owners)

    def set(self, key: str, value: Value, *, only_if_missing: bool = False) -> Flow[None]:
        """Store one whole value."""
        return self.set_many([(key, value)], only_if_missing=only_if_missing)

    def set_partial_values(self, key_start_values: Iterable[tuple[str, int, Value]]) -> Flow[None]:
        """Write pieces into values; each shard is committed once.

        Raises
        ------
        SpecError
            If pieces of one value overlap, or a key is not valid: nothing was written. If a
            piece starts behind the end of its value: nothing of its shard was written.
        """
        pieces: dict[str, list[Piece]] = {}
        for key, start, value in key_start_values:
            check_key(key)
            pieces.setdefault(key, []).append((start, value))
        patches = {key: check_pieces(key, parts) for key, parts in pieces.items()}
        owners = yield from self._router.writable(list(patches))
        requests: list[SetPartial] = []
        chunk_owners: list[Owner] = []
        for owner, (key, parts) in zip(owners, patches.items(), strict=True):
            if owner is None:  # perhaps a document: what is changed is what readers see
                old = yield from self.get(key)
                yield from self.set(key, apply_pieces(key, old, parts))
            else:
                requests.append(SetPartial(key, parts))
                chunk_owners.append(owner)
        yield from self._router.perform(requests, chunk_owners)

    def set_or_erase(self, items: Iterable[tuple[str, Value | None]]) -> Flow[None]:
        """Store values, then erase those that are ``None``; each shard is committed once.

        Raises
        ------
        SpecError
            If a key is not valid, or not for its array; no value of the call was written.
        """
        items = sorted(items, key=lambda item: item[1] is None)  # erasures last
        chunks = self._cached_chunks([key for key, _ in items])
        if chunks is not None:
            changes = [Delete(key) if value is None else Set(key, value) for key, value in items]
            yield from perform_on_chunks(changes, chunks, self._reading)
            return
        values: list[tuple[str, Value]] = []
        erased: list[str] = []
        for key, value in items:
            check_key(key)
            if is_document(key):
                raise SpecError(f"key {key!r} is a document: store or erase it by itself")
            if value is None:
                erased.append(key)
            else:
                values.append((key, value))
        owners = yield from self._router.writable([key for key, _ in values])
        erasures, erased_owners = yield from self._eraser.erasures(erased)
        sets = [Set(key, value) for key, value in values]
        yield from self._router.perform([*sets, *erasures], [*owners, *erased_owners])

    def erase_values(self, keys: Iterable[str]) -> Flow[None]:
        """Erase values; those of one shard together. A missing key is no error."""
        return self._eraser.erase_values(keys)

    def erase_prefix(self, prefix: str) -> Flow[None]:
        """Erase all values whose key starts with `prefix`; whole directories are relayed."""
        return self._eraser.erase_prefix(prefix)

    def _cached_chunks(self, keys: Sequence[str]) -> list[ChunkRef] | None:
        """Return the chunks of keys, if their arrays are cached and no batch is open."""
        return None if self.buffer.is_active else self.catalog.cached_chunks(keys)

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

"""The operations of the draft's abstract store interface, as flows.

Each takes keys as zarr asks for them, and makes requests of the base store. The stores that
users hold only convert arguments and choose the driver.

Source: sharding storage transformer draft, "API implementation".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zarr_shardstore.errors import ShardStoreError, SpecError
from zarr_shardstore.format.consolidated import directory_of_v2_consolidated
from zarr_shardstore.format.declarations import Native
from zarr_shardstore.format.documents import Node, node_of_document
from zarr_shardstore.format.keys import check_key, check_prefix
from zarr_shardstore.format.layout import ChunkRef, ShardRef
from zarr_shardstore.format.orders import EntryOrder
from zarr_shardstore.plan.documents import read_documents, whole_documents
from zarr_shardstore.plan.entries import EntryUpdate, Erase, Piece, apply_pieces, check_pieces
from zarr_shardstore.plan.holding import (
    hold_updates,
    perform_or_hold,
    update_with_held,
    with_held,
)
from zarr_shardstore.plan.listing import GridDirectory
from zarr_shardstore.plan.ranges import ByteRange, Range, resolve_range
from zarr_shardstore.plan.read import ReadOptions
from zarr_shardstore.plan.requests import (
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
    relay,
)
from zarr_shardstore.plan.stack import Stack, perform, through, together
from zarr_shardstore.store.arrays import ArrayReader, StoredArray
from zarr_shardstore.store.batch import BatchState
from zarr_shardstore.store.catalog import Catalog, Misfit, StackedKey
from zarr_shardstore.store.known_arrays import Knowledge, KnownArrays
from zarr_shardstore.store.listing import Listing, raise_first
from zarr_shardstore.store.new_arrays import NewArrays
from zarr_shardstore.store.publishing import Publisher
from zarr_shardstore.store.view import View

__all__ = ["Operations", "Options"]

Value: TypeAlias = bytes | memoryview
_Owner: TypeAlias = "ChunkRef | StackedKey | Misfit | None"


@dataclass(frozen=True, slots=True)
class Options:
    """Runtime options of a store; none of them is stored."""

    order: EntryOrder = "morton"
    reading: ReadOptions = field(default_factory=ReadOptions)
    native: Native = "flat"


class Operations:
    """Operations on one base store, without the base store.

    Parameters
    ----------
    new_arrays : NewArrays
        Which new arrays are sharded, and how they are declared.
    options : Options
        Order of entries, coalescing, what becomes of native arrays.
    """

    def __init__(self, new_arrays: NewArrays, options: Options) -> None:
        self.options = options
        reader = ArrayReader(options.native, options.reading)
        self.known = KnownArrays(new_arrays.policy, reader)
        self.catalog = Catalog(new_arrays.policy, self.known)
        self.batches = BatchState()
        self._pending = self.batches.pending
        self.publisher = Publisher(self.catalog, self.known, self._pending)
        self.listing = Listing(self.catalog, self._pending)
        self._view = View(new_arrays, reader)

    def update_shard(
        self, request: UpdateShard, groups: Sequence[Sequence[EntryUpdate]]
    ) -> Flow[Sequence[Exception | None]]:
        """The write strategy, for the driver."""
        flow = update_with_held(request.shard, groups, self._pending, order=self.options.order)
        return through(request.below, flow) if request.below else flow

    # --------------------------------------------------------------- reads

    def get_many(
        self, key_ranges: Sequence[tuple[str, ByteRange | None]]
    ) -> Flow[list[memoryview | None]]:
        """Values, or ranges of them; ``None`` for a missing key.

        Cost: two rounds, once the documents of the arrays are known.
        """
        for key, byte_range in key_ranges:
            check_key(key)
            resolve_range(byte_range, 0)
        knowledge = self.known.now()
        owners = yield from self._owners([key for key, _ in key_ranges])
        # A key that is a chunk is no document; only of others it must be looked at.
        is_document = [
            not isinstance(owner, ChunkRef) and _is_document(key)
            for owner, (key, _) in zip(owners, key_ranges, strict=True)
        ]
        requests = [
            Get(key, None if yes else byte_range)
            for yes, (key, byte_range) in zip(is_document, key_ranges, strict=True)
        ]
        founds: list[Found | None] = yield from self._perform(requests, owners)
        documents = [(i, f) for i, f in enumerate(founds) if is_document[i] and f is not None]
        if documents:
            keys = [key_ranges[i][0] for i, _ in documents]
            whole = yield from whole_documents(keys, [found for _, found in documents])
            for (i, _), found in zip(documents, whole, strict=True):
                founds[i] = found
        values = [None if found is None else found.value for found in founds]
        for i, (key, byte_range) in enumerate(key_ranges):
            if is_document[i]:
                values[i] = self._shown(key, values[i], byte_range, knowledge)
        return values

    def get(self, key: str, byte_range: ByteRange | None = None) -> Flow[memoryview | None]:
        """One value, or a range of it; ``None`` if the key is missing."""
        (value,) = yield from self.get_many([(key, byte_range)])
        return value

    def exists(self, key: str) -> Flow[bool]:
        """Whether there is a value; for a chunk, by one read of its shard's index."""
        check_key(key)
        owners = yield from self._owners([key])
        (is_there,) = yield from self._perform([Exists(key)], owners)
        return bool(is_there)

    def get_size(self, key: str) -> Flow[int | None]:
        """Size of a value in bytes; ``None`` if there is none. No chunk is read."""
        if _is_document(key):
            value = yield from self.get(key)
            return None if value is None else len(value)
        check_key(key)
        owners = yield from self._owners([key])
        size: int | None
        (size,) = yield from self._perform([GetSize(key)], owners)
        return size

    def get_total_size(self, prefix: str) -> Flow[int]:
        """Sum of the sizes of all values whose key starts with `prefix`, in bytes."""
        total = 0
        errors: list[ShardStoreError] = []
        base_keys = yield from self.listing.list_base(prefix)
        for part in self.listing.listing_rounds(base_keys):
            for key, size in (yield from self.listing.list_sizes(part, prefix, errors)):
                if size is None:
                    size = yield from self.get_size(key)
                total += size or 0
        raise_first(errors)
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
        values: list[tuple[str, Value]] = []
        documents: list[tuple[str, Value]] = []
        for key, value in items:
            check_key(key)
            (documents if _is_document(key) else values).append((key, value))
        for key, value in documents:  # first: they say which of the other keys are chunks
            yield from self._set_document(key, memoryview(value), only_if_missing)
        owners = yield from self._writable([key for key, _ in values])
        request = SetIfNotExists if only_if_missing else Set
        yield from self._perform([request(key, value) for key, value in values], owners)

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
        owners = yield from self._writable(list(patches))
        requests: list[SetPartial] = []
        chunk_owners: list[_Owner] = []
        for owner, (key, parts) in zip(owners, patches.items(), strict=True):
            if owner is None:  # perhaps a document: what is changed is what readers see
                old = yield from self.get(key)
                yield from self.set(key, apply_pieces(key, old, parts))
            else:
                requests.append(SetPartial(key, parts))
                chunk_owners.append(owner)
        yield from self._perform(requests, chunk_owners)

    def erase_values(self, keys: Iterable[str]) -> Flow[None]:
        """Erase values; those of one shard together. A missing key is no error."""
        requests, kept = yield from self._erasures(keys)
        nodes = [node for request in requests if (node := node_of_document(request.key))]
        arrays = yield from self.known.know(nodes, self.known.now())
        try:
            if nodes and self._pending:
                # What is held of an array is published while its document still says where.
                of_chunks = [i for i, r in enumerate(requests) if not _is_document(r.key)]
                yield from self._perform(
                    [requests[i] for i in of_chunks], [kept[i] for i in of_chunks]
                )
                for node in nodes:
                    yield from self.publisher.publish_array(node)
                requests = [r for r in requests if _is_document(r.key)]
                kept = [None] * len(requests)
            yield from self._perform(requests, kept)
        finally:
            for node in nodes:
                array = arrays[node]
                self.known.erased(node, array if isinstance(array, StoredArray) else None)

    def set_or_erase(self, items: Iterable[tuple[str, Value | None]]) -> Flow[None]:
        """Store values, and erase those that are ``None``; each shard is committed once.

        Raises
        ------
        SpecError
            If a key is not valid, or not for its array; no value of the call was written.
        """
        values: list[tuple[str, Value]] = []
        erased: list[str] = []
        for key, value in items:
            check_key(key)
            if _is_document(key):
                raise SpecError(f"key {key!r} is a document: store or erase it by itself")
            if value is None:
                erased.append(key)
            else:
                values.append((key, value))
        owners = yield from self._writable([key for key, _ in values])
        erasures, erased_owners = yield from self._erasures(erased)
        sets = [Set(key, value) for key, value in values]
        yield from self._perform([*sets, *erasures], [*owners, *erased_owners])

    def erase_prefix(self, prefix: str) -> Flow[None]:
        """Erase all values whose key starts with `prefix`; whole directories are relayed."""
        prefix = check_prefix(prefix)
        if prefix and not prefix.endswith("/"):
            yield from self._erase_listed(prefix)
            return
        directory = yield from self.catalog.directory_of(prefix)
        if isinstance(directory, GridDirectory) and directory.leading:
            yield from self._erase_grid_directory(directory, prefix)
        elif (
            directory.is_inside_grid(prefix)
            if isinstance(directory, StoredArray)
            else directory is None and self.listing.is_translated_without_metadata(prefix)
        ):
            yield from self._erase_listed(prefix)
        else:
            yield from self.publisher.publish_orphans(prefix)
            try:
                yield [DeletePrefix(prefix)]
                self._pending.drop_below(prefix)
            finally:
                if directory is None:  # otherwise there are no documents below
                    self.known.changed(below=prefix)

    # ------------------------------------------------------------- details

    def _perform(self, requests: Sequence[Request], owners: Sequence[_Owner]) -> Flow[list[Any]]:
        """Reply to requests for keys, of whatever array, side by side. Misfits get ``None``."""
        stacks: dict[Node, tuple[Stack, list[int]]] = {}
        chunks: list[int] = []
        others: list[int] = []
        for i, owner in enumerate(owners):
            if isinstance(owner, ChunkRef):
                chunks.append(i)
            elif isinstance(owner, StackedKey):
                array = owner.array
                stacks.setdefault(array.node, (array.stack, []))[1].append(i)
            elif not _is_outside(owner):
                others.append(i)
        parts: list[tuple[list[int], Flow[list[Any]]]] = []
        if chunks:
            refs = [owner for owner in owners if isinstance(owner, ChunkRef)]
            of_chunks = [requests[i] for i in chunks]
            reading = self.options.reading
            parts.append((chunks, perform_or_hold(of_chunks, refs, reading, self._pending)))
        if others:
            parts.append((others, relay([requests[i] for i in others])))
        for whole_stack, positions in stacks.values():
            stack = with_held(whole_stack, self._pending)
            parts.append((positions, perform(stack, [requests[i] for i in positions])))
        replies: list[Any] = [None] * len(requests)
        results = yield from together([flow for _, flow in parts])
        for (positions, _), result in zip(parts, results, strict=True):
            for i, reply in zip(positions, result, strict=True):
                replies[i] = reply
        if not all(isinstance(request, Get | GetSize | Exists) for request in requests):
            yield from self.publisher.publish_due()
        return replies

    def _shown(
        self,
        key: str,
        data: memoryview | None,
        byte_range: ByteRange | None,
        knowledge: Knowledge,
    ) -> memoryview | None:
        """A stored document as readers see it; what it says is learned on the way."""
        node = node_of_document(key)
        if data is None:
            if node is not None:
                knowledge.forget(node)  # what is there is looked up when it matters
            return None
        if node is None:
            value = self._view.presented_directory(directory_of_v2_consolidated(key) or "", data)
        else:
            value, array = self._view.presented(node, data)
            knowledge.learn(node, array)
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
            yield [request(key, (yield from self._view.stored_directory(directory, data)))]
            return
        if found.value is None:
            yield from self.publisher.publish_array(node)  # the view looks for its chunks
        stored, array, is_changed = yield from self._view.stored(node, data, found.value)
        if is_changed:
            yield from self.publisher.publish_changed(node, found.value, array)
        is_certain = False
        try:
            yield [request(key, stored)]
            is_certain = not only_if_missing  # otherwise another writer may have been first
        finally:
            if is_changed or not is_certain:
                self.known.changed(node, array if is_certain else None)
            else:
                self.known.now().learn(node, array)

    def _owners(self, keys: Sequence[str]) -> Flow[list[_Owner]]:
        """What keys name; also chunks of an array whose document this store has just erased."""
        owners = yield from self.catalog.chunks_of(keys)
        if self.known.has_erased:
            for i, key in enumerate(keys):
                if owners[i] is None:
                    owners[i] = self.catalog.chunk_without_document(key)
        return owners

    def _writable(self, keys: Sequence[str]) -> Flow[list[_Owner]]:
        owners = yield from self.catalog.chunks_of(keys)
        for owner in owners:
            if isinstance(owner, Misfit):
                raise SpecError(owner.message)
        return owners

    def _erasures(self, keys: Iterable[str]) -> Flow[tuple[list[Delete], list[_Owner]]]:
        """What erases values, and what their keys name."""
        keys = list(dict.fromkeys(keys))
        for key in keys:
            check_key(key)
        owners = yield from self._owners(keys)
        misfits = [
            key
            for key, owner in zip(keys, owners, strict=True)
            if isinstance(owner, Misfit) and not owner.is_outside
        ]
        objects: set[str] = set()
        if misfits:
            # LocalStore erases a whole directory if the key names one: here that would be one
            # of shards, which are not the chunks below the key. Only objects can be read.
            founds: list[Found] = yield [Get(key, Range(0, 1)) for key in misfits]
            found = zip(misfits, founds, strict=True)
            objects = {key for key, reply in found if reply.value is not None}
        requests: list[Delete] = []
        kept: list[_Owner] = []
        for key, owner in zip(keys, owners, strict=True):
            is_misfit = isinstance(owner, Misfit)
            if not is_misfit or key in objects:
                requests.append(Delete(key))
                kept.append(None if is_misfit else owner)
        return requests, kept

    def _erase_listed(self, prefix: str) -> Flow[None]:
        keys = yield from self.listing.list_all(prefix)
        yield from self.erase_values(keys)

    def _erase_grid_directory(self, directory: GridDirectory, prefix: str) -> Flow[None]:
        """Erase the chunks under a prefix that reaches into the grid of an array."""
        base_keys = yield from self.listing.list_base(prefix)
        shards = yield from self.catalog.shards_of(base_keys)
        batch: list[Request] = []
        for base_key, shard in zip(base_keys, shards, strict=True):
            if isinstance(shard, ShardRef):
                erasures = tuple(map(Erase, shard.entries_of(directory.leading).tolist()))
                if erasures and self._pending.is_open:
                    yield from hold_updates(shard, erasures, self.options.reading, self._pending)
                elif erasures:
                    batch.append(UpdateShard(shard, erasures))
            elif base_key.startswith(prefix):
                batch.append(Delete(base_key))
        if batch:
            yield batch
        yield from self.publisher.publish_due()


def _is_document(key: str) -> bool:
    """Whether the view shows something else than what is stored."""
    return node_of_document(key) is not None or directory_of_v2_consolidated(key) is not None


def _is_outside(owner: _Owner) -> bool:
    """Whether the key is one of a chunk outside the array: it is missing, whatever is stored."""
    return isinstance(owner, Misfit) and owner.is_outside

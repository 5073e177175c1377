"""The operations of the draft's abstract store interface, as flows.

Each takes keys as zarr asks for them, and makes requests of the base store. The stores that
users hold only convert arguments and choose the driver.

Source: sharding storage transformer draft, "API implementation".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.declarations import Declaration
from zarr_shardstore.format.documents import Node, node_of_document
from zarr_shardstore.format.keys import check_key, check_prefix
from zarr_shardstore.format.layout import ChunkRef, ShardRef
from zarr_shardstore.format.orders import EntryOrder
from zarr_shardstore.plan.entries import (
    EntryUpdate,
    Erase,
    Patch,
    Piece,
    Put,
    apply_pieces,
    check_pieces,
)
from zarr_shardstore.plan.listing import GridDirectory
from zarr_shardstore.plan.ranges import ByteRange, Range, resolve_range
from zarr_shardstore.plan.read import EntryRead, ReadOptions, read_entries, read_indexes
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
    UpdateShard,
)
from zarr_shardstore.plan.write import update_shard
from zarr_shardstore.store.catalog import Catalog, Misfit
from zarr_shardstore.store.listing import Listing
from zarr_shardstore.store.policy import ShardingPolicy
from zarr_shardstore.store.view import declared_document, presented

__all__ = ["Operations", "Options"]

Value: TypeAlias = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Options:
    """Runtime options of a store; none of them is stored."""

    declaration: Declaration = "codec"
    order: EntryOrder = "morton"
    reading: ReadOptions = field(default_factory=ReadOptions)


class Operations:
    """Operations on one base store, without the base store.

    Parameters
    ----------
    policy : ShardingPolicy
        Which new arrays are sharded.
    options : Options
        Declaration of new arrays, order of entries, coalescing.
    """

    def __init__(self, policy: ShardingPolicy, options: Options) -> None:
        self.policy = policy
        self.options = options
        self.catalog = Catalog(policy)
        self.listing = Listing(self.catalog)

    def update_shard(
        self, shard: ShardRef, groups: Sequence[Sequence[EntryUpdate]]
    ) -> Flow[Sequence[Exception | None]]:
        """The write strategy, for the driver."""
        return update_shard(shard, groups, order=self.options.order)

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
        chunks = yield from self.catalog.chunks_of([key for key, _ in key_ranges])
        nodes = [node_of_document(key) for key, _ in key_ranges]
        reads: list[EntryRead] = []
        others: list[Get] = []
        for chunk, node, (key, byte_range) in zip(chunks, nodes, key_ranges, strict=True):
            if isinstance(chunk, ChunkRef):
                reads.append(EntryRead(chunk, byte_range))
            elif not _is_outside(chunk):
                others.append(Get(key, None if node else byte_range))
        read, founds = yield from read_entries(reads, self.options.reading, others)
        values: list[memoryview | None] = []
        next_read, next_other = iter(read), iter(founds)
        for chunk, node, (_, byte_range) in zip(chunks, nodes, key_ranges, strict=True):
            if isinstance(chunk, ChunkRef):
                values.append(next(next_read))
            elif _is_outside(chunk):
                values.append(None)
            else:
                value = next(next_other).value
                if node is not None:
                    value = self._shown(node, value, byte_range)
                values.append(value)
        return values

    def get(self, key: str, byte_range: ByteRange | None = None) -> Flow[memoryview | None]:
        """One value, or a range of it; ``None`` if the key is missing."""
        (value,) = yield from self.get_many([(key, byte_range)])
        return value

    def exists(self, key: str) -> Flow[bool]:
        """Whether there is a value; for a chunk, by one read of its shard's index."""
        chunk = yield from self._chunk_or_key(key)
        if isinstance(chunk, ChunkRef):
            return (yield from self._entry_nbytes(chunk)) is not None
        if _is_outside(chunk):
            return False
        (is_there,) = yield [Exists(key)]
        return bool(is_there)

    def get_size(self, key: str) -> Flow[int | None]:
        """Size of a value in bytes; ``None`` if there is none. No chunk is read."""
        chunk = yield from self._chunk_or_key(key)
        if isinstance(chunk, ChunkRef):
            return (yield from self._entry_nbytes(chunk))
        if _is_outside(chunk):
            return None
        if node_of_document(key) is not None:
            value = yield from self.get(key)
            return None if value is None else len(value)
        size: int | None
        (size,) = yield [GetSize(key)]
        return size

    def get_total_size(self, prefix: str) -> Flow[int]:
        """Sum of the sizes of all values whose key starts with `prefix`, in bytes."""
        total = 0
        base_keys = yield from self.listing.list_base(prefix)
        for part in self.listing.listing_rounds(base_keys):
            for key, size in (yield from self.listing.list_sizes(part, prefix)):
                if size is None:
                    size = yield from self.get_size(key)
                total += size or 0
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
        documents: list[tuple[Node, str, Value]] = []
        for key, value in items:
            check_key(key)
            node = node_of_document(key)
            if node is not None:
                documents.append((node, key, value))
            else:
                if key.rpartition("/")[2] == ".zarray":
                    yield from self._check_v2_array(key)
                values.append((key, value))
        for node, key, value in documents:  # first: they say which of the other keys are chunks
            yield from self._set_document(node, key, memoryview(value), only_if_missing)
        chunks = yield from self._writable_chunks([key for key, _ in values])
        updates: dict[ShardRef, list[EntryUpdate]] = {}
        batch: list[Request] = []
        relay = SetIfNotExists if only_if_missing else Set
        for chunk, (key, value) in zip(chunks, values, strict=True):
            if chunk is not None:
                put = Put(chunk.entry_id, value, only_if_missing)
                updates.setdefault(chunk.shard, []).append(put)
            else:
                batch.append(relay(key, value))
        batch += [UpdateShard(shard, tuple(puts)) for shard, puts in updates.items()]
        if batch:
            yield batch

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
        chunks = yield from self._writable_chunks(list(patches))
        updates: dict[ShardRef, list[EntryUpdate]] = {}
        for chunk, (key, parts) in zip(chunks, patches.items(), strict=True):
            if chunk is not None:
                updates.setdefault(chunk.shard, []).append(Patch(chunk.entry_id, parts))
            else:
                old = yield from self.get(key)
                yield from self.set(key, apply_pieces(key, old, parts))
        if updates:
            yield [UpdateShard(shard, tuple(parts)) for shard, parts in updates.items()]

    def erase_values(self, keys: Iterable[str]) -> Flow[None]:
        """Erase values; those of one shard together. A missing key is no error."""
        keys = list(dict.fromkeys(keys))
        for key in keys:
            check_key(key)
        chunks = yield from self.catalog.chunks_of(keys)
        updates: dict[ShardRef, list[EntryUpdate]] = {}
        relayed: list[str] = []
        misfits: list[str] = []
        for chunk, key in zip(chunks, keys, strict=True):
            if isinstance(chunk, ChunkRef):
                updates.setdefault(chunk.shard, []).append(Erase(chunk.entry_id))
            elif chunk is None:
                relayed.append(key)
            elif not _is_outside(chunk):
                misfits.append(key)
        if misfits:
            # LocalStore erases a whole directory if the key names one: here that would be one
            # of shards, which are not the chunks below the key. Only objects can be read.
            founds: list[Found] = yield [Get(key, Range(0, 1)) for key in misfits]
            objects = zip(misfits, founds, strict=True)
            relayed += [key for key, found in objects if found.value is not None]
        batch: list[Request] = [Delete(key) for key in relayed]
        batch += [UpdateShard(shard, tuple(erasures)) for shard, erasures in updates.items()]
        if batch:
            yield batch
        for key in relayed:
            node = node_of_document(key)
            if node is not None:
                self.catalog.forget(node)
            else:
                self.catalog.forget_directory(f"{key}/")

    def erase_prefix(self, prefix: str) -> Flow[None]:
        """Erase all values whose key starts with `prefix`; whole directories are relayed."""
        prefix = check_prefix(prefix)
        if prefix and not prefix.endswith("/"):
            keys = yield from self.listing.list_all(prefix)
            yield from self.erase_values(keys)
            return
        directory = yield from self.catalog.directory_of(prefix)
        if directory is not None and directory.leading:
            yield from self._erase_grid_directory(directory, prefix)
        elif directory is None and self.listing.is_translated_without_metadata(prefix):
            keys = yield from self.listing.list_all(prefix)
            yield from self.erase_values(keys)
        else:
            yield [DeletePrefix(prefix)]
            self.catalog.forget_directory(prefix)

    # ------------------------------------------------------------- details

    def _shown(
        self, node: Node, data: memoryview | None, byte_range: ByteRange | None
    ) -> memoryview | None:
        """A stored document as readers see it; the catalog learns it on the way."""
        if data is None:
            self.catalog.forget(node)  # what is there instead is looked up when it matters
            return None
        value = presented(node, data)
        self.catalog.learn_document(node, data)
        start, stop = resolve_range(byte_range, len(value))
        return value[start:stop]

    def _set_document(
        self, node: Node, key: str, data: memoryview, only_if_missing: bool
    ) -> Flow[None]:
        found: Found
        (found,) = yield [Get(key)]
        if only_if_missing and found.value is not None:
            return
        stored, array = yield from declared_document(
            node, data, found.value, self.policy, self.options.declaration
        )
        yield [SetIfNotExists(key, stored) if only_if_missing else Set(key, stored)]
        if only_if_missing:
            self.catalog.forget(node)  # another writer may have been first
        else:
            self.catalog.learn(node, array)

    def _check_v2_array(self, key: str) -> Flow[None]:
        """A new v2 array cannot be sharded; its user would find out by the number of files."""
        path = key.removesuffix(".zarray").removesuffix("/")
        if self.policy.has_rule(path):
            (is_there,) = yield [Exists(key)]
            if not is_there:
                raise UnsupportedError(
                    f"the array {path!r} has Zarr format 2, which cannot be sharded yet: create it "
                    "with zarr_format=3, or leave it out of chunks_per_shard (a mapping from "
                    "path, with None for this one)"
                )

    def _chunk_or_key(self, key: str) -> Flow[ChunkRef | Misfit | None]:
        check_key(key)
        (chunk,) = yield from self.catalog.chunks_of([key])
        return chunk

    def _writable_chunks(self, keys: Sequence[str]) -> Flow[list[ChunkRef | None]]:
        chunks = yield from self.catalog.chunks_of(keys)
        writable: list[ChunkRef | None] = []
        for chunk in chunks:
            if isinstance(chunk, Misfit):
                raise SpecError(chunk.message)
            writable.append(chunk)
        return writable

    def _entry_nbytes(self, chunk: ChunkRef) -> Flow[int | None]:
        (index,) = yield from read_indexes([chunk.shard])
        entry = None if index is None else index.entry(chunk.entry_id)
        return None if entry is None else entry[1]

    def _erase_grid_directory(self, directory: GridDirectory, prefix: str) -> Flow[None]:
        """Erase the chunks under a prefix that reaches into the grid of an array."""
        base_keys = yield from self.listing.list_base(prefix)
        shards = yield from self.catalog.shards_of(base_keys)
        batch: list[Request] = []
        for base_key, shard in zip(base_keys, shards, strict=True):
            if shard is not None:
                ids = shard.entries_of(directory.leading).tolist()
                if ids:
                    batch.append(UpdateShard(shard, tuple(map(Erase, ids))))
            elif base_key.startswith(prefix):
                batch.append(Delete(base_key))
        if batch:
            yield batch


def _is_outside(chunk: ChunkRef | Misfit | None) -> bool:
    """Whether the key is one of a chunk outside the array: it is missing, whatever is stored."""
    return isinstance(chunk, Misfit) and chunk.is_outside

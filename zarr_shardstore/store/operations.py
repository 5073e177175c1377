"""The operations of the draft's abstract store interface, as flows.

Each takes keys as zarr asks for them, and makes requests of the base store. The stores that
users hold only convert arguments and choose the driver.

Source: sharding storage transformer draft, "API implementation".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from zarr_shardstore.errors import SpecError
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
from zarr_shardstore.plan.listing import GridDirectory, entries_present
from zarr_shardstore.plan.ranges import ByteRange, resolve_range
from zarr_shardstore.plan.read import Coalescing, EntryRead, read_entries, read_indexes
from zarr_shardstore.plan.requests import (
    Delete,
    DeletePrefix,
    Exists,
    Flow,
    Found,
    Get,
    GetSize,
    ListDir,
    ListPrefix,
    Request,
    Set,
    SetIfNotExists,
    UpdateShard,
)
from zarr_shardstore.plan.write import update_shard
from zarr_shardstore.store.catalog import Catalog, Misfit
from zarr_shardstore.store.policy import ShardingPolicy
from zarr_shardstore.store.view import declared_document, presented

__all__ = ["Operations", "Options"]

Value: TypeAlias = bytes | memoryview
Kind: TypeAlias = Literal["key", "prefix", "both"] | None
"""What a listed name is; ``None``: the base store does not tell."""

_SHARDS_PER_LISTING_ROUND = 64


@dataclass(frozen=True, slots=True)
class Options:
    """Runtime options of a store; none of them is stored."""

    declaration: Declaration = "codec"
    order: EntryOrder = "morton"
    coalescing: Coalescing = Coalescing()


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
        read, founds = yield from read_entries(reads, self.options.coalescing, others)
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
            if node is None:
                values.append((key, value))
            else:
                documents.append((node, key, value))
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
        batch: list[Request] = []
        for chunk, key in zip(chunks, keys, strict=True):
            if isinstance(chunk, ChunkRef):
                updates.setdefault(chunk.shard, []).append(Erase(chunk.entry_id))
            elif not _is_outside(chunk):
                batch.append(Delete(key))
        batch += [UpdateShard(shard, tuple(erasures)) for shard, erasures in updates.items()]
        if batch:
            yield batch
        for key in keys:
            node = node_of_document(key)
            if node is not None:
                self.catalog.forget(node)
            # LocalStore erases a whole directory if the key names one.
            self.catalog.forget_directory(f"{key}/")

    def erase_prefix(self, prefix: str) -> Flow[None]:
        """Erase all values whose key starts with `prefix`; whole directories are relayed."""
        prefix = check_prefix(prefix)
        if prefix and not prefix.endswith("/"):
            keys = yield from self.list_all(prefix)
            yield from self.erase_values(keys)
            return
        directory = yield from self.catalog.directory_of(prefix)
        if directory is not None and directory.leading:
            yield from self._erase_grid_directory(directory, prefix)
        elif directory is None and self._may_be_in_grid_without_metadata(prefix):
            keys = yield from self.list_all(prefix)
            yield from self.erase_values(keys)
        else:
            yield [DeletePrefix(prefix)]
            self.catalog.forget_directory(prefix)

    # ------------------------------------------------------------- listing

    def list_all(self, prefix: str) -> Flow[list[str]]:
        """All keys that start with `prefix`."""
        base_keys = yield from self.list_base(prefix)
        keys: list[str] = []
        for part in self.listing_rounds(base_keys):
            keys += yield from self.list_some(part, prefix)
        return keys

    def list_base(self, prefix: str) -> Flow[list[str]]:
        """Keys of the base store that keys starting with `prefix` may come from."""
        prefix = check_prefix(prefix)
        directory = prefix[: prefix.rfind("/") + 1]
        in_grid = yield from self.catalog.directory_of(directory)
        if in_grid is None and self.catalog.may_lack_metadata(directory):
            directory = _array_directory_without_metadata(directory)
        directories = [directory]
        if in_grid is not None and in_grid.base_directory != directory:
            # What passes through is still listed where it was.
            directories.append(in_grid.base_directory)
        listings = yield [ListPrefix(d) for d in directories]
        return list(dict.fromkeys(key for listing in listings for key in listing))

    def listing_rounds(self, base_keys: list[str]) -> Iterable[list[str]]:
        """Cut base keys into parts whose shard indexes are read in one round each."""
        n = _SHARDS_PER_LISTING_ROUND
        return (base_keys[i : i + n] for i in range(0, len(base_keys), n))

    def list_some(self, base_keys: Sequence[str], prefix: str) -> Flow[list[str]]:
        """Keys that start with `prefix` and are stored in these objects of the base store."""
        sizes = yield from self.list_sizes(base_keys, prefix)
        return [key for key, _ in sizes]

    def list_sizes(
        self, base_keys: Sequence[str], prefix: str
    ) -> Flow[list[tuple[str, int | None]]]:
        """As `list_some`, each key with its size in bytes where the index tells it."""
        prefix = check_prefix(prefix)
        shards = yield from self.catalog.shards_of(base_keys)
        wanted = [s for s in shards if s is not None]
        indexes = iter((yield from read_indexes(wanted)))
        listed: list[tuple[str, int | None]] = []
        for base_key, shard in zip(base_keys, shards, strict=True):
            if shard is None:
                listed.append((base_key, None))
                continue
            index = next(indexes)
            if index is not None:
                ids = entries_present(shard, index)
                sizes = index.fields[ids, 1].tolist()
                listed += zip(shard.chunk_keys(ids), sizes, strict=True)
        return [item for item in listed if item[0].startswith(prefix)]

    def list_dir(self, prefix: str) -> Flow[dict[str, Kind]]:
        """Names of the keys and directories directly in a directory, with what each is.

        Directories of chunks are listed if the shard that could hold their chunks exists;
        keys only if they do. A base store that lists names does not tell their kind.
        """
        prefix = _as_directory(prefix)
        directory = yield from self.catalog.directory_of(prefix)
        if directory is not None:
            return (yield from self._list_grid_directory(directory, prefix))
        if not self.catalog.may_lack_metadata(prefix):
            (names,) = yield [ListDir(prefix)]
            return dict.fromkeys(names)
        kinds: dict[str, Kind] = {}
        for key in (yield from self.list_all(prefix)):
            name, slash, _ = key[len(prefix) :].partition("/")
            kind: Kind = "prefix" if slash else "key"
            kinds[name] = kind if kinds.get(name, kind) == kind else "both"
        return kinds

    def list_keys_and_prefixes(self, prefix: str) -> Flow[tuple[list[str], list[str]]]:
        """What is directly in a directory: full keys, and full prefixes ending with ``/``.

        Cost: that of `list_dir`, and where the base store does not tell what a name is, one
        question for each name, in one round.
        """
        prefix = _as_directory(prefix)
        kinds = yield from self.list_dir(prefix)
        unknown = [name for name, kind in kinds.items() if kind is None]
        if unknown:
            exist: list[bool] = yield [Exists(prefix + name) for name in unknown]
            found = [name for name, is_key in zip(unknown, exist, strict=True) if is_key]
            kinds |= dict.fromkeys(unknown, "prefix")
            if found:
                below = yield [ListDir(f"{prefix}{name}/") for name in found]
                for name, names in zip(found, below, strict=True):
                    kinds[name] = "both" if names else "key"
        keys = [prefix + name for name, kind in kinds.items() if kind != "prefix"]
        return keys, [f"{prefix}{name}/" for name, kind in kinds.items() if kind != "key"]

    def get_total_size(self, prefix: str) -> Flow[int]:
        """Sum of the sizes of all values whose key starts with `prefix`, in bytes."""
        total = 0
        base_keys = yield from self.list_base(prefix)
        for part in self.listing_rounds(base_keys):
            for key, size in (yield from self.list_sizes(part, prefix)):
                if size is None:
                    size = yield from self.get_size(key)
                total += size or 0
        return total

    # ------------------------------------------------------------- details

    def _shown(
        self, node: Node, data: memoryview | None, byte_range: ByteRange | None
    ) -> memoryview | None:
        """A stored document as readers see it; the catalog learns it on the way."""
        if data is None:
            self.catalog.learn(node, None)
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

    def _may_be_in_grid_without_metadata(self, prefix: str) -> bool:
        is_widened = _array_directory_without_metadata(prefix) != prefix
        return is_widened and self.catalog.may_lack_metadata(prefix)

    def _list_grid_directory(
        self, directory: GridDirectory, prefix: str
    ) -> Flow[dict[str, Kind]]:
        base_directory = directory.base_directory
        translated: list[str]
        relayed: list[str]
        if base_directory == prefix:
            (translated,) = yield [ListDir(prefix)]
            relayed = translated
        else:
            translated, relayed = yield [ListDir(base_directory), ListDir(prefix)]
        kinds: dict[str, Kind] = {}
        shards: list[ShardRef] = []
        for name in translated:
            shard = directory.shard_of_name(name)
            if shard is not None:
                shards.append(shard)
            kinds |= dict.fromkeys(directory.expand_name(name) or (), "prefix")
        indexes = yield from read_indexes(shards)
        for shard, index in zip(shards, indexes, strict=True):
            if index is not None:
                kinds |= dict.fromkeys(directory.names_of_entries(shard, index), "key")
        for name in relayed:
            if directory.expand_name(name) is None and directory.shard_of_name(name) is None:
                kinds.setdefault(name, None)
        return kinds

    def _erase_grid_directory(self, directory: GridDirectory, prefix: str) -> Flow[None]:
        """Erase the chunks under a prefix that reaches into the grid of an array."""
        base_keys = yield from self.list_base(prefix)
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


def _as_directory(prefix: str) -> str:
    prefix = check_prefix(prefix)
    return prefix if not prefix or prefix.endswith("/") else f"{prefix}/"


def _array_directory_without_metadata(directory: str) -> str:
    """Where the shards may lie that chunk keys below `directory` come from.

    Without metadata the number of dimensions is not known, so a directory inside a grid is
    not translated: from the first segment on that may be a coordinate, all is listed.
    """
    segments = directory.split("/")
    for i, segment in enumerate(segments):
        if re.fullmatch(r"c|c?\.?[0-9.]+", segment):
            return "".join(f"{s}/" for s in segments[:i])
    return directory

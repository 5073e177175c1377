"""Reads, writes and erasures of values by key, and the choice of the write strategy.

Each takes keys as zarr spells them, finds their owners, and makes requests::

    key ──▶ owner ──┬─ a chunk of a sharding ──────── the write buffer, then its shard
                    ├─ a key above a stack ────────── the transformers of its array
                    ├─ a chunk outside the grid ───── no request: it is missing
                    └─ anything else ──────────────── the base store

Source: sharding storage transformer draft, "API implementation"; of erase_prefix: a prefix that
contains a part of the chunk-grid key is translated to the shards that it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import accumulate, repeat
from typing import Any, TypeAlias

from zarr_shardstore.arrays.array_cache import ArrayCache, Generation, read_documents
from zarr_shardstore.arrays.catalog import Catalog, InvalidChunkKey, TransformedKey, layouts_of
from zarr_shardstore.arrays.metadata_view import MetadataView
from zarr_shardstore.arrays.policy import ShardingPolicy
from zarr_shardstore.arrays.stored_array import ArrayReader, StoredArray
from zarr_shardstore.errors import CorruptShardError, SpecError
from zarr_shardstore.format.keys import check_key, check_prefix
from zarr_shardstore.format.layout import ArrayLayout, ChunkRef, ShardRef
from zarr_shardstore.format.ranges import ByteRange, Range, column_of_ranges
from zarr_shardstore.format.shard import Bytes, EntryOrder
from zarr_shardstore.metadata.declaration import Native, View
from zarr_shardstore.metadata.documents import Node, document_key, is_document
from zarr_shardstore.operations import write_buffer
from zarr_shardstore.operations.batch import Flusher
from zarr_shardstore.operations.documents import Documents
from zarr_shardstore.operations.joint_update import Function, JointUpdate
from zarr_shardstore.operations.listing import Listing, raise_first
from zarr_shardstore.operations.locate import Owner, shard_id
from zarr_shardstore.operations.write_buffer import WriteBuffer
from zarr_shardstore.shards import requests, stack
from zarr_shardstore.shards.append import append_to_shard
from zarr_shardstore.shards.index_reads import rounds_of
from zarr_shardstore.shards.read import ReadOptions, ShardReads, read_entries, read_groups
from zarr_shardstore.shards.requests import EntryUpdate, Flow, Piece
from zarr_shardstore.shards.rewrite import rewrite_shard, rewrite_value
from zarr_shardstore.shards.shard_listing import GridDirectory
from zarr_shardstore.shards.stack import WriteStrategy
from zarr_shardstore.shards.updates import (
    EntryBlock,
    apply_pieces,
    check_pieces,
    shard_updates,
)

_Asked: TypeAlias = "tuple[requests.ValueRequest, Owner]"

_ERASURE_NBYTES = 100
"""Memory of the erasure of an entry, in bytes."""


class Operations:
    """Operations on one base store, without the base store.

    `refuse_links` raises `SpecError` if a link of the base store leads to a prefix. `state_of`
    returns the state of the local file of a key, ``None`` without local files.
    """

    def __init__(
        self,
        policy: ShardingPolicy,
        *,
        native: Native,
        view: View,
        reading: ReadOptions,
        order: EntryOrder,
        strategy: WriteStrategy,
        max_dead_nbytes: int | None,
        max_dead_share: float,
        refuse_links: Callable[[str], None],
        state_of: Callable[[str], object],
    ) -> None:
        self.reading = reading
        self._strategy = strategy
        self._rewrite = partial(rewrite_shard, order=order)
        self._append = partial(
            append_to_shard,
            order=order,
            max_dead_nbytes=max_dead_nbytes,
            max_dead_share=max_dead_share,
        )
        reader = ArrayReader(native, reading)
        self.arrays = ArrayCache(policy, reader, state_of)
        self.catalog = Catalog(policy, self.arrays)
        self.buffer = WriteBuffer()
        self.flusher = Flusher(self.catalog, self.buffer)
        self.listing = Listing(self.flusher)
        self._refuse_links = refuse_links
        self.view = MetadataView(policy, reader, view)
        self.documents = Documents(self.arrays, self.view, self.flusher)

    def update_shard(
        self, request: requests.UpdateShard, groups: Sequence[Sequence[EntryUpdate]]
    ) -> Flow[Sequence[Exception | None]]:
        """Commit groups of updates of one shard by the write strategy; for the driver."""
        if isinstance(request.shard, requests.PlainValue):
            return (yield from rewrite_value(request.shard, groups))
        # Transformers below a sharding store whole shards only.
        appends = self._strategy == "append" and not request.below
        commit = self._append if appends else self._rewrite
        layout = request.shard.layout
        yield from self.arrays.confirm({layout.document_key: layout})
        flow = write_buffer.commit_with_buffered(request.shard, groups, commit, self.buffer)
        if request.below:
            flow = stack.run_through((*request.below, stack.InCommit()), flow)
        return (yield from flow)

    # --------------------------------------------------------------- reads

    def get_many(
        self, key_ranges: Sequence[tuple[str, ByteRange | None]]
    ) -> Flow[list[memoryview | None]]:
        """Return values or ranges, ``None`` if missing; two rounds if documents are cached."""
        keys = [key for key, _ in key_ranges]
        byte_ranges = column_of_ranges([byte_range for _, byte_range in key_ranges])
        generation = self.arrays.current()
        knew_arrays = bool(generation.arrays)
        owners = yield from self._owners(keys)
        try:
            chunks = [owner for owner in owners if isinstance(owner, ChunkRef)]
            if len(chunks) == len(keys) and not self.buffer.is_active:
                values = yield from read_entries(chunks, self.reading, byte_ranges)
            else:
                values = yield from self._get_any(key_ranges, owners, generation)
        except CorruptShardError:  # or these are shards of another array
            yield from self._confirm_arrays(keys, owners)
            raise
        # Documents may have been read long ago, and a chunk that is missing may have been replaced.
        if knew_arrays or None in values:
            layouts = [chunk.shard.layout for chunk in chunks]
            documents = {layout.document_key: layout for layout in layouts}
            pairs = zip(keys, owners, values, strict=True)
            others = [k for k, o, v in pairs if v is None or not isinstance(o, ChunkRef)]
            yield from self.arrays.confirm({**self.catalog.documents_above(others), **documents})
        return values

    def _get_any(
        self,
        key_ranges: Sequence[tuple[str, ByteRange | None]],
        owners: Sequence[Owner],
        generation: Generation,
    ) -> Flow[list[memoryview | None]]:
        """As `get_many`, for all kinds of keys."""
        keys = [key for key, _ in key_ranges]
        documents = [i for i, key in enumerate(keys) if is_document(key)]
        asked = [requests.Get(key, byte_range) for key, byte_range in key_ranges]
        for i in documents:
            asked[i] = requests.Get(keys[i])  # its view is another one
        pairs = list(zip(asked, owners, strict=True))
        founds: list[requests.Found | None] = yield from self._perform(pairs)
        values = [None if found is None else found.value for found in founds]
        whole = yield from read_documents(
            [keys[i] for i in documents],
            [founds[i] or requests.Found(None, None) for i in documents],
        )
        for i, found in zip(documents, whole, strict=True):
            byte_range = key_ranges[i][1]
            values[i] = self.documents.to_user(keys[i], found, byte_range, generation)
        return values

    def get_groups(self, groups: Sequence[ShardReads]) -> Flow[list[Sequence[memoryview | None]]]:
        """Return the values of each group. Its positions are set here."""
        ends = list(accumulate(map(len, groups)))
        for end, group in zip(ends, groups, strict=True):
            group.positions = list(range(end - len(group), end))
        layouts = layouts_of(group.shard for group in groups)
        try:
            values = yield from read_groups(groups, sum(map(len, groups)), self.reading)
        except CorruptShardError:
            yield from self.arrays.confirm(layouts)
            raise
        yield from self.arrays.confirm(layouts)
        return [values[end - len(group) : end] for end, group in zip(ends, groups, strict=True)]

    def get(self, key: str, byte_range: ByteRange | None = None) -> Flow[memoryview | None]:
        """Return one value, or a range of it; ``None`` if the key is missing."""
        (value,) = yield from self.get_many([(key, byte_range)])
        return value

    def exists(self, key: str) -> Flow[bool]:
        """Whether there is a value; for a chunk, by one read of its shard's index."""
        check_key(key)
        return bool((yield from self._look_at([requests.Exists(key)]))[0])

    def get_sizes(self, keys: Sequence[str]) -> Flow[list[int | None]]:
        """Return the sizes of values in bytes, ``None`` if missing; no chunk is read.

        Cost: one round, and one for documents.
        """
        for key in keys:
            check_key(key)
        documents = [key for key in keys if is_document(key)]
        others = [requests.GetSize(key) for key in keys if not is_document(key)]
        values = (yield from self.get_many([(k, None) for k in documents])) if documents else []
        pairs = zip(documents, values, strict=True)
        sizes = {key: None if value is None else len(value) for key, value in pairs}
        if others:
            sizes |= zip([r.key for r in others], (yield from self._look_at(others)), strict=True)
        return [sizes[key] for key in keys]

    def _look_at(self, asked: Sequence[requests.Exists | requests.GetSize]) -> Flow[list[Any]]:
        keys = [request.key for request in asked]
        owners = yield from self._owners(keys, are_values=False)
        try:
            replies = yield from self._perform(list(zip(asked, owners, strict=True)))
        except CorruptShardError:  # as in `get_many`
            yield from self._confirm_arrays(keys, owners)
            raise
        yield from self._confirm_arrays(keys, owners)
        return replies

    def get_total_size(self, prefix: str) -> Flow[int]:
        """Return the sum of the sizes of all values whose key starts with `prefix`, in bytes."""
        total = 0
        stream = yield from self.listing.stream(prefix)
        while stream.has_more:
            unknown = []
            for key, size in (yield from stream.next_round()).sizes():
                if size is None:
                    unknown.append(key)
                total += size or 0
            total += sum(size or 0 for size in (yield from self.get_sizes(unknown)))
        raise_first(stream.errors)
        return total

    # -------------------------------------------------------------- writes

    def set_many(
        self,
        items: Iterable[tuple[str, Bytes | requests.Modify | None]],
        *,
        only_if_missing: bool = False,
    ) -> Flow[None]:
        """Store whole values and parts, then erase what is ``None``; each shard is committed once.

        If a key is not valid, or not for its array, no value of the call is written.
        """
        items = list(items)
        request = requests.SetIfNotExists if only_if_missing else requests.Set
        sets = [
            value._replace(key=key, may_wait=True)
            if isinstance(value, requests.Modify)
            else request(key, value)
            for key, value in items
            if value is not None
        ]
        erased = [key for key, value in items if value is None]
        if not self.buffer.is_active:
            changes = [*sets, *map(requests.Delete, erased)]
            found = self.arrays.current().chunks_of([each.key for each in changes])
            chunks = [chunk for chunk in found if chunk is not None]
            if len(chunks) == len(changes):
                yield shard_updates(zip(changes, chunks, strict=True))
                return
        values: list[requests.Set | requests.SetIfNotExists | requests.Modify] = []
        documents: list[requests.Set | requests.SetIfNotExists] = []
        for each in sets:
            check_key(each.key)
            if is_document(each.key) and not isinstance(each, requests.Modify):
                documents.append(each)
            else:
                values.append(each)
        for document in documents:  # first: they say which of the other keys are chunks
            value = memoryview(document.value)
            yield from self.documents.set(document.key, value, only_if_missing=only_if_missing)
        owners = yield from self._owners_to_write([each.key for each in values])
        erasures = yield from self._erasures(erased)
        yield from self._perform([*zip(values, owners, strict=True), *erasures])
        yield from self.documents.erase([key for key in erased if is_document(key)])

    def set_chunks(self, items: Sequence[tuple[str, Bytes | requests.Modify | None]]) -> Flow[None]:
        """As `set_many`, for chunks of one array: the first one makes the key table of all."""
        if len(items) > 1:
            yield from self.catalog.chunks_of([items[0][0]])
        yield from self.set_many(items)

    def set_blocks(self, blocks: Sequence[EntryBlock]) -> Flow[None]:
        """As `set_many`, for chunks of whole boxes."""
        is_buffered = self.buffer.is_active
        left = [b for b in blocks if not (is_buffered and self.buffer.put(b.shard, b))]
        if left:
            yield [requests.UpdateShard(block.shard, block) for block in left]
        if is_buffered:
            yield from self.flusher.flush_shards(self.buffer.due())

    def layout_of(self, key: str) -> Flow[ArrayLayout | None]:
        """Return the layout of the array of a chunk, if it is sharded and not otherwise changed."""
        (owner,) = yield from self.catalog.chunks_of([key])
        return owner.shard.layout if isinstance(owner, ChunkRef) else None

    def is_in_shard(self, key: str) -> Flow[bool]:
        """Whether a key belongs to a chunk in a shard, or to a shard that zarr writes itself."""
        if is_document(key):
            return False
        (owner,) = yield from self.catalog.chunks_of([key])
        is_chunk = isinstance(owner, ChunkRef | TransformedKey)
        return is_chunk or key.startswith(tuple(self.arrays.reader.sharded_by_zarr))

    def set_partial_values(self, key_start_values: Iterable[tuple[str, int, Bytes]]) -> Flow[None]:
        """Write pieces into values; each shard is committed once.

        No value is written if pieces of one value overlap, or a key is not valid. If a piece starts
        after the end of its value, no value of its shard is written.
        """
        pieces: dict[str, list[Piece]] = {}
        for key, start, value in key_start_values:
            check_key(key)
            pieces.setdefault(key, []).append((start, value))
        patches = [
            requests.SetPartial(key, check_pieces(key, parts)) for key, parts in pieces.items()
        ]
        others: list[_Asked] = []
        owners = yield from self._owners_to_write(list(pieces))
        for patch, owner in zip(patches, owners, strict=True):
            if is_document(patch.key):  # what is changed is what readers see
                old = yield from self.get(patch.key)
                new = apply_pieces(patch.key, old, patch.pieces)
                yield from self.set_many([(patch.key, new)])
            else:
                others.append((patch, owner))
        yield from self._perform(others)

    def update(self, keys: Sequence[str], function: Function) -> Flow[None]:
        """Replace values by what a function makes of them; see `ShardingStore.update`."""
        if not callable(function):
            raise SpecError(f"the function takes and returns a list of values, got {function!r}")
        for key in keys:
            check_key(key)
            if is_document(key):
                raise SpecError(f"key {key!r} is metadata: it is not updated by a function")
        if len(set(keys)) < len(keys):
            raise SpecError("keys: each key can be there only once")
        owners = yield from self._owners_to_write(keys)
        update = JointUpdate(keys, function, (yield from self.get_many([(k, None) for k in keys])))
        shards: dict[Hashable, list[int]] = {}
        for i, key in enumerate(keys):
            shards.setdefault(shard_id(key, owners[i]), []).append(i)
        for positions in shards.values():
            at = {keys[i]: owners[i] for i in positions}
            changes = [(change, at[change.key]) for change in update.changes_of(positions)]
            # Not buffered by a batch, which is no part of the promise to other processes.
            yield from self._perform(changes, may_buffer=False)

    # ------------------------------------------------------------- erasures

    def erase_shard(self, key: str) -> Flow[None]:
        """Erase the shard that a key of the base store names, or else the value.

        Its entries beyond the grid are erased too: the array may have been longer.
        """
        (shard,) = yield from self.catalog.shards_of([key])
        if isinstance(shard, ShardRef):
            ids = range(shard.spec.n_entries)
            yield [requests.UpdateShard(shard, tuple(zip(ids, repeat(requests.Delete(key)))))]
        else:
            yield from self.set_many([(key, None)])

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
        # The draft has documents and chunks in two places.
        yield from self.flusher.flush_arrays(
            lambda layout: (
                not layout.prefix.startswith(prefix)
                and document_key(Node("draft", layout.path)).startswith(prefix)
            )
        )
        try:
            yield [requests.DeletePrefix(prefix)]
            self.buffer.drop(prefix)
        finally:
            if directory is None:  # otherwise there are no documents below
                self.arrays.documents_changed(below=prefix)

    def _erasures(self, keys: Sequence[str]) -> Flow[list[_Asked]]:
        """Return the requests that erase all values but documents, with the owners of the keys."""
        for key in keys:
            check_key(key)
        keys = [key for key in dict.fromkeys(keys) if not is_document(key)]
        pairs = list(zip(keys, (yield from self._owners(keys)), strict=True))
        yield from self._confirm_arrays(key for key, owner in pairs if owner is None)
        invalid = [k for k, o in pairs if isinstance(o, InvalidChunkKey) and not o.is_outside]
        # LocalStore erases a whole directory if a key names one: here a directory of shards, which
        # are not the chunks below the key. Only objects can be read.
        founds: list[requests.Found] = (
            (yield [requests.Get(key, Range(0, 1)) for key in invalid]) if invalid else []
        )
        objects = {k for k, f in zip(invalid, founds, strict=True) if f.value is not None}
        return [
            (requests.Delete(key), None if key in objects else owner)
            for key, owner in pairs
            if not isinstance(owner, InvalidChunkKey) or key in objects
        ]

    def _erase_listed(self, prefix: str) -> Flow[None]:
        """Erase below a prefix that cuts directories or shards.

        Cost: a listing. The indexes of arrays with other transformers are read, of others none.
        """
        self._refuse_links(prefix)
        stream = yield from self.listing.stream(prefix)
        shards, keys = yield from stream.all_shards_and_keys()
        raise_first(stream.errors)  # before anything is erased
        for part in rounds_of(shards, lambda s: s.spec.n_entries * _ERASURE_NBYTES):
            updates: list[requests.Request] = [
                requests.UpdateShard(
                    s, tuple(zip(ids, repeat(requests.Delete(s.key)), strict=False))
                )
                for s in part
                if (ids := s.ids_to_erase(prefix))
            ]
            if updates:
                yield updates
        yield from self.set_many((key, None) for key in keys)

    # ------------------------------------------------- the owners of keys

    def _owners(
        self, keys: Sequence[str], *, are_values: bool = True, to_write: bool = False
    ) -> Flow[list[Owner]]:
        """Return the owners of keys, also in an array whose document this store has just erased."""
        owners = yield from self.catalog.chunks_of(keys, are_values=are_values)
        for i, owner in enumerate(owners if self.arrays.erased else ()):
            is_by_rule = isinstance(owner, ChunkRef) and owner.shard.layout.grid_shape is None
            array = self.catalog.erased_array(keys[i]) if is_by_rule or owner is None else None
            if array is not None and to_write and owner is None:
                self.arrays.erased.pop(array.node, None)  # what is written is none of its chunks
            elif array is not None:
                layout, key = array.layout, keys[i]
                owners[i] = layout.chunk_of_key(key) if layout else TransformedKey(key, array)
        return owners

    def _confirm_arrays(self, keys: Iterable[str], owners: Iterable[Owner] = ()) -> Flow[None]:
        """Refuse keys whose array another process has converted. With their owners, also if another
        thread was refused meanwhile, which drops the array from the cache."""
        documents = self.catalog.documents_above(keys)
        yield from self.arrays.confirm({**documents, **layouts_of(owners)})

    def _owners_to_write(self, keys: Sequence[str]) -> Flow[list[Owner]]:
        """Return the owners of keys; refuse a key that is no chunk key."""
        owners = yield from self._owners(keys, to_write=True)
        for owner in owners:
            if isinstance(owner, InvalidChunkKey):
                raise SpecError(owner.message)
        yield from self._confirm_arrays(k for k, o in zip(keys, owners, strict=True) if not o)
        return owners

    def _perform(self, pairs: Sequence[_Asked], *, may_buffer: bool = True) -> Flow[list[Any]]:
        """Reply to requests by the owners of their keys; ``None`` for keys outside a grid."""
        is_buffered = may_buffer and self.buffer.is_active
        kinds: list[Node | str | None] = []
        for _, owner in pairs:
            if isinstance(owner, TransformedKey):
                kinds.append(owner.array.node)
            elif isinstance(owner, ChunkRef):
                kinds.append("chunk")
            else:
                kinds.append("other" if owner is None or not owner.is_outside else None)

        def flow_of(kind: Node | str, part: list[Any]) -> Flow[list[Any]]:
            asked = [request for request, _ in part]
            if isinstance(kind, Node):
                transformers = part[0][1].array.stack
                if is_buffered:
                    transformers = write_buffer.with_buffer(transformers, self.buffer)
                return stack.ask_through(transformers, asked)
            if kind == "other":
                return requests.relay(asked)
            if is_buffered:
                return write_buffer.perform_buffered(part, self.reading, self.buffer)
            return stack.perform_on_chunks(part, self.reading)

        replies = yield from stack.for_each_kind(pairs, kinds, flow_of)
        if is_buffered and any(isinstance(request, requests.Update) for request, _ in pairs):
            yield from self.flusher.flush_shards(self.buffer.due())
        return replies

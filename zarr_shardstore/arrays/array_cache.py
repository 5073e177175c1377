"""Cache of parsed array metadata.

Each document is read once, and dropped when any store of the process changes metadata. Changes by
other processes are seen after `invalidate_documents`. A resize is seen without it: a key outside
the grid drops the document before it is refused. Local files also show that another process has
converted an array or made it anew: `ArrayCache.confirm` reads a document again if its file has
changed. It does so before a commit, after a shard index was read, and where a chunk is missing.

The content is a `Generation`. An operation puts its replies into the generation in which it began.
A change starts another one, so a reply from before the change is never a hit after it.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

from zarr_shardstore.arrays.policy import ShardingPolicy
from zarr_shardstore.arrays.stored_array import ArrayReader, StoredArray
from zarr_shardstore.errors import (
    ShardConflictError,
    ShardStoreError,
    UnfinishedConversionError,
)
from zarr_shardstore.format.layout import ArrayLayout, ChunkRef, KeyTable, ShardRef
from zarr_shardstore.format.ranges import ByteRange
from zarr_shardstore.metadata.documents import (
    Node,
    document_key,
    node_of_document,
    parse_document,
    parse_json,
)
from zarr_shardstore.shards.read import ShardReads
from zarr_shardstore.shards.requests import Exists, Flow, Found, Get, GetSize
from zarr_shardstore.synchronized import synchronized

_MAX_ABSENT = 65_536
"""Most cached places without an array: stray numeric keys could make any number."""

_ABSENT_S = 5.0
"""Time after which a document that was missing is read again."""

_MAX_ERASED = 1024
_MAX_KEY_TABLES = 8

CachedArray: TypeAlias = "StoredArray | ShardStoreError | None"
"""Array at a place, the error of a bad document, or no array."""

_synchronized = synchronized()


class Generation:
    """Content of the cache between two changes of metadata by this process.

    Key tables translate keys of the arrays that were used last, without a look at documents. Keys
    that differ only in the numbers after the path of an array belong to this array. An array below
    it is the exception. So each `put` of an array drops the tables.

    Thread safety: may be used from any thread.
    """

    __slots__ = ("absent", "arrays", "key_tables", "n_changes", "refused", "states")

    def __init__(self, n_changes: int) -> None:
        self.n_changes = n_changes
        self.arrays: dict[Node, StoredArray] = {}
        self.states: dict[str, tuple[StoredArray, object]] = {}
        """Array, and state of the file of its document that described it, by the document's key."""
        self.absent: dict[Node, float] = {}
        """Places without an array, and when they are looked at again: another process may make
        one."""
        self.refused: set[Node] = set()
        """Arrays that another process has replaced, until their document is read again."""
        self.key_tables: tuple[KeyTable, ...] = ()

    def put(self, node: Node, array: StoredArray | None, state: object = None) -> None:
        """Cache the array at `node`, or that it is missing."""
        self.refused.discard(node)
        if array is not None:
            self.absent.pop(node, None)
            self.arrays[node] = array
            self.states[document_key(node)] = (array, state)
            self.key_tables = ()
            return
        self.drop(node)
        self.absent[node] = time.monotonic() + _ABSENT_S
        while len(self.absent) > _MAX_ABSENT:
            self.absent.pop(next(iter(self.absent)), None)

    def drop(self, node: Node) -> StoredArray | None:
        """Forget what is at `node`, and return the array."""
        self.absent.pop(node, None)
        array = self.arrays.pop(node, None)
        if array is not None:
            self.states.pop(document_key(node), None)
            self.key_tables = ()
        return array

    def refuse(self, node: Node) -> ShardConflictError:
        """Forget the array at `node`, and return the error that it is another one than before."""
        self.drop(node)
        self.refused.add(node)
        return ShardConflictError.of_replaced(node.path)

    def renew(self, node: Node, now: StoredArray | None, state: object) -> None:
        """Take the document of a cached array as it is stored `now`, or refuse another array."""
        cached = self.arrays.get(node)
        if cached is not None and now is not None and cached.has_same_chunks(now):
            self.put(node, cached if cached.document == now.document else now, state)
        elif cached is not None:
            self.refuse(node)

    def forget_doubts(self) -> None:
        """Read documents again that were missing, or those of arrays that were replaced."""
        self.absent.clear()
        self.refused.clear()

    def in_state(self, key: str, state: object) -> StoredArray | None:
        """Return the cached array, if its document had this state when it was read."""
        array, seen = self.states.get(key, (None, None))
        is_cached = array is not None and self.arrays.get(array.node) is array
        return array if is_cached and seen == state else None

    def add_key_table(self, layout: ArrayLayout) -> None:
        """Translate further keys of an array by a table."""
        # Without a document the spelling of a key does not name its array.
        is_known = layout.grid_shape is not None or layout.encoding.style == "draft"
        tables = self.key_tables
        if layout.spec.ndim and is_known and not any(table.layout is layout for table in tables):
            # One tuple: another thread sees the old one or the new one.
            self.key_tables = (KeyTable(layout), *tables[: _MAX_KEY_TABLES - 1])

    def chunks_of(self, keys: Sequence[str]) -> list[ChunkRef | None]:
        """Return the chunks that key tables find; ``None``: look elsewhere."""
        chunks: list[ChunkRef | None] = [None] * len(keys)
        shards: dict[str, ShardRef] = {}
        for i, key in enumerate(keys):
            for table in self.key_tables:
                if (place := table.translate(key)) is not None:
                    shard_key, entry_id = place
                    if shard_key not in shards:
                        shards[shard_key] = table.shard(shard_key)
                    chunks[i] = ChunkRef(key, shards[shard_key], entry_id)
                    break
        return chunks

    def reads_by_shard(
        self, keys: Sequence[str], byte_ranges: Sequence[ByteRange | None] | None = None
    ) -> list[ShardReads]:
        """Return reads of the chunks that key tables find, by shard."""
        groups: dict[str, ShardReads] = {}
        tables = self.key_tables
        for i, key in enumerate(keys):
            for table in tables:
                if (place := table.translate(key)) is not None:
                    shard_key, entry_id = place
                    if shard_key not in groups:
                        groups[shard_key] = ShardReads(table.shard(shard_key), byte_ranges)
                    groups[shard_key].positions.append(i)
                    groups[shard_key].entry_ids.append(entry_id)
                    break
        return list(groups.values())


class ArrayCache:
    """Cache of parsed array metadata of one store. Thread safety: as `Generation`."""

    def __init__(
        self, policy: ShardingPolicy, reader: ArrayReader, state_of: Callable[[str], object]
    ) -> None:
        self.reader = reader
        self._policy = policy
        self._state_of = state_of
        self._generation = Generation(_n_changes)
        self.erased: dict[Node, StoredArray] = {}
        """Arrays whose document this store erased alone. One counts while its place is absent."""
        self.under_erasure: set[Node] = set()
        """Places whose document this store is erasing; no other process is blamed."""

    def current(self) -> Generation:
        """Return the content that no store of this process has made stale."""
        generation = self._generation
        return generation if generation.n_changes == _n_changes else self._renew()

    @_synchronized
    def _renew(self) -> Generation:
        if self._generation.n_changes != _n_changes:
            self._generation = Generation(_n_changes)
        return self._generation

    def lookup(
        self, nodes: Sequence[Node], generation: Generation | None = None
    ) -> Flow[dict[Node, CachedArray]]:
        """Return the array, or the error, at each place. Cost: usually one round."""
        generation = generation or self.current()
        found: dict[Node, CachedArray] = {}
        for node in nodes:
            array = generation.arrays.get(node)
            if array is not None or generation.absent.get(node, 0.0) > time.monotonic():
                found[node] = array
            elif node in generation.refused:
                found[node] = ShardConflictError.of_replaced(node.path)
        misses = [node for node in nodes if node not in found]
        # A document is not expected where the option declares arrays of the draft. So ask whether
        # it exists: the writer of a whole shard reads no value.
        doubtful = [
            n for n in misses if n.hierarchy == "draft" and self._policy.rule_of(n.path) is not None
        ]
        if doubtful:
            exist: list[bool] = yield [Exists(document_key(node)) for node in doubtful]
            for node in [n for n, is_there in zip(doubtful, exist, strict=True) if not is_there]:
                found[node] = None
                generation.put(node, None)
            misses = [node for node in misses if node not in found]
        if misses:
            # Lookups into one generation may share one reply.
            keys = [document_key(node) for node in misses]
            replies = yield from read_documents(keys, together=generation.n_changes)
            for node, reply in zip(misses, replies, strict=True):
                try:
                    doc = parse_document(node, reply.value)
                    found[node] = array = None if doc is None else self.reader.read(node, doc)
                except ShardStoreError as error:
                    found[node] = error
                else:
                    generation.put(node, array, reply.state)
        return found

    def confirm(self, documents: Mapping[str, ArrayLayout | None]) -> Flow[bool]:
        """Raise `ShardConflictError` if a document, by its key, has become another array's. Return
        whether the grid of a given layout is another one now, as after a resize.

        An array has the layout that is given, or else is the one in the cache.

        Cost: a look at each file, and a read if the file has changed. Documents that are no local
        files are not looked at.
        """
        has_newer = False
        for key, layout in documents.items():
            state, generation = self._state_of(key), self.current()
            now = generation.in_state(key, state)
            if now and (layout is None or layout is (now.layout or now.sharding[0])):
                continue
            node = None if state is None else node_of_document(key)
            if node is None:
                continue
            if node in generation.refused:
                raise ShardConflictError.of_replaced(node.path)
            if layout is None and node not in generation.arrays:
                continue
            if now is None:
                (reply,) = yield from read_documents([key])
                doc = parse_document(node, reply.value)
                now = None if doc is None else self.reader.read(node, doc)
                is_ours = node in self.erased and node not in self.current().arrays
                if now is None and (is_ours or node in self.under_erasure):
                    continue
                generation.renew(node, now, state)
            is_other = node in generation.refused
            if layout is not None:
                declared = None if now is None else now.sharding[0]
                is_other = declared is None or not declared.has_same_entries(layout)
                has_newer |= declared is not None and declared.grid_shape != layout.grid_shape
            if is_other:
                raise ShardConflictError.of_replaced(node.path)
        return has_newer

    def check_not_hidden(self, prefix: str) -> Flow[None]:
        """Raise `UnfinishedConversionError` if a conversion hides a cached array that may have keys
        with a prefix."""
        nodes = [
            node
            for node in self.current().arrays
            if node.chunk_prefix.startswith(prefix) or prefix.startswith(node.chunk_prefix)
        ]
        for key in map(document_key, nodes):
            state = self._state_of(key)
            node = None if state is None else node_of_document(key)
            if node is not None and self.current().in_state(key, state) is None:
                (reply,) = yield from read_documents([key])
                try:
                    self.reader.read(node, parse_document(node, reply.value) or {})
                except UnfinishedConversionError:
                    raise
                except ShardStoreError:
                    pass  # reading it shows this

    def document_erased(self, node: Node, array: CachedArray) -> None:
        """Note that the document of `node` was erased alone; its chunks may still be there."""
        self.documents_changed(node)
        if isinstance(array, StoredArray) and array.stack:
            self.erased[node] = array
            while len(self.erased) > _MAX_ERASED:
                self.erased.pop(next(iter(self.erased)), None)

    @_synchronized
    def documents_changed(
        self, node: Node | None = None, array: StoredArray | None = None, *, below: str = ""
    ) -> None:
        """Note that `array` is at `node`, or that documents below a prefix have changed. All other
        stores of the process read their documents again."""

        def is_changed(other: Node) -> bool:
            return document_key(other).startswith(below) if node is None else other == node

        for gone in [n for n in list(self.erased) if is_changed(n)]:
            self.erased.pop(gone, None)
        before = self._generation
        was_current = before.n_changes == _n_changes
        invalidate_documents()
        after = Generation(_n_changes)
        if was_current:  # the other documents are as this store knows them
            after.arrays = {n: a for n, a in list(before.arrays.items()) if not is_changed(n)}
            states = before.states.copy().items()
            after.states = {key: s for key, s in states if s[0].node in after.arrays}
            if node is not None and array is not None:
                after.put(node, array)
        self._generation = after


_n_changes = 0
"""Changes of metadata by all stores of this process."""


@_synchronized
def invalidate_documents() -> None:
    """Make every store of this process read its documents again, and drop replies under way."""
    global _n_changes
    _n_changes += 1


def read_documents(
    keys: Sequence[str], replies: Sequence[Found] | None = None, *, together: Hashable | None = None
) -> Flow[list[Found]]:
    """Read documents, unless the `replies` are given; read those again that were too short.

    A document that is cut off would count as none, and chunks would overwrite its shards. But the
    beginning of a JSON object is no JSON object. So a document that cannot be parsed is asked for
    its size, and read again if it is longer. A second reply that is too short is an `OSError`.
    """
    if replies is None:
        replies = yield [Get(key, together=together) for key in keys]
    whole = list(replies)
    for is_last in (False, True):
        nbytes = {
            i: len(value)
            for i, (value, _, size, _) in enumerate(whole)
            if value is not None and size != len(value) and parse_json(value) is None
        }
        sizes: list[int | None] = (yield [GetSize(keys[i]) for i in nbytes]) if nbytes else []
        left = [i for i, size in zip(nbytes, sizes, strict=True) if size not in (None, nbytes[i])]
        if not left:
            break
        if is_last:
            n_read = nbytes[left[0]]
            raise OSError(errno.EIO, f"reading all of it gave {n_read} bytes only", keys[left[0]])
        again: list[Found] = yield [Get(keys[i]) for i in left]
        for i, reply in zip(left, again, strict=True):
            whole[i] = reply
    return whole

"""What is known of the documents of one store: each is read once, and never stale.

What another store of the process changes is noticed at the next operation, by a counter; what
other processes change needs `ArrayCache.refresh`.

Arrays that were met last: their keys are translated without a look at documents.

A key that differs from one of an array only in the numbers after the array's path names a chunk
of it, too, as long as nothing was learned of any other array: those on the way to it are known
not to own it.

Stored arrays: what their documents declare, made into a stack of transformers.

How often a store of this process changed what a document says about keys.

Whoever keeps what documents say compares the count, and reads them again when it moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zarr_shardstore.arrays.document_reads import read_documents
from zarr_shardstore.arrays.policy import ShardingPolicy
from zarr_shardstore.arrays.registry import make_stack
from zarr_shardstore.errors import ShardStoreError, SpecError, UnsupportedError
from zarr_shardstore.format.consolidated_index import (
    CONSOLIDATED_INDEX_NAME,
    without_consolidated_index,
)
from zarr_shardstore.format.grid import is_inside
from zarr_shardstore.format.key_table import KeyTable
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ArrayLayout, ChunkRef
from zarr_shardstore.format.ranges import ByteRange
from zarr_shardstore.metadata.declaration import Native, strip
from zarr_shardstore.metadata.documents import (
    ArrayDocument,
    Node,
    chunk_nbytes,
    document_key,
    parse_array,
    parse_document,
)
from zarr_shardstore.shards.read import ReadOptions, ShardReads
from zarr_shardstore.shards.requests import Exists, Flow
from zarr_shardstore.shards.sharding import ShardingTransformer
from zarr_shardstore.shards.stack import ArrayContext, Stack
from zarr_shardstore.synchronized import synchronized


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array: its document, and what stands between it and the base store.

    Parameters
    ----------
    stack
        Transformers, nearest to the array first; empty for plain chunks.
    """

    document: ArrayDocument
    stack: Stack = ()
    layout: ArrayLayout | None = field(init=False)
    """Where chunks and shards are, if the stack is one sharding; these are treated together."""
    grid_shape: Coords | None = field(init=False)
    """Number of chunks along each dimension, if it is known."""

    def __post_init__(self) -> None:
        top = self.stack[0] if len(self.stack) == 1 else None
        layout = top.layout if isinstance(top, ShardingTransformer) else None
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "grid_shape", self.document.grid_shape)

    @property
    def node(self) -> Node:
        """Its place."""
        return self.document.node

    @property
    def is_spelled_oddly(self) -> bool:
        """Whether its chunk keys have a separator that the usual grammar does not know."""
        geometry = self.document.geometry
        return geometry is not None and geometry.encoding.separator not in ("/", ".")

    def coords_of(self, key: str) -> Coords | None:
        """Chunk coordinates that a key spells, also outside the grid; ``None`` if it is none."""
        geometry, prefix = self.document.geometry, self.node.chunk_prefix
        if geometry is None or not key.startswith(prefix):
            return None
        return geometry.encoding.decode(key[len(prefix) :], len(geometry.shape))

    def is_outside(self, key: str) -> bool:
        """Whether a key is that of a chunk outside the grid."""
        coords = self.coords_of(key)
        return (
            coords is not None
            and self.grid_shape is not None
            and not is_inside(coords, self.grid_shape)
        )

    def is_inside_grid(self, directory: str) -> bool:
        """Whether the path of a directory of this array spells a coordinate."""
        geometry = self.document.geometry
        rest = directory[len(self.node.chunk_prefix) :].removesuffix("/")
        if geometry is None or not rest:
            return False
        return bool(geometry.encoding.decode_leading(rest.split("/"), len(geometry.shape)))


@dataclass(frozen=True, slots=True)
class ArrayReader:
    """Reads array documents as one store was told to."""

    native: Native
    reading: ReadOptions

    def read(self, node: Node, doc: Mapping[str, Any]) -> StoredArray | None:
        """The array that a stored document describes; ``None`` if it describes no array.

        Raises
        ------
        SpecError
            If it declares what is not possible.
        UnsupportedError
            If it declares a transformer that is not known.
        """
        try:
            return self._read(node, doc)
        except (SpecError, UnsupportedError) as error:
            raise type(error)(f"the document of the array {node.path!r}: {error}") from error

    def _read(self, node: Node, doc: Mapping[str, Any]) -> StoredArray | None:
        document = parse_array(node, doc, self.native)
        if document is None:
            return None
        geometry, grid_shape = document.geometry, document.grid_shape
        if document.declaration is None or geometry is None or grid_shape is None:
            return StoredArray(document)
        context = ArrayContext(
            path=node.path,
            prefix=node.chunk_prefix,
            encoding=geometry.encoding,
            grid_shape=grid_shape,
            document=strip(without_consolidated_index(doc), document.declaration),
            reading=self.reading,
            index_key=node.chunk_prefix + CONSOLIDATED_INDEX_NAME
            if document.has_consolidated_index
            else None,
            chunk_nbytes=chunk_nbytes(doc, geometry.chunk_shape),
        )
        stack = make_stack(document.transformers, context)
        if sum(isinstance(transformer, ShardingTransformer) for transformer in stack) > 1:
            raise UnsupportedError(
                "it has more than one sharding in its storage transformers; shards of shards "
                "cannot be updated safely"
            )
        return StoredArray(document, stack)


_MAX_ABSENT = 65_536
"""Places without an array that are remembered; stray numeric keys could make any number."""

_MAX_ERASED = 1024
"""Arrays that are remembered after their document was erased."""

State: TypeAlias = "StoredArray | ShardStoreError | None"
"""What is at a place: an array, one whose document is bad, or no array."""


_synchronized = synchronized()


class Generation:
    """What was learned since the last change of any document by this process.

    An operation takes it once and learns only into it. A change puts another one in its place,
    so that what was asked for before the change is not learned after it.
    """

    __slots__ = ("absent", "arrays", "n_changes")

    def __init__(self, n_changes: int, arrays: dict[Node, StoredArray] | None = None) -> None:
        self.n_changes = n_changes
        self.arrays = arrays or {}
        self.absent: dict[Node, None] = {}

    def learn(self, node: Node, array: StoredArray | None) -> None:
        """Remember what is at `node`; ``None``: no array."""
        if array is not None:
            self.absent.pop(node, None)
            self.arrays[node] = array
            return
        self.arrays.pop(node, None)
        self.absent[node] = None
        while len(self.absent) > _MAX_ABSENT:
            self.absent.pop(next(iter(self.absent)), None)

    def forget(self, node: Node) -> None:
        """Read the document of `node` again when it is next needed."""
        self.arrays.pop(node, None)
        self.absent.pop(node, None)

    def has_any(self, nodes: Iterable[Node]) -> bool:
        """Whether an array is known at one of the places."""
        return any(node in self.arrays for node in nodes)


class ArrayCache:
    """What is at the places of one store that were asked for.

    Thread safety: may be used from any thread.
    """

    def __init__(self, policy: ShardingPolicy, reader: ArrayReader) -> None:
        self.reader = reader
        self._policy = policy
        self._knowledge = Generation(n_document_changes())
        self._erased: dict[Node, StoredArray] = {}

    def now(self) -> Generation:
        """What is known, and as far as this process can tell still true."""
        knowledge = self._knowledge
        if knowledge.n_changes == n_document_changes():
            return knowledge
        return self._renewed()

    @_synchronized
    def _renewed(self) -> Generation:
        n_changes = n_document_changes()
        if self._knowledge.n_changes != n_changes:
            self._knowledge = Generation(n_changes)
        return self._knowledge

    def refresh(self) -> None:
        """Forget everything, also what reads under way are about to learn."""
        count_document_change(-1)

    def erased(self, node: Node, array: StoredArray | None) -> None:
        """The document of `node` was erased by itself; its chunks may still be there."""
        self.changed(node)
        if array is not None and array.layout is not None:
            self._erased[node] = array
            while len(self._erased) > _MAX_ERASED:
                self._erased.pop(next(iter(self._erased)), None)

    @property
    def has_erased(self) -> bool:
        """Whether `erased_at` may find anything."""
        return bool(self._erased)

    def erased_at(self, node: Node) -> StoredArray | None:
        """The array whose document this store erased, if nothing is in its place since."""
        if node not in self._erased or node not in self.now().absent:
            return None
        return self._erased.get(node)

    def changed(
        self, node: Node | None = None, array: StoredArray | None = None, *, below: str = ""
    ) -> None:
        """Documents changed, by this store: the others of the process read theirs again.

        Parameters
        ----------
        node, array
            Whose document it was, and the array that is there now.
        below
            All documents whose keys start so, if it is not of one `node`.
        """
        for gone in list(self._erased):
            if gone == node or (node is None and document_key(gone).startswith(below)):
                self._erased.pop(gone, None)
        self._count_change(node, array, below)

    @_synchronized
    def _count_change(self, node: Node | None, array: StoredArray | None, below: str) -> None:
        before = self._knowledge
        n_changes, is_alone = count_document_change(before.n_changes)
        kept: dict[Node, StoredArray] = {}
        if is_alone:  # what nobody else changed is still known
            kept = {
                n: a
                for n, a in list(before.arrays.items())
                if n != node and not (node is None and document_key(n).startswith(below))
            }
        if node is not None and array is not None and is_alone:
            kept[node] = array
        self._knowledge = Generation(n_changes, kept)

    def read(self, node: Node, data: bytes | memoryview | None) -> StoredArray | None:
        """What the stored document of `node` says; ``None``: there is none, or no array."""
        doc = None if data is None else parse_document(node, data)
        return None if doc is None else self.reader.read(node, doc)

    def know(self, nodes: Sequence[Node], knowledge: Generation) -> Flow[dict[Node, State]]:
        """What is at places; documents that are not known are read, in one round as a rule."""
        states: dict[Node, State] = {}
        for node in nodes:
            array = knowledge.arrays.get(node)
            if array is not None or node in knowledge.absent:
                states[node] = array
        unknown = [n for n in nodes if n not in states]
        learned = yield from self._read_documents(unknown, knowledge)
        for node, state in learned.items():
            if not isinstance(state, ShardStoreError):
                knowledge.learn(node, state)
        return states | learned

    def _read_documents(
        self, nodes: Sequence[Node], knowledge: Generation
    ) -> Flow[dict[Node, State]]:
        learned: dict[Node, State] = {}
        # Where the store's own rule would apply, a document is not expected: ask whether it
        # is there before it is read, so that writing a whole shard reads nothing.
        doubtful = [n for n in nodes if n.hierarchy == "draft" and self._policy.has_rule(n.path)]
        if doubtful:
            exist: list[bool] = yield [Exists(document_key(n)) for n in doubtful]
            learned |= {n: None for n, yes in zip(doubtful, exist, strict=True) if not yes}
        expected = [n for n in nodes if n not in learned]
        if expected:
            # Who learns into the same knowledge may learn from one reply.
            keys = [document_key(n) for n in expected]
            founds = yield from read_documents(keys, together=knowledge.n_changes)
            for node, found in zip(expected, founds, strict=True):
                try:
                    learned[node] = self.read(node, found.value)
                except ShardStoreError as error:
                    learned[node] = error
        return learned


_MAX_ARRAYS = 8
"""Each is tried in turn."""


class RecentArrays:
    """The arrays of one store that were met last.

    Thread safety: may be used from any thread.
    """

    def __init__(self, known: ArrayCache) -> None:
        self._known = known
        # One tuple: another thread sees the old one or the new one.
        self._arrays: tuple[Generation | None, int, tuple[KeyTable, ...]] = None, 0, ()

    def translators(self) -> tuple[KeyTable, ...]:
        """Translations that hold now."""
        knowledge, n_arrays, translators = self._arrays
        if knowledge is self._known.now() and n_arrays == len(knowledge.arrays):
            return translators
        return ()

    def met(self, layout: ArrayLayout | None, knowledge: Generation) -> None:
        """A chunk of this array was found with that knowledge."""
        if layout is None or not layout.ndim:
            return
        if layout.grid_shape is None and layout.encoding.style != "draft":
            return  # without a document its keys are not known by their spelling alone
        others = self.translators()
        if any(translator.layout is layout for translator in others):
            return
        kept = others[: _MAX_ARRAYS - 1]
        self._arrays = knowledge, len(knowledge.arrays), (KeyTable(layout), *kept)

    def chunks_of(self, keys: Sequence[str]) -> list[ChunkRef | None]:
        """The chunks of these arrays that keys name; ``None``: look elsewhere."""
        chunks: list[ChunkRef | None] = [None] * len(keys)
        for i, translator, shard_key, entry_id in self._places(keys):
            chunks[i] = ChunkRef(keys[i], translator.shard(shard_key), entry_id)
        return chunks

    def by_shard(
        self, keys: Sequence[str], byte_ranges: Sequence[ByteRange | None] | None = None
    ) -> list[ShardReads]:
        """Reads of chunks of these arrays, those of a shard together; other keys are left out.

        Parameters
        ----------
        byte_ranges
            What of each value is wanted; ``None``: all.
        """
        groups: dict[str, ShardReads] = {}
        for i, translator, shard_key, entry_id in self._places(keys):
            group = groups.get(shard_key)
            if group is None:
                group = ShardReads(translator.shard(shard_key), byte_ranges)
                groups[shard_key] = group
            group.add(i, entry_id, None if byte_ranges is None else byte_ranges[i])
        return list(groups.values())

    def _places(self, keys: Sequence[str]) -> Iterator[tuple[int, KeyTable, str, int]]:
        """Position of a key, who translates it, its shard key and entry id; of other keys none."""
        translators = self.translators()
        if not translators:
            return
        for i, key in enumerate(keys):
            for translator in translators:
                place = translator.translate(key)
                if place is not None:
                    yield i, translator, *place
                    break


_n = 0


def n_document_changes() -> int:
    """Changes so far."""
    return _n


@_synchronized
def count_document_change(seen: int) -> tuple[int, bool]:
    """Count a change; return the new count, and whether its maker had seen all others."""
    global _n
    is_alone = seen == _n
    _n += 1
    return _n, is_alone

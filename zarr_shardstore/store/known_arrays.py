"""What is known of the documents of one store: each is read once, and never stale.

What another store of the process changes is noticed at the next operation, by a counter; what
other processes change needs `KnownArrays.refresh`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.format.documents import Node, document_key, parse_document
from zarr_shardstore.io.synchronized import synchronized
from zarr_shardstore.plan.documents import read_documents
from zarr_shardstore.plan.requests import Exists, Flow
from zarr_shardstore.store import changes
from zarr_shardstore.store.arrays import ArrayReader, StoredArray
from zarr_shardstore.store.policy import ShardingPolicy

__all__ = ["Knowledge", "KnownArrays", "State"]

_MAX_ABSENT = 65_536
"""Places without an array that are remembered; stray numeric keys could make any number."""

_MAX_ERASED = 1024
"""Arrays that are remembered after their document was erased."""

State: TypeAlias = "StoredArray | ShardStoreError | None"
"""What is at a place: an array, one whose document is bad, or no array."""


_synchronized = synchronized()


class Knowledge:
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


class KnownArrays:
    """What is at the places of one store that were asked for.

    Thread safety: may be used from any thread.
    """

    def __init__(self, policy: ShardingPolicy, reader: ArrayReader) -> None:
        self.reader = reader
        self._policy = policy
        self._knowledge = Knowledge(changes.n_changes())
        self._erased: dict[Node, StoredArray] = {}

    def now(self) -> Knowledge:
        """What is known, and as far as this process can tell still true."""
        knowledge = self._knowledge
        if knowledge.n_changes == changes.n_changes():
            return knowledge
        return self._renewed()

    @_synchronized
    def _renewed(self) -> Knowledge:
        n_changes = changes.n_changes()
        if self._knowledge.n_changes != n_changes:
            self._knowledge = Knowledge(n_changes)
        return self._knowledge

    def refresh(self) -> None:
        """Forget everything, also what reads under way are about to learn."""
        changes.count_change(-1)

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
        n_changes, is_alone = changes.count_change(before.n_changes)
        kept: dict[Node, StoredArray] = {}
        if is_alone:  # what nobody else changed is still known
            kept = {
                n: a
                for n, a in list(before.arrays.items())
                if n != node and not (node is None and document_key(n).startswith(below))
            }
        if node is not None and array is not None and is_alone:
            kept[node] = array
        self._knowledge = Knowledge(n_changes, kept)

    def read(self, node: Node, data: bytes | memoryview | None) -> StoredArray | None:
        """What the stored document of `node` says; ``None``: there is none, or no array."""
        doc = None if data is None else parse_document(node, data)
        return None if doc is None else self.reader.read(node, doc)

    def know(self, nodes: Sequence[Node], knowledge: Knowledge) -> Flow[dict[Node, State]]:
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
        self, nodes: Sequence[Node], knowledge: Knowledge
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

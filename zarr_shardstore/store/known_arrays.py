"""What is known of the documents of one store: each is read once, and never stale.

What another store of the process changes is noticed at the next operation, by a counter; what
other processes change needs `KnownArrays.clear`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.format.documents import Node, document_key, parse_json
from zarr_shardstore.plan.requests import Exists, Flow, Found, Get
from zarr_shardstore.store import changes
from zarr_shardstore.store.arrays import ArrayReader, StoredArray
from zarr_shardstore.store.policy import ShardingPolicy

__all__ = ["Knowledge", "KnownArrays"]

_MAX_ABSENT = 65_536
"""Places without an array that are remembered; stray numeric keys could make any number."""

_N_ATTEMPTS = 8
"""Documents are read again if another store of the process changed one meanwhile; then the
change and this operation run at the same time, and either order is right."""


Knowledge: TypeAlias = "StoredArray | ShardStoreError | None"
"""What is at a place: an array, one whose document is bad, or no array."""


class KnownArrays:
    """What is at the places of one store that were asked for.

    Thread safety: may be used from any thread; what is learned twice is learned equal.
    """

    def __init__(self, policy: ShardingPolicy, reader: ArrayReader) -> None:
        self.reader = reader
        self._policy = policy
        self._arrays: dict[Node, StoredArray] = {}
        self._absent: dict[Node, None] = {}
        self._n_changes = changes.n_changes()

    def learn(self, node: Node, array: StoredArray | None, n_changes: int | None = None) -> None:
        """Remember what is at `node`; ``None``: no array.

        With `n_changes`, what `notice_changes` returned before the document was read: only if
        nothing changed since.
        """
        if n_changes is not None and not n_changes == self._n_changes == changes.n_changes():
            return
        if array is not None:
            self._absent.pop(node, None)
            self._arrays[node] = array
            return
        self._arrays.pop(node, None)
        self._absent[node] = None
        while len(self._absent) > _MAX_ABSENT:
            self._absent.pop(next(iter(self._absent)), None)

    def read(self, node: Node, data: bytes | memoryview | None) -> StoredArray | None:
        """What the stored document of `node` says; ``None``: there is none, or no array."""
        doc = None if data is None else parse_json(data)
        return None if doc is None else self.reader.read(node, doc)

    def tell_others(self) -> None:
        """A document changed: the other stores of the process shall read theirs again."""
        self._n_changes = changes.count_change(self._n_changes)

    def forget(self, node: Node) -> None:
        """Read the document of `node` again when it is next needed."""
        self._arrays.pop(node, None)
        self._absent.pop(node, None)

    def forget_directory(self, prefix: str) -> None:
        """Forget all arrays whose document key starts with `prefix`."""
        for known in (self._arrays, self._absent):
            for node in [n for n in list(known) if document_key(n).startswith(prefix)]:
                known.pop(node, None)

    def clear(self) -> None:
        """Forget everything."""
        self._arrays.clear()
        self._absent.clear()

    def notice_changes(self) -> int:
        """Forget everything if another store changed something; return the count of changes."""
        n_changes = changes.n_changes()
        if self._n_changes != n_changes:
            self._n_changes = n_changes
            self.clear()
        return self._n_changes

    def know(self, nodes: Sequence[Node]) -> Flow[dict[Node, Knowledge]]:
        """What is at places; documents that are not known are read, in one round as a rule."""
        for _ in range(_N_ATTEMPTS):
            n_changes = self.notice_changes()
            known = {n: self._arrays.get(n) for n in nodes if not self.is_unknown(n)}
            learned = yield from self._read_documents([n for n in nodes if n not in known])
            for node, array in learned.items():
                if not isinstance(array, ShardStoreError):
                    self.learn(node, array, n_changes)
            if not learned or n_changes == changes.n_changes():
                break
        return known | learned

    def _read_documents(self, nodes: Sequence[Node]) -> Flow[dict[Node, Knowledge]]:
        learned: dict[Node, Knowledge] = {}
        # Where the store's own rule would apply, a document is not expected: ask whether it
        # is there before it is read, so that writing a whole shard reads nothing.
        doubtful = [n for n in nodes if n.hierarchy == "draft" and self._policy.has_rule(n.path)]
        if doubtful:
            exist: list[bool] = yield [Exists(document_key(n)) for n in doubtful]
            learned |= {n: None for n, yes in zip(doubtful, exist, strict=True) if not yes}
        expected = [n for n in nodes if n not in learned]
        if expected:
            founds: list[Found] = yield [Get(document_key(n)) for n in expected]
            for node, found in zip(expected, founds, strict=True):
                try:
                    learned[node] = self.read(node, found.value)
                except ShardStoreError as error:
                    learned[node] = error
        return learned

    def is_unknown(self, node: Node) -> bool:
        """Whether the document of `node` must be read to know more."""
        return node not in self._arrays and node not in self._absent

    def array_at(self, node: Node) -> StoredArray | None:
        """The array at `node`, if there is one and it is known."""
        return self._arrays.get(node)

    def has_any(self, nodes: Iterable[Node]) -> bool:
        """Whether an array is known at one of the places."""
        return any(node in self._arrays for node in nodes)

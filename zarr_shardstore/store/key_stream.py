"""A listing as a stream: what is listed comes in rounds, and only one of them is in memory.

::

    base store ── page of base keys ──▶ catalog ── shards, others ──▶ those that may hold
                                                                      keys with the prefix
                                                                          │ cut into rounds
                                                                          │ indexes
                  keys, shard by shard ◀── parts of a round ◀─────────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from zarr_shardstore.errors import CorruptShardError, ShardStoreError
from zarr_shardstore.format.documents import Node
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.plan.holding import read_indexes_with_held, split_at_sharding, with_held
from zarr_shardstore.plan.key_pages import KeyPages
from zarr_shardstore.plan.listing import Listed, ListedChunks, ListedValues
from zarr_shardstore.plan.pending import PendingShards
from zarr_shardstore.plan.requests import Flow
from zarr_shardstore.plan.stack import ValueTransformer, keys_above
from zarr_shardstore.store.arrays import StoredArray
from zarr_shardstore.store.catalog import Catalog, StackedKey

__all__ = ["KeyStream", "Located", "raise_first"]

_SHARDS_PER_ROUND = 64
"""Shards whose indexes are asked for at once."""

_NBYTES_PER_ROUND = 16 * 1024 * 1024
"""Of these indexes, and of the keys of stacked arrays: what a round may take in memory."""

_STACKED_NBYTES = 160
"""About what a key above a stack takes, with its size, in bytes."""

Located: TypeAlias = tuple[str, object, ShardRef | StackedKey | ShardStoreError | None]
"""A base key, its version as it was listed, and what it names."""


class KeyStream:
    """What is listed below base keys, round by round.

    Parameters
    ----------
    prefix : str
        What the keys that are wanted start with; the parts of a round have others, too.
    pages : KeyPages
        The base keys.

    Attributes
    ----------
    prefix : str
        As given.
    errors : list of ShardStoreError
        What could not be listed so far: shards and documents that cannot be read block
        nothing else. For `raise_first`, after the last round.
    """

    def __init__(
        self, catalog: Catalog, pending: PendingShards, pages: KeyPages, prefix: str
    ) -> None:
        self.prefix = prefix
        self.errors: list[ShardStoreError] = []
        self._catalog = catalog
        self._pending = pending
        self._pages = pages
        self._located: deque[Located] = deque()

    @property
    def has_more(self) -> bool:
        """Whether another round is to be asked for."""
        return bool(self._located) or self._pages.has_more

    def next_round(self) -> Flow[list[Listed]]:
        """The next parts of the listing.

        Cost: a page of base keys now and then; the indexes of up to 64 shards, side by side.
        """
        if not self._located:
            self._located.extend((yield from self._next_page()))
        located = self._take_round()
        shards = [found for *_, found in located if isinstance(found, ShardRef)]
        versions = [version for _, version, found in located if isinstance(found, ShardRef)]
        indexes = iter((yield from read_indexes_with_held(shards, self._pending, versions)))
        parts: list[Listed] = []
        stacked: dict[Node, tuple[StoredArray, list[str]]] = {}
        for base_key, _, found in located:
            match found:
                case None:
                    last = parts[-1] if parts else None
                    if not isinstance(last, ListedValues):
                        parts.append(last := ListedValues([]))
                    last.sizes.append((base_key, None))
                case StackedKey(key, array):
                    stacked.setdefault(array.node, (array, []))[1].append(key)
                case ShardStoreError():
                    self.errors.append(found)
                case ShardRef():
                    index = next(indexes)
                    if isinstance(index, CorruptShardError):
                        self.errors.append(index)
                    elif index is not None:
                        parts.append(ListedChunks(found, index))
        for array, keys in stacked.values():
            parts.append(ListedValues((yield from self.keys_above(array, keys))))
        return parts

    def all_located(self) -> Flow[list[Located]]:
        """Instead of rounds: base keys that may hold keys that are wanted, and what they name.

        Cost: pages of base keys; no index is read.
        """
        located: list[Located] = []
        while self._pages.has_more:
            located += yield from self._next_page()
        return located

    def close(self) -> Flow[None]:
        """No more rounds are wanted."""
        yield from self._pages.close()

    def keys_of(self, parts: Sequence[Listed]) -> Iterator[list[str]]:
        """Those of the keys of a round that are wanted, a bounded number at a time."""
        for part in parts:
            yield from part.keys_with(self.prefix)

    def _next_page(self) -> Flow[list[Located]]:
        page = yield from self._pages.next_page()
        names = yield from self._catalog.shards_of(page)
        located = zip(page, page.versions, names, strict=True)
        return [item for item in located if _may_hold(item, self.prefix)]

    def _take_round(self) -> list[Located]:
        """Base keys whose shards are read together."""
        taken: list[Located] = []
        n_shards = nbytes = 0
        while self._located and n_shards < _SHARDS_PER_ROUND:
            added = _nbytes_of(self._located[0])
            if n_shards and nbytes + added > _NBYTES_PER_ROUND:
                break
            taken.append(self._located.popleft())
            n_shards += added > 0
            nbytes += added
        return taken

    def keys_above(self, array: StoredArray, keys: list[str]) -> Flow[list[tuple[str, int | None]]]:
        """Keys in the array of the values that objects hold; a damaged one blocks no other."""
        above: list[tuple[str, int | None]] = []
        try:
            above = yield from keys_above(with_held(array.stack, self._pending), keys)
        except ShardStoreError as error:
            if len(keys) == 1:
                self.errors.append(error)
                return []
            for key in keys:
                above += yield from self.keys_above(array, [key])
        return [item for item in above if not array.is_outside(item[0])]


def raise_first(errors: Sequence[ShardStoreError]) -> None:
    """Raise the first of the errors that a listing met, if any, now that all else is listed."""
    if errors:
        if len(errors) > 1:
            errors[0].add_note(f"and {len(errors) - 1} more shards or keys could not be listed")
        raise errors[0]


def _may_hold(located: Located, prefix: str) -> bool:
    """Whether a base key may hold a key with this prefix; of damaged arrays nothing is known."""
    base_key, _, found = located
    match found:
        case None:
            return base_key.startswith(prefix)
        case ShardRef():
            # All shards of an array count: also one that lies outside a grid that has shrunk.
            return found.layout.prefix.startswith(prefix) or found.has_entries_with(prefix)
        case StackedKey(key, array):
            split = split_at_sharding(array.stack)
            others = [t for t in array.stack if split is None or t is not split[0]]
            if not all(isinstance(transformer, ValueTransformer) for transformer in others):
                return True  # the others may change keys
            shard = None if split is None else split[0].layout.shard_of_key(key)
            if shard is None:
                return key.startswith(prefix)
            return _may_hold((base_key, None, shard), prefix)
    return True


def _nbytes_of(located: Located) -> int:
    """What reading a shard takes in memory; nothing for a value that passes through."""
    match located[2]:
        case ShardRef() as shard:
            return shard.layout.spec.index_nbytes
        case StackedKey(_, array):
            found = split_at_sharding(array.stack)
            n_keys = found[0].layout.spec.n_entries if found else 1
            return n_keys * _STACKED_NBYTES
    return 0

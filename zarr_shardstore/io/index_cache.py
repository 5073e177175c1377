"""Cache of shard indexes, shared by all stores of the process and bounded in bytes.

Each index is cached with the version of its object. A user checks that the object still has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from zarr_shardstore.format.arguments import whole_number
from zarr_shardstore.format.shard import ENTRY_NBYTES, ShardIndex, ShardingSpec
from zarr_shardstore.synchronized import synchronized

_DEFAULT_MAX_NBYTES = 64 * 1024 * 1024  # four million entries
_ITEM_NBYTES = 1024  # memory of an item besides the entries of its index, about


@dataclass(slots=True, eq=False)
class CachedIndex:
    """Cached index, and the version of the object that it was read from."""

    index: ShardIndex
    spec: ShardingSpec
    version: object
    """Version of a remote object; ``None`` for a `CachedShardFile`."""
    size: int | None
    is_recorded: bool = False
    """Whether it comes from a consolidated index, which may be stale."""
    was_used: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.index.fields) * ENTRY_NBYTES + _ITEM_NBYTES


_synchronized = synchronized()


class IndexCache:
    """Indexes by the identity of their object; second-chance eviction, the oldest first.

    An item has a `spec`, its `nbytes`, and `was_used`. Thread safety: may be used from any thread.
    """

    def __init__(self, max_nbytes: int) -> None:
        self.max_nbytes = max_nbytes
        self.nbytes = 0
        self._items: OrderedDict[Hashable, Any] = OrderedDict()
        self.find = self._items.get  # its user sets `was_used`

    def get(self, scope: Hashable, spec: ShardingSpec) -> Any:
        """Return the item of an object, if it was decoded with this spec."""
        item = self._items.get(scope)
        if item is None or item.spec != spec:
            return None
        item.was_used = True
        return item

    @_synchronized
    def put(self, scope: Hashable, item: Any) -> None:
        if scope in self._items:
            self.forget(scope)
        if item.nbytes <= self.max_nbytes:
            self._items[scope] = item
            self.nbytes += item.nbytes
        if self.nbytes > self.max_nbytes:
            self.resize(self.max_nbytes)

    @_synchronized
    def forget(self, scope: Hashable) -> None:
        item = self._items.pop(scope, None)
        if item is not None:
            self.nbytes -= item.nbytes

    def scopes(self) -> list[Hashable]:
        return list(self._items)

    @_synchronized
    def resize(self, max_nbytes: int) -> None:
        """Set another bound, and evict what exceeds it."""
        self.max_nbytes = max_nbytes
        while self.nbytes > max_nbytes and self._items:
            scope, item = self._items.popitem(last=False)
            if item.was_used:  # a second chance, so that a use needs no lock
                item.was_used = False
                self._items[scope] = item
            else:
                self.nbytes -= item.nbytes
        if not self._items:  # an exception may have come between two counts
            self.nbytes = 0

    @_synchronized
    def clear(self) -> None:
        self._items.clear()
        self.nbytes = 0


index_cache = IndexCache(_DEFAULT_MAX_NBYTES)


def set_index_cache_nbytes(max_nbytes: int) -> None:
    """Bound the memory of the shard indexes that this process caches.

    Parameters
    ----------
    max_nbytes : int
        64 MiB by default; an index takes 16 bytes for each chunk of its shard.
        With 0 each read asks for the index again.

    Raises
    ------
    SpecError
        If the bound is no whole number, or negative.
    """
    index_cache.resize(whole_number("max_nbytes", max_nbytes))

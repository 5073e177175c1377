"""A base store as the tools use it: objects under their own keys, nothing translated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from zarr.abc.store import Store

from zarr_shardstore.io.kinds_of_store import is_in_memory
from zarr_shardstore.io.resolve import BaseStore, BaseStoreLike, backend_of, base_store_of
from zarr_shardstore.io.runner import Runner
from zarr_shardstore.io.sealing import seal_all
from zarr_shardstore.io.uploads import Upload
from zarr_shardstore.plan.entries import EntryUpdate
from zarr_shardstore.plan.requests import Flow, Request, UpdateShard
from zarr_shardstore.store.base import check_writable
from zarr_shardstore.store.draft_hierarchy import DraftHierarchyStore
from zarr_shardstore.store.sharding_mapping import ShardingMapping
from zarr_shardstore.store.sharding_store import ShardingStore

__all__ = ["OpenBase", "open_base"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenBase:
    """A base store and the driver for it; blocking, and picklable as the store is.

    Parameters
    ----------
    is_read_only : bool
        It was reached through a store that refuses writes.

    Thread safety: may be used from any thread.
    """

    store: BaseStore
    runner: Runner
    is_read_only: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return open_base, (self.store,)

    def run(self, flow: Flow[T]) -> T:
        """Run a flow of requests in this thread."""
        return self.runner.run(flow)

    def perform(self, requests: Sequence[Request]) -> list[Any]:
        """Perform independent requests, and wait for the replies."""
        return self.runner.run(_one_round(requests))

    def seal(self) -> None:
        """Bring the shards to rest that this process has changed in their place."""
        if not self.is_read_only:
            seal_all(self.runner.backend)

    def upload(self, key: str) -> Upload:
        """Begin to store an object piece by piece."""
        return self.runner.backend.upload(key)

    def is_same(self, other: OpenBase) -> bool:
        """Whether both are the same objects."""
        return self.runner.backend.scope("") == other.runner.backend.scope("")

    @property
    def is_in_memory(self) -> bool:
        """Whether another process would get a copy instead of the store itself."""
        return not isinstance(self.store, Store) or is_in_memory(self.store)

    def check_writable(self) -> None:
        """Raise `ReadOnlyError` if the store refuses writes."""
        is_base_read_only = isinstance(self.store, Store) and self.store.read_only
        check_writable(self.is_read_only or is_base_read_only)

    def describe(self) -> str:
        """The store, for messages."""
        return str(self.store) if isinstance(self.store, Store) else repr(self.runner.backend)


def open_base(
    store: BaseStoreLike | ShardingStore | ShardingMapping | DraftHierarchyStore,
    storage_options: Mapping[str, Any] | None = None,
) -> OpenBase:
    """Open whatever `ShardingStore` wraps; of a store that wraps already, what it wraps.

    Raises
    ------
    SpecError, TypeError
        As `base_store_of`.
    """
    is_read_only = False
    if isinstance(store, ShardingStore | ShardingMapping | DraftHierarchyStore):
        is_read_only = store.read_only
        store = (store.store if isinstance(store, DraftHierarchyStore) else store).base
    base = base_store_of(store, storage_options)
    return OpenBase(base, Runner(backend_of(base), _refuse_update), is_read_only)


def _one_round(requests: Sequence[Request]) -> Flow[list[Any]]:
    return (yield list(requests)) if requests else []


def _refuse_update(request: UpdateShard, _groups: Sequence[Sequence[EntryUpdate]]) -> Flow[Any]:
    raise TypeError(f"the tools write whole objects, not {request!r}")

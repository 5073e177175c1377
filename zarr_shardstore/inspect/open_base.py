"""A base store as the tools use it: objects under their own keys, nothing translated."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import LocalStore

from zarr_shardstore.draft.hierarchy_store import DraftHierarchyStore
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.inspect.contents import STAGING
from zarr_shardstore.io.backends.resolve import BaseStore, BaseStoreLike, backend_of, base_store_of
from zarr_shardstore.io.backends.store_traits import has_no_such_key, is_in_memory, location_of
from zarr_shardstore.io.driver import Driver
from zarr_shardstore.io.seal import seal_all
from zarr_shardstore.io.uploads import Upload
from zarr_shardstore.shards.requests import Flow, Request, UpdateShard
from zarr_shardstore.shards.updates import EntryUpdate
from zarr_shardstore.store.engine import check_writable
from zarr_shardstore.store.sharding_mapping import ShardingMapping
from zarr_shardstore.store.sharding_store import ShardingStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BaseStoreHandle:
    """A base store and the driver for it; blocking, and picklable as the store is.

    Parameters
    ----------
    is_read_only : bool
        It was reached through a store that refuses writes.

    Thread safety: may be used from any thread.
    """

    store: BaseStore
    driver: Driver
    is_read_only: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return open_base, (self.store,)

    def run(self, flow: Flow[T]) -> T:
        """Run a flow of requests in this thread."""
        return self.driver.run(flow)

    def perform(self, requests: Sequence[Request]) -> list[Any]:
        """Perform independent requests, and wait for the replies."""
        return self.driver.run(_one_round(requests))

    def seal(self) -> None:
        """Bring the shards to rest that this process has changed in their place."""
        if not self.is_read_only:
            seal_all(self.driver.backend)

    def upload(self, key: str) -> Upload:
        """Begin to store an object piece by piece."""
        return self.driver.backend.upload(key)

    def is_same(self, other: BaseStoreHandle) -> bool:
        """Whether both are the same objects."""
        if self.driver.backend.scope("") == other.driver.backend.scope(""):
            return True
        (how, root), (how_there, there) = self._location(), other._location()
        return how == how_there and _is_same_place(str(how), root, there)

    def overlaps(self, other: BaseStoreHandle) -> bool:
        """Whether objects of the one are objects of the other, too, as far as can be told."""
        (how, root), (how_there, there) = self._location(), other._location()
        return how == how_there and (root.startswith(there) or there.startswith(root))

    def _location(self) -> tuple[Hashable, str]:
        """What the store is in, and what comes before its keys there."""
        if isinstance(self.store, Store):
            return location_of(self.store)
        return self.driver.backend.scope(""), ""

    @property
    def is_in_memory(self) -> bool:
        """Whether another process would get a copy instead of the store itself."""
        return not isinstance(self.store, Store) or is_in_memory(self.store)

    @property
    def supports_deletes(self) -> bool:
        """Whether objects can be removed and replaced. In a zip they cannot."""
        return not isinstance(self.store, Store) or self.store.supports_deletes

    def check_replaceable(self) -> None:
        """Raise `UnsupportedError` if objects of the store cannot be removed and replaced."""
        if not self.supports_deletes:
            raise UnsupportedError(
                f"in {self.describe()} nothing can be removed or replaced; nothing was changed: "
                "convert it into another store"
            )

    def check_takes_any_key(self) -> None:
        """Refuse a store in which a conversion can keep nothing of its own.

        Raises
        ------
        UnsupportedError
            Nothing was written.
        """
        if not isinstance(self.store, Store) or not self.supports_deletes:
            return
        try:
            sync(self.store.exists(f"{STAGING}manifest.json"))
        except Exception as error:
            if not has_no_such_key(error):
                raise
            raise UnsupportedError(
                f"{type(self.store).__name__} takes documents of Zarr v3 and chunks only, and a "
                "conversion has to keep beside them how far it is; nothing was written: create "
                "the arrays through a ShardingStore over it, and copy their values"
            ) from error

    def check_writable(self) -> None:
        """Raise `ReadOnlyError` if the store refuses writes."""
        is_base_read_only = isinstance(self.store, Store) and self.store.read_only
        check_writable(self.is_read_only or is_base_read_only)

    def describe(self) -> str:
        """The store, for messages."""
        if isinstance(self.store, Store):
            return " ".join(str(self.store).split())  # icechunk's has several lines
        return repr(self.driver.backend)


def open_base(
    store: BaseStoreLike | ShardingStore | ShardingMapping | DraftHierarchyStore,
    storage_options: Mapping[str, Any] | None = None,
) -> BaseStoreHandle:
    """Open whatever `ShardingStore` wraps; of a store that wraps already, what it wraps.

    Raises
    ------
    SpecError, TypeError
        As `base_store_of`; or if there is a file where the directory should be.
    UnsupportedError
        If the store cannot list keys.
    """
    is_read_only = False
    if isinstance(store, ShardingStore | ShardingMapping | DraftHierarchyStore):
        is_read_only = store.read_only
        store = (store.store if isinstance(store, DraftHierarchyStore) else store).base
    base = base_store_of(store, storage_options)
    if isinstance(base, LocalStore):
        there = next((path for path in (base.root, *base.root.parents) if path.exists()), base.root)
        if there.exists() and not there.is_dir():
            raise SpecError(f"{str(there)!r} is a file, not the directory of a store")
    if isinstance(base, Store) and not base.supports_listing:
        raise UnsupportedError(f"{base} lists no keys: what it holds cannot be found")
    return BaseStoreHandle(base, Driver(backend_of(base), _refuse_update), is_read_only)


def _is_same_place(how: str, root: str, there: str) -> bool:
    """Whether two roots are one: on a disk one directory may have several names."""
    if root == there:
        return True
    try:
        return how == "file" and os.path.samefile(root, there)
    except OSError:
        return False


def _one_round(requests: Sequence[Request]) -> Flow[list[Any]]:
    return (yield list(requests)) if requests else []


def _refuse_update(request: UpdateShard, _groups: Sequence[Sequence[EntryUpdate]]) -> Flow[Any]:
    raise TypeError(f"the tools write whole objects, not {request!r}")

"""Base stores for the tools: objects under their own keys, with no key translated."""

from __future__ import annotations

import os
from collections.abc import Generator, Hashable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

from zarr import Group
from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import LocalStore, StorePath

from zarr_shardstore.errors import ReadOnlyError, ShardConflictError, SpecError, UnsupportedError
from zarr_shardstore.format.ranges import Range
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.io.backends import store_traits
from zarr_shardstore.io.backends.base import (
    DEFAULT_OPTIONS,
    ODD_KEY_ERRORS,
    Backend,
    BackendOptions,
)
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.backends.mapping import MappingBackend
from zarr_shardstore.io.backends.resolve import BaseStore, BaseStoreLike, backend_of, base_store_of
from zarr_shardstore.io.driver import Driver
from zarr_shardstore.io.local.locks import beside
from zarr_shardstore.io.local.shard_files import JOURNAL_SUFFIX
from zarr_shardstore.io.seal import seal_all
from zarr_shardstore.metadata.documents import dump_document, parse_json
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.index_reads import check_whole
from zarr_shardstore.shards.requests import EntryUpdate
from zarr_shardstore.shards.rewrite import rewrite_value
from zarr_shardstore.store.sharding_mapping import ShardingMapping
from zarr_shardstore.store.sharding_store import ShardingStore

T = TypeVar("T")

StoreLike: TypeAlias = BaseStoreLike | ShardingStore | ShardingMapping

_KEYS_PER_PAGE = 4096

STAGING = ".zarr_shardstore/"
"""Directory of conversions in place for objects that are not published yet. No tool shows it."""


@dataclass(frozen=True, slots=True)
class BaseStoreHandle:
    """A base store with a blocking driver, for any thread. It pickles if the store does."""

    store: BaseStore
    driver: Driver
    is_read_only: bool = False
    """Whether the caller passed a read-only sharding store around it."""
    options: BackendOptions = field(default=DEFAULT_OPTIONS, kw_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_base, (self.store, None, self.options)

    @property
    def backend(self) -> Backend:
        return self.driver.backend

    def run(self, flow: requests.Flow[T]) -> T:
        return self.driver.run(flow)

    def perform(self, batch: Sequence[requests.Request]) -> list[Any]:
        return self.run(requests.ask(batch)) if batch else []

    def seal(self) -> None:
        if not self.is_read_only:
            seal_all(self.backend)

    def sizes(self, keys: Sequence[str], *, consistent: bool = False) -> list[int | None]:
        """Return the sizes of objects. A `consistent` size is of a shard as `values` reads it."""
        sizes: list[int | None] = self.perform([requests.GetSize(key) for key in keys])
        torn = [i for i, k in enumerate(keys) if consistent and _has_journal(self.backend, k)]
        founds = self.perform([requests.Get(keys[i], Range(0, 0), consistent=True) for i in torn])
        for i, found in zip(torn, founds, strict=True):
            sizes[i] = sizes[i] if found.size is None else found.size
        return sizes

    def values(
        self, keys: Sequence[str], *, check: bool = True, consistent: bool = False
    ) -> list[memoryview | None]:
        """Read whole objects; ``None`` for each that is missing. With `check`, a truncated reply
        raises `ShardConflictError`; the sizes that replies lack are requested. If they shall be
        `consistent`, a shard shows no change that a killed writer has cut off."""
        gets = [
            requests.Get(k, consistent=consistent and _has_journal(self.backend, k)) for k in keys
        ]
        founds: list[requests.Found] = self.perform(gets)
        if check:
            there = {key: f for key, f in zip(keys, founds, strict=True) if f.value is not None}
            # The size in a mapping's reply is the length of the value itself.
            is_mapping = isinstance(self.backend, MappingBackend)
            unknown = [key for key, found in there.items() if is_mapping or found.size is None]
            sizes = dict(zip(unknown, self.sizes(unknown), strict=True))
            for key, found in there.items():
                check_whole(key, found.value, sizes.get(key, found.size))
        return [found.value for found in founds]

    def documents(self, keys: Iterable[str]) -> list[dict[str, Any] | None]:
        """Read documents; ``None`` for each that is missing, or no JSON object."""
        return [None if value is None else parse_json(value) for value in self.values(list(keys))]

    def write_documents(self, documents: Mapping[str, Mapping[str, Any]]) -> None:
        self.perform([requests.Set(key, dump_document(doc)) for key, doc in documents.items()])

    def stored_key(self, key: str) -> str:
        """Return the key of the stored document that this store shows as `key`."""
        return key

    def keys(self, prefix: str, *, shows_all: bool = False) -> Generator[str, None, None]:
        """List the keys below a prefix, page by page; with `shows_all` also side files."""
        cursor = requests.KeyCursor(prefix, shows_all=shows_all)
        is_done = False
        try:
            while not is_done:
                (page,) = self.perform([requests.ListPage(cursor, _KEYS_PER_PAGE)])
                is_done = len(page) < _KEYS_PER_PAGE
                yield from page
        finally:
            if not is_done:
                self.perform([requests.ListPage(cursor, 0)])

    def swap(
        self,
        key: str,
        old: Bytes | None,
        new: Bytes | None,
        also: Sequence[requests.Request] = (),
        unchanged: Mapping[str, Bytes | None] | None = None,
    ) -> None:
        """Replace an object that still has the old bytes, and then perform requests under its lock.
        ``None`` means no object. A changed object stays, and raises `ShardConflictError`. So does
        one beside which an object of `unchanged` has other bytes than these."""

        def refuse(_: Bytes | None) -> Bytes | None:
            raise ShardConflictError(f"{key!r} was changed since it was read: check again")

        def update(_: Any, groups: Any) -> requests.Flow[Sequence[Exception | None]]:
            for name, bytes_there in (unchanged or {}).items():
                (found,) = yield [requests.Get(name, None, True)]
                if found.value != bytes_there:
                    raise ShardConflictError(f"{name!r} was changed since it was read: check again")
            outcomes = yield from rewrite_value(value, groups)
            if also and not any(outcomes):
                yield [*also]
            return outcomes

        value = requests.PlainValue(key)
        driver = Driver(self.backend, update)
        seen, stored = (None if each is None else bytes(each) for each in (old, new))
        updates = ((0, requests.swap(key, seen, stored, refuse)),)
        driver.run(requests.ask([requests.UpdateShard(value, updates)]))

    def synced(self) -> BaseStoreHandle:
        """Return the same store with durable writes: local files survive a loss of power."""
        if not isinstance(self.backend, LocalBackend):
            return self
        options = replace(self.options, durability="power")
        driver = Driver(backend_of(self.store, options), self.driver.update_flow)
        return BaseStoreHandle(self.store, driver, self.is_read_only, options=options)

    def names(self, directory: str) -> list[str]:
        return list(self.perform([requests.ListDir(directory)])[0])

    def overlap(self, other: BaseStoreHandle) -> Literal["same", "inside"] | None:
        """Return whether two stores are known to be the same, or one to lie inside the other."""
        (place, root), (other_place, other_root) = self._location(), other._location()
        if place != other_place:
            return None
        if root == other_root:
            return "same"
        if place == "file":
            with suppress(OSError):  # one directory may have several names
                if os.path.samefile(root, other_root):
                    return "same"
        return "inside" if root.startswith(other_root) or other_root.startswith(root) else None

    def _location(self) -> tuple[Hashable, str]:
        if isinstance(self.store, Store):
            return store_traits.scope_of_store(self.store)
        return self.backend.scope(""), ""

    @property
    def is_in_memory(self) -> bool:
        """True if another process would get a copy instead of the store itself."""
        if isinstance(self.store, Store):
            return store_traits.is_in_memory(self.store)
        return isinstance(self.store, MutableMapping)

    @property
    def supports_deletes(self) -> bool:
        """True if objects can be removed and replaced. In a zip they cannot."""
        has_deletes = not isinstance(self.store, Store) or self.store.supports_deletes
        return has_deletes and "delete" not in self.backend.lacks

    def check_replaceable(self) -> None:
        if not self.supports_deletes:
            raise UnsupportedError(
                f"in {self.describe()} nothing can be removed or replaced; nothing was changed: "
                "convert it into another store"
            )

    def check_takes_any_key(self) -> None:
        """Refuse a store that cannot store the notes of a conversion."""
        if not isinstance(self.store, Store) or not self.supports_deletes:
            return
        try:
            sync(self.store.exists(f"{STAGING}manifest.json"))
        except NotImplementedError:
            return
        except Exception as error:
            if store_traits.remedy_of(error) != "missing" and not isinstance(error, ODD_KEY_ERRORS):
                store_traits.note_cause(error)
                raise
            raise UnsupportedError(
                f"{type(self.store).__name__} takes documents of Zarr v3 and chunks only, and a "
                "conversion has to keep beside them how far it is; nothing was written: create "
                "the arrays through a ShardingStore over it, and copy their values"
            ) from error

    def try_to_remove(self) -> None:
        """Find out whether the store removes objects, by a key that is always missing."""
        if self.supports_deletes:
            with suppress(UnsupportedError):
                self.perform([requests.Delete(f"{STAGING}manifest.json")])

    def check_writable(self) -> None:
        if self.is_read_only or (isinstance(self.store, Store) and self.store.read_only):
            raise ReadOnlyError(
                f"{self.describe()} is open for reading only: convert it into another store, or "
                "pass one that can be written"
            )

    @property
    def root_of_files(self) -> str | None:
        """Directory of the local files that are the objects, if any; it ends with a slash."""
        return store_traits.root_of_files(self.store) if isinstance(self.store, Store) else None

    @property
    def url(self) -> str | None:
        """URL below which other programs find the objects by their keys, if there is one."""
        return store_traits.url_of_store(self.store) if isinstance(self.store, Store) else None

    def describe(self) -> str:
        if isinstance(self.store, Store):
            return " ".join(str(self.store).split())[:200]  # icechunk's has several lines
        return repr(self.backend)


def open_base(
    store: StoreLike | BaseStoreHandle | Backend,
    storage_options: Mapping[str, Any] | None = None,
    options: BackendOptions = DEFAULT_OPTIONS,
    *,
    needs_chunks: bool = False,
) -> BaseStoreHandle:
    """Open everything that `ShardingStore` takes; for a sharding store, its base store, with its
    locks. The path of a file raises `SpecError`, as does an open batch if chunks are needed. A
    store without listing raises `UnsupportedError`."""
    is_read_only, path = False, ""
    if isinstance(store, BaseStoreHandle):
        return store
    if isinstance(store, Backend):  # a parsed source
        source: Any = store
        return BaseStoreHandle(source, Driver(store, _refuse_update), is_read_only=True)
    if isinstance(store, Group | StorePath) and isinstance(store.store, ShardingStore):
        path, store = store.path, store.store
    inner = getattr(store, "store", store)  # a draft hierarchy is a store on a sharding store
    if isinstance(inner, ShardingStore | ShardingMapping):
        if needs_chunks and inner._engine.operations.buffer.is_active:
            raise SpecError("a batch of the store is open, and its chunks lie nowhere yet: end it")
        is_read_only, store = inner.read_only, inner.base
        options = BackendOptions(locking=inner._engine.options.locking)
    base = base_store_of(store, storage_options)
    if path and not isinstance(base, Store):
        raise SpecError(f"of a mapping no part can be opened, here {path!r}: open all of it")
    if isinstance(base, Store):
        base = base_store_of(StorePath(base, path))
    if isinstance(base, LocalStore):
        there = next((path for path in (base.root, *base.root.parents) if path.exists()), None)
        if there is not None and not there.is_dir():
            raise SpecError(f"{str(there)!r} is a file, not the directory of a store")
    if isinstance(base, Store) and not base.supports_listing:
        raise UnsupportedError(f"{base} lists no keys: what it holds cannot be found")
    driver = Driver(backend_of(base, options), _refuse_update)
    return BaseStoreHandle(base, driver, is_read_only, options=options)


def _refuse_update(
    request: requests.UpdateShard, _groups: Sequence[Sequence[EntryUpdate]]
) -> requests.Flow[Any]:
    raise TypeError(f"the tools write whole objects, not {request!r}")


def _has_journal(backend: Backend, key: str) -> bool:
    root = backend.root
    return root is not None and os.path.exists(beside(root + key, JOURNAL_SUFFIX))

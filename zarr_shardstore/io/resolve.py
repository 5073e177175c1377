"""From whatever a user passes as a base store to a backend."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.mapping import FSMap
from zarr.abc.store import Store
from zarr.storage import FsspecStore, LocalStore, ObjectStore, StorePath

from zarr_shardstore.errors import SpecError
from zarr_shardstore.io.backend import Backend
from zarr_shardstore.io.file_options import DEFAULT_FILE_OPTIONS, FileOptions
from zarr_shardstore.io.kinds_of_store import is_in_memory, path_of_file
from zarr_shardstore.io.local_backend import LocalBackend
from zarr_shardstore.io.mapping_backend import MappingBackend
from zarr_shardstore.io.obstore_backend import ObstoreBackend
from zarr_shardstore.io.zarr_backend import ZarrBackend

__all__ = ["BaseStoreLike", "backend_of", "base_store_of"]

BaseStoreLike: TypeAlias = (
    "Store | StorePath | FSMap | fsspec.AbstractFileSystem | Path | str | "
    "MutableMapping[str, bytes] | Any"
)

BaseStore: TypeAlias = "Store | MutableMapping[str, bytes]"


def base_store_of(store: BaseStoreLike, storage_options: dict[str, Any] | None = None) -> BaseStore:
    """The zarr store or the mapping that `store` stands for.

    ===================================  =============================================
    zarr ``Store``                       itself
    local path, ``file://`` URL          ``LocalStore``
    other URL, fsspec file system        ``FsspecStore``
    fsspec mapper                        ``FsspecStore``; ``LocalStore`` if local, which
                                         replaces files at once where fsspec does not
    obstore store                        ``ObjectStore``
    other ``MutableMapping``             itself, values are plain bytes
    ===================================  =============================================

    Raises
    ------
    SpecError
        If `storage_options` are given and no URL takes them.
    TypeError
        If it stands for none of these.
    """
    is_remote_url = isinstance(store, str) and "://" in store and not store.startswith("file://")
    if storage_options and not is_remote_url:
        raise SpecError("storage_options go with a URL; this base store takes none")
    if isinstance(store, Store):
        return store
    if isinstance(store, StorePath):
        if store.path:
            raise SpecError(
                f"a StorePath with a path ({store.path!r}) cannot be wrapped: wrap its store, "
                "and pass the path to zarr"
            )
        return store.store
    if isinstance(store, str) and is_remote_url:
        return FsspecStore.from_url(store, storage_options=storage_options)
    if isinstance(store, str):
        return LocalStore(Path(store.removeprefix("file://")))
    if isinstance(store, fsspec.AbstractFileSystem):
        store = FSMap(store.root_marker or "/", store)
    if isinstance(store, FSMap):
        if isinstance(store.fs, LocalFileSystem):
            return LocalStore(Path(store.root))
        return FsspecStore.from_mapper(store)
    if isinstance(store, Path):
        return LocalStore(store)
    if hasattr(store, "fs") and hasattr(store, "path"):
        return FsspecStore.from_upath(store)
    if type(store).__module__.split(".")[0] == "obstore":
        obstore: Any = store
        return ObjectStore(obstore)
    if isinstance(store, MutableMapping):
        return store
    raise TypeError(
        f"a base store is a zarr store, a path or URL, an fsspec file system or mapper, an obstore "
        f"store or a MutableMapping of bytes; got {type(store).__name__}"
    )


def backend_of(
    store: BaseStore, options: FileOptions = DEFAULT_FILE_OPTIONS, *, is_static: bool = False
) -> Backend:
    """The backend for a base store. Subclasses keep their own methods: they may differ.

    Raises
    ------
    SpecError
        If writes shall survive a loss of power, and the base store does not say when they do.
    """
    if type(store) is LocalStore:
        return LocalBackend(store, options)
    is_remote = isinstance(store, Store) and not is_in_memory(store) and not path_of_file(store, "")
    if options.durability == "power" and not is_remote:
        raise SpecError(
            "durability='power' is for paths, LocalStore and object stores: other base stores "
            f"do not say when a write survives a loss of power, got {store!r}"
        )
    if type(store) is ObjectStore:
        return ObstoreBackend(store, options, is_static=is_static)
    if isinstance(store, Store):
        return ZarrBackend(store, options, is_static=is_static)
    return MappingBackend(store)

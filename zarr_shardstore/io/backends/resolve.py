"""Resolution of base stores: from the object that a user passes to a zarr store and a backend."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from reprlib import repr as short
from typing import Any, Protocol, TypeAlias

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.mapping import FSMap
from zarr import Group
from zarr.abc.store import Store
from zarr.storage import FsspecStore, LocalStore, ObjectStore, StorePath, ZipStore

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import storage_options_of
from zarr_shardstore.io.backends.base import DEFAULT_OPTIONS, Backend, BackendOptions
from zarr_shardstore.io.backends.cloud_urls import EXTRAS as EXTRAS
from zarr_shardstore.io.backends.cloud_urls import store_of_url
from zarr_shardstore.io.backends.fsspec_store import FsspecBackend
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.backends.mapping import MappingBackend
from zarr_shardstore.io.backends.store_traits import (
    directory_of,
    file_system_of,
    innermost,
    is_in_memory,
    root_of_files,
)
from zarr_shardstore.io.backends.wrapped_files import WrappedFilesBackend, WrappedFsspecBackend
from zarr_shardstore.io.backends.zarr_store import ZarrBackend


class FsspecFileSystem(Protocol):
    """File system of fsspec, which has no types."""

    def cat_file(self, *args: Any, **kwargs: Any) -> object:
        """Read a file."""


class FsspecPath(Protocol):
    """Mapper of fsspec, or a path of universal_pathlib: a directory of a file system."""

    @property
    def fs(self) -> FsspecFileSystem:
        """File system."""


class ObstoreStore(Protocol):
    """Store of obstore, which need not be installed."""

    def get_ranges_async(self, *args: Any, **kwargs: Any) -> Any:
        """Read ranges of an object."""


BaseStoreLike: TypeAlias = (
    Store
    | StorePath
    | Group
    | Path
    | str
    | MutableMapping[str, bytes]
    | FsspecFileSystem
    | FsspecPath
    | ObstoreStore
)
"""Everything that `base_store_of` takes. Protocols, because ``Any`` would allow everything."""

BaseStore: TypeAlias = Store | MutableMapping[str, bytes]


def base_store_of(
    store: BaseStoreLike, storage_options: Mapping[str, Any] | None = None
) -> BaseStore:
    """Return the zarr store or the mapping that `store` stands for.

    ===================================  =============================================
    zarr ``Store``                       itself
    local path, ``file://`` URL          ``LocalStore``; of a zip archive ``ZipStore``,
                                         for reading
    ``StorePath``, ``Group`` of zarr     its store, or one of the objects below the path
    URL of S3, GCS, Azure                ``ObjectStore``, if obstore is installed and
                                         knows the options; otherwise ``FsspecStore``
    other URL, fsspec file system        ``FsspecStore``
    fsspec mapper, ``UPath``             ``FsspecStore``; ``LocalStore`` if local
    obstore store                        ``ObjectStore``
    other ``MutableMapping``             itself, values are plain bytes
    ===================================  =============================================
    """
    is_remote_url = isinstance(store, str) and "://" in store and not store.startswith("file://")
    options = storage_options_of(storage_options)
    if options and not is_remote_url:
        raise SpecError("storage_options go with a URL; this base store takes none")
    if isinstance(store, Store):
        return store
    if isinstance(store, Group):
        store = store.store_path
    if isinstance(store, StorePath):
        return _below(store.store, store.path)
    if isinstance(store, str) and is_remote_url:
        return store_of_url(store, options or {})
    if isinstance(store, str):
        store = local_path(store)
    elif isinstance(store, fsspec.AbstractFileSystem):
        store = FSMap(store.root_marker or "/", store)
    elif hasattr(store, "fs") and hasattr(store, "path"):  # a UPath may also be a Path
        store = FSMap(store.path, store.fs)
    if isinstance(store, FSMap):
        fs, path = file_system_of(store.fs, store.root)
        if not isinstance(fs, LocalFileSystem):
            return FsspecStore.from_mapper(store if fs is store.fs else FSMap(path, fs))
        store = Path(path)
    if isinstance(store, Path):
        return _store_at(store)
    if type(store).__module__.split(".")[0] == "obstore":
        obstore: Any = store
        return ObjectStore(obstore)
    if isinstance(store, MutableMapping):
        return store
    raise TypeError(
        "a base store is a zarr store, a path or URL, an fsspec file system or mapper, an obstore "
        f"store, or a MutableMapping of bytes such as {{}}; got {short(store)}"
    )


def local_path(path: str) -> Path:
    """Return the path that a ``file://`` URL, or a path, stands for."""
    is_url = path.startswith("file://")
    # On Windows the path of ``file:///C:/data`` is ``C:/data``.
    return Path(LocalFileSystem._strip_protocol(path) if is_url else path)


def _below(store: Store, path: str) -> Store:
    """Return a store of the objects below a path: with the locks and caches of `store`."""
    if not path:
        return store
    directory = directory_of(store)
    if directory is not None:
        return LocalStore(os.path.join(directory, path), read_only=store.read_only)
    if type(store) is FsspecStore:
        below = f"{store.path.rstrip('/')}/{path}" if store.path else path
        return FsspecStore(store.fs, store.read_only, below, store.allowed_exceptions)
    client: Any = store.store if type(store) is ObjectStore else None
    if type(client).__name__ in ("S3Store", "GCSStore", "AzureStore"):
        args, options = client.__getnewargs_ex__()
        below = f"{client.prefix or ''}/{path}".lstrip("/")
        client = type(client)(*args, **{**options, "prefix": below})
        return ObjectStore(client, read_only=store.read_only)
    raise SpecError(
        f"of {store} no part can be wrapped, here {path!r}: wrap the whole store, and pass the "
        "path to zarr"
    )


def _store_at(path: Path) -> Store:
    """Return the store at a local path, which need not exist yet."""
    if path.is_file():
        if zipfile.is_zipfile(path):
            return ZipStore(path, mode="r")
        raise SpecError(f"{str(path)!r} is a file: a base store is a directory or a zip archive")
    if path.suffix == ".zip" and not path.exists():
        raise SpecError(
            f"there is no zip archive {str(path)!r}: take a directory, or in Python "
            f"zarr.storage.ZipStore({str(path)!r}, mode='w')"
        )
    return LocalStore(path)


def backend_of(store: BaseStore, options: BackendOptions = DEFAULT_OPTIONS) -> Backend:
    """Return the backend for a base store. Subclasses of stores keep their own methods."""
    if isinstance(store, Store) and directory_of(store) is not None:
        return LocalBackend(store, options)
    is_on_files = isinstance(store, Store) and root_of_files(store) is not None
    is_remote = isinstance(store, Store) and not is_in_memory(store) and not is_on_files
    if options.durability == "power" and not is_remote:
        raise SpecError(
            "durability='power' is for local files and object stores: other base stores "
            f"do not say when a write survives a loss of power, got {store!r}"
        )
    if type(store) is ObjectStore:
        from zarr_shardstore.io.backends.obstore import ObstoreBackend  # obstore is optional

        return ObstoreBackend(store, options)
    if isinstance(store, Store):
        is_fsspec = isinstance(innermost(store), FsspecStore)
        if is_on_files:
            return (WrappedFsspecBackend if is_fsspec else WrappedFilesBackend)(store, options)
        return (FsspecBackend if is_fsspec else ZarrBackend)(store, options)
    return MappingBackend(store)

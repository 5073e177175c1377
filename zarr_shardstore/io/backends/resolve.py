"""Resolution of base stores: from the object that a user passes to a zarr store and a backend.

For URLs of S3, Google Cloud Storage and Azure the client is obstore if it can, otherwise fsspec:
obstore writes with conditions, so that several processes may write one shard. Each option of the
caller is understood by the client that is chosen, or there is an error.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Mapping, MutableMapping
from inspect import signature
from pathlib import Path
from reprlib import repr as short
from typing import Any, Protocol, TypeAlias
from urllib.parse import quote

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.mapping import FSMap
from zarr import Group
from zarr.abc.store import Store
from zarr.storage import FsspecStore, LocalStore, ObjectStore, StorePath, ZipStore

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import storage_options_of
from zarr_shardstore.io.backends.base import DEFAULT_OPTIONS, Backend, BackendOptions
from zarr_shardstore.io.backends.fsspec_store import FsspecBackend
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.backends.mapping import MappingBackend
from zarr_shardstore.io.backends.store_traits import absolute_path as absolute_path
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

    def cat_file(self, *args: Any, **kwargs: Any) -> object: ...


class FsspecPath(Protocol):
    """Mapper of fsspec, or a path of universal_pathlib: a directory of a file system."""

    @property
    def fs(self) -> FsspecFileSystem: ...


class ObstoreStore(Protocol):
    """Store of obstore, which need not be installed."""

    def get_ranges_async(self, *args: Any, **kwargs: Any) -> Any: ...


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
"""Everything that `base_store_of` takes."""

BaseStore: TypeAlias = Store | MutableMapping[str, bytes]


_ONE_SLASH = re.compile("[A-Za-z][A-Za-z0-9+.-]+:/[^/]")


def base_store_of(
    store: BaseStoreLike, storage_options: Mapping[str, Any] | None = None
) -> BaseStore:
    """Return the zarr store for what a user passes, or a mapping, whose values are plain bytes."""
    given, options = store, storage_options_of(storage_options)
    if isinstance(store, str):
        store = _path_or_url(store)  # what is a str from here on is a remote URL
    if options and not isinstance(store, str):
        names = sorted(options)
        raise SpecError(f"storage_options {names} go with a URL, and {short(given)} is none")
    if isinstance(given, str | Path) and _ONE_SLASH.match(str(given)) and not Path(given).exists():
        raise SpecError(f"{str(given)!r} has one slash after its scheme: a URL is a str with two")
    if isinstance(store, Store):
        return store
    if isinstance(store, Group):
        store = store.store_path
    if isinstance(store, StorePath):
        return _below(store.store, store.path)
    if isinstance(store, str):
        return _store_of_url(store, options or {})
    if isinstance(store, fsspec.AbstractFileSystem):
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


def _path_or_url(store: str) -> Path | str:
    if not store:
        raise SpecError("an empty text names no store: the current directory is '.'")
    return local_path(store) or store


def local_path(path: str) -> Path | None:
    """Return the path of a ``file://`` URL, or a path itself; ``None`` for another URL."""
    is_url = path.startswith("file://")
    if "://" in path and not is_url:
        return None
    # On Windows the path of ``file:///C:/data`` is ``C:/data``.
    return Path(LocalFileSystem._strip_protocol(path) if is_url else path)


def _below(store: Store, path: str) -> Store:
    """Return a store of the objects below a path, with the locks and caches of `store`."""
    if not path:
        return store
    place = _place_of(store)
    if place is None:
        raise SpecError(
            f"of {store} no part can be wrapped, here {path!r}: wrap the whole store, and pass the "
            "path to zarr"
        )
    return _at(store, f"{place.rstrip('/')}/{path}" if place else path)


def stores_above(store: Store) -> Iterator[tuple[Store, str]]:
    """Yield a store of each directory above a store, and the path of the store there."""
    files, store = root_of_files(store), innermost(store)
    store = store if files is None else LocalStore(files)
    place, below = _place_of(store) or "", ""
    root, parent = "/" * place.startswith("/"), place.rstrip("/")
    while "/" in parent or (parent and type(store) is ObjectStore):
        parent, _, name = parent.rpartition("/")
        below = f"{name}/{below}".rstrip("/")
        yield _at(store, parent or root), below


def _place_of(store: Store) -> str | None:
    """Return the path of a store in its client, with no slash at its end but a root's.

    ``None``: it is not known.
    """
    place = directory_of(store)
    if place is None and type(store) is FsspecStore:
        place = store.path
    client: Any = store.store if type(store) is ObjectStore else None
    if type(client).__name__ in ("S3Store", "GCSStore", "AzureStore"):
        place = str(client.prefix or "").lstrip("/")
    return None if place is None else place.rstrip("/") or place[:1]


def _at(store: Store, place: str) -> Store:
    """Return a store at another path of the client of `store`."""
    if directory_of(store) is not None:
        return LocalStore(place, read_only=store.read_only)
    if isinstance(store, FsspecStore):
        return FsspecStore(store.fs, store.read_only, place, store.allowed_exceptions)
    client: Any = store.store  # type: ignore[attr-defined]
    args, options = client.__getnewargs_ex__()
    client = type(client)(*args, **{**options, "prefix": place or None})
    return ObjectStore(client, read_only=store.read_only)


def _store_at(path: Path) -> Store:
    """Return the store at a local path."""
    if path.is_file():
        if zipfile.is_zipfile(path):
            return ZipStore(path, mode="r")
        raise SpecError(f"{str(path)!r} is a file: a base store is a directory or a zip archive")
    if path.suffix == ".zip" and not path.exists():
        raise SpecError(
            f"there is no zip archive {str(path)!r}: take a directory, or in Python "
            f"zarr.storage.ZipStore({str(path)!r}, mode='w')"
        )
    return LocalStore(absolute_path(str(path)))


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


# ------------------------------------------------------------ URLs of clouds

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
EXTRAS |= dict.fromkeys(("az", "abfs", "abfss"), "azure")
"""Extra of this package that installs a client, by the scheme of a URL."""

_S3_NAMES = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "anon": "skip_signature",
}
"""obstore's names of the options of s3fs and of its ``client_kwargs``."""

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "azure": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
"""Variables that obstore reads. It refuses plain HTTP there, unless an option allows it."""

_OF_CLIENT = frozenset(
    [
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "timeout",
        "proxy_url",
        "user_agent",
    ]
)
"""Options of every client of obstore; beside the options of a store it panics at them."""

_CREDENTIALS = {"access_key_id", "aws_access_key_id", "skip_signature", "aws_skip_signature"}


def _store_of_url(url: str, options: Mapping[str, Any]) -> Store:
    """Return the store at a remote URL. Chains such as ``simplecache::s3://`` and other schemes are
    fsspec's. Raise `ImportError`, naming an extra, if no client is installed."""
    scheme, _, place = url.partition("://")
    extra = EXTRAS.get(scheme)
    refusal, known = "", list[str]()
    if extra is not None:
        try:
            from obstore.exceptions import UnknownConfigurationKeyError
            from obstore.store import from_url
        except ImportError:
            refusal = f'install obstore: pip install "zarr-shardstore[{extra}]"'
        else:
            host, _, path = place.partition("/")
            # fsspec takes a path as it is spelled, obstore takes off a query and "%20".
            quoted = f"{scheme.replace('gcs', 'gs')}://{host}/{quote(path)}"

            def client_of(given: Mapping[str, Any]) -> Any:
                try:
                    return from_url(quoted, **given)
                except UnknownConfigurationKeyError:
                    return None
                except Exception as error:
                    reason = str(error).partition("\n")[0]
                    raise SpecError(
                        f"{url!r} with the options {sorted(given)}: {reason}"
                    ) from error

            translated = _translated(options, extra)
            client = None if translated is None else client_of(translated)
            if client is not None:
                return ObjectStore(client)
            refusal = f"obstore does not know all of the options {sorted(options)}"
            known = [name for name in options if _is_of_obstore(name, client_of)]
    try:
        if known:
            accepted = signature(fsspec.get_filesystem_class(scheme).__init__).parameters
            if only_of_obstore := [name for name in known if name not in accepted]:
                raise SpecError(
                    f"{refusal}, and of {only_of_obstore} fsspec knows nothing: spell all of "
                    "storage_options as one of the two does"
                )
        return FsspecStore.from_url(url, storage_options=dict(options))
    except ImportError as error:
        if not refusal:
            raise
        raise ImportError(f"{url!r}: {refusal}; for fsspec: {error}") from error


def _is_of_obstore(name: str, client_of: Any) -> bool:
    try:
        return client_of({name: ""}) is not None
    except SpecError:  # a known name with a wrong value
        return True


def _translated(options: Mapping[str, Any], extra: str) -> dict[str, Any] | None:
    """Return options in obstore's spelling; ``None`` if only fsspec has them."""
    nested = options.get("client_kwargs") or {}
    given = {k: v for k, v in options.items() if k != "client_kwargs"}
    names = _S3_NAMES if extra == "s3" else {"anon": "skip_signature"}
    if extra == "gcs" and given.get("token") == "anon":
        given["anon"] = bool(given.pop("token"))
    if extra == "azure" and not given and "AZURE_STORAGE_CONNECTION_STRING" in os.environ:
        return None
    if not isinstance(nested, Mapping) or not nested.keys() <= {"endpoint_url", "region_name"}:
        return None
    translated: dict[str, Any] = {}
    value: Any
    for name, value in [*given.items(), *nested.items()]:
        if value is None:
            continue
        if translated.setdefault(names.get(str(name), str(name)), value) != value:
            return None
    if extra == "s3" and not translated.keys() & _CREDENTIALS:
        profile = _of_profile()
        if profile is None:
            return None
        translated = {**profile, **translated}
    return _with_client_options(translated, extra)


def _with_client_options(options: dict[str, Any], extra: str) -> dict[str, Any]:
    """Give the options of a store those of its client as a mapping of their own; return them."""
    endpoints = [value for name, value in options.items() if "endpoint" in name.lower()]
    endpoints = endpoints or [os.environ.get(name) for name in _ENDPOINTS.get(extra, ())]
    client = {name: options.pop(name) for name in _OF_CLIENT & options.keys()}
    if any(str(endpoint).startswith("http://") for endpoint in endpoints):
        client = {"allow_http": True, **client}
    if client:
        options["client_options"] = {**client, **options.get("client_options", {})}
    return options


def _of_profile() -> dict[str, str] | None:
    """Return keys and region of the user's AWS profile, for obstore, which does not read it;
    ``None`` if only botocore can get the keys of the profile."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    try:
        from botocore.session import Session
    except ImportError:
        return {}
    session = Session()
    providers = session.get_component("credential_provider").providers
    files = [p for p in providers if p.METHOD in ("shared-credentials-file", "config-file")]
    keys = next((keys for p in files if (keys := p.load()) is not None), None)
    if keys is None:
        return None if "AWS_PROFILE" in os.environ else {}
    found = {
        "access_key_id": keys.access_key,
        "secret_access_key": keys.secret_key,
        "session_token": keys.token,
        "region": os.environ.get("AWS_REGION") or session.get_config_variable("region"),
    }
    return {name: value for name, value in found.items() if value}

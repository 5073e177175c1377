"""Traits of zarr stores that zarr does not state: files, identity, faults, other writers."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import ref

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from zarr.abc.store import Store
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, WrapperStore, ZipStore

from zarr_shardstore.synchronized import synchronized

_synchronized = synchronized()
_tokens: dict[int, tuple[object, list[ref[Store]]]] = {}
"""Tokens by the `id` of a thing, and the stores that use it."""


def scope_of_store(store: Store) -> tuple[Hashable, str]:
    """Return the identity of the place of a store's objects, and the prefix of its keys there.

    Both are equal for equal stores of this process, as far as the package can tell. A longer prefix
    of the same place is a store inside the other.
    """
    root = root_of_files(store)
    store = innermost(store)
    if isinstance(store, ZipStore):
        root = os.path.join(os.path.realpath(str(store.path)), "")
    if root is not None:
        return "file", root
    if isinstance(store, MemoryStore):
        return ("memory", _token_of(store._store_dict, store)), ""
    if isinstance(store, FsspecStore):
        fs, path = file_system_of(store.fs, store.path)
        return ("fsspec", _identity_of(fs)), f"{path.strip('/')}/".lstrip("/")
    if isinstance(store, ObjectStore):
        client: Any = store.store
        if hasattr(client, "config"):
            options = frozenset((name, repr(value)) for name, value in client.config.items())
            prefix = str(client.prefix or "").strip("/")
            return ("obstore", type(client), options), f"{prefix}/".lstrip("/")
        url = getattr(client, "url", None)
        return ("obstore", _token_of(client, store) if url is None else url), ""
    return ("store", _token_of(store, store)), ""


@_synchronized
def _token_of(thing: object, user: Store) -> object:
    """Return a token of a thing, the same as long as a store uses it.

    A later thing may get the same `id`. Without tokens, cached indexes of a store in memory would
    count for the next store, whose ETags are the same numbers.
    """
    token, users = _tokens.get(id(thing), (None, ()))
    users = [each for each in users if each() is not None]
    if not users:
        token = object()
    if all(each() is not user for each in users):
        users.append(ref(user, partial(_forget_token, id(thing))))
    _tokens[id(thing)] = token, users
    return token


@_synchronized
def _forget_token(thing_id: int, _: object) -> None:
    _, users = _tokens.get(thing_id, (None, ()))
    if all(each() is None for each in users):
        _tokens.pop(thing_id, None)


def _identity_of(fs: AbstractFileSystem) -> Hashable:
    """Return the identity of a file system by its arguments: fsspec's equality is per thread."""

    def part(value: object) -> Hashable:
        return _identity_of(value) if isinstance(value, AbstractFileSystem) else repr(value)

    options = {k: v for k, v in fs.storage_options.items() if k not in ("asynchronous", "loop")}
    return (
        type(fs),
        tuple(part(value) for value in fs.storage_args),
        frozenset((name, part(value)) for name, value in options.items()),
    )


def root_of_files(store: Store) -> str | None:
    """Return the directory of a store whose objects are local files, with links resolved."""
    directory = _directory(innermost(store))
    return None if directory is None else os.path.join(os.path.realpath(directory), "")


def directory_of(store: Store) -> str | None:
    """Return the directory of a store that maps keys to local files and does nothing else."""
    is_plain = type(store) in (LocalStore, ObjectStore)
    if type(store) is FsspecStore:
        is_plain = type(file_system_of(store.fs, store.path)[0]) is LocalFileSystem
    return _directory(store) if is_plain else None


def _directory(store: Store) -> str | None:
    if isinstance(store, LocalStore):
        return str(store.root)
    if isinstance(store, FsspecStore) and "file" in _protocols(store):
        return str(LocalFileSystem._strip_protocol(file_system_of(store.fs, store.path)[1]))
    if isinstance(store, ObjectStore) and type(store.store).__name__ == "LocalStore":
        return str(getattr(store.store, "prefix", None) or "/")
    return None


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path without ``..``, which means another directory after a link."""
    is_plain = os.pardir not in Path(path).parts
    return os.path.abspath(path) if is_plain else os.path.realpath(path)


_BUCKETS = {"S3Store": ("s3", "bucket"), "GCSStore": ("gs", "bucket")}
_BUCKETS |= {"AzureStore": ("az", "container_name")}
"""Scheme of URLs, and the option that names the bucket, by the class of a client of obstore."""


def url_of_store(store: Store) -> str | None:
    """Return the URL below which any program finds the objects of a store, if there is one."""
    directory = directory_of(store)
    if directory is not None:
        return f"file://{absolute_path(directory)}"
    if is_in_memory(store) or kind_that_is_only_read(store):
        return None
    if type(store) is FsspecStore:
        fs, path = file_system_of(store.fs, store.path)
        return str(fs.unstrip_protocol(path)).rstrip("/")
    client: Any = store.store if type(store) is ObjectStore else None
    if type(client).__name__ in _BUCKETS:
        scheme, option = _BUCKETS[type(client).__name__]
        return f"{scheme}://{client.config[option]}/{client.prefix or ''}".rstrip("/")
    url = getattr(client, "url", None)
    return None if url is None else str(url).rstrip("/")


def is_in_memory(store: Store) -> bool:
    """Whether objects are in the memory of this process: a pickled copy has other objects."""
    store = innermost(store)
    if isinstance(store, FsspecStore):
        return "memory" in _protocols(store)
    if isinstance(store, ObjectStore):
        return type(store.store).__name__ == "MemoryStore"
    return isinstance(store, MemoryStore)


def _is_plain_wrapper(store: Store) -> bool:
    """Whether zarr has a class of wrapper, and the class has nothing of one event loop."""
    cls = type(store)
    names = ("WrapperStore", "LoggingStore", "LatencyStore")
    return cls.__module__.startswith("zarr.") and cls.__name__ in names


def may_belong_to_loop(store: Store) -> bool:
    """Whether a store may use things of one event loop, as connections of aiohttp, or its locks."""
    while _is_plain_wrapper(store):
        store = store._store  # type: ignore[attr-defined]
    if type(store) is FsspecStore:
        return bool(file_system_of(store.fs, store.path)[0].async_impl)
    if type(store) is ObjectStore:
        return getattr(store.store, "credential_provider", None) is not None
    return type(store) not in (LocalStore, MemoryStore, ZipStore)


def innermost(store: Store) -> Store:
    """Return the store inside all of zarr's wrappers."""
    while isinstance(store, WrapperStore):
        store = store._store
    return store


def deletes_only_by_key(store: Store) -> bool:
    """Whether a wrapper must see each deleted key: CacheStore passes `delete_dir` through."""
    cls = type(store)
    return (
        isinstance(store, WrapperStore)
        and cls.delete is not WrapperStore.delete
        and cls.delete_dir is WrapperStore.delete_dir
    )


def _protocols(store: FsspecStore) -> tuple[str, ...]:
    protocol = file_system_of(store.fs, store.path)[0].protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def file_system_of(fs: AbstractFileSystem, path: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of fsspec that has the objects, without wrappers, and the path."""
    from fsspec.implementations.dirfs import DirFileSystem

    while True:
        if hasattr(fs, "sync_fs"):
            fs = fs.sync_fs
        elif type(fs) is DirFileSystem:
            fs, path = fs.fs, fs._join(path)
        else:
            return fs, path


_ONLY_READ = {
    "CachingFileSystem": "a cache of fsspec, which serves what it copied first",
    "AbstractArchiveFileSystem": "an archive that fsspec reads",
    "ReferenceFileSystem": "a set of references to bytes of other files",
}
"""By the name of the class, so that these modules of fsspec are not imported."""


def kind_that_is_only_read(store: Store) -> str:
    """Return what a store is, if a write through it would be lost or is impossible; else ``""``."""
    store = innermost(store)
    if not isinstance(store, FsspecStore):
        return ""
    classes = type(file_system_of(store.fs, store.path)[0]).__mro__
    return next((_ONLY_READ[c.__name__] for c in classes if c.__name__ in _ONLY_READ), "")


_NO_KEY = "invalid zarr key format|bad key prefix|node not found at|key not found at"

_FAULTS: tuple[tuple[str, str, Literal["another way", "missing"] | None], ...] = (
    ("UnsupportedError", "", None),
    ("NotImplementedError", "", "another way"),
    ("NotSupportedError", "", "another way"),  # of obstore
    ("Exception", "^(405|501) |501 Not Implemented|405 Method Not Allowed", "another way"),
    ("IcechunkError", _NO_KEY, "missing"),  # of a key that is neither a document of v3 nor a chunk
    ("KeyError", _NO_KEY, "missing"),
)
"""Class of an error by its name, pattern of its text after the status of a server, and remedy: to
take *another way*, because the store never has this operation; or the object is *missing*."""


def remedy_of(error: Exception) -> Literal["another way", "missing"] | None:
    """Return the remedy for an error of a store, by the first row that fits."""
    classes = {kind.__name__ for kind in type(error).__mro__}
    text = f"{getattr(error, 'status', '')} {error}"
    rows = (row for row in _FAULTS if row[0] in classes and re.search(row[1], text))
    return next(rows, ("", "", None))[2]


_CAUSES = (
    (
        r"169\.254\.169\.254|metadata\.google|[Mm]issing ?[Cc]redential|[Nn]o credentials",
        "no credentials were found, not in the options, the environment or a profile",
        "the keys, or pass skip_signature=true for public data",
    ),
    (
        r"NoSuchBucket|ContainerNotFound|bucket does not exist",
        "the server has no such bucket or container",
        "the name in the URL, the region and the endpoint",
    ),
    (
        r"kind: Connect|ConnectError|dns error|[Cc]onnection refused",
        "no server answers there",
        "the endpoint, and the network",
    ),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|AuthenticationFailed"
        r"|status: 40[13]|40[13] (Forbidden|Unauthorized)",
        "the server refuses these credentials",
        "the keys, their permissions and the region",
    ),
    (
        r"kind: (Interrupted|Timeout)|IncompleteBody|error decoding response body",
        "the reply was cut off, or came too late",
        "the network, and run it again",
    ),
)
"""Text in an error of obstore, what came back, and what to check; the first that fits counts."""


def note_cause(error: Exception) -> None:
    """Add a sentence to an error of obstore, which is a structure of Rust. Its URL has no query,
    which may hold a signature."""
    text = str(error)
    if "Debug source:" not in text or hasattr(error, "__notes__"):
        return
    tried = re.search(r"\b(GET|PUT|POST|HEAD|DELETE) (https?://[^\s?]+)", text)
    for pattern, came_back, to_check in _CAUSES:
        if re.search(pattern, text):
            request = f"{tried[1]} {tried[2]}: " if tried else ""
            error.add_note(f"{request}{came_back}. Check {to_check}")
            return

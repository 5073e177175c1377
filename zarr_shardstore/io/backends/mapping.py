"""Backend for any ``MutableMapping[str, bytes]``, with plain bytes as values.

A mapping has no partial reads: each reply is cut from the whole value. One that is no dict may not
be safe for threads (dbm, shelve): it is called by one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, MutableMapping
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.consolidated_index import is_consolidated_index_key
from zarr_shardstore.format.ranges import resolve_range
from zarr_shardstore.io.backends.base import Backend, OpenFiles
from zarr_shardstore.io.local.files import QUARANTINE
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.index_reads import check_whole, found_index, index_get
from zarr_shardstore.shards.requests import Found, Request
from zarr_shardstore.shards.shard_listing import VersionedKeys
from zarr_shardstore.synchronized import in_forked_child

_locks: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
"""By the id of the mapping, which lives as long as its backends."""


@in_forked_child
def _release_all() -> None:
    for lock in list(_locks.values()):
        lock._at_fork_reinit()  # type: ignore[attr-defined]


class MappingBackend(Backend):
    """Reads and writes a mapping.

    Thread safety: any thread may call it. A mapping that is no dict is called from one of several
    worker threads at a time.
    """

    def __init__(self, mapping: MutableMapping[str, bytes]) -> None:
        is_dict = type(mapping) is dict
        self._lock = nullcontext() if is_dict else _locks.setdefault(id(mapping), threading.Lock())
        self.mapping = mapping
        self.mode = "inline" if is_dict else "thread"

    def __repr__(self) -> str:
        return f"<{type(self.mapping).__name__} at {id(self.mapping):#x}>"

    def scope(self, key: str) -> Hashable:
        return ("mapping", id(self.mapping), key)

    def perform(self, batch: list[Request], _: OpenFiles | None = None) -> list[Any]:
        try:
            with self._lock:
                return [self._perform_one(request) for request in batch]
        except NotImplementedError as error:
            self.lacks.add("delete")
            raise UnsupportedError(
                f"{self!r} cannot remove or replace what it has ({error}); it was not done: write "
                "into another base store"
            ) from error
        except Exception as error:
            if "in that same thread" not in str(error):
                raise
            raise UnsupportedError(
                f"{self!r} belongs to one thread ({error}); nothing was done: use it by a "
                "ShardingMapping in that thread, or take another base store, such as a zict.File"
            ) from error

    def _perform_one(self, request: Request) -> Any:
        match request:
            case requests.Get(key, byte_range):
                value = self._value(key)
                if value is None:
                    return Found(None, None)
                start, stop = resolve_range(byte_range, len(value))
                return Found(value[start:stop], None, len(value))
            case requests.GetIndex():
                return found_index(request, self._perform_one(index_get(request)))
            case requests.GetMany(keys):
                return [Found(self._value(key), None) for key in keys]
            case requests.Exists(key):
                return key in self.mapping
            case requests.GetSize(key):
                value = self._value(key)
                return None if value is None else len(value)
            case requests.Set(key, value):
                self.mapping[key] = bytes(value)
            case requests.SetIfNotExists(key, value):
                self.mapping.setdefault(key, bytes(value))
            case requests.Delete(key):
                self._delete(key)
            case requests.DeletePrefix(prefix):
                for key in self._keys(prefix):
                    self._delete(key)
            case requests.Move(key, to):
                if (value := self._value(key)) is not None:
                    check_whole(key, value, self._perform_one(requests.GetSize(key)))
                    self.mapping[to] = bytes(value)
                    self._delete(key)
            case requests.ListPrefix(prefix):
                return self._listed(prefix)
            case requests.ListPage(cursor, n_keys):
                listed = self._keys if cursor.shows_all else self._listed
                cursor.pages = cursor.pages or iter(listed(cursor.prefix))
                return VersionedKeys(islice(cursor.pages, n_keys))
            case requests.CloseListing():
                pass
            case requests.ListDir(prefix):
                names = (key[len(prefix) :].split("/", 1)[0] for key in self._listed(prefix))
                return list(dict.fromkeys(names))
            case _:
                raise TypeError(f"a backend does not perform {request!r}")
        return None

    def _delete(self, key: str) -> None:
        with suppress(KeyError):
            del self.mapping[key]

    def _value(self, key: str) -> memoryview | None:
        if hasattr(self.mapping, "__missing__") and key not in self.mapping:
            return None  # a defaultdict would store a default value
        try:
            value = self.mapping[key]
        except KeyError:
            return None
        try:
            return memoryview(value).toreadonly()
        except TypeError:
            raise SpecError(
                f"a base store that is a mapping has values of bytes, that of {key!r} is a "
                f"{type(value).__name__}; a dict of zarr's buffers goes into a MemoryStore"
            ) from None

    def _listed(self, prefix: str) -> list[str]:
        keys = self._keys(prefix)
        return [k for k in keys if not (is_consolidated_index_key(k) or k.startswith(QUARANTINE))]

    def _keys(self, prefix: str) -> list[str]:
        # list() first, in one step: other threads may change the mapping concurrently.
        keys: list[Any] = list(self.mapping)
        if keys and isinstance(keys[0], bytes):  # dbm encodes its keys
            keys = [key.decode() for key in keys]
        return [key for key in keys if key.startswith(prefix)]

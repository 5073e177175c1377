"""Backend for any ``MutableMapping[str, bytes]``, with plain bytes as values."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, MutableMapping
from contextlib import nullcontext, suppress
from typing import Any
from weakref import WeakValueDictionary

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.consolidated_index import is_consolidated_index_key
from zarr_shardstore.format.ranges import resolve_range
from zarr_shardstore.io.backends.base import BlockingBackend, OpenFiles
from zarr_shardstore.io.local.files import QUARANTINE
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.index_reads import check_whole, found_index, index_get
from zarr_shardstore.shards.requests import Found, Request
from zarr_shardstore.synchronized import in_forked_child

_locks: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
"""By the id of the mapping, which lives as long as its backends."""


@in_forked_child
def _release_all() -> None:
    for lock in list(_locks.values()):
        lock._at_fork_reinit()  # type: ignore[attr-defined]


class MappingBackend(BlockingBackend):
    """Reads and writes a mapping. Each reply is cut from the whole value.

    Thread safety: any thread may call it. A mapping that is no dict, such as a shelve, is called by
    one worker thread at a time.
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
                return [self.replies[type(request)](self, request) for request in batch]
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

    def get(self, request: requests.Get) -> Found:
        value = self._value(request.key)
        if value is None:
            return Found(None, None)
        start, stop = resolve_range(request.byte_range, len(value))
        return Found(value[start:stop], None, len(value))

    def get_index(self, request: requests.GetIndex) -> requests.FoundIndex:
        return found_index(request, self.get(index_get(request)))

    def exists(self, request: requests.Exists) -> bool:
        return request.key in self.mapping

    def get_size(self, request: requests.GetSize) -> int | None:
        value = self._value(request.key)
        return None if value is None else len(value)

    def set(self, request: requests.Set) -> None:
        self.mapping[request.key] = bytes(request.value)

    def set_if_not_exists(self, request: requests.SetIfNotExists) -> None:
        self.mapping.setdefault(request.key, bytes(request.value))

    def delete(self, request: requests.Delete) -> None:
        with suppress(KeyError):
            del self.mapping[request.key]

    def delete_prefix(self, request: requests.DeletePrefix) -> None:
        for key in self.keys(request.prefix, shows_all=True):
            self.delete(requests.Delete(key))

    def move(self, request: requests.Move) -> None:
        value = self._value(request.key)
        if value is not None:
            check_whole(request.key, value, self.get_size(requests.GetSize(request.key)))
            self.mapping[request.to] = bytes(value)
            self.delete(requests.Delete(request.key))

    def list_dir(self, request: requests.ListDir) -> list[str]:
        start = len(request.prefix)
        names = (key[start:].split("/", 1)[0] for key in self.keys(request.prefix))
        return list(dict.fromkeys(names))

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

    def keys(self, prefix: str, *, shows_all: bool = False) -> Iterator[str]:
        # list() first, in one step: other threads may change the mapping concurrently.
        keys: list[Any] = list(self.mapping)
        if keys and isinstance(keys[0], bytes):  # dbm encodes its keys
            keys = [key.decode() for key in keys]
        keys = [key for key in keys if key.startswith(prefix)]
        if shows_all:
            return iter(keys)
        return (k for k in keys if not (is_consolidated_index_key(k) or k.startswith(QUARANTINE)))

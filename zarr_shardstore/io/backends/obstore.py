"""Backend for zarr's ``ObjectStore``: objects have versions (ETags), and writes conditions.

A read tells the version that it read. An update is optimistic: what it writes is stored only
if nobody has replaced the object since the update read it (compare and swap); otherwise it
begins anew. So writers of any number of processes and hosts lose nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import warnings
from collections.abc import AsyncIterator, Hashable
from hashlib import blake2b
from typing import Any

from zarr.storage import ObjectStore

from zarr_shardstore.format.consolidated_index import IndexCopy
from zarr_shardstore.format.ranges import ByteRange, Range, StartFrom, Suffix, resolve_range
from zarr_shardstore.io.backends.base import (
    DEFAULT_FILE_OPTIONS,
    Backend,
    FileOptions,
    Mode,
    ReplacedMeanwhileError,
)
from zarr_shardstore.io.backends.key_pages import next_page_with_versions
from zarr_shardstore.io.backends.zarr_store import ZarrBackend, concurrently
from zarr_shardstore.io.index_cache import RememberedIndex
from zarr_shardstore.io.remote.consolidated_reads import ConsolidatedIndexes
from zarr_shardstore.io.remote.etags import is_strong, version_of_meta
from zarr_shardstore.io.remote.object_calls import ObjectReader
from zarr_shardstore.io.remote.remote_index import RemoteIndexes
from zarr_shardstore.shards.requests import (
    Delete,
    Exists,
    Found,
    FoundIndex,
    Get,
    GetIndex,
    ListPage,
    Recorded,
    RecordIndex,
    Request,
    Set,
)

_MIN_AGE_ON_WEB_SERVERS_S = 2.0

_N_PUTS = 4
"""Attempts to store an object with a condition, if the server fails or is not reached. The
connection of which one was lost is often an old one that the server had closed."""

_LONGEST_PAUSE_S = 1.0
"""Between two of these; half of it on average."""


class ObstoreBackend(ZarrBackend):
    """Reads with versions; gives updates a view with conditional writes."""

    store: ObjectStore[Any]

    def __init__(
        self,
        store: ObjectStore[Any],
        options: FileOptions = DEFAULT_FILE_OPTIONS,
        *,
        is_static: bool = False,
    ) -> None:
        super().__init__(store, options, is_static=is_static)
        identity = _identity_of(store.store)

        def identity_of(key: str) -> Hashable:
            return (*identity, key)

        collected = ConsolidatedIndexes(self._get_at_most, identity_of)
        self._indexes = RemoteIndexes(self, identity_of, is_static=is_static, collected=collected)
        self.has_lasting_versions = True
        self._has_conditions = type(store.store).__name__ != "HTTPStore"
        self._is_probed = False
        self._takes_quotes = True
        self._has_suffixes = type(store.store).__name__ != "AzureStore"
        self.reads = ObjectReader(store, lambda key, byte_range: self._get_once(key, byte_range))

    def optimistic(self) -> Backend | None:
        return _Optimistic(self) if self._has_conditions else None

    async def get_if_modified(self, request: Get, known: RememberedIndex) -> Found | None:
        """For `RemoteIndexes`."""
        from obstore.exceptions import NotModifiedError

        byte_range = request.byte_range
        if not isinstance(known.version, str) or known.size is None or byte_range is None:
            return await self.get(request)
        if not self._has_suffixes:
            byte_range = Range(*resolve_range(byte_range, known.size))
        options: Any = {"range": _range_of(byte_range), "if_none_match": known.version}
        try:
            found = await self._get_with(request.key, options)
        except NotModifiedError:
            return None
        except Exception:  # it is shorter now, or the server knows no conditions
            return await self.get(request)
        if found.version == known.version:  # such a server, too
            return None
        is_other_range = not self._has_suffixes and found.size != known.size
        return await self.get(request) if is_other_range else found

    def can_be_remembered(self, found: FoundIndex) -> bool:
        return is_strong(found.version)

    async def _perform_one(self, request: Request) -> Any:
        match request:
            case RecordIndex():
                return await self._record_index(request)
            case ListPage(cursor, n_keys):
                if cursor.pages is None:
                    cursor.pages = self._metas(cursor.prefix)
                return await next_page_with_versions(cursor.pages, n_keys)
        return await super()._perform_one(request)

    async def _record_index(self, request: RecordIndex) -> Recorded:
        assert self._indexes is not None
        found = await self._indexes.get(GetIndex(request.shard))
        if found.decoded is None or found.size is None or not is_strong(found.version):
            return None
        return IndexCopy(found.decoded, str(found.version), found.size)

    async def _metas(self, prefix: str) -> AsyncIterator[tuple[str, object]]:
        """Keys, as `ObjectStore.list_prefix` has them, and versions."""
        import obstore

        async for page in obstore.list(self.store.store, prefix=prefix):
            for meta in page:
                yield meta["path"], version_of_meta(meta)

    async def _get_once(self, key: str, byte_range: ByteRange | None) -> Found:
        return await self._get_with(
            key, {"range": _range_of(byte_range)} if byte_range is not None else {}
        )

    async def _get_with(self, key: str, options: Any) -> Found:
        import obstore

        try:
            reply = await obstore.get_async(self.store.store, key, options=options)
            value = await reply.bytes_async()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return Found(None, None)
        version = None if self._is_too_young(reply.meta) else version_of_meta(reply.meta)
        return Found(memoryview(value), version, reply.meta["size"])

    async def _get_at_most(self, key: str, max_nbytes: int) -> Found:
        """An object, if it is not larger."""
        import obstore

        try:
            reply = await obstore.get_async(self.store.store, key)
            if reply.meta["size"] > max_nbytes:
                return Found(None, None)
            value = await reply.bytes_async()
        except FileNotFoundError:
            return Found(None, None)
        return Found(memoryview(value), version_of_meta(reply.meta), reply.meta["size"])

    def _is_too_young(self, meta: Any) -> bool:
        """Whether an ETag proves nothing: web servers make it of the size and the second."""
        if type(self.store.store).__name__ != "HTTPStore" or meta["last_modified"] is None:
            return False
        return bool(time.time() - meta["last_modified"].timestamp() < _MIN_AGE_ON_WEB_SERVERS_S)

    # ---------------------------------------------------------- conditional writes

    async def put_if(self, key: str, value: bytes | memoryview, version: object) -> object:
        """Store an object if it is the one of that version; ``None``: if there is none.

        Returns
        -------
        object
            Its version now.

        Raises
        ------
        ReplacedMeanwhileError
            If it is another one.
        obstore.exceptions.GenericError
            If the server fails again and again, or is not reached.
        """
        if self._indexes is None:
            return await self._put_if(key, value, version)
        with self._indexes.changing(key):
            return await self._put_if(key, value, version)

    async def _put_if(self, key: str, value: bytes | memoryview, version: object) -> object:
        for n_left in reversed(range(_N_PUTS)):
            failure: Exception | None = None
            try:
                return await self._put(key, value, version)
            except _refusals():
                pass
            except _failures() as error:  # perhaps of the connection: clients do not send it again
                failure = error
            # The store may have taken it, and the reply was lost: then what is there is ours.
            try:
                found = await self.reads.get(key, None)
            except Exception:
                if failure is None:
                    raise
                raise failure from None
            if found.value is not None and found.value == memoryview(value):
                return found.version
            is_same = (found.value is None) if version is None else found.version == version
            if not is_same:
                break
            if failure is not None:
                if not n_left:
                    raise failure
                await asyncio.sleep(random.uniform(0, _LONGEST_PAUSE_S))
            elif version is not None and self._takes_quotes:
                # It is the one that was read: some servers compare what stands in the quotes.
                self._takes_quotes = False
            else:
                break
        raise ReplacedMeanwhileError(key)

    async def _put(self, key: str, value: bytes | memoryview, version: object) -> object:
        if version is None:
            mode: Any = "create"
        else:
            mode = {"e_tag": version if self._takes_quotes else str(version).strip('"')}
        now = await self._put_with(mode, key, value)
        if version is not None and not self._is_probed:  # new shards shall cost one request
            self._is_probed = True
            await self._probe(key, value)
        return now

    async def _put_with(self, mode: Any, key: str, value: bytes | memoryview) -> object:
        import obstore

        # In one part: conditions do not go with multi-part uploads.
        reply = await obstore.put_async(
            self.store.store, key, value, mode=mode, use_multipart=False
        )
        return reply["e_tag"]

    async def _probe(self, key: str, value: bytes | memoryview) -> None:
        """After the first update: see that the store refuses what it must, and stores nothing."""
        try:
            await self._put_with({"e_tag": '"00000000000000000000000000000000"'}, key, value)
        except _refusals():
            return
        self._has_conditions = False
        warnings.warn(
            f"{self.store} ignores the conditions of writes (If-Match): let each shard have one "
            "writer at a time, or updates are lost",
            stacklevel=2,
        )


class _Optimistic:
    """What one update reads is remembered, what it writes goes with a condition."""

    can_block = False
    mode: Mode = "async"
    replaces_at_once = True
    max_shards_at_once = None

    def __init__(self, backend: ObstoreBackend) -> None:
        self._backend = backend
        self._versions: dict[str, object] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        return await concurrently([self._perform_one(request) for request in batch])

    async def _perform_one(self, request: Request) -> Any:
        match request:
            case Set(key, value) if key in self._versions:
                self._versions[key] = await self._backend.put_if(key, value, self._versions[key])
                return None
            case Delete(key, placeholder) if self._versions.get(key) is not None and placeholder:
                await self._perform_one(Set(key, placeholder()))
                return None
        (reply,) = await self._backend.perform_async([request])
        match request:
            case Get(key):
                # The first: if it is another one later, the write will fail.
                self._versions.setdefault(key, reply.version if reply.value is not None else None)
            case GetIndex():
                is_there = reply.decoded is not None or reply.damage is not None
                self._versions.setdefault(request.key, reply.version if is_there else None)
            case Exists(key) if not reply:
                self._versions.setdefault(key, None)
        return reply


def _identity_of(store: Any) -> tuple[Hashable, ...]:
    """Equal for obstore's stores that were made alike, by all of their options."""
    try:
        args = store.__getnewargs_ex__()
    except Exception:  # its memory, and one with credentials of a kind that is not pickled
        return ("obstore", _Same(store))
    spelled = json.dumps(args, sort_keys=True, default=repr)  # their order is not always the same
    return ("obstore", type(store).__name__, blake2b(spelled.encode()).digest())


class _Same:
    """Equal for one object, which lives as long as this."""

    __slots__ = ("_object",)

    def __init__(self, of: object) -> None:
        self._object = of

    def __hash__(self) -> int:
        return id(self._object)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._object is other._object


def _failures() -> type[Exception]:
    from obstore.exceptions import GenericError

    return GenericError


def _refusals() -> tuple[type[Exception], ...]:
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    return AlreadyExistsError, PreconditionError, FileNotFoundError


def _range_of(byte_range: ByteRange) -> Any:
    match byte_range:
        case Range(start, stop):
            return (start, stop)
        case StartFrom(start):
            return {"offset": start}
        case Suffix(nbytes):
            return {"suffix": nbytes}

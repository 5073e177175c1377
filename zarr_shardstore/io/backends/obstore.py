"""Backend for zarr's ``ObjectStore``: objects have versions (ETags), and writes conditions.

An update is a compare-and-swap: a shard is replaced only if it is the one that the update has read.
So writers of any number of processes and hosts lose no update. The rules of an update:

1. Its reads of a key fix the expected version: an ETag, or none for a missing object. If two reads
   differ the update runs again. A whole shard needs no read: it replaces the version of the last
   write here, or nothing if the last one that was asked for was missing. Otherwise the version is
   asked for. An upload in parts has no condition: a server repeats no effect of it.
2. Its write has the condition ``If-Match`` with that ETag, or ``If-None-Match: *`` without one. A
   removal cannot have a condition: an emptied shard is replaced by one without entries, and an
   object that was missing is not removed.
3. A refusal (412, 409 or 404) or a failure leaves open what is stored, so the object is read.
   A client does not repeat a write with a condition when the connection fails.
4. If it has the id of this write, the write took effect and its reply was lost: success. Equal
   bytes prove nothing: two writers may count from 1 to 2. Each write has an id in the metadata of
   its object, before the ids of the writes that it builds on: later writers do not hide it. Where
   a server drops ids, the bytes decide after a failure, and not after a refusal.
5. If its version is not the expected one, another writer was faster. `ReplacedMeanwhileError`
   makes the driver run the update again.
6. If its version is the expected one after a failure, the write is sent again, up to three times.
7. If its version is the expected one after a refusal, the write is sent once more, without quotes
   in the ETag: some servers want it so. A spelling that is taken is kept. A second refusal is
   treated as in 5: the first may have been for a write of another client that is under way.
8. The first replacement of an object is followed by a write that must be refused. A store that
   takes it ignores conditions, and one without ETags, or with weak ones, has none: there is a
   warning, and later updates are not optimistic.
9. A server may refuse all writes: a proxy has changed its ETags. If for some seconds each refusal
   leaves the expected version there, that is an error.

Each reply has the size of the whole object: the flows of `shards.read` find truncated replies.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
from collections.abc import Hashable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    NotModifiedError,
    PermissionDeniedError,
    PreconditionError,
)
from zarr.storage import ObjectStore

from zarr_shardstore.errors import CorruptValueError, UnsupportedError
from zarr_shardstore.format.consolidated_index import IndexCopy
from zarr_shardstore.format.ranges import ByteRange, Range, StartFrom, Suffix, resolve_range
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.io.backends import base
from zarr_shardstore.io.backends.zarr_store import Listed, ZarrBackend
from zarr_shardstore.io.concurrency import backoff
from zarr_shardstore.io.local.cached_files import index_cache
from zarr_shardstore.io.remote_indexes import RemoteIndexes, Version
from zarr_shardstore.io.write_epochs import UNSTABLE
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.requests import Found, FoundIndex, Recorded, Request
from zarr_shardstore.telemetry import warn

_N_PUTS = 4  # attempts of a write: often the first takes a connection that the server has closed
_LONGEST_PAUSE_S = 1.0  # between two attempts; half of it on average
_WRITE_ID = "shardwriteid"  # name of the ids in the metadata: Azure takes letters only
_WRITE_IDS_NBYTES = 16 * 32  # of the last 16 writes; S3 takes 2 KB of metadata
_REFUSALS = AlreadyExistsError, PreconditionError, FileNotFoundError  # 409, 412 and 404
_PARTS_AT_ONCE = 2  # of one upload; more hide no more latency behind one reader of chunks
_MAX_KEYS_OF_DELETE = 1000  # keys in one request that deletes many objects (S3)
_FEW_REFUSALS, _LONGEST_REFUSAL_S = 4, 10.0  # of one key, while no other client has written it
_KNOWN_NBYTES = 1000  # memory of a known version, with its ids
_ONE_PART_NBYTES = 5 * 1024 * 1024  # obstore uploads more in several parts


@dataclass(slots=True, eq=False)
class KnownVersion:
    """Version that the last write here has stored, in the cache of indexes; ``None``: missing."""

    version: Version | None
    spec: None = None
    was_used: bool = False

    @property
    def nbytes(self) -> int:
        return _KNOWN_NBYTES


class ObstoreBackend(ZarrBackend):
    """Reads with versions; a view for updates writes with conditions."""

    store: ObjectStore[Any]
    process: int | None = None
    """Process in which obstore has its threads, for all stores."""

    def __init__(
        self, store: ObjectStore[Any], options: base.BackendOptions = base.DEFAULT_OPTIONS
    ) -> None:
        super().__init__(store, options)
        self._indexes: RemoteIndexes = RemoteIndexes(
            self.read, self.scope, is_static=options.is_static, read_consolidated=self._get_at_most
        )
        self.has_lasting_versions = True
        self._is_web_server = type(store.store).__name__ == "HTTPStore"
        self._has_conditions = not self._is_web_server
        self._is_probed = False
        self._n_lost_probes = 0
        self._takes_quotes = True
        self._in_vain: dict[str, list[float]] = {}
        """Times of the refusals in a row that left the expected version there, by key."""

    def optimistic(self) -> base.Backend | None:
        base.check_no_fork(self, ObstoreBackend)
        return _Optimistic(self) if self._has_conditions else None

    def upload(self, key: str, parts: base.Parts) -> None:
        base.check_no_fork(self, ObstoreBackend)
        writer: Any = obstore.open_writer(
            self.store.store, key, buffer_size=base.PART_NBYTES, max_concurrency=_PARTS_AT_ONCE
        )
        # The writer aborts when it leaves its block by an exception, and only then.
        base.write_stream(
            writer, lambda: writer.__exit__(RuntimeError, RuntimeError(), None), parts
        )

    async def read(self, get: requests.Get, unless: Version | None, /) -> Found | None:
        byte_range = get.byte_range
        if unless is None or unless.etag is None or unless.size is None or byte_range is None:
            return await self.get(get)
        if "suffixes" in self.lacks:
            byte_range = Range(*resolve_range(byte_range, unless.size))
        try:
            found = await self._get_once(get.key, byte_range, unless.etag)
        except NotModifiedError:
            return None
        except Exception:  # it is shorter now, or the server knows no conditions
            return await self.get(get)
        if found.version == unless:  # the server ignores conditions
            return None
        is_other_range = "suffixes" in self.lacks and found.size != unless.size
        return await self.get(get) if is_other_range else found

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        base.check_no_fork(self, ObstoreBackend)
        keys = [request.key for request in batch if isinstance(request, requests.Delete)]
        if len(keys) == len(batch) > 1:
            # GCS stops at a missing object, and some servers take one key a request.
            with suppress(Exception), ExitStack() as changes:
                for key in keys:
                    self._remember(key, None)
                    changes.enter_context(self._indexes.changing(key))
                for i in range(0, len(keys), _MAX_KEYS_OF_DELETE):
                    part = keys[i : i + _MAX_KEYS_OF_DELETE]
                    await obstore.delete_async(self.store.store, part)
                return [None] * len(keys)
        return await super().perform_async(batch)

    async def delete(self, request: requests.Delete) -> None:
        self._remember(request.key, None)
        await super().delete(request)

    async def delete_prefix(self, request: requests.DeletePrefix) -> None:
        place, below = self._place, self._path + request.prefix
        index_cache.forget_if(
            lambda scope: (
                scope[0] is KnownVersion and scope[1][0] == place and scope[1][1].startswith(below)
            )
        )
        await super().delete_prefix(request)

    async def move(self, request: requests.Move) -> None:
        self._remember(request.key, None)
        with suppress(FileNotFoundError):
            await obstore.rename_async(self.store.store, request.key, request.to)

    async def record_index(self, request: requests.RecordIndex) -> Recorded:
        found = await self._indexes.get(requests.GetIndex(request.shard))
        version = found.version
        if found.decoded is None or found.size is None or not isinstance(version, Version):
            return None
        etag = version.etag if version.is_strong else None
        return None if etag is None else IndexCopy(found.decoded, etag, found.size)

    async def _listed(self, prefix: str) -> Listed:
        async for page in obstore.list(self.store.store, prefix=prefix):
            for meta in page:
                yield meta["path"], _version_of(meta), meta["size"]

    async def _get_within(self, key: str, byte_range: ByteRange) -> Found:
        found = await super()._get_within(key, byte_range)
        if found.value is None or len(found.value) or found.version is not None:
            return found
        if self._is_web_server:  # the object may be young
            return found._replace(version=UNSTABLE)
        try:  # the range is after the end, and no byte was read
            return await _head(self.store.store, key)
        except FileNotFoundError:
            return Found(None, None)

    async def _get_once(
        self, key: str, byte_range: ByteRange | None, unless_etag: str | None = None
    ) -> Found:
        options: Any = {}
        if byte_range is not None:
            options["range"] = _range_of(byte_range)
        if unless_etag is not None:
            options["if_none_match"] = unless_etag
        try:
            reply = await obstore.get_async(self.store.store, key, options=options)
            value = await reply.bytes_async()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return Found(None, None)
        version: Any = _version_of(reply.meta, reply.attributes.get(_WRITE_ID))
        modified = reply.meta["last_modified"]
        if self._is_web_server and modified is not None:
            is_young = time.time() - modified.timestamp() < base.MIN_AGE_ON_WEB_SERVERS_S
            version = UNSTABLE if is_young else version  # the next request may find another file
        return Found(memoryview(value), version, reply.meta["size"])

    async def _get_at_most(self, key: str, max_nbytes: int) -> Found:
        """Read an object, unless it is larger; its version counts, however young it is."""
        reply = await obstore.get_async(self.store.store, key)
        if reply.meta["size"] > max_nbytes:
            return Found(None, None)
        return Found(memoryview(await reply.bytes_async()), _version_of(reply.meta))

    # ---------------------------------------------------------- conditional writes

    async def put_if(self, key: str, value: Bytes, expected: Version | None) -> Version | None:
        """Store an object if it has the expected version, or is missing; return the new version.

        Raises `ReplacedMeanwhileError` if it has another version or the write was refused twice,
        and the client's error if the server fails repeatedly.
        """
        with self._indexes.changing(key):
            took_quotes, write_id = self._takes_quotes, uuid.uuid4().hex
            older = "" if expected is None else expected.write_ids or ""
            write_ids = (write_id + older)[:_WRITE_IDS_NBYTES]
            pauses = backoff(_LONGEST_PAUSE_S, _LONGEST_PAUSE_S, math.inf, is_random=True)
            for n_left in reversed(range(_N_PUTS)):
                failure: Exception | None = None
                try:
                    return await self._put(key, value, expected, write_ids)
                except FileNotFoundError:
                    if expected is None:  # it names no object: the bucket is missing
                        raise
                except _REFUSALS:
                    pass
                except (NotImplementedError, GenericError) as error:
                    failure = error
                    self._check_that_conditions_are_known(key, error)
                found = await self._read_back(key, failure)
                stored = found.version if isinstance(found.version, Version) else None
                ids = None if stored is None else stored.write_ids
                if write_id in (ids or ""):
                    return stored
                if ids is None and failure is not None and found.value == memoryview(value):
                    return stored
                is_expected = found.value is None if expected is None else stored == expected
                if not is_expected:
                    self._in_vain.pop(key, None)
                    break
                if failure is not None:
                    if not n_left:
                        raise failure
                    await asyncio.sleep(next(pauses))
                elif expected is not None and self._takes_quotes == took_quotes:
                    self._takes_quotes = not took_quotes
                else:
                    self._takes_quotes = took_quotes
                    self._refused_in_vain(key, expected)
                    break
            self._remember(key, None)
            self._remember(_array_of(key), None)
            raise base.ReplacedMeanwhileError(key)

    def _refused_in_vain(self, key: str, expected: Version | None) -> None:
        """Note a refusal though no other client has written; raise an error after many (rule 9)."""
        now, times = time.monotonic(), self._in_vain.setdefault(key, [])
        if times and now - times[-1] > 2 * _LONGEST_REFUSAL_S:
            times.clear()
        times.append(now)
        is_long = len(times) > _FEW_REFUSALS and now - times[0] > _LONGEST_REFUSAL_S
        if expected is not None and is_long:
            del self._in_vain[key]
            raise UnsupportedError(
                f"{self.store} refuses writes on the condition of the ETag that it gives, "
                f"{expected.etag}: a proxy may have changed it. Connect to the server directly. "
                f"{key!r} was not written"
            )

    def _known(self, key: str) -> KnownVersion | None:
        known: KnownVersion | None = index_cache.get((KnownVersion, self.scope(key)), None)
        return known

    def _remember(self, key: str, known: KnownVersion | None) -> None:
        scope = KnownVersion, self.scope(key)
        if known is None:
            index_cache.forget(scope)
        else:
            index_cache.put(scope, known)

    async def version_to_replace(self, key: str, *, may_guess: bool) -> Version | None:
        """Return the version that a write of a whole object expects; ``None``: no object.

        A wrong guess is refused, and the update runs again.
        """
        known = self._known(key) or (self._known(_array_of(key)) if may_guess else None)
        if known is not None:
            return known.version
        try:
            found = await _head(self.store.store, key)
        except PermissionDeniedError:  # S3 forbids missing objects to those who may not list
            return None
        except FileNotFoundError:
            self._remember(_array_of(key), KnownVersion(None))  # perhaps the array is new
            return None
        return self.strong(key, found.version)

    def strong(self, key: str, version: object) -> Version:
        """Return a version that may be a condition; otherwise the driver runs the update again,
        without conditions."""
        if not isinstance(version, Version) or not version.is_strong:
            why = "has no ETags" if version is None else "has weak ETags only"
            self._give_up_and_repeat(key, why)
        return version

    def _check_that_conditions_are_known(self, key: str, error: Exception) -> None:
        # Not 400: S3 also replies so to an upload that was slow.
        if isinstance(error, NotImplementedError) or (
            not self._is_probed and re.search(r"\b501 Not\b", str(error))
        ):
            self._give_up_and_repeat(key, "takes no conditions of writes")

    async def _read_back(self, key: str, failure: Exception | None) -> Found:
        """Return the version of an object after a write that was refused, or failed; and its bytes,
        if they decide. If this fails, too, raise the failure of the write."""
        try:
            found = await _head(self.store.store, key)
            version: Any = found.version
            if failure is None or (version is not None and version.write_ids is not None):
                return found
            found = await self._get_once(key, None)
        except FileNotFoundError:
            return Found(None, None)
        except Exception as error:
            raise failure or error from None
        nbytes = len(found.value or b"")
        if found.value is not None and found.size != nbytes:
            raise CorruptValueError(
                f"it has {found.size} bytes, and reading it gave {nbytes}", key=key
            )
        return found

    async def _put(
        self, key: str, value: Bytes, expected: Version | None, write_ids: str
    ) -> Version | None:
        mode: Any = "create"
        if expected is not None:
            given = expected.etag or ""
            mode = {"e_tag": given if self._takes_quotes else given.strip('"')}
            if expected.generation is not None:
                mode["version"] = expected.generation
        reply = await self._put_with(mode, key, value, write_ids)
        if expected is not None and not self._is_probed:  # a new shard costs one request only
            self._is_probed = True
            # Any other ETag is to be refused, and nothing stored (rule 8).
            never = {"e_tag": f'"{0:032}"'} | ({"version": "0"} if "version" in mode else {})
            try:
                await self._put_with(never, key, value, write_ids)
                self.give_up_conditions("ignores the conditions of writes (If-Match)")
            except _REFUSALS:
                pass
            except GenericError:  # no reply: the next update asks again, up to three times
                self._n_lost_probes += 1
                self._is_probed = self._n_lost_probes > 2
        self._in_vain.pop(key, None)
        stored = None
        if reply["e_tag"] is not None:
            stored = Version(reply["e_tag"], write_ids=write_ids, generation=reply.get("version"))
        self._remember(key, None if stored is None else KnownVersion(stored))
        return stored

    async def _put_with(self, mode: Any, key: str, value: Bytes, write_ids: str) -> Any:
        # In one part: multi-part uploads take no conditions.
        named: Any = {_WRITE_ID: write_ids}
        return await obstore.put_async(
            self.store.store, key, value, mode=mode, use_multipart=False, attributes=named
        )

    def _give_up_and_repeat(self, key: str, why: str) -> NoReturn:
        """Let the driver run the update again, without conditions."""
        self.give_up_conditions(why)
        raise base.ReplacedMeanwhileError(key)

    def give_up_conditions(self, why: str) -> None:
        """Let later updates write without conditions, after a warning."""
        self._has_conditions = False
        warn(
            f"{self.store} {why}: let each shard have one writer at a time, or updates are lost",
            stacklevel=2,
        )


class _Optimistic(base.Backend):
    """View for one update, which remembers the versions that it has read (rules 1 and 2)."""

    def __init__(self, backend: ObstoreBackend) -> None:
        self._backend = backend
        self._expected: dict[str, Version | None] = {}
        self._values: dict[str, Any] = {}
        """Whole values that were read, unless they are large: a shard without entries is not."""

    def scope(self, key: str) -> Hashable:
        return self._backend.scope(key)

    async def _reply(self, request: Request) -> Any:
        if isinstance(request, requests.Delete):
            key, placeholder = request
            if placeholder is not None:
                await self._expect_what_is_there(key, may_guess=False)
            if self._expected.get(key, True) is None:
                return None  # another writer may have stored one since
            if placeholder is not None:
                request = requests.Set(key, placeholder())
                if request.value == self._values.get(key):
                    return None
        elif isinstance(request, requests.Set) and len(request.value) <= _ONE_PART_NBYTES:
            await self._expect_what_is_there(request.key, may_guess=True)
        if isinstance(request, requests.Set) and request.key in self._expected:
            key, value = request
            async with self._backend.slots.here():
                self._expected[key] = await self._backend.put_if(key, value, self._expected[key])
            return None
        (reply,) = await self._backend.perform_async([request])
        match request:
            case requests.Get(key, byte_range):
                self._expect(key, reply, is_there=reply.value is not None)
                if byte_range is None and len(reply.value or b"") <= _ONE_PART_NBYTES:
                    self._values[key] = reply.value
            case requests.GetIndex() if not reply.is_unverified:  # else the flow asks again
                is_there = reply.decoded is not None or reply.damage is not None
                self._expect(request.key, reply, is_there=is_there)
            case requests.Exists(key) if not reply:
                self._expected.setdefault(key, None)
        return reply

    async def _expect_what_is_there(self, key: str, *, may_guess: bool) -> None:
        if key not in self._expected:
            async with self._backend.slots.here():
                version = await self._backend.version_to_replace(key, may_guess=may_guess)
            self._expected[key] = version

    def _expect(self, key: str, found: Found | FoundIndex, *, is_there: bool) -> None:
        version = self._backend.strong(key, found.version) if is_there else None
        # The first version may be back when the write comes, but not what was read in between.
        if key in self._expected and self._expected[key] != version:
            raise base.ReplacedMeanwhileError(key)
        self._expected[key] = version


async def _head(client: Any, key: str) -> Found:
    """Return version and size of an object, without its bytes."""
    reply = await obstore.get_async(client, key, options={"head": True})
    version = _version_of(reply.meta, reply.attributes.get(_WRITE_ID))
    return Found(memoryview(b""), version, reply.meta["size"])


def _version_of(meta: Any, write_ids: str | None = None) -> Version | None:
    if meta["e_tag"] is None:
        return None
    modified = meta["last_modified"]
    modified_s = None if modified is None else int(modified.timestamp())
    return Version(meta["e_tag"], meta["size"], modified_s, write_ids, meta.get("version"))


def _array_of(key: str) -> str:
    """Return the key of a shard without its coordinates, or something above it."""
    while key and any(map(str.isdigit, key.rpartition("/")[2])):
        key = key.rpartition("/")[0]
    return key + "/"


def _range_of(byte_range: ByteRange) -> Any:
    match byte_range:
        case Range(start, stop):
            return (start, stop)
        case StartFrom(start):
            return {"offset": start}
        case Suffix(nbytes):
            return {"suffix": nbytes}

"""The stack of storage transformers between one array and the base store.

::

    array ── requests for chunk keys ──▶ transformer 1 ──▶ … ──▶ transformer n ──▶ base store
                                         nearest to the array

A transformer is a flow: it replies to requests for keys above it by requests for keys below it. It
waits for nothing itself, and works under both drivers.

Source: sharding storage transformer draft, "Storage transformer implementation"; Zarr v3
draft of 2022, "Storage transformers".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import crc32c as _crc32c

from zarr_shardstore.errors import CorruptValueError, SpecError, UnsupportedError
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.ranges import resolve_range
from zarr_shardstore.shards.index_reads import found_index, index_get
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.requests import (
    Delete,
    Exists,
    Flow,
    Found,
    Get,
    GetIndex,
    GetSize,
    Modify,
    Request,
    Set,
    SetIfNotExists,
    SetPartial,
    UpdateShard,
    relay,
)
from zarr_shardstore.shards.updates import apply_pieces

Bytes: TypeAlias = bytes | memoryview
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArrayContext:
    """The array that a transformer is made for.

    Parameters
    ----------
    path : str
        Path of the array, ``""`` for the root.
    prefix : str
        Prefix of each chunk key: ``""``, or it ends with ``/``.
    encoding : ChunkKeyEncoding
        Spelling of coordinates in chunk keys.
    grid_shape : tuple of int
        Number of chunks along each dimension.
    document : mapping
        Metadata document as readers see it.
    reading : ReadOptions
        Options of reads.
    index_key : str, optional
        Key of the consolidated index of the array.
    chunk_nbytes : int, optional
        Size of a decoded chunk in bytes, if the data type tells.
    """

    path: str
    prefix: str
    encoding: ChunkKeyEncoding
    grid_shape: Coords
    document: Mapping[str, Any]
    reading: ReadOptions
    index_key: str | None = None
    chunk_nbytes: int | None = None


class StorageTransformer(Protocol):
    """One transformer of one array.

    The keys above and below are chunk keys of the array, as its metadata spells them. A
    transformer may put several values above into one below, as sharding does.

    Thread safety: it has no state, so any thread and any task may use it.
    """

    def perform(self, requests: Sequence[Request]) -> Flow[list[Any]]:
        """Reply to requests for keys above, in order, by requests for keys below.

        The requests are `Get`, `Exists`, `GetSize`, `Set`, `SetIfNotExists`, `SetPartial`,
        `Modify` and `Delete`; each has one key. A yielded list may have any of them, and gets
        one reply for each, as `zarr_shardstore.shards.requests` says.
        """

    def keys_above(self, keys: Sequence[str]) -> Flow[list[tuple[str, int | None]]]:
        """Return the keys of the values in objects below, with sizes where they are known."""


Stack: TypeAlias = "tuple[StorageTransformer, ...]"
"""Transformers of one array, nearest to the array first."""


class ValueTransformer(ABC):
    """A transformer that keeps keys and changes values, each as a whole.

    Cost: a read of a range, and of the size, reads the whole value.
    """

    @abstractmethod
    def encode(self, key: str, value: Bytes, /) -> Bytes:
        """Return the value to store."""

    @abstractmethod
    def decode(self, key: str, stored: Bytes, /) -> Bytes:
        """Return the value that was encoded. Raise an error that names `key` if it is damaged."""

    def perform(self, requests: Sequence[Request]) -> Flow[list[Any]]:
        """Relay the requests; encode and decode their values."""
        replies = yield [self._request_below(request) for request in requests]
        return [self._reply_above(*pair) for pair in zip(requests, replies, strict=True)]

    def keys_above(self, keys: Sequence[str]) -> Flow[list[tuple[str, int | None]]]:
        """Return the same keys, without sizes."""
        return [(key, None) for key in keys]
        yield  # a flow without requests

    def _request_below(self, request: Request) -> Request:
        match request:
            case Get(key) | GetSize(key):
                return Get(key)
            case Set(key, value):
                return Set(key, self.encode(key, value))
            case SetIfNotExists(key, value):
                return SetIfNotExists(key, self.encode(key, value))
            case SetPartial(key, pieces):
                return self._modify(key, lambda old: apply_pieces(key, old, pieces))
            case Modify(key, change):
                return self._modify(key, change)
            case Exists() | Delete():
                return request
        raise TypeError(f"a transformer does not perform {request!r}")

    def _modify(self, key: str, change: Any) -> Modify:
        def changed(stored: Bytes | None) -> Bytes:
            old = None if stored is None else self.decode(key, stored)
            return self.encode(key, change(old))

        return Modify(key, changed)

    def _reply_above(self, request: Request, reply: Any) -> Any:
        if not isinstance(request, Get | GetSize):
            return reply
        found: Found = reply
        value = None
        if found.value is not None:
            value = memoryview(self.decode(request.key, found.value))
        if isinstance(request, GetSize):
            return None if value is None else len(value)
        if value is None:
            return found
        start, stop = resolve_range(request.byte_range, len(value))
        return Found(value[start:stop], found.version, len(value))


@dataclass(frozen=True, slots=True)
class ReadOnlyTransformer:
    """A transformer that changes nothing and refuses writes to the array at `path`."""

    path: str
    passed_over: tuple[str, ...]
    """Names of unknown transformers of the array. A write without them may contradict their
    data."""

    def perform(self, requests: Sequence[Request]) -> Flow[list[Any]]:
        """Relay reads; raise `UnsupportedError` for any other request."""
        for request in requests:
            if not isinstance(request, Get | Exists | GetSize):
                names = ", ".join(map(repr, self.passed_over))
                raise UnsupportedError(
                    f"the array {self.path!r} is read-only, because the storage transformers "
                    f"{names} are not known: install the packages that provide them, to write"
                )
        return (yield [*requests])

    def keys_above(self, keys: Sequence[str]) -> Flow[list[tuple[str, int | None]]]:
        """Return the same keys, without sizes."""
        return [(key, None) for key in keys]
        yield  # a flow without requests


def handle(stack: Stack, requests: Sequence[Request]) -> Flow[list[Any]]:
    """Reply to requests for keys above a stack by requests to the base store."""
    if not stack:
        return (yield from relay(requests))

    def perform(is_update: bool, part: list[Request]) -> Flow[list[Any]]:
        if not is_update:  # transformers below a sharding know bytes only
            below = [index_get(r) if isinstance(r, GetIndex) else r for r in part]
            replies = yield from run_above(stack[1:], stack[0].perform(below))
            return [
                found_index(request, reply) if isinstance(request, GetIndex) else reply
                for request, reply in zip(part, replies, strict=True)
            ]
        # The driver runs the commit of a shard later, above the stack that the shard lies on.
        return (yield [replace(r, below=stack) for r in part if isinstance(r, UpdateShard)])

    return (yield from by_kind(requests, [isinstance(r, UpdateShard) for r in requests], perform))


def run_above(stack: Stack, flow: Flow[Any]) -> Flow[Any]:
    """Run a flow above a stack, which replies to its requests."""
    try:
        batch = next(flow)
        while True:
            try:
                replies = yield from handle(stack, batch)
            except Exception as error:
                batch = flow.throw(error)
            else:
                batch = flow.send(replies)
    except StopIteration as stop:
        return stop.value
    finally:
        flow.close()


def keys_above(stack: Stack, keys: Sequence[str]) -> Flow[list[tuple[str, int | None]]]:
    """Return the keys above a stack of the values in base objects, with known sizes."""
    sized: list[tuple[str, int | None]] = [(key, None) for key in keys]
    for n in reversed(range(len(stack))):
        flow = stack[n].keys_above([key for key, _ in sized])
        sized = yield from run_above(stack[n + 1 :], flow)
    return sized


def gather(flows: Sequence[Flow[Any]]) -> Flow[list[Any]]:
    """Run flows in shared rounds: their requests of one round are one list. Return their results.

    If a request fails, each flow of that round gets the error, and may continue; all are then run
    to their end. The first error that is not that of the request is raised, or else the first. If
    a flow fails for another reason, the others are closed.
    """
    if len(flows) == 1:
        return [(yield from flows[0])]
    results: list[Any] = [None] * len(flows)
    batches: dict[int, list[Request]] = {}
    failures: list[Exception] = []
    told: list[Exception] = []

    def advance(i: int, step: Callable[[], list[Request]]) -> None:
        try:
            batches[i] = step()
        except StopIteration as stop:
            results[i] = stop.value
        except Exception as error:
            failures.append(error)

    try:
        for i, flow in enumerate(flows):
            advance(i, partial(next, flow))
        while batches and (told or not failures):
            round_of, batches = batches, {}
            try:
                replies = yield [request for batch in round_of.values() for request in batch]
            except Exception as error:
                told.append(error)
                for i in round_of:
                    advance(i, partial(flows[i].throw, error))
            else:
                for i, batch in round_of.items():
                    advance(i, partial(flows[i].send, replies[: len(batch)]))
                    replies = replies[len(batch) :]
        if failures:
            raise next((f for f in failures if f not in told), failures[0])
    finally:
        for flow in flows:
            flow.close()
    return results


def by_kind(
    requests: Sequence[T],
    kinds: Sequence[Any],
    flow_of: Callable[[Any, list[T]], Flow[list[Any]]],
) -> Flow[list[Any]]:
    """Run a flow for the requests of each kind, as `gather`; return the replies in order.

    Requests of the kind ``None`` get the reply ``None``.
    """
    positions: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        if kind is not None:
            positions.setdefault(kind, []).append(i)
    flows = [flow_of(kind, [requests[i] for i in at]) for kind, at in positions.items()]
    replies: list[Any] = [None] * len(requests)
    for at, found in zip(positions.values(), (yield from gather(flows)), strict=True):
        for i, reply in zip(at, found, strict=True):
            replies[i] = reply
    return replies


# ------------------------------------------------------------------------ crc32c

_CHECKSUM_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Crc32cTransformer(ValueTransformer):
    """The transformer ``crc32c``: a checksum behind each value, which each read checks.

    ::

        ├── value ──┤ crc32c of the value, u32le ┤

    Above a sharding it protects each chunk; below it, each shard, which is then read whole.

    Source: zarr-specs#134, the discussion of checksums; RFC 3720, "CRC/Checksums" (crc32c).
    """

    def encode(self, key: str, value: bytes | memoryview) -> bytes:  # noqa: ARG002
        """Return the value and its checksum."""
        return b"".join([value, _crc32c.crc32c(value).to_bytes(_CHECKSUM_NBYTES, "little")])

    def decode(self, key: str, stored: bytes | memoryview) -> memoryview:
        """Return the value without its checksum, without a copy."""
        view = memoryview(stored)
        if len(view) < _CHECKSUM_NBYTES:
            raise CorruptValueError(f"{len(view)} bytes are too few for a checksum", key=key)
        value = view[:-_CHECKSUM_NBYTES]
        written = int.from_bytes(view[-_CHECKSUM_NBYTES:], "little")
        computed = _crc32c.crc32c(value)
        if written != computed:
            raise CorruptValueError(
                f"the checksum is {written:#010x}, the {len(value)} bytes before it give "
                f"{computed:#010x}",
                key=key,
            )
        return value


def crc32c(
    configuration: Mapping[str, Any],
    array: ArrayContext,  # noqa: ARG001 - each factory takes it
) -> Crc32cTransformer:
    """Make the transformer ``crc32c`` of metadata, which has no configuration."""
    if configuration:
        raise SpecError(f"the crc32c transformer has no configuration, got {dict(configuration)!r}")
    return Crc32cTransformer()

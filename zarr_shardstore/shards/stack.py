"""Storage transformers between one array and the base store: the stack, sharding, crc32c.

::

    array ── requests for chunk keys ──▶ transformer 1 ──▶ … ──▶ transformer n ──▶ base store
                                         nearest to the array

A transformer is a flow: it replies to requests for keys above it by requests for keys below it. So
it works under both drivers.

Source: sharding storage transformer draft, "Storage transformer implementation", "API
implementation"; Zarr v3 draft of 2022, "Storage transformers".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, get_args

from zarr_shardstore.errors import CorruptValueError, SpecError, UnsupportedError
from zarr_shardstore.format import checksum
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.layout import ArrayLayout, ChunkRef
from zarr_shardstore.format.ranges import column_of_ranges, resolve_range
from zarr_shardstore.format.shard import CHECKSUM_NBYTES, Bytes
from zarr_shardstore.shards.index_reads import found_index, index_get, read_indexes
from zarr_shardstore.shards.read import ReadOptions, read_entries
from zarr_shardstore.shards.requests import (
    Change,
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
    Update,
    UpdateShard,
    relay,
)
from zarr_shardstore.shards.shard_listing import ListedKeys
from zarr_shardstore.shards.updates import apply_pieces, new_value, shard_updates

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArrayContext:
    """The array that a transformer is made for."""

    path: str
    """Path of the array, ``""`` for the root."""
    prefix: str
    """Prefix of each chunk key: ``""``, or it ends with ``/``."""
    encoding: ChunkKeyEncoding
    grid_shape: Coords
    """Number of chunks along each dimension."""
    document: Mapping[str, Any]
    """Metadata document as readers see it."""
    reading: ReadOptions
    index_key: str | None = None
    """Key of the consolidated index of the array."""
    chunk_nbytes: int | None = None
    """Size of a decoded chunk in bytes; ``None``: not known."""


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
        """Return the keys of the values in objects below, with known sizes.

        By default the keys are the same.
        """
        return [(key, None) for key in keys]
        yield  # a flow without requests


Stack: TypeAlias = "tuple[StorageTransformer, ...]"
"""Transformers of one array, nearest to the array first."""


class ValueTransformer(StorageTransformer, ABC):
    """A transformer that keeps keys and changes values, each as a whole.

    Cost: a read of a range, and of the size, reads the whole value.
    """

    @abstractmethod
    def encode(self, key: str, value: Bytes, /) -> Bytes:
        """Return the value to store."""

    @abstractmethod
    def decode(self, key: str, stored: Bytes, /) -> Bytes:
        """Return the encoded value; raise an error that names `key` if it is damaged."""

    def perform(self, requests: Sequence[Request]) -> Flow[list[Any]]:
        """Relay the requests; encode and decode their values."""
        replies = yield [self._request_below(request) for request in requests]
        return [self._reply_above(*pair) for pair in zip(requests, replies, strict=True)]

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
            case Modify(key, change, placeholder, may_wait):
                below = self._encoded(key, placeholder)
                return self._modify(key, change)._replace(placeholder=below, may_wait=may_wait)
            case Delete(key, placeholder):
                return Delete(key, self._encoded(key, placeholder))
            case Exists():
                return request
        raise TypeError(f"a transformer does not perform {request!r}")

    def _encoded(
        self, key: str, placeholder: Callable[[], Bytes] | None
    ) -> Callable[[], Bytes] | None:
        return None if placeholder is None else lambda: self.encode(key, placeholder())

    def _modify(self, key: str, change: Change) -> Modify:
        def changed(stored: Bytes | None) -> Bytes | None:
            old = None if stored is None else self.decode(key, stored)
            new = change(old)
            if new is old:
                return stored
            return None if new is None else self.encode(key, new)

        return Modify(key, changed)

    def _reply_above(self, request: Request, reply: Any) -> Any:
        if not isinstance(request, Get | GetSize):
            return reply
        stored, version, *_ = reply
        value = None if stored is None else memoryview(self.decode(request.key, stored))
        return reply_of(request, value, version)


def reply_of(request: Get | GetSize | Exists, value: memoryview | None, version: object) -> Any:
    """Return the reply to a request for a value that is in memory; ``None`` is a missing one."""
    if isinstance(request, Exists):
        return value is not None
    nbytes = None if value is None else len(value)
    if isinstance(request, GetSize):
        return nbytes
    start, stop = resolve_range(request.byte_range, nbytes or 0)
    return Found(None if value is None else value[start:stop], version, nbytes)


class InCommit(StorageTransformer):
    """End of a stack below a shard that is being committed: these values have one writer."""

    def perform(self, requests: Sequence[Request]) -> Flow[list[Any]]:
        """Relay the requests; change a value by a read and a write."""
        batch = list(requests)
        for i, request in enumerate(requests):
            if isinstance(request, SetPartial | Modify):
                (found,) = yield [Get(request.key)]
                new = new_value(request, found.value)
                placeholder = request.placeholder if isinstance(request, Modify) else None
                gone = Delete(request.key, placeholder)
                batch[i] = gone if new is None else Set(request.key, new)
        return (yield batch)


@dataclass(frozen=True, slots=True)
class ReadOnlyTransformer(StorageTransformer):
    """A transformer that relays reads and refuses writes to the array at `path`."""

    path: str
    passed_over: tuple[str, ...]
    """Names of unknown transformers. A write without them may contradict their data."""

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


def ask_through(stack: Stack, requests: Sequence[Request]) -> Flow[list[Any]]:
    """Reply to requests for keys above a stack by requests to the base store."""
    if not stack:
        return (yield from relay(requests))
    if isinstance(stack[0], InCommit):
        return (yield from stack[0].perform(requests))

    def perform(is_update: bool, part: list[Request]) -> Flow[list[Any]]:
        if not is_update:  # below a sharding there are bytes only
            below = [index_get(r) if isinstance(r, GetIndex) else r for r in part]
            replies = yield from run_through(stack[1:], stack[0].perform(below))
            return [
                found_index(request, reply) if isinstance(request, GetIndex) else reply
                for request, reply in zip(part, replies, strict=True)
            ]
        # The driver runs the commit of a shard later, above the stack that the shard lies on.
        return (yield [r._replace(below=stack) for r in part if isinstance(r, UpdateShard)])

    return (
        yield from for_each_kind(requests, [isinstance(r, UpdateShard) for r in requests], perform)
    )


def run_through(stack: Stack, flow: Flow[Any]) -> Flow[Any]:
    """Run a flow above a stack, which replies to its requests."""
    return answered(flow, partial(ask_through, stack))


def answered(flow: Flow[T], ask: Callable[[list[Request]], Flow[list[Any]]]) -> Flow[T]:
    """Run a flow, to whose requests the flows of `ask` reply."""
    try:
        batch = next(flow)
        while True:
            try:
                replies = yield from ask(batch)
            except Exception as error:
                batch = flow.throw(error)
            else:
                batch = flow.send(replies)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        flow.close()


def keys_above(stack: Stack, keys: Sequence[str]) -> Flow[list[tuple[str, int | None]]]:
    """Return the keys above a stack of the values in base objects, with known sizes."""
    sized: list[tuple[str, int | None]] = [(key, None) for key in keys]
    for n in reversed(range(len(stack))):
        flow = stack[n].keys_above([key for key, _ in sized])
        sized = yield from run_through(stack[n + 1 :], flow)
    return sized


def in_shared_rounds(flows: Sequence[Flow[Any]]) -> Flow[list[Any]]:
    """Run flows in shared rounds: their requests of one round are one list. Return their results.

    If a request fails, each flow of that round gets the error, and may continue to its end. Other
    errors are raised first. If a flow fails otherwise, all are closed.
    """
    if len(flows) == 1:
        return [(yield from flows[0])]
    results: list[Any] = [None] * len(flows)
    batches: dict[int, list[Request]] = {}
    failures: list[Exception] = []
    thrown: list[Exception] = []

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
        while batches and (thrown or not failures):
            round_of, batches = batches, {}
            try:
                replies = yield [request for batch in round_of.values() for request in batch]
            except Exception as error:
                thrown.append(error)
                for i in round_of:
                    advance(i, partial(flows[i].throw, error))
            else:
                for i, batch in round_of.items():
                    advance(i, partial(flows[i].send, replies[: len(batch)]))
                    replies = replies[len(batch) :]
        if failures:
            raise next((f for f in failures if f not in thrown), failures[0])
    finally:
        for flow in flows:
            flow.close()
    return results


def for_each_kind(
    requests: Sequence[T],
    kinds: Sequence[Any],
    flow_of: Callable[[Any, list[T]], Flow[list[Any]]],
) -> Flow[list[Any]]:
    """Run a flow for each kind of requests, in shared rounds; requests of no kind get ``None``."""
    positions: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        if kind is not None:
            positions.setdefault(kind, []).append(i)
    flows = [flow_of(kind, [requests[i] for i in at]) for kind, at in positions.items()]
    replies: list[Any] = [None] * len(requests)
    for at, found in zip(positions.values(), (yield from in_shared_rounds(flows)), strict=True):
        for i, reply in zip(at, found, strict=True):
            replies[i] = reply
    return replies


# ---------------------------------------------------------------------- sharding

WriteStrategy: TypeAlias = Literal["rewrite", "append"]

Strategy: TypeAlias = Literal["auto", "rewrite", "append"]
"""The option of a store: ``"auto"`` is ``"append"`` if the base store can append."""

ChunkRequests: TypeAlias = Sequence[tuple[Any, ChunkRef]]
"""Requests for the values of chunks, and the chunks."""


def perform_on_chunks(pairs: ChunkRequests, reading: ReadOptions) -> Flow[list[Any]]:
    """Reply to requests for chunks, also of several arrays, in shared rounds.

    Cost: two rounds for reads, one for sizes, one `UpdateShard` for each shard that changes.
    """
    try:
        kinds = [_FLOWS[type(request)] for request, _ in pairs]
    except KeyError as error:
        raise TypeError(f"a transformer does not perform {error.args[0].__name__}") from None
    return (yield from for_each_kind(pairs, kinds, lambda flow, part: flow(part, reading)))


def _read_values(pairs: ChunkRequests, reading: ReadOptions) -> Flow[list[Found]]:
    ranges = column_of_ranges([request.byte_range for request, _ in pairs])
    values = yield from read_entries([chunk for _, chunk in pairs], reading, ranges)
    return [Found(value, None) for value in values]


def _read_sizes(pairs: ChunkRequests, _: ReadOptions) -> Flow[list[int | bool | None]]:
    """Reply to `GetSize` and `Exists`, from indexes alone."""
    shards = list({chunk.shard: None for _, chunk in pairs})
    indexes = dict(zip(shards, (yield from read_indexes(shards)), strict=True))
    replies: list[int | bool | None] = []
    for request, chunk in pairs:
        index = indexes[chunk.shard]
        entry = None if index is None else index.entry(chunk.entry_id)
        if isinstance(request, Exists):
            replies.append(entry is not None)
        else:
            replies.append(None if entry is None else entry[1])
    return replies


def _update(pairs: ChunkRequests, _: ReadOptions) -> Flow[list[None]]:
    yield shard_updates(pairs)
    return [None] * len(pairs)


_FLOWS: Mapping[type, Callable[[ChunkRequests, ReadOptions], Flow[list[Any]]]] = {
    Get: _read_values,
    GetSize: _read_sizes,
    Exists: _read_sizes,
    **dict.fromkeys(get_args(Update), _update),
}


@dataclass(frozen=True, slots=True)
class ShardingTransformer(StorageTransformer):
    """The transformer that packs the chunks of one array into shards."""

    layout: ArrayLayout
    reading: ReadOptions
    on_chunks: Callable[[ChunkRequests, ReadOptions], Flow[list[Any]]] = perform_on_chunks
    """Replies to requests for chunks, as `perform_on_chunks`."""

    def perform(self, requests: Sequence[Request]) -> Flow[list[Any]]:
        """Reply to requests for chunks; relay those for keys that are no chunk keys."""
        pairs = [(r, self.layout.chunk_of_key(r.key)) for r in requests]  # type: ignore[union-attr]

        def flow_of(is_chunk: bool, part: list[Any]) -> Flow[list[Any]]:
            if is_chunk:
                return (yield from self.on_chunks(part, self.reading))
            return (yield [request for request, _ in part])

        return (yield from for_each_kind(pairs, [c is not None for _, c in pairs], flow_of))

    def keys_above(self, keys: Sequence[str]) -> Flow[list[tuple[str, int | None]]]:
        """Return the keys of the chunks in shards, with their sizes; other keys as they are."""
        shards = {key: self.layout.shard_of_key(key) for key in keys}
        found = [shard for shard in shards.values() if shard is not None]
        indexes = zip(found, (yield from read_indexes(found)), strict=True)
        listed = ListedKeys("", [(key, None) for key, shard in shards.items() if shard is None])
        listed.shards = [(shard, index) for shard, index in indexes if index is not None]
        return list(listed.sizes())


def split_at_sharding(stack: Stack) -> tuple[ShardingTransformer, Stack] | None:
    """Return the sharding of a stack, and what lies below it; ``None`` if it has none."""
    if any(isinstance(transformer, ReadOnlyTransformer) for transformer in stack):
        return None
    for i, transformer in enumerate(stack):
        if isinstance(transformer, ShardingTransformer):
            return transformer, stack[i + 1 :]
    return None


# ------------------------------------------------------------------------ crc32c


@dataclass(frozen=True, slots=True)
class Crc32cTransformer(ValueTransformer):
    """The transformer ``crc32c``: a checksum after each value, which each read checks.

    ::

        ├── value ──┤ crc32c of the value, u32le ┤

    It protects each chunk above a sharding, or each shard below it, which is then read whole.

    Source: zarr-specs#134, the discussion of checksums; RFC 3720, "CRC/Checksums" (crc32c).
    """

    def encode(self, key: str, value: bytes | memoryview) -> bytes:  # noqa: ARG002
        """Return the value and its checksum."""
        return b"".join([value, checksum.crc32c(value).to_bytes(CHECKSUM_NBYTES, "little")])

    def decode(self, key: str, stored: bytes | memoryview) -> memoryview:
        """Return the value without its checksum, without a copy."""
        view = memoryview(stored)
        if len(view) < CHECKSUM_NBYTES:
            raise CorruptValueError(f"{len(view)} bytes are too few for a checksum", key=key)
        value = view[:-CHECKSUM_NBYTES]
        written = int.from_bytes(view[-CHECKSUM_NBYTES:], "little")
        computed = checksum.crc32c(value)
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

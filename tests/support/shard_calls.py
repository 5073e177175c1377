"""Operations on chunks: performed on a store, and on a dict that is what the store should be."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync

from tests.support.async_calls import set_partial_values
from tests.support.kit import Event
from zarr_shardstore import ShardingMapping, ShardingStore, SpecError

__all__ = [
    "CHUNKS_PER_SHARD",
    "DOCUMENTS",
    "SHARDS",
    "Call",
    "Compact",
    "Erase",
    "Exists",
    "GetSize",
    "Options",
    "Patch",
    "Program",
    "Read",
    "Set",
    "SetIfMissing",
    "State",
    "Update",
    "is_read",
    "open_store",
    "perform",
    "perform_blocking",
    "perform_on",
    "performed",
    "restricted",
    "run_program",
    "step",
    "value",
]

CHUNKS_PER_SHARD = 3

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def _array(chunk: int, codecs: Sequence[Any], transformers: Sequence[Any] = ()) -> bytes:
    """Metadata document of an array of 5 chunks, each of one byte as far as zarr is concerned."""
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [5],
        "data_type": "uint8",
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": codecs,
        "storage_transformers": transformers,
    }
    return json.dumps(document).encode()


_NATIVE = {
    "chunk_shape": [1],
    "codecs": [{"name": "bytes"}],
    "index_codecs": [_LITTLE, {"name": "crc32c"}],
}
_SHARDING = {"name": "sharding", "configuration": {"chunks_per_shard": [CHUNKS_PER_SHARD]}}
DOCUMENTS = {
    "z/zarr.json": _array(
        CHUNKS_PER_SHARD, [{"name": "sharding_indexed", "configuration": _NATIVE}]
    ),
    "t/zarr.json": _array(1, [{"name": "bytes"}], [{"name": "crc32c"}, _SHARDING]),
    "p/zarr.json": _array(1, [{"name": "bytes"}]),
    "q/zarr.json": _array(1, [{"name": "bytes"}], [{"name": "crc32c"}]),
}

SHARDS = {
    "inside": ("z/c/0", "z/c/1", "z/c/2"),
    "at the edge": ("z/c/3", "z/c/4"),
    "below a transformer": ("t/c/0", "t/c/1", "t/c/2"),
    "without checksum": ("data/root/a/c0", "data/root/a/c1", "data/root/a/c2"),
}
"""Keys of the chunks of each. The last has no metadata: `CHUNKS_PER_SHARD` declares it."""

PLAIN = {"unsharded": ("p/c/0",), "unsharded, below a transformer": ("q/c/0",)}
"""Chunks that are objects. Whole writes of them are not linearizable: a reader may see one twice,
around that of a part."""

Options: TypeAlias = Mapping[str, Any]
State: TypeAlias = "frozenset[tuple[str, bytes]]"
"""Keys and values."""

REFUSED = "refused"
"""Result of a `Patch` that raised `SpecError`, which is documented to write nothing."""


def value(number: int, nbytes: int) -> bytes:
    """One byte again and again, so that a mix of two values shows, and prints short."""
    return bytes([number]) * nbytes


@dataclass(frozen=True, slots=True)
class Set:
    """``set``; of several keys, as pipelines do."""

    items: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class SetIfMissing:
    """``set_if_not_exists``."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Patch:
    """``set_partial_values``, of chunks of one shard: all or none."""

    pieces: tuple[tuple[str, int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Update:
    """``update``, of chunks of one shard. Its result is what the last call of the function got."""

    keys: tuple[str, ...]
    number: int

    def new(self, old: Sequence[bytes | None]) -> list[bytes | None]:
        """What each becomes depends on all of them; some become missing."""
        rotated = [*old[1:], *old[:1]]
        new = [(value or b"")[-6:] + bytes([self.number]) for value in rotated]
        return [None if (i + self.number) % 5 == 0 else value for i, value in enumerate(new)]


@dataclass(frozen=True, slots=True)
class Erase:
    """``erase_values``."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """``get_partial_values``, each range a key, a start and a stop."""

    ranges: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Exists:
    key: str


@dataclass(frozen=True, slots=True)
class GetSize:
    key: str


@dataclass(frozen=True, slots=True)
class Compact:
    """``compact`` of the whole store, which changes no value."""


Call: TypeAlias = "Set | SetIfMissing | Patch | Update | Erase | Read | Exists | GetSize | Compact"
Program: TypeAlias = "Sequence[Call]"
"""What one client does, one after the other."""


# ------------------------------------------------------------------- the model


def is_read(call: Call) -> bool:
    return isinstance(call, Read | Exists | GetSize)


def step(state: State, call: Call) -> tuple[State, object]:
    """The sequential model: chunks are entries of a dict."""
    values = dict(state)
    match call:
        case Read(ranges):
            found = [(values.get(key), start, stop) for key, start, stop in ranges]
            return state, tuple(v if v is None else v[start:stop] for v, start, stop in found)
        case Exists(key):
            return state, key in values
        case GetSize(key):
            return state, len(values[key]) if key in values else None
        case Set(items):
            values.update(items)
        case SetIfMissing(key, value):
            values.setdefault(key, value)
        case Erase(keys):
            for key in keys:
                values.pop(key, None)
        case Update(keys):
            old_values = [values.get(key) for key in keys]
            for key, new in zip(keys, call.new(old_values), strict=True):
                if new is None:
                    values.pop(key, None)
                else:
                    values[key] = new
            return frozenset(values.items()), tuple(old_values)
        case Patch(pieces):
            for key, start, piece in pieces:
                old = values.get(key, b"")
                if not -len(old) <= start <= len(old):
                    return state, REFUSED
                tail = old[start + len(piece) :] if start >= 0 else b""
                values[key] = old[:start] + piece + tail
    return frozenset(values.items()), None


def restricted(event: Event[Call], keys: Collection[str]) -> Event[Call] | None:
    """The part of an event that is about the chunks of one shard; ``None`` if none is."""
    call, result = event.call, event.result
    match call:
        case Set(items):
            call = Set(tuple(item for item in items if item[0] in keys))
            is_empty = not call.items
        case Erase(all_keys):
            call = Erase(tuple(key for key in all_keys if key in keys))
            is_empty = not call.keys
        case Read(ranges):
            assert isinstance(result, tuple)
            pairs = [pair for pair in zip(ranges, result, strict=True) if pair[0][0] in keys]
            call, result = Read(tuple(r for r, _ in pairs)), tuple(v for _, v in pairs)
            is_empty = not pairs
        case Patch(pieces):
            is_empty = pieces[0][0] not in keys
        case Update(updated):
            is_empty = updated[0] not in keys
        case SetIfMissing(key) | Exists(key) | GetSize(key):
            is_empty = key not in keys
        case Compact():
            is_empty = True
    return None if is_empty else Event(event.client, call, event.invoked, event.responded, result)


# ------------------------------------------------------------------- the stores


def open_store(base: Any, options: Options) -> ShardingStore:
    return ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD, **options)


async def perform(store: ShardingStore, call: Call) -> object:
    """Perform a call by zarr's methods."""
    match call:
        case Set(((key, value),)):
            await store.set(key, cpu.Buffer.from_bytes(value))
        case Set(items):
            await store._set_or_erase((key, cpu.Buffer.from_bytes(value)) for key, value in items)
        case SetIfMissing(key, value):
            await store.set_if_not_exists(key, cpu.Buffer.from_bytes(value))
        case Patch(pieces):
            try:
                await set_partial_values(store, pieces)
            except SpecError:
                return REFUSED
        case Update(keys):
            last: list[Any] = []
            await store.update(keys, lambda old: call.new(_noted(last, old)))
            return last[-1]
        case Erase((key,)):
            await store.delete(key)
        case Erase(keys):
            await store._set_or_erase([(key, None) for key in keys])
        case Compact():
            await store.compact()
        case Read(ranges):
            requests = [(key, RangeByteRequest(start, stop)) for key, start, stop in ranges]
            found = await store.get_partial_values(default_buffer_prototype(), requests)
            return tuple(None if value is None else value.to_bytes() for value in found)
        case Exists(key):
            return await store.exists(key)
        case GetSize(key):
            try:
                return await store.getsize(key)
            except FileNotFoundError:
                return None
    return None


def perform_blocking(store: ShardingStore, call: Call) -> object:
    """Perform a call by the blocking methods, as far as there are any."""
    if isinstance(call, SetIfMissing | GetSize):
        return sync(perform(store, call))
    return perform_on(ShardingMapping(store), call)


def perform_on(mapping: Any, call: Call, refusal: type[Exception] = SpecError) -> object:
    """Perform a call on a `ShardingMapping`, whose package may be a copy with errors of its own."""
    match call:
        case Set(((key, value),)):
            mapping[key] = value
        case Set(items):
            mapping.update(items)
        case Patch(pieces):
            try:
                mapping.set_partial_values(pieces)
            except refusal:
                return REFUSED
        case Update(keys):
            last: list[Any] = []
            mapping.update_values(keys, lambda old: call.new(_noted(last, old)))
            return last[-1]
        case Erase(keys):
            mapping.erase_values(keys)
        case Read(ranges):
            parts = [(key, (start, stop - start)) for key, start, stop in ranges]
            return tuple(mapping.get_partial_values(parts))
        case Exists(key):
            return key in mapping
        case Compact():
            mapping.compact()
        case _:
            raise TypeError(call)
    return None


def _noted(last: list[Any], old: list[bytes | None]) -> list[bytes | None]:
    last.append(tuple(old))
    return old


def performed(client: str, call: Call, invoked: int, result: object) -> Event[Call]:
    """An event that ends now. The clock is one for all threads and processes of the machine."""
    return Event(client, call, invoked, time.monotonic_ns(), result)


def run_program(client: str, program: Program, do: Callable[[Call], object]) -> list[Event[Call]]:
    """Perform calls one after the other, and record when, and what came of it."""
    events = []
    for call in program:
        invoked = time.monotonic_ns()
        events.append(performed(client, call, invoked, do(call)))
    return events

"""Reads and writes of one array operation: its chunks, in units of whole shards.

::

    read:   get the values ──▶ decode in threads ──▶ put each part into the result
    write:  get the values of partial chunks ──▶ encode in threads ──▶ set, each shard once

A chunk that is written in part is encoded before its shard is locked. If another writer has changed
the chunk meanwhile, the commit encodes it again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, BufferPrototype, NDBuffer

from zarr_shardstore.io.buffers import own_bytes, to_buffer_of
from zarr_shardstore.io.concurrency import map_in_threads, run_within
from zarr_shardstore.shards.requests import Modify, swap
from zarr_shardstore.zarr_hooks import box_jobs
from zarr_shardstore.zarr_hooks.chunk_codec import (
    ChunkCodec,
    ChunkValues,
    PlainCodec,
    fill_value_of,
    is_empty,
)

Value: TypeAlias = bytes | memoryview
NewValue: TypeAlias = Buffer | bytes | Modify | None
Prototype: TypeAlias = BufferPrototype | None
Axes: TypeAlias = tuple[int, ...]
Batch: TypeAlias = Sequence[tuple[Any, ...]]
"""Parts as zarr passes them: path, spec, selections inside and outside, whether it is complete."""


class ChunkPart(NamedTuple):
    """Part of one chunk that an array operation reads or writes."""

    key: str
    spec: ArraySpec
    inside: Any
    """Selection in the chunk."""
    outside: Any
    """Selection in the value of the operation."""
    is_complete: bool
    """Whether the part has all elements of the chunk that lie in the array."""

    def chunk_to_write(
        self, value: NDBuffer, old: NDBuffer | None, drop_axes: Axes
    ) -> NDBuffer | None:
        """Return the whole chunk with this part of `value`, in memory of its own; ``None`` if the
        chunk must be missing."""
        spec, dtype = self.spec, self.spec.dtype.to_native_dtype()
        make = spec.prototype.nd_buffer
        part, inside = value, self.inside
        if value.shape != () and inside != ():
            part = value[self.outside]
        if old is not None:
            chunk = old.copy()
        elif self.is_complete and part.shape == spec.shape:
            chunk = make.empty(shape=spec.shape, dtype=dtype, order=spec.order)
            inside = ...  # also where a number selects the only element
        else:
            fill = fill_value_of(spec)
            chunk = make.create(shape=spec.shape, dtype=dtype, order=spec.order, fill_value=fill)
        if drop_axes and part is not value:
            axes = tuple(None if i in drop_axes else slice(None) for i in range(spec.ndim))
            part = part[axes]
        chunk[inside] = part
        return None if is_empty(chunk, spec) else chunk

    def put(self, chunk: ChunkValues | None, out: ChunkValues, drop_axes: Axes) -> None:
        """Put this part of a chunk, or of the fill value, into the result of a read."""
        if chunk is None:
            out[self.outside] = fill_value_of(self.spec)
            return
        part = chunk[self.inside]
        out[self.outside] = part.squeeze(axis=drop_axes) if drop_axes else part


@runtime_checkable
class TakesWholeOperations(Protocol):
    """Methods of the stores of this package, which zarr's wrappers around them lack."""

    async def _shard_ids(self, keys: Sequence[str]) -> Sequence[Hashable]: ...

    async def _set_or_erase(
        self, items: Iterable[tuple[str, NewValue]], prototype: Prototype = None
    ) -> None: ...

    async def _get_values(
        self, keys: Sequence[str], prototype: Prototype = None
    ) -> Sequence[Value | None]: ...


def statuses(are_stored: Iterable[bool]) -> tuple[Any, ...]:
    """Return the reply of a pipeline to a read: whether each chunk is stored."""
    return tuple([{"status": "present" if each else "missing"} for each in are_stored])


class ReadJob(NamedTuple):
    """Read of one array operation into `out`."""

    store: TakesWholeOperations
    codec: ChunkCodec
    plain: PlainCodec | None
    """Codec of chunks as numpy arrays, if `out` is one."""
    out: NDBuffer
    drop_axes: Axes
    is_present: dict[int, bool]
    """Whether a chunk is stored, by the position of its part in the operation."""

    async def run(self, positions: list[int], parts: list[ChunkPart]) -> None:
        """Read and decode one unit."""
        keys = [part.key for part in parts]
        values = await self.store._get_values(keys, parts[0].spec.prototype)
        found = zip(positions, values, strict=True)
        self.is_present.update((i, value is not None) for i, value in found)
        await map_in_threads(self._put, list(zip(parts, values, strict=True)), _nbytes(parts))

    def _put(self, items: Sequence[tuple[ChunkPart, Value | None]]) -> Sequence[None]:
        """Decode chunks, and put the parts into the result."""
        plain = self.plain
        target: Any = self.out if plain is None else self.out.as_ndarray_like()
        for part, value in items:
            chunk: ChunkValues | None = None
            if value is not None and plain is not None:
                chunk = plain.decode(value, part.spec.shape)
            elif value is not None:
                buffer = part.spec.prototype.buffer.from_bytes(value)
                chunk = self.codec.decode(buffer, part.spec)
            part.put(chunk, target, self.drop_axes)
        return [None] * len(items)


class WriteJob(NamedTuple):
    """Write of one array operation from `value`."""

    store: TakesWholeOperations
    codec: ChunkCodec
    value: NDBuffer
    drop_axes: Axes
    encoding: asyncio.Lock
    """Lets one unit be encoded at a time, while others are stored."""

    async def run(self, _: list[int], parts: list[ChunkPart]) -> None:
        """Encode and store one unit."""
        partial = [part for part in parts if not part.is_complete]
        prototype = parts[0].spec.prototype
        keys = [part.key for part in partial]
        found = iter(await self.store._get_values(keys, prototype) if partial else ())
        async with self.encoding:
            items = [(part, None if part.is_complete else next(found)) for part in parts]
            encoded = await map_in_threads(self._encode_all, items, _nbytes(parts))
        values = zip([part.key for part in parts], encoded, strict=True)
        await self.store._set_or_erase(values, prototype)

    def _encode_all(self, items: Sequence[tuple[ChunkPart, Value | None]]) -> list[NewValue]:
        """Return the new values of chunks, or the updates of the stored values."""
        return [self._encode(*item) for item in items]

    def _encode(self, part: ChunkPart, old: Value | None) -> NewValue:
        new = self._chunk_with(part, old)
        if part.is_complete:
            return new
        encoded = None if new is None else own_bytes(new)
        seen = None if old is None else own_bytes(old)

        def again(stored: Value | None) -> Value | None:
            chunk = self._chunk_with(part, stored)
            return None if chunk is None else own_bytes(chunk)

        def fill() -> bytes:
            return own_bytes(self.codec.encode(*empty_chunk(part.spec)) or b"")

        return swap(part.key, seen, encoded, again, fill)

    def _chunk_with(self, part: ChunkPart, old: Value | None) -> Buffer | bytes | None:
        """Return the encoded chunk with this part of the values in it."""
        before = to_buffer_of(old, part.spec.prototype)
        old_chunk = None if before is None else self.codec.decode(before, part.spec)
        chunk = part.chunk_to_write(self.value, old_chunk, self.drop_axes)
        return None if chunk is None else self.codec.encode(chunk, part.spec)


def empty_chunk(spec: ArraySpec) -> tuple[NDBuffer, ArraySpec]:
    """Return a chunk of fill values, and a spec by which sharding codecs store these."""
    make, dtype, fill = spec.prototype.nd_buffer, spec.dtype.to_native_dtype(), fill_value_of(spec)
    chunk = make.create(shape=spec.shape, dtype=dtype, order=spec.order, fill_value=fill)
    return chunk, replace(spec, config=replace(spec.config, write_empty_chunks=True))


def _nbytes(parts: Sequence[ChunkPart]) -> int:
    """Return the size of decoded chunks in bytes; a string counts as a pointer."""
    spec = parts[0].spec
    return len(parts) * math.prod(spec.shape) * spec.dtype.to_native_dtype().itemsize


async def run_in_units(job: ReadJob | WriteJob, batch: Batch) -> None:
    """Run a job for all parts at once, or for some whole shards at a time if they are large."""
    parts = [ChunkPart(path.path, *rest) for path, *rest in batch]
    unit_nbytes = box_jobs.READ_NBYTES if isinstance(job, ReadJob) else box_jobs.WRITE_NBYTES
    if _nbytes(parts) <= unit_nbytes:
        await job.run(list(range(len(parts))), parts)
        return
    ids = await job.store._shard_ids([part.key for part in parts])
    shards: dict[Hashable, list[int]] = {}
    for i, shard_id in enumerate(ids):
        shards.setdefault(shard_id, []).append(i)

    def nbytes_of(positions: list[int]) -> int:
        return _nbytes([parts[i] for i in positions])

    async def run_unit(of_shards: list[list[int]]) -> None:
        positions = [i for positions in of_shards for i in positions]
        await job.run(positions, [parts[i] for i in positions])

    units = box_jobs.units_of(shards.values(), nbytes_of, unit_nbytes)
    await run_within(box_jobs.MAX_NBYTES_AT_ONCE, units, run_unit)

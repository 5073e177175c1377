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
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, BufferPrototype, NDBuffer

from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.io.buffers import own_bytes, to_buffer_of
from zarr_shardstore.io.concurrency import map_in_threads, run_within
from zarr_shardstore.shards.requests import Modify, swap
from zarr_shardstore.zarr_hooks import box_jobs
from zarr_shardstore.zarr_hooks.box_jobs import Values
from zarr_shardstore.zarr_hooks.chunk_codec import ChunkCodec, ChunkValues, fill_value_of, is_empty

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

    async def _get_values(self, keys: Sequence[str], prototype: Prototype = None) -> Values: ...


def statuses(are_stored: Iterable[bool]) -> tuple[Any, ...]:
    """Return the reply of a pipeline to a read: whether each chunk is stored."""
    return tuple([{"status": "present" if each else "missing"} for each in are_stored])


async def read_parts(
    store: TakesWholeOperations, codec: ChunkCodec, batch: Batch, out: NDBuffer, drop_axes: Axes
) -> list[bool]:
    """Read and decode parts of chunks into `out`; return whether each chunk is stored."""
    are_stored = [False] * len(batch)
    array: Any = out.as_ndarray_like()
    plain = codec.plain(batch[0][1]) if isinstance(array, np.ndarray) else None

    def put(items: Sequence[tuple[ChunkPart, Bytes | None]]) -> Sequence[None]:
        for part, value in items:
            chunk: ChunkValues | None = None
            if value is not None and plain is not None:
                chunk = plain.decode(value, part.spec.shape)
            elif value is not None:
                buffer = part.spec.prototype.buffer.from_bytes(value)
                chunk = codec.decode(buffer, part.spec)
            part.put(chunk, out if plain is None else array, drop_axes)
        return [None] * len(items)

    async def read_unit(positions: list[int], parts: list[ChunkPart]) -> None:
        values = await store._get_values([part.key for part in parts], parts[0].spec.prototype)
        for i, value in zip(positions, values, strict=True):
            are_stored[i] = value is not None
        await map_in_threads(put, list(zip(parts, values, strict=True)), _nbytes(parts))

    await _run_in_units(store, batch, box_jobs.READ_NBYTES, read_unit)
    return are_stored


async def write_parts(
    store: TakesWholeOperations, codec: ChunkCodec, batch: Batch, value: NDBuffer, drop_axes: Axes
) -> None:
    """Encode and store the parts of chunks in `value`."""
    encoding = asyncio.Lock()  # of one unit, while others are stored

    def encoded_with(part: ChunkPart, old: Bytes | None) -> Buffer | bytes | None:
        """Return the encoded chunk with this part of the values in it."""
        before = to_buffer_of(old, part.spec.prototype)
        old_chunk = None if before is None else codec.decode(before, part.spec)
        chunk = part.chunk_to_write(value, old_chunk, drop_axes)
        return None if chunk is None else codec.encode(chunk, part.spec)

    def new_value(part: ChunkPart, old: Bytes | None) -> NewValue:
        new = encoded_with(part, old)
        if part.is_complete:
            return new
        encoded = None if new is None else own_bytes(new)
        seen = None if old is None else own_bytes(old)

        def again(stored: Bytes | None) -> Bytes | None:
            chunk = encoded_with(part, stored)
            return None if chunk is None else own_bytes(chunk)

        def fill() -> bytes:
            return own_bytes(codec.encode(*empty_chunk(part.spec)) or b"")

        return swap(part.key, seen, encoded, again, fill)

    def new_values(items: Sequence[tuple[ChunkPart, Bytes | None]]) -> list[NewValue]:
        return [new_value(*item) for item in items]

    async def write_unit(_: list[int], parts: list[ChunkPart]) -> None:
        partial = [part.key for part in parts if not part.is_complete]
        prototype = parts[0].spec.prototype
        found = iter(await store._get_values(partial, prototype) if partial else ())
        async with encoding:
            items = [(part, None if part.is_complete else next(found)) for part in parts]
            encoded = await map_in_threads(new_values, items, _nbytes(parts))
        values = zip([part.key for part in parts], encoded, strict=True)
        await store._set_or_erase(values, prototype)

    await _run_in_units(store, batch, box_jobs.WRITE_NBYTES, write_unit)


def empty_chunk(spec: ArraySpec) -> tuple[NDBuffer, ArraySpec]:
    """Return a chunk of fill values, and a spec by which sharding codecs store these."""
    make, dtype, fill = spec.prototype.nd_buffer, spec.dtype.to_native_dtype(), fill_value_of(spec)
    chunk = make.create(shape=spec.shape, dtype=dtype, order=spec.order, fill_value=fill)
    return chunk, replace(spec, config=replace(spec.config, write_empty_chunks=True))


def _nbytes(parts: Sequence[ChunkPart]) -> int:
    """Return the size of decoded chunks in bytes; a string counts as a pointer."""
    spec = parts[0].spec
    return len(parts) * math.prod(spec.shape) * spec.dtype.to_native_dtype().itemsize


async def _run_in_units(
    store: TakesWholeOperations,
    batch: Batch,
    unit_nbytes: int,
    run: Callable[[list[int], list[ChunkPart]], Coroutine[Any, Any, None]],
) -> None:
    """Run for all parts at once, or for some whole shards at a time if they are large."""
    parts = [ChunkPart(path.path, *rest) for path, *rest in batch]
    if _nbytes(parts) <= unit_nbytes:
        await run(list(range(len(parts))), parts)
        return
    ids = await store._shard_ids([part.key for part in parts])
    shards: dict[Hashable, list[int]] = {}
    for i, shard_id in enumerate(ids):
        shards.setdefault(shard_id, []).append(i)

    def nbytes_of(positions: list[int]) -> int:
        return _nbytes([parts[i] for i in positions])

    async def run_unit(of_shards: list[list[int]]) -> None:
        positions = [i for positions in of_shards for i in positions]
        await run(positions, [parts[i] for i in positions])

    units = box_jobs.units_of(shards.values(), nbytes_of, unit_nbytes)
    await run_within(box_jobs.MAX_NBYTES_AT_ONCE, units, run_unit)

"""Reads and writes of whole boxes of chunks, in units of whole shards.

::

    read:   get the values of shards ──▶ decode runs in threads ──▶ copy each run into the result
    write:  copy runs ──▶ encode them in threads ──▶ set, each shard once

A *run* is a box of neighbouring chunks of one shard. One strided copy moves it between the array
and a contiguous slab of chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from zarr.core.array_spec import ArraySpec

from zarr_shardstore.format.box_grid import Box
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.io.buffers import own_bytes
from zarr_shardstore.io.concurrency import (
    bulk_pool,
    codec_pool,
    in_threads,
    map_in_threads,
    n_threads,
    run_within,
)
from zarr_shardstore.shards.read import ShardReads
from zarr_shardstore.shards.updates import EntryBlock
from zarr_shardstore.zarr_hooks.box import Array, ArrayBox, ShardBox, blocks_of, cut, n_chunks_of
from zarr_shardstore.zarr_hooks.chunk_codec import ChunkCodec, PlainCodec, fill_value_of, is_empty

T = TypeVar("T")

Values: TypeAlias = Sequence[Bytes | None]

MIB = 1024 * 1024

MAX_NBYTES_AT_ONCE = 64 * MIB
"""Decoded size of the shards of one operation in memory."""

WRITE_NBYTES = 16 * MIB
"""Decoded size of the shards in one write: others are encoded while these are stored."""

READ_NBYTES = 32 * MIB
"""Decoded size of the shards in one read over a network, where each takes two round trips."""

_LOCAL_READ_NBYTES = 4 * MIB
"""The same for local files: a round costs little, and others are decoded while these are read."""

_SHARDS_PER_THREAD = 4
"""If there are so many shards of local files, one thread does all of the work on a shard: its I/O
and its codecs. Otherwise several threads run the codecs of one shard."""

_MAX_SHARD_NBYTES = 32 * MIB
"""Decoded size of the largest of these shards. Each thread holds one in memory, encoded."""

_RUN_NBYTES = MIB
"""Decoded size of a run."""

_HOP_NBYTES = 256 * 1024
"""Decoded size of an operation on local files that one thread does faster than several."""

_JOINED_NBYTES = 32 * 1024
"""Decoded size of chunks from which on each is copied alone: less than the work on it."""


class SlabCodec(NamedTuple):
    """Codec of the runs of one array."""

    codec: ChunkCodec
    plain: PlainCodec | None
    spec: ArraySpec

    @classmethod
    def of(cls, codec: ChunkCodec, spec: ArraySpec) -> SlabCodec:
        return cls(codec, codec.plain(spec), spec)

    @property
    def chunk_nbytes(self) -> int:
        """Decoded size of a chunk in bytes; a string counts as a pointer."""
        return max(1, prod(self.spec.shape) * self.spec.dtype.to_native_dtype().itemsize)

    def nbytes_of(self, part: ShardBox) -> int:
        """Return the decoded size of the chunks of a shard."""
        return n_chunks_of(part.chunks) * self.chunk_nbytes

    def encode(self, slab: Array) -> Values:
        """Return the encoded chunks of a contiguous slab; ``None`` for those to be left out."""
        empty = self._empty(slab)
        encode: Callable[[Array], bytes | None] = self._encode_one
        if self.plain is not None and self.plain.compress is not None:
            encode = self.plain.compress
        return [None if i in empty else encode(chunk) for i, chunk in enumerate(slab)]

    def _encode_one(self, chunk: Any) -> bytes | None:
        buffer = self.spec.prototype.nd_buffer.from_ndarray_like(chunk)
        value = self.codec.encode(buffer, self.spec)
        return None if value is None else own_bytes(value)

    def _empty(self, slab: Array) -> set[int]:
        """Return the positions of the chunks with only fill values, if the array omits them."""
        spec, kind = self.spec, slab.dtype.kind
        if spec.config.write_empty_chunks:
            return set()
        if kind not in "biuf":
            return {i for i, chunk in enumerate(slab) if is_empty(chunk, spec)}
        rows, fill = slab.reshape(len(slab), -1), fill_value_of(spec)
        firsts = rows[:, 0]  # most chunks differ here
        found = np.flatnonzero((firsts == fill) | (firsts != firsts))  # or are NaN
        if kind == "f":
            return {i for i in found.tolist() if is_empty(slab[i], spec)}
        return {*found[(rows[found] == fill).all(axis=1)].tolist()}

    def decode(self, values: Values, out: Array) -> None:
        """Decode chunks into a view of the shape grid x chunk."""
        spec = self.spec
        n, shape = len(values), out.shape[-len(spec.shape) :]
        found = [value for value in values if value is not None]
        if len(found) < n:
            out[...] = fill_value_of(spec)
        if not found:
            return
        grid = out.shape[: -len(shape)]
        slab = None
        if self.plain is not None and self.chunk_nbytes < _JOINED_NBYTES:
            slab = self.plain.decode_all(found, shape)
        if slab is not None and len(found) == n:
            out[...] = slab.reshape(out.shape)
        elif slab is not None:
            out[np.reshape([value is not None for value in values], grid)] = slab
        else:
            for at, value in zip(np.ndindex(grid), values, strict=True):
                if value is not None:
                    out[at] = self.decode_one(value)

    def decode_one(self, value: Bytes) -> Array:
        """Return the chunk that bytes encode."""
        if self.plain is not None:
            return self.plain.decode(value, self.spec.shape)
        buffer = self.spec.prototype.buffer.from_bytes(value)
        return self.codec.decode(buffer, self.spec).as_numpy_array()


class BoxJob(NamedTuple):
    """Read or write of a box of chunks."""

    store: Any
    """A `WholeOperations`: a store that reads and writes entries of shards."""
    box: ArrayBox
    codec: SlabCodec
    values: Array
    """Array to fill, or to write, with an axis for each dimension."""

    @classmethod
    def of(cls, store: Any, box: ArrayBox, codec: SlabCodec, array: Array) -> BoxJob | None:
        """Return the job for an array of the shape of the box, or for one value to write."""
        array = np.asarray(array)  # no subclass, which may have a shape of its own
        if not array.shape and box.shape:
            array = np.broadcast_to(array, box.shape)
        if array.dtype.hasobject:  # their codecs take no array that is read-only
            array = np.require(array, requirements="W")
        fits = array.shape == box.shape
        return cls(store, box, codec, box.with_all_axes(array)) if fits else None

    async def read(self) -> npt.NDArray[np.bool_]:
        """Read the box; return whether each chunk is stored."""
        is_present = self.box.no_chunks()
        parts, read = list(self.box.shards()), self.store._blocking_reads()
        read_shards = partial(self._read_shards, read, is_present)
        if read is None or not await _in_threads(read_shards, parts, self.codec, codec_pool()):
            await self._read_units(parts, is_present, read is not None)
        return is_present

    async def _read_units(
        self, parts: Sequence[ShardBox], is_present: npt.NDArray[np.bool_], is_local: bool
    ) -> None:
        decoding = asyncio.Lock()  # of one unit, while others are read

        async def read_unit(some: list[ShardBox]) -> None:
            found = await self.store._get_groups(_reads_of(some), self.codec.spec.prototype)
            runs = list(self._encoded_runs(some, found, is_present))
            async with decoding:
                await map_in_threads(self._decode, runs, _nbytes(some, self.codec))

        nbytes = _LOCAL_READ_NBYTES if is_local else READ_NBYTES
        units = units_of(parts, self.codec.nbytes_of, nbytes)
        await run_within(MAX_NBYTES_AT_ONCE, units, read_unit)

    def read_here(self) -> npt.NDArray[np.bool_] | None:
        """Do as `read` in this thread; ``None`` if that would be slower or is not possible."""
        is_present, read = self.box.no_chunks(), self.store._blocking_reads()
        if read is None or is_present.size * self.codec.chunk_nbytes > _RUN_NBYTES:
            return None
        self._read_shards(read, is_present, list(self.box.shards()))
        return is_present

    def _read_shards(
        self, read: Any, is_present: npt.NDArray[np.bool_], parts: Sequence[ShardBox]
    ) -> Sequence[None]:
        found = read(_reads_of(parts))
        return self._decode(list(self._encoded_runs(parts, found, is_present)))

    def _encoded_runs(
        self, parts: Sequence[ShardBox], found: Sequence[Values], is_present: npt.NDArray[np.bool_]
    ) -> Iterator[tuple[Box, Values]]:
        limit = max(1, _RUN_NBYTES // self.codec.chunk_nbytes)
        for part, values in zip(parts, found, strict=True):
            place = is_present[self.box.slices_of(part.chunks)]
            are_all = None not in values
            mask = True if are_all else np.reshape([v is not None for v in values], place.shape)
            place[...] = mask
            left = iter(values)
            for box in cut(part.chunks, limit):
                yield box, [*islice(left, n_chunks_of(box))]

    def _decode(self, runs: Sequence[tuple[Box, Values]]) -> Sequence[None]:
        sides, dtype = self.box.chunk_shape, self.codec.spec.dtype.to_native_dtype()
        for chunks, values in runs:
            outside, inside, is_whole = self.box.place_of(chunks)
            if is_whole:
                self.codec.decode(values, blocks_of(self.values[outside], sides))
                continue
            shape = [(hi - lo) * side for (lo, hi), side in zip(chunks, sides, strict=True)]
            whole = np.empty(shape, dtype)
            self.codec.decode(values, blocks_of(whole, sides))
            self.values[outside] = whole[inside]
        return [None] * len(runs)

    async def write(self, is_complete: npt.NDArray[np.bool_]) -> list[int]:
        """Write the shards whose chunks are all complete; return the positions of the others.

        A caller that is cancelled waits for the shards under way. So nothing is stored later.
        """
        grid = is_complete.reshape([stop - start for start, stop in self.box.chunks])
        left = np.zeros(grid.shape, bool)
        parts: list[ShardBox] = []
        for part in self.box.shards():
            place = self.box.slices_of(part.chunks)
            if grid[place].all():
                parts.append(part)
            else:
                left[place] = True
        write = self.store._blocking_writes()

        def write_shards(some: Sequence[ShardBox]) -> Sequence[None]:
            assert write is not None
            write(self._encoded_blocks(some))
            return [None] * len(some)

        if write is None or not await _in_threads(write_shards, parts, self.codec, bulk_pool()):
            await self._write_units(parts)
        return np.flatnonzero(left).tolist()

    async def _write_units(self, parts: Sequence[ShardBox]) -> None:
        encoding = asyncio.Lock()  # of one unit, while others are stored

        async def write_unit(some: list[ShardBox]) -> None:
            async with encoding:
                nbytes = _nbytes(some, self.codec)
                encoded = await map_in_threads(self._encode, self._runs(some), nbytes)
            blocks = _blocks(some, encoded)
            await self.store._set_blocks(blocks, self.codec.spec.prototype)

        units = units_of(parts, self.codec.nbytes_of, WRITE_NBYTES)
        await run_within(MAX_NBYTES_AT_ONCE, units, write_unit)

    def write_here(self) -> bool:
        """Write all chunks in this thread; return false if that is slower or not possible."""
        parts, write = list(self.box.shards()), self.store._blocking_writes()
        if write is None or _nbytes(parts, self.codec) > _RUN_NBYTES:
            return False
        write(self._encoded_blocks(parts))
        return True

    def _encoded_blocks(self, parts: Sequence[ShardBox]) -> list[EntryBlock]:
        return _blocks(parts, self._encode(self._runs(parts)))

    def _runs(self, parts: Sequence[ShardBox]) -> list[Box]:
        limit = max(1, _RUN_NBYTES // self.codec.chunk_nbytes)
        return [box for part in parts for box in cut(part.chunks, limit)]

    def _encode(self, runs: Sequence[Box]) -> list[Values]:
        spec, plain, sides = self.codec.spec, self.codec.plain, self.box.chunk_shape
        is_plain = plain is not None and plain.compress is not None
        dtype = plain.dtype if plain is not None and is_plain else spec.dtype.to_native_dtype()
        encoded: list[Values] = []
        for chunks in runs:
            outside, inside, is_whole = self.box.place_of(chunks)
            part = self.values[outside]
            if not is_whole:
                shape = [(hi - lo) * side for (lo, hi), side in zip(chunks, sides, strict=True)]
                whole = np.full(shape, fill_value_of(spec), dtype)
                whole[inside] = part
                part = whole
            slab = np.ascontiguousarray(blocks_of(part, sides), dtype).reshape(-1, *sides)
            encoded.append(self.codec.encode(slab))
        return encoded


def _blocks(parts: Sequence[ShardBox], encoded: Iterable[Values]) -> list[EntryBlock]:
    left = chain.from_iterable(encoded)
    return [EntryBlock(p.shard, p.chunks, [*islice(left, n_chunks_of(p.chunks))]) for p in parts]


def _reads_of(parts: Sequence[ShardBox]) -> list[ShardReads]:
    return [ShardReads(part.shard, None, entry_ids=part.entry_ids().tolist()) for part in parts]


def _nbytes(parts: Iterable[ShardBox], codec: SlabCodec) -> int:
    return sum(map(codec.nbytes_of, parts))


async def _in_threads(
    work: Callable[[Sequence[ShardBox]], Sequence[None]],
    parts: Sequence[ShardBox],
    codec: SlabCodec,
    pool: ThreadPoolExecutor,
) -> bool:
    """Do the work of shards, each in one thread, two units at a time; return false, with nothing
    done, if several threads work on one shard faster."""
    if _nbytes(parts, codec) <= _HOP_NBYTES:
        await in_threads([partial(work, parts)], pool, lambda: None)
        return True
    n_at_least = _SHARDS_PER_THREAD * n_threads()
    shard_nbytes = prod(parts[0].shard.layout.spec.chunks_per_shard) * codec.chunk_nbytes
    if len(parts) < n_at_least or shard_nbytes > _MAX_SHARD_NBYTES:
        return False
    n = max(n_at_least, WRITE_NBYTES // shard_nbytes)
    units = ((1, parts[i : i + n]) for i in range(0, len(parts), n))

    async def run(some: Sequence[ShardBox]) -> None:
        await map_in_threads(work, some, _nbytes(some, codec), pool)

    await run_within(2, units, run)
    return True


def units_of(
    parts: Iterable[T], nbytes_of: Callable[[T], int], limit_nbytes: int
) -> Iterator[tuple[int, list[T]]]:
    """Yield the size of a unit and its parts, which have at most so many bytes, or are one."""
    unit: list[T] = []
    unit_size = 0
    for part in parts:
        size = nbytes_of(part)
        if unit and unit_size + size > limit_nbytes:
            yield unit_size, unit
            unit, unit_size = [], 0
        unit.append(part)
        unit_size += size
    if unit:
        yield unit_size, unit

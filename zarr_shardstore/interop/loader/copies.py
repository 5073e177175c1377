"""Copies of decoded chunks into batches, and the memory of batches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import EntryReader
from zarr_shardstore.interop.loader.order import Ints
from zarr_shardstore.interop.loader.plan import SMALL_NBYTES, Geometry, Unit

Array: TypeAlias = npt.NDArray[Any]
Buffers: TypeAlias = dict[int, Array]
"""Arrays of the batches by their numbers."""

PIECE_NBYTES = 1024 * 1024
"""Decoded size of the chunks that a thread decodes at a time."""

_MOST_KEPT = 32
"""Delivered batches whose memory may be used again."""

_MOST_BUFFERS = 1024
"""Buffers that one read of POSIX fills."""

PLAIN_KINDS = "biufcmMSUV"
"""Kinds of data types whose elements are plain bytes."""

_ALIGNMENT = 64
"""Alignment of batches in bytes: jax shares aligned memory only."""

_JOINED_NBYTES = 128 * 1024
"""Of chunks of at most this size, one call decompresses many, without the lock of the
interpreter."""


@dataclass(frozen=True)
class Source(Geometry):
    """One array of the samples."""

    entries: EntryReader
    dtype: np.dtype[Any]
    sample_shape: tuple[int, ...]
    """As `lengths`, without the sampled axis of rows."""

    def in_pieces(self) -> Source:
        """Return the array with the number of chunks that are one piece.

        Small chunks are decoded many at a time, others one by one while they are in the cache.
        """
        slabs = self.entries.chunks.slabs
        joins = slabs is None or slabs.plain is None or slabs.plain.decompress is not None
        joins = joins or self.row_nbytes < SMALL_NBYTES
        if self.chunk_nbytes > _JOINED_NBYTES or not joins:
            return self
        return replace(self, n_in_piece=max(1, PIECE_NBYTES // self.chunk_nbytes))

    def fill(self, unit: Unit, read: Callable[[], Sequence[Any]], buffers: Buffers) -> int:
        """Read the chunks of a unit into the buffers of batches. Return their encoded size."""
        targets = self._targets(unit, buffers) if self._takes_bytes else None
        if targets and self.entries.read_into(unit.reads, targets, self.chunk_nbytes):
            return unit.n_chunks * self.chunk_nbytes
        values, n = read(), self.n_in_piece
        chunks = np.concatenate([chunks for _, chunks in unit.reads])
        starts = range(0, len(values), n)
        pieces = (self._decoded(values[i : i + n], chunks[i : i + n]) for i in starts)
        copy_parts(self, pieces, unit, buffers)
        return sum(len(value) for value in values if value is not None)

    @cached_property
    def _takes_bytes(self) -> bool:
        """Whether the bytes of a chunk are those of its rows, which are long and not many."""
        slabs = self.entries.chunks.slabs
        plain = None if slabs is None else slabs.plain
        are_bytes = plain is not None and plain.decompress is None and plain.dtype == self.dtype
        are_whole = self.are_rows and self.lengths[1:] == self.chunk_shape[1:]
        is_short = self.row_nbytes < SMALL_NBYTES or self.chunk_shape[0] > _MOST_BUFFERS
        return are_bytes and are_whole and not is_short

    def _targets(self, unit: Unit, buffers: Buffers) -> list[list[Array]] | None:
        """Return the buffers that each chunk fills; ``None`` if samples share a row."""
        first = int(unit.copies[1][0])
        others = np.empty(self.chunk_shape, self.dtype)  # for rows that no sample has
        targets, ends = [list[Array]() for _ in range(unit.n_chunks)], [0] * unit.n_chunks
        order = np.lexsort((unit.copies[4], unit.copies[1]))
        columns = [each[order].tolist() for each in unit.copies[1:6]]
        for piece, number, slot, place, n in zip(*columns, strict=True):
            i = piece - first
            if place < ends[i]:
                return None
            targets[i] += [others[ends[i] : place], buffers[number][slot : slot + n]]
            ends[i] = place + n
        for target, end in zip(targets, ends, strict=True):
            target.append(others[end:])
        return [[each for each in target if len(each)] for target in targets]

    def _decoded(self, values: Sequence[Any], coords: Ints) -> Array:
        """Return chunks as one array; a single one without a copy if possible."""
        reader, slabs = self.entries.chunks, self.entries.chunks.slabs
        if slabs is not None and None not in values:
            with suppress(Exception):  # below, the error gets the name of its chunk
                if len(values) == 1:
                    return slabs.decode_one(values[0])[None]
                found = slabs.plain and slabs.plain.decode_all(values, self.chunk_shape)
                if found is not None:
                    return found
        chunks = np.empty((len(values), *self.chunk_shape), self.dtype)
        reader.decode_run(lambda i: reader.keys(coords[i : i + 1])[0], values, chunks)
        return chunks


def copy_parts(geometry: Geometry, pieces: Iterator[Array], unit: Unit, buffers: Buffers) -> None:
    """Copy the parts of a unit from pieces, which are arrays of chunks."""
    last, slots, places = -1, unit.parts.slots, unit.parts.places
    are_rows, inside = geometry.are_rows, (slice(None), *map(slice, geometry.lengths[1:]))
    arrays = unit.copies if are_rows else [*unit.copies[:5], *geometry.corners(unit.copies[5])]
    columns = map(np.ndarray.tolist, arrays)
    for first, piece, number, slot, place, this, that in zip(*columns, strict=True):
        if piece != last:
            chunks, last = next(pieces), piece
            if are_rows:
                chunks = chunks.reshape(-1, *geometry.chunk_shape[1:])[inside]
        if not are_rows:
            box = chunks[(place, *map(slice, *this))]
            buffers[number][(slot, *map(slice, *that))] = box
        elif that:
            buffers[number][slot : slot + this, 0] = chunks[place : place + this]
        else:
            some = slice(first, first + this)
            buffers[number][slots[some], 0] = chunks[places[some]]


class Memory:
    """Memory of batches, used again when the consumer has dropped a batch.

    Without it the first write to new memory makes batches of uncompressed chunks 1.4 times as
    slow. An array is free when only this object refers to it: all views refer to the array that
    owns the memory.
    """

    def __init__(
        self, allocate: Callable[[int], npt.NDArray[np.uint8]], n_arrays: int, n_batches: int
    ) -> None:
        self._allocate = allocate
        self._n_kept = n_arrays * max(2, min(_MOST_KEPT, n_batches))
        self._delivered: list[npt.NDArray[np.uint8]] = []

    def take(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialized array, aligned as every framework can share it."""
        if dtype.kind not in PLAIN_KINDS:
            return np.empty(shape, dtype)
        nbytes, kept = math.prod(shape) * dtype.itemsize, self._delivered
        for i in range(len(kept)):
            if kept[i].nbytes == nbytes + _ALIGNMENT and sys.getrefcount(kept[i]) <= 2:
                owner = kept.pop(i)  # the list and the argument were the only references
                break
        else:
            owner = self._allocate(nbytes + _ALIGNMENT)
        start = -owner.ctypes.data % _ALIGNMENT
        return owner[start : start + nbytes].view(dtype).reshape(shape)

    def give_back(self, array: Array) -> None:
        """Note the memory of a batch that the consumer gets now."""
        if array.base is not None and array.dtype.kind in PLAIN_KINDS:
            self._delivered = [*self._delivered, array.base][-self._n_kept :]

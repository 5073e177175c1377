"""Copies of decoded chunks into batches, and the memory of batches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import EntryReader
from zarr_shardstore.interop.loader.order import Ints
from zarr_shardstore.interop.loader.plan import Geometry, Unit

Array: TypeAlias = npt.NDArray[Any]
Buffers: TypeAlias = dict[int, Array]
"""Arrays of the batches by their numbers."""

PIECE_NBYTES = 1024 * 1024
"""Decoded size of the chunks that a thread decodes at a time."""

PLAIN_KINDS = "biufcmMSUV"
"""Kinds of data types whose elements are plain bytes."""

_ALIGNMENT = 64
"""Alignment of batches in bytes: jax shares aligned memory only."""

_SMALL_NBYTES, _JOINED_NBYTES = 8 * 1024, 128 * 1024
"""Smaller rows of the first size are copied many at a time. One call decompresses many chunks of
at most the second size, without the lock of the interpreter."""


@dataclass(frozen=True)
class Source(Geometry):
    """One array of the samples."""

    entries: EntryReader
    dtype: np.dtype[Any]
    sample_shape: tuple[int, ...]
    """As `lengths`, without the sampled axis of rows."""

    def copy(self, values: Sequence[Any], unit: Unit, buffers: Buffers) -> None:
        """Decode the chunks of a unit, and copy their parts into the buffers of batches.

        Small chunks are decoded many at a time, others one by one while they are in the cache.
        """
        slabs = self.entries.chunks.slabs
        joins = slabs is None or slabs.plain is None or slabs.plain.decompress is not None
        joins = joins or self.sample_nbytes < _SMALL_NBYTES
        n = max(1, PIECE_NBYTES // self.chunk_nbytes)
        n = n if joins and self.chunk_nbytes <= _JOINED_NBYTES else 1
        starts = range(0, len(values), n)
        pieces = (self._decoded(values[i : i + n], unit.chunks[i : i + n]) for i in starts)
        counts = np.diff(unit.bounds)
        at = divmod(np.repeat(np.arange(len(counts)), counts), n)
        (self._copy_rows if self.are_rows else self._copy_boxes)(pieces, *at, unit, buffers)

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

    def _copy_rows(
        self, pieces: Iterator[Array], piece_of: Ints, at: Ints, unit: Unit, buffers: Buffers
    ) -> None:
        """Copy rows: those that follow each other, or that are small, in one step."""
        columns = [
            unit.batches,
            piece_of,
            unit.slots,
            at * self.chunk_shape[0] + unit.offsets[:, 0],
        ]
        are_small = self.sample_nbytes < _SMALL_NBYTES
        if are_small:  # a stable order: rows of one batch keep theirs
            order = np.lexsort((unit.batches, piece_of))
            columns = [column[order] for column in columns]
        steps = [np.diff(column) for column in columns]
        is_new = (steps[0] != 0) | (steps[1] != 0)
        is_jump = (steps[2] != 1) | (steps[3] != 1)
        firsts = np.append(0, np.flatnonzero(is_new if are_small else is_new | is_jump) + 1)
        n_each = np.diff(firsts, append=len(piece_of))
        jumps = np.append(0, np.cumsum(is_jump))
        are_runs = jumps[firsts + n_each - 1] == jumps[firsts]
        runs = [*(column[firsts] for column in columns), firsts, n_each, are_runs]
        slots, places = columns[2:]
        inside, last = (slice(None), *map(slice, self.lengths[1:])), -1
        for number, piece, slot, place, first, n, is_run in zip(
            *map(np.ndarray.tolist, runs), strict=True
        ):
            if piece != last:
                rows, last = next(pieces).reshape(-1, *self.chunk_shape[1:])[inside], piece
            if is_run:
                buffers[number][slot : slot + n, 0] = rows[place : place + n]
            else:
                some = slice(first, first + n)
                buffers[number][slots[some], 0] = rows[places[some]]

    def _copy_boxes(
        self, pieces: Iterator[Array], piece_of: Ints, at: Ints, unit: Unit, buffers: Buffers
    ) -> None:
        offsets, last = unit.offsets, -1
        here = np.maximum(offsets, 0)
        end = np.minimum(offsets + np.array(self.lengths, np.int64), self.chunk_shape)
        columns = (piece_of, at, unit.batches, unit.slots, here, end, here - offsets, end - offsets)
        for piece, i, number, slot, a, b, c, d in zip(
            *map(np.ndarray.tolist, columns), strict=True
        ):
            if piece != last:
                chunks, last = next(pieces), piece
            box = chunks[(i, *map(slice, a, b))]
            buffers[number][(slot, *map(slice, c, d))] = box


class Memory:
    """Memory of batches, used again when the consumer has dropped a batch.

    Without it the first write to new memory makes batches of uncompressed chunks 1.4 times as
    slow. An array is free when only this object refers to it: all views refer to the array that
    owns the memory.
    """

    def __init__(self, allocate: Callable[[int], npt.NDArray[np.uint8]], n_kept: int) -> None:
        self._allocate, self._n_kept = allocate, n_kept
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

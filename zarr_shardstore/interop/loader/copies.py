"""Copies of decoded chunks into batches, and the memory of batches."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import EntryReader
from zarr_shardstore.interop.loader.order import Ints
from zarr_shardstore.interop.loader.plan import Geometry, Parts

Array: TypeAlias = npt.NDArray[Any]

_ROWS_OF_CHUNK = 4
"""Rows from which on those of one chunk are copied together."""

PLAIN_KINDS = "biufcmMSUV"
"""Kinds of data types whose elements are plain bytes."""

_ALIGNMENT = 64
"""Alignment of batches in bytes: jax shares aligned memory only."""

_COPIED_NBYTES, _JOINED_NBYTES = 8 * 1024, 128 * 1024
"""Chunks and rows of at least the first size are copied one by one. One call decompresses many
chunks of at most the second size, without the lock of the interpreter."""


class Source(NamedTuple):
    """One array of the samples."""

    entries: EntryReader
    geometry: Geometry
    dtype: np.dtype[Any]
    squeezes: bool
    """Whether samples lack the sampled axis: rows."""

    def decode(self, values: Sequence[Any], coords: Ints) -> Array | list[Array]:
        """Return chunks: many small ones as one array, others without a copy."""
        reader, geometry = self.entries.chunks, self.geometry
        slabs, nbytes = reader.slabs, geometry.chunk_nbytes
        if slabs is not None and None not in values and nbytes >= _COPIED_NBYTES:
            with suppress(Exception):  # below, the error gets the name of its chunk
                plain, joined = slabs.plain, None
                if nbytes <= _JOINED_NBYTES and plain is not None and plain.decompress is not None:
                    joined = plain.decode_all(values, geometry.chunk_shape)
                return [*map(slabs.decode_one, values)] if joined is None else joined
        chunks = np.empty((len(values), *geometry.chunk_shape), self.dtype)
        reader.decode_run(lambda i: reader.keys(coords[i : i + 1])[0], values, chunks)
        return chunks

    def copy_parts(
        self, chunks: Array | list[Array], parts: Parts, lo: int, hi: int, buffers: dict[int, Array]
    ) -> None:
        """Copy the parts of chunks `lo` to `hi` into the buffers of their batches."""
        geometry, some = self.geometry, slice(parts.bounds[lo], parts.bounds[hi])
        offsets, slots, batches = parts.offsets[some], parts.slots[some], parts.batches[some]
        chunk_of = np.repeat(np.arange(hi - lo), np.diff(parts.bounds[lo : hi + 1]))
        if geometry.are_rows and isinstance(chunks, np.ndarray):
            places = chunk_of * geometry.chunk_shape[0] + offsets[:, 0]
            self._copy_rows(chunks, places, batches, slots, buffers)
            return
        if geometry.are_rows and len(slots) > _ROWS_OF_CHUNK * len(chunks):
            bounds = parts.bounds[lo : hi + 1] - parts.bounds[lo]
            for chunk, first, stop in zip(chunks, bounds, bounds[1:], strict=False):
                own = slice(first, stop)
                self._copy_rows(chunk, offsets[own, 0], batches[own], slots[own], buffers)
            return
        lengths, sides = np.array(geometry.lengths), np.array(geometry.chunk_shape)
        here, end = np.maximum(offsets, 0), np.minimum(offsets + lengths, sides)
        there = here - offsets
        columns = (chunk_of, here, end, there, there + end - here, slots, batches)
        for i, a, b, c, d, slot, number in zip(*map(np.ndarray.tolist, columns), strict=True):
            buffers[number][(slot, *map(slice, c, d))] = chunks[i][tuple(map(slice, a, b))]

    def _copy_rows(
        self, chunks: Array, places: Ints, batches: Ints, slots: Ints, buffers: dict[int, Array]
    ) -> None:
        """Copy rows of one or more chunks to the slots of their samples."""
        geometry = self.geometry
        is_inside = (slice(None), slice(None), *map(slice, geometry.lengths[1:]))
        rows = chunks.reshape(-1, 1, *geometry.chunk_shape[1:])[is_inside]
        first, n = int(batches[0]), len(slots)
        steps = np.arange(n)
        are_runs = [(each - each[0] == steps).all() for each in (slots, places)]
        if all(are_runs) and (batches == first).all():  # rows in order
            at, start = int(slots[0]), int(places[0])
            buffers[first][at : at + n] = rows[start : start + n]
            return
        if geometry.sample_nbytes >= _COPIED_NBYTES:
            columns = (batches, slots, places)
            for number, slot, place in zip(*map(np.ndarray.tolist, columns), strict=True):
                buffers[number][slot] = rows[place]
            return
        for number, buffer in buffers.items():
            is_here = batches == number
            buffer[slots[is_here]] = rows[places[is_here]]


class Memory:
    """Memory of batches, used again when the consumer has dropped a batch.

    The first write to new memory takes half of the time of decoding. An array is free when the
    deque alone refers to it: all views refer to the array that owns the memory.
    """

    def __init__(self, make: Callable[[int], npt.NDArray[np.uint8]], n_kept: int) -> None:
        self._make = make
        self._delivered: deque[npt.NDArray[np.uint8]] = deque(maxlen=n_kept)

    def take(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialized array, aligned as every framework can share it."""
        if dtype.kind not in PLAIN_KINDS:
            return np.empty(shape, dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        for _ in range(len(self._delivered)):
            owner = self._delivered.popleft()
            if sys.getrefcount(owner) > 2:  # more than the variable and the argument
                self._delivered.append(owner)
            elif owner.nbytes == nbytes + _ALIGNMENT:
                break
        else:
            owner = self._make(nbytes + _ALIGNMENT)
        start = -owner.ctypes.data % _ALIGNMENT
        return owner[start : start + nbytes].view(dtype).reshape(shape)

    def give_back(self, array: Array) -> None:
        """Note the memory of a batch that the consumer gets now."""
        if array.base is not None and array.dtype.kind in PLAIN_KINDS:
            self._delivered.append(array.base)

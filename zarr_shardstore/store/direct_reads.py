"""Reads of chunks by their coordinates, without zarr's array operations.

An array operation of zarr takes 300 to 600 µs before it asks for the first chunk. A reader of
random chunks, such as a training loop, pays that for each of them. `ChunkReader` has what all reads
of one array share: its codecs, its grid and the spelling of its keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
from zarr import AsyncArray
from zarr.abc.store import Store
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import StorePath

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.io.concurrency import worker_pool
from zarr_shardstore.metadata.documents import Node
from zarr_shardstore.store.chunk_codec import ChunkCodec

_UNIT_NBYTES = 32 * 1024 * 1024
"""Decoded size of the chunks whose stored bytes are in memory at a time."""

_RUN_NBYTES = 1024 * 1024
"""Decoded size of the chunks that one thread decodes at a time."""


class ChunkReader:
    """Keys and codecs of the chunks of one array; for any thread."""

    def __init__(self, array: AsyncArray[Any]) -> None:
        metadata: Any = array.metadata
        is_v2 = metadata.zarr_format == 2
        sides = metadata.chunks if is_v2 else getattr(metadata.chunk_grid, "chunk_shape", None)
        if sides is None:
            raise UnsupportedError(
                f"the chunks of {array.path!r} differ in shape: read them through zarr"
            )
        self.chunk_shape: Coords = tuple(sides)
        self._path = array.path
        self.grid_shape = tuple(
            math.ceil(size / side) if side else 0
            for size, side in zip(metadata.shape, self.chunk_shape, strict=True)
        )
        self._key_of: Callable[[Coords], str] = metadata.encode_chunk_key
        self._dtype: np.dtype[Any] = metadata.dtype.to_native_dtype()
        fill = metadata.fill_value
        self._fill = metadata.dtype.default_scalar() if fill is None else fill
        self._spec = ArraySpec(
            shape=self.chunk_shape,
            dtype=metadata.dtype,
            fill_value=self._fill,
            config=replace(array.config, order=metadata.order) if is_v2 else array.config,
            prototype=default_buffer_prototype(),
        )
        self._pipeline = pipeline = cast(Any, array.codec_pipeline)
        self._codec = ChunkCodec.of(list(pipeline))
        self._plain = None if self._codec is None else self._codec.plain(self._spec)

    @classmethod
    def open(cls, store: Store, node: Node) -> Self:
        zarr_format: Any = 2 if node.hierarchy == "v2" else 3
        return cls(sync(AsyncArray.open(StorePath(store, node.path), zarr_format=zarr_format)))

    def coords_of(self, coords: npt.ArrayLike) -> list[Coords]:
        """Return coordinates in the grid of chunks as tuples of integers."""
        wanted, ndim = np.asarray(coords), len(self.chunk_shape)
        if wanted.size == 0:
            return []
        if wanted.ndim != 2 or wanted.shape[1] != ndim or wanted.dtype.kind not in "iu":
            raise SpecError(
                f"coordinates of chunks of {self._path!r} are n x {ndim} integers, got the shape "
                f"{wanted.shape} of {wanted.dtype}"
            )
        return list(map(tuple, wanted.tolist()))

    def outside(self, coords: Sequence[Coords]) -> Coords | None:
        """Return the first coordinates that lie outside the grid."""
        grid = self.grid_shape
        for each in coords:
            if not all(0 <= i < n for i, n in zip(each, grid, strict=True)):
                return each
        return None

    def keys(self, coords: Sequence[Coords]) -> list[str]:
        prefix = f"{self._path}/" if self._path else ""
        return [prefix + self._key_of(each) for each in coords]

    def units(self, n_chunks: int) -> Iterator[slice]:
        """Yield runs of so many chunks that their bytes fit in memory."""
        length = max(1, _UNIT_NBYTES // self._nbytes)
        return (slice(i, i + length) for i in range(0, n_chunks, length))

    def result(self, n_chunks: int, out: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        """Return an array for so many chunks: `out`, if it has their shape."""
        shape = (n_chunks, *self.chunk_shape)
        if out is None:
            return np.empty(shape, self._dtype)
        if out.shape != shape:
            raise SpecError(f"out has the shape {out.shape}, the chunks take {shape}")
        return out

    def decode(self, values: Sequence[bytes | memoryview | None], out: npt.NDArray[Any]) -> None:
        """Decode chunks into an array, in threads if there are many."""
        length = max(1, _RUN_NBYTES // self._nbytes)
        runs = [slice(i, i + length) for i in range(0, len(values), length)]
        if len(runs) < 2:
            self._decode_run(values, out)
            return

        def decode(run: slice) -> None:
            self._decode_run(values[run], out[run])

        for _ in worker_pool().map(decode, runs):
            pass  # raises the first error

    def _decode_run(
        self, values: Sequence[bytes | memoryview | None], out: npt.NDArray[Any]
    ) -> None:
        there = [value for value in values if value is not None]
        shape = self.chunk_shape
        if self._plain is not None:
            chunks = iter(self._plain.decode_many(there, [shape] * len(there)))
        else:
            chunks = iter(self._decoded(there))
        for i, value in enumerate(values):
            out[i] = self._fill if value is None else next(chunks)

    def _decoded(self, values: Sequence[bytes | memoryview]) -> Iterator[npt.NDArray[Any]]:
        buffers = map(self._spec.prototype.buffer.from_bytes, values)
        if self._codec is not None:
            decoded = [self._codec.decode(buffer, self._spec) for buffer in buffers]
        else:
            decoded = sync(self._pipeline.decode([(buffer, self._spec) for buffer in buffers]))
        return (chunk.as_numpy_array() for chunk in decoded)

    @property
    def _nbytes(self) -> int:
        return max(1, math.prod(self.chunk_shape) * self._dtype.itemsize)

"""`DirectArrays`: reads and writes of parts of arrays, without zarr's work for each chunk.

zarr lists the chunks of an array operation before it asks for the first one, in about 4 µs each. A
selection of slices is a box, which needs no list.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.core.sync import sync

from zarr_shardstore.format.arguments import array_path
from zarr_shardstore.store.direct_reads import ChunkReader, DirectReads
from zarr_shardstore.store.engine import documented_like
from zarr_shardstore.store.key_values import KeyValues
from zarr_shardstore.zarr_hooks.box import ArrayBox
from zarr_shardstore.zarr_hooks.box_jobs import ReadBox, SlabCodec, WriteBox


class DirectArrays(DirectReads, KeyValues):
    """Reads and writes of boxes of an array."""

    def read_array(
        self, path: str, selection: Any = Ellipsis, *, out: npt.NDArray[Any] | None = None
    ) -> Any:
        """Read a part of an array: the same as ``z[selection]``, without zarr's work per chunk.

        Use it for many small chunks. A selection of integers and slices without steps goes to the
        shards directly. Any other selection, and an array that zarr shards itself, goes through
        ``z[selection]``.

        Parameters
        ----------
        path
            Path of the array.
        selection
            As in ``z[selection]``; all of the array by default.
        out : ndarray, optional
            Array to fill and return, of the shape of the result and a type that can take the
            values. After an error it may be filled in part.

        Returns
        -------
        ndarray
            As ``z[selection]``. Missing chunks have the fill value.

        Raises
        ------
        SpecError
            If there is no array at `path`, or `out` has another shape or type.
        IndexError
            As ``z[selection]`` does.

        Notes
        -----
        Memory: the result, and one shard for each core, encoded; a shard of more than 32 MiB is
        decoded by all cores. Thread safety: any thread may call it.

        Examples
        --------
        >>> import zarr
        >>> store = ShardingStore({}, chunks_per_shard=(2, 2))
        >>> z = zarr.create_array(store, name="z", shape=(8, 8), chunks=(2, 2), dtype="u1")
        >>> store.write_array("z", (slice(0, 4), slice(None)), z[:4] + 7)
        >>> store.read_array("z", (slice(2, 6), 0))
        array([7, 7, 0, 0], dtype=uint8)
        """
        reader = self._reader_of(array_path(path))
        box = self._box(reader, selection, reads=True)
        if box is None or not box.shape:
            values = zarr.Array(reader.array)[selection]
            if out is None:
                return values
            result = reader.result(np.shape(values), out)
            result[...] = values
            return result
        result = reader.result(box.shape, out, reader.spec.config.order)
        read = ReadBox(self, box, _slabs(reader), box.with_all_axes(result), asyncio.Lock())
        there = read.run_here()
        if there is None:
            there = sync(read.run())
        if not there.all() and getattr(reader.spec.config, "read_missing_chunks", True) is False:
            zarr.Array(reader.array)[selection]  # raises zarr's error
        return result

    def write_array(self, path: str, selection: Any, value: Any) -> None:
        """Write a part of an array: as ``z[selection] = value``, without zarr's work per chunk.

        An array of whole chunks, in the type of the array, goes to the shards directly. All else
        goes through ``z[selection] = value``.

        Parameters
        ----------
        path
            Path of the array.
        selection
            As in ``z[selection] = value``.
        value : ndarray
            The values. Each shard is committed once, as always; see `read_array` for an example.

        Raises
        ------
        SpecError
            If there is no array at `path`.
        IndexError, ValueError
            As ``z[selection] = value`` does.
        """
        self._check_writable()
        reader = self._reader_of(array_path(path))
        box = self._box(reader, selection, reads=False)
        if (
            box is None
            or not isinstance(value, np.ndarray)
            or (value.dtype != reader.dtype and value.dtype.name != reader.dtype.name)
            or value.shape != box.shape
            or not box.has_whole_chunks(reader.array.shape)
        ):
            zarr.Array(reader.array)[selection] = value
            return
        write = WriteBox(self, box, _slabs(reader), box.with_all_axes(value), asyncio.Lock())
        if not write.run_here():
            sync(write.run(~box.no_chunks()))

    @documented_like(read_array, "in a thread, which completes its work if you cancel the call")
    async def read_array_async(
        self, path: str, selection: Any = Ellipsis, *, out: npt.NDArray[Any] | None = None
    ) -> Any:
        return await asyncio.to_thread(self.read_array, path, selection, out=out)

    @documented_like(write_array, "in a thread, which completes its work if you cancel the call")
    async def write_array_async(self, path: str, selection: Any, value: Any) -> None:
        await asyncio.to_thread(self.write_array, path, selection, value)

    def _box(self, reader: ChunkReader, selection: Any, *, reads: bool) -> ArrayBox | None:
        shape, sides = reader.array.shape, reader.chunk_shape
        if reader.codec is None or not shape:
            return None
        if reads and self._engine.operations.buffer.is_active:
            return None
        (chunk,) = self._engine.operations.arrays.current().chunks_of([reader.first_key])
        known = None if chunk is None else chunk.shard.layout
        layout = known or sync(self._layout_of(reader.first_key, reads=reads))
        if layout is None or layout.grid_shape != reader.grid_shape:
            return None
        return ArrayBox.of_selection(selection, shape, sides, layout)


def _slabs(reader: ChunkReader) -> SlabCodec:
    assert reader.codec is not None
    return SlabCodec(reader.codec, reader.plain, reader.spec)

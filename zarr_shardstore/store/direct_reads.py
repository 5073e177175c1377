"""Reads of chunks by their coordinates, and of boxes, without zarr's array operations.

An array operation of zarr takes 300 to 600 µs before it asks for the first chunk. A reader of
random chunks, such as a training loop, pays that for each chunk. It also takes about 4 µs for each
chunk, to list them all. A selection of slices is a box, which needs no list.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from reprlib import repr as short
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt
import zarr
from zarr import Array, AsyncArray
from zarr.abc.store import Store
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import StorePath

from zarr_shardstore.arrays.array_cache import invalidate_documents
from zarr_shardstore.errors import ShardConflictError, SpecError, UnsupportedError
from zarr_shardstore.format.arguments import array_path
from zarr_shardstore.format.box_grid import BoxGrid
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.io.concurrency import (
    StateApart,
    codec_pool,
    run_apart_from_signals,
    to_the_end,
)
from zarr_shardstore.io.local.fs import min_age_ns, state_of
from zarr_shardstore.metadata.documents import Node, document_key
from zarr_shardstore.operations.locate import array_at
from zarr_shardstore.shards.requests import Get, ask
from zarr_shardstore.store.engine import documented_like
from zarr_shardstore.store.key_values import KeyValues
from zarr_shardstore.zarr_hooks.box import ArrayBox
from zarr_shardstore.zarr_hooks.box_jobs import BoxJob, SlabCodec, Values
from zarr_shardstore.zarr_hooks.chunk_codec import ChunkCodec

T = TypeVar("T")
_UNIT_NBYTES = 32 * 1024 * 1024
"""Decoded size of the chunks of one operation of the store."""

_RUN_NBYTES = 1024 * 1024
"""Decoded size of the chunks that one thread decodes at a time."""


class ChunkReader:
    """Codecs, grid and keys of the chunks of one array; for any thread."""

    def __init__(self, store: Store, node: Node, document: bytes | memoryview) -> None:
        if node.hierarchy == "draft":
            raise UnsupportedError(f"{node.path!r} is an array of the draft: read its keys")
        array = AsyncArray.from_dict(StorePath(store, node.path), json.loads(bytes(document)))
        self.array: AsyncArray[Any] = array
        self.node = node
        self.config = {**_config_of_arrays()}
        self.stored_document = b""
        self.state: object = None
        """State of the file of the document before it was read; ``None`` if it is not known."""
        metadata: Any = array.metadata
        is_v2 = metadata.zarr_format == 2
        sides = metadata.chunks if is_v2 else getattr(metadata.chunk_grid, "chunk_shape", None)
        self.is_even = sides is not None
        given = metadata.chunk_grid.chunk_shapes if sides is None else sides
        chunks = BoxGrid(tuple([side or 1 for side in given]))
        self.chunk_shape: Coords = chunks.largest if sides is None else tuple(sides)
        """Shape of the chunks; where they differ, of the largest."""
        self._path = array.path
        self.grid_shape = chunks.shape(metadata.shape)
        self._key_of: Callable[[Coords], str] = metadata.encode_chunk_key
        (self.first_key,) = self.keys(np.zeros((1, len(self.chunk_shape)), np.int64))
        self.dtype: np.dtype[Any] = metadata.dtype.to_native_dtype()
        fill = metadata.fill_value
        self._fill = metadata.dtype.default_scalar() if fill is None else fill
        config = replace(array.config, order=metadata.order) if is_v2 else array.config
        prototype = default_buffer_prototype()
        self.spec = ArraySpec(self.chunk_shape, metadata.dtype, fill, config, prototype)
        self._pipeline = cast(Any, array.codec_pipeline)
        self._nbytes = max(1, math.prod(self.chunk_shape) * self.dtype.itemsize)
        codec = ChunkCodec.of(list(self._pipeline))
        self.slabs = SlabCodec.of(codec, self.spec) if codec is not None and self.is_even else None

    def coords_of(self, coords: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return coordinates in the grid of chunks as an array of the shape n x ndim."""
        wanted, ndim = np.asarray(coords), len(self.chunk_shape)
        if wanted.size == 0:
            return np.empty((len(wanted) if wanted.ndim == 2 and not ndim else 0, ndim), np.int64)
        if wanted.ndim != 2 or wanted.shape[1] != ndim or wanted.dtype.kind not in "iu":
            raise SpecError(
                f"coordinates of chunks of {self._path!r} are n x {ndim} integers, got the shape "
                f"{wanted.shape} of {wanted.dtype}"
            )
        return wanted.astype(np.int64, copy=False)

    def outside(self, coords: npt.NDArray[np.int64]) -> Coords | None:
        """Return the first coordinates that lie outside the grid."""
        is_outside = ((coords < 0) | (coords >= self.grid_shape)).any(axis=1)
        return tuple(coords[is_outside.argmax()].tolist()) if is_outside.any() else None

    def keys(self, coords: npt.NDArray[np.int64]) -> list[str]:
        prefix = f"{self._path}/" if self._path else ""
        return [prefix + self._key_of(each) for each in map(tuple, coords.tolist())]

    def result(
        self, shape: Coords, out: npt.NDArray[Any] | None, order: Literal["C", "F"] = "C"
    ) -> npt.NDArray[Any]:
        """Return the array for the values: `out` if it is given and fits."""
        if out is None:
            return np.empty(shape, self.dtype, order)
        if not isinstance(out, np.ndarray) or not out.flags.writeable:
            raise SpecError(f"out is an array of numpy that can be written, got {short(out)}")
        if out.shape != shape or not np.can_cast(self.dtype, out.dtype, "same_kind"):
            raise SpecError(
                f"out has the shape {out.shape} and the type {out.dtype}, the values take {shape} "
                f"and have {self.dtype}"
            )
        return out

    def read(self, get: Callable[[list[str]], Values], coords: Any, out: Any) -> None:
        """Read chunks in units, and decode each unit into `out` while the next one is read."""
        keys, state = self.keys(coords), StateApart()
        read = partial(self._read_units, get, keys, out, state)
        if len(keys) * self._nbytes <= _RUN_NBYTES:
            read()
        else:
            run_apart_from_signals(read, state.stop)

    def _read_units(
        self, get: Callable[[list[str]], Values], keys: list[str], out: Any, state: StateApart
    ) -> None:
        length = max(1, _UNIT_NBYTES // self._nbytes)
        try:
            for start in range(0, len(keys), length):
                unit = slice(start, start + length)
                state.waits = True
                values = get(keys[unit])
                state.waits = False
                for job in state.jobs:
                    job.result()
                if state.is_stopped:
                    break
                is_last = unit.stop >= len(keys)
                state.jobs = self._decode(keys[unit], values, out[unit], is_last=is_last)
            for job in state.jobs:
                job.result()
        finally:
            wait(state.jobs)  # no thread writes into `out` after an error

    def _decode(
        self, keys: Sequence[str], values: Values, out: npt.NDArray[Any], *, is_last: bool
    ) -> list[Future[None]]:
        """Decode chunks in threads. A few last ones are decoded in this thread."""
        length = max(1, _RUN_NBYTES // self._nbytes)
        if is_last and len(values) <= length:
            self.decode_run(keys.__getitem__, values, out)
            return []
        runs = [slice(i, i + length) for i in range(0, len(values), length)]
        pool = codec_pool()
        return [pool.submit(self.decode_run, keys[r].__getitem__, values[r], out[r]) for r in runs]

    def decode_run(
        self, key_of: Callable[[int], str], values: Values, out: npt.NDArray[Any]
    ) -> None:
        """Decode chunks in this thread into an array of the shape n x shape of a chunk."""
        with suppress(Exception):  # below, chunk by chunk, the error gets the name of its chunk
            if self.slabs is not None:
                self.slabs.decode(values, out)
                return
        for i, value in enumerate(values):
            try:
                out[i] = self._fill if value is None else self._decode_one(value)
            except Exception as error:
                error.add_note(f"in the chunk {key_of(i)!r}: `zarr-shardstore fsck` tells more")
                raise

    def _decode_one(self, value: bytes | memoryview) -> npt.NDArray[Any]:
        if self.slabs is not None:
            return self.slabs.decode_one(value)
        buffer = self.spec.prototype.buffer.from_bytes(value)
        (chunk,) = sync(self._pipeline.decode([(buffer, self.spec)]))
        array: npt.NDArray[Any] = chunk.as_numpy_array()
        return array


class DirectReads(KeyValues):
    """Reads of chunks, and reads and writes of boxes, without zarr's array operations."""

    def read_chunks(
        self, path: str, coords: npt.ArrayLike, *, out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Read and decode chunks of an array, without zarr's array operations.

        Use it for many small random reads, as in a training loop. It reads chunks in at most two
        rounds for each 32 MiB of values. Threads decode them.
        `read_chunks` blocks; `read_chunks_async` does not.

        Parameters
        ----------
        path
            Path of the array.
        coords : n x ndim integers
            Coordinates in the grid of chunks, in any order; you may repeat them. If zarr shards the
            array (``native="passthrough"``), this is the grid of the shards.
        out : ndarray, optional
            Array to fill and return, of the shape of the result and a type that can take the
            values. After an error it may be filled in part.

        Returns
        -------
        ndarray
            Array of the shape n x shape of a chunk. Missing chunks have the fill value. Elements
            beyond the end of the array are as stored, usually the fill value.

        Raises
        ------
        IndexError
            If coordinates lie outside the grid.
        SpecError
            If there is no array at `path`, or `coords` or `out` have another shape or type.
        UnsupportedError
            If the chunks of the array differ in shape.

        Notes
        -----
        Thread safety: any thread may call it. You may pickle a store to worker processes, and use
        it after a fork.

        Examples
        --------
        >>> import zarr
        >>> store = ShardingStore({}, chunks_per_shard=(2, 2))
        >>> z = zarr.create_array(store, name="z", shape=(4, 4), chunks=(2, 2), dtype="u1")
        >>> z[:] = 7
        >>> store.read_chunks("z", [(0, 1), (1, 1)]).shape
        (2, 2, 2)
        """

        def read() -> npt.NDArray[Any]:
            reader, wanted = self._reader(path, coords)
            if not reader.is_even:
                raise UnsupportedError(
                    f"the chunks of {path!r} differ in shape, so they are no array: use read_array"
                )
            result = reader.result((len(wanted), *reader.chunk_shape), out)
            reader.read(self._encoded, wanted, result)
            return result

        return _again_if_replaced(read)

    @documented_like(read_chunks, "in a thread, which completes its work if you cancel the call")
    async def read_chunks_async(
        self, path: str, coords: npt.ArrayLike, *, out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        return await asyncio.to_thread(self.read_chunks, path, coords, out=out)

    def read_encoded(self, path: str, coords: npt.ArrayLike) -> list[bytes | None]:
        """Return encoded chunks by coordinates, ``None`` for missing ones; see `read_chunks`."""

        def read() -> Values:
            reader, wanted = self._reader(path, coords)
            return self._encoded(reader.keys(wanted))

        values = _again_if_replaced(read)
        return [None if value is None else bytes(value) for value in values]

    def _encoded(self, keys: list[str]) -> Values:
        return self._engine.get_many_blocking([(key, None) for key in keys])

    def _reader(self, path: str, coords: Any) -> tuple[ChunkReader, npt.NDArray[np.int64]]:
        path, engine = array_path(path), self._engine
        for _ in range(2):
            reader = self._reader_of(path)
            wanted = reader.coords_of(coords)
            outside = reader.outside(wanted)
            if outside is None:
                return reader, wanted
            (key,) = reader.keys(np.array([outside]))
            engine.get_blocking(key, None)  # a document that has grown is read again
        raise IndexError(f"{path!r} has the grid {reader.grid_shape} of chunks, not {outside}")

    def _reader_of(self, path: str) -> ChunkReader:
        engine = self._engine
        if not self._is_open:
            sync(self._ensure_open())
        known = engine.chunk_readers.get(path)
        arrays = engine.operations.arrays.current().arrays
        if known is not None and arrays.get(known[0].node) is known[0]:
            reader: ChunkReader = known[1]
            return reader  # otherwise its document was read again since, or never
        return self._new_reader_of(path)

    def _new_reader_of(self, path: str) -> ChunkReader:
        engine = self._engine
        node = engine.driver.run(array_at(engine.operations.arrays, path)).node
        state = self._state_of(node)
        found = engine.driver.run(engine.operations.documents.of_array(node))
        if found is None:
            raise SpecError(f"there is no array at {path!r}: it was removed while it was opened")
        stored, document, array = found
        reader = ChunkReader(self, node, document)
        reader.stored_document, reader.state = stored, state
        engine.chunk_readers[path] = array, reader
        return reader

    def _current_reader_of(self, path: str) -> ChunkReader:
        """As `_reader_of`, for the document that is stored now: another process may have resized
        the array, or made another one in its place. It has zarr's configuration of arrays."""
        reader = self._stored_reader_of(path)
        return reader if reader.config == _config_of_arrays() else self._new_reader_of(path)

    def _stored_reader_of(self, path: str) -> ChunkReader:
        try:
            reader = self._reader_of(path)
            state = self._state_of(reader.node)
            if state is not None and state == reader.state:
                return reader
            (found,) = self._engine.driver.run(ask([Get(document_key(reader.node))]))
            if found.value is not None and bytes(found.value) == reader.stored_document:
                reader.state = state
                return reader
        except (SpecError, ShardConflictError):  # there was no array, or another one
            pass
        invalidate_documents()
        return self._reader_of(path)

    def _state_of(self, node: Node) -> object:
        """Return the state of the file of a document; ``None`` if the file may change and keep it,
        or another host."""
        engine = self._engine
        if engine.root is None:
            return None
        state = state_of(engine.root + document_key(node))
        is_version = state and time.time_ns() - state[2] >= min_age_ns(state[2])
        return state if is_version else None

    def read_array(
        self, path: str, selection: Any = Ellipsis, *, out: npt.NDArray[Any] | None = None
    ) -> Any:
        """Read a part of an array: the same as ``z[selection]``, without zarr's work per chunk.

        Use it for many small chunks. A selection of integers and slices without steps goes to the
        shards directly. Any other selection, an array that zarr shards itself, and chunks of
        several shapes go through ``z[selection]``.

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
        UnsupportedError
            If it is an array of the draft.
        IndexError
            As ``z[selection]`` does.

        Notes
        -----
        Each call reads the metadata document of the array, unless its local file is as it was. So
        it sees what other processes did to the array. zarr's configuration of arrays counts, not
        that of an array object.

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
        reader = self._current_reader_of(array_path(path))
        box = self._box(reader, selection, reads=True)
        if box is None or reader.slabs is None or not box.shape:
            values = Array(reader.array)[selection]
            if out is None:
                return values
            result = reader.result(np.shape(values), out)
            result[...] = values
            return result
        result = reader.result(box.shape, out, reader.spec.config.order)
        job = BoxJob(self, box, reader.slabs, box.with_all_axes(np.asarray(result)))
        there = job.read_here()
        if there is None:
            there = sync(job.read())
        if not there.all() and getattr(reader.spec.config, "read_missing_chunks", True) is False:
            Array(reader.array)[selection]  # raises zarr's error
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
        UnsupportedError
            As `read_array` does.
        IndexError, ValueError
            As ``z[selection] = value`` does.
        """
        self._check_writable()
        self._write_box(self._current_reader_of(array_path(path)), selection, value)

    def _write_box(self, reader: ChunkReader, selection: Any, value: Any) -> None:
        box = self._box(reader, selection, reads=False)
        if (
            box is None
            or reader.slabs is None
            or not isinstance(value, np.ndarray)
            or (value.dtype != reader.dtype and value.dtype.name != reader.dtype.name)
            or value.shape != box.shape
            or not box.has_whole_chunks(reader.array.shape)
        ):
            Array(reader.array)[selection] = value
            return
        job = BoxJob(self, box, reader.slabs, box.with_all_axes(np.asarray(value)))
        if not job.write_here():
            sync(job.write(~box.no_chunks()))

    @documented_like(read_array, "in a thread, which completes its work if you cancel the call")
    async def read_array_async(
        self, path: str, selection: Any = Ellipsis, *, out: npt.NDArray[Any] | None = None
    ) -> Any:
        return await asyncio.to_thread(self.read_array, path, selection, out=out)

    @documented_like(write_array, "in a thread; a call that is cancelled waits for its end")
    async def write_array_async(self, path: str, selection: Any, value: Any) -> None:
        await to_the_end(self.write_array, path, selection, value)

    def _box(self, reader: ChunkReader, selection: Any, *, reads: bool) -> ArrayBox | None:
        shape, sides = reader.array.shape, reader.chunk_shape
        if not shape:
            return None
        if reads and self._engine.operations.buffer.is_active:
            return None
        (chunk,) = self._engine.operations.arrays.current().chunks_of([reader.first_key])
        known = None if chunk is None else chunk.shard.layout
        layout = known or sync(self._layout_of(reader.first_key, reads=reads))
        if layout is None or layout.grid_shape != reader.grid_shape:
            return None
        return ArrayBox.of_selection(selection, shape, sides, layout)


def _config_of_arrays() -> dict[str, Any]:
    """Return zarr's configuration of arrays, itself: `zarr.config.get` takes microseconds."""
    found: dict[str, Any] = zarr.config.config["array"]
    return found


def _again_if_replaced(read: Callable[[], T]) -> T:
    """Read, and once more if another process has replaced the array since its document was read."""
    try:
        return read()
    except ShardConflictError:
        invalidate_documents()
        return read()

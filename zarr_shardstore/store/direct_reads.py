"""`DirectReads`: chunks of an array by their coordinates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from zarr.core.sync import sync

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import array_path
from zarr_shardstore.operations.locate import array_at
from zarr_shardstore.store.chunk_reader import ChunkReader
from zarr_shardstore.store.engine_store import EngineStore, part_of_sharding_store
from zarr_shardstore.store.twins import twin_of


@part_of_sharding_store
class DirectReads(EngineStore):
    """Reads of chunks without zarr's array operations."""

    def read_chunks(
        self, path: str, coords: npt.ArrayLike, *, out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Read and decode chunks of an array, without zarr's array operations. The call blocks.

        For many small reads at random, as in a training loop. All chunks are read in at most two
        rounds for each 32 MiB of values, 8 MiB from local files, and decoded in threads.

        Parameters
        ----------
        path
            Path of the array.
        coords : n x ndim integers
            Coordinates in the grid of chunks, in any order, repeated or not. In an array whose
            shards are left to zarr (``native="passthrough"``) its grid is that of the shards.
        out : ndarray, optional
            Is filled and returned; its shape is that of the result, and its type can take the
            values. After an error it may be filled in part.

        Returns
        -------
        ndarray
            Of the shape n x shape of a chunk. Missing chunks, and the elements of a chunk behind
            the end of the array, are as stored: usually the fill value.

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
        Thread safety: may be called from any thread. A store pickles to worker processes, and may
        be used after a fork.

        Examples
        --------
        >>> import zarr
        >>> store = ShardingStore({}, chunks_per_shard=(2, 2))
        >>> z = zarr.create_array(store, name="z", shape=(4, 4), chunks=(2, 2), dtype="u1")
        >>> z[:] = 7
        >>> store.read_chunks("z", [(0, 1), (1, 1)]).shape
        (2, 2, 2)
        """
        reader, wanted = self._reader(path, coords)
        result = reader.result(len(wanted), out)
        reader.read(self._encoded, wanted, result, is_local=self._engine.is_local)
        return result

    @twin_of(read_chunks, "in a thread; a cancelled call still ends there, and may fill `out`")
    async def read_chunks_async(
        self, path: str, coords: npt.ArrayLike, *, out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        return await asyncio.to_thread(self.read_chunks, path, coords, out=out)

    def read_encoded(self, path: str, coords: npt.ArrayLike) -> list[bytes | None]:
        """As `read_chunks`, but return the bytes that the codecs made; ``None``: it is missing."""
        reader, wanted = self._reader(path, coords)
        values = self._encoded(reader.keys(wanted))
        return [None if value is None else bytes(value) for value in values]

    def _encoded(self, keys: list[str]) -> Sequence[bytes | memoryview | None]:
        return self._engine.get_many_blocking([(key, None) for key in keys])

    def _reader(
        self, path: str, coords: npt.ArrayLike
    ) -> tuple[ChunkReader, npt.NDArray[np.int64]]:
        path, engine = array_path(path), self._engine
        if not self._is_open:
            sync(self._ensure_open())
        for _ in range(2):
            reader = engine.chunk_reader(path) or self._new_reader(path)
            wanted = reader.coords_of(coords)
            outside = reader.outside(wanted)
            if outside is None:
                return reader, wanted
            (key,) = reader.keys(np.array([outside]))
            engine.get_blocking(key, None)  # a document that has grown is read again
        raise IndexError(f"{path!r} has the grid {reader.grid_shape} of chunks, not {outside}")

    def _new_reader(self, path: str) -> ChunkReader:
        engine = self._engine
        node = engine.driver.run(array_at(engine.operations.arrays, path)).node
        found = engine.driver.run(engine.operations.array_document(node))
        if found is None:
            raise SpecError(f"there is no array at {path!r}: it was removed while it was opened")
        document, array = found
        reader = ChunkReader(self, node, document)
        engine.chunk_readers[path] = array, reader
        return reader

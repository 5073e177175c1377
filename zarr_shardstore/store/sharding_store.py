"""`ShardingStore`: zarr ``Store`` that packs chunks into shards of the store it wraps.

Source: zarr-python 3, ``zarr.abc.store``, and the methods that its codec pipelines look for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from reprlib import repr as short
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, cpu
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore

from zarr_shardstore.arrays.array_cache import invalidate_documents
from zarr_shardstore.arrays.policy import ChunksPerShard, V3Declaration
from zarr_shardstore.errors import ReadOnlyError, ShardStoreError, SpecError
from zarr_shardstore.format.arguments import array_path, items_of
from zarr_shardstore.format.keys import SHARD_MARK
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.io.backends.base import Durability
from zarr_shardstore.io.backends.resolve import BaseStore, BaseStoreLike, base_store_of
from zarr_shardstore.io.buffers import as_view, buffer_class_of, own_bytes, range_of, to_buffer_of
from zarr_shardstore.io.concurrency import one_ahead
from zarr_shardstore.io.counters import Stats
from zarr_shardstore.io.local.locks import Locking
from zarr_shardstore.io.seal import seal_all, seal_all_async
from zarr_shardstore.metadata.declaration import Native
from zarr_shardstore.operations.batch import Batch
from zarr_shardstore.operations.joint_update import Function
from zarr_shardstore.operations.listing import Region, as_directory, chunks_initialized, raise_first
from zarr_shardstore.operations.locate import array_at, shard_shape
from zarr_shardstore.operations.values import shard_ids
from zarr_shardstore.shards.append import MAX_DEAD_SHARE
from zarr_shardstore.shards.requests import Flow, Modify
from zarr_shardstore.shards.shard_listing import ListedKeys
from zarr_shardstore.shards.stack import Strategy
from zarr_shardstore.store.direct_reads import ChunkReader
from zarr_shardstore.store.engine import ShardingEngine
from zarr_shardstore.store.frame_writer import DEFAULT_FLUSH_NBYTES, FrameWriter
from zarr_shardstore.store.options import IndexCodecs, IndexLocation, ShardingOptions, Transformers
from zarr_shardstore.zarr_hooks.pipeline import is_unsafe, make_default, warn_of_other_pipeline

T = TypeVar("T")
Value: TypeAlias = Buffer | bytes | bytearray | memoryview

_KEYS_BETWEEN_TURNS = 4096
"""Keys of a listing between two turns of other tasks; a listing itself may never wait."""

_OF_THE_DRAFT = ("set_partial_values", "erase", "erase_values", "erase_prefix")
"""Operations of the draft that zarr's ``Store`` does not have under these names."""


def _as_base(name: str) -> property:
    """Return a property that is that of the base store; mappings can do everything."""
    return property(lambda self: getattr(self.base, name, True))


class ShardingStore(Store):
    """Zarr store that packs many chunks into one object of the store it wraps.

    Its users see plain chunks; the wrapped store has shards. Keys that are no chunks of a
    sharded array pass through.

    Parameters
    ----------
    store
        The base store: any zarr store, local path, URL, fsspec file system or mapper, obstore
        store, or ``MutableMapping[str, bytes]`` such as a dict. A path is that of a directory,
        or of a zip archive to read; to write one, pass a ``zarr.storage.ZipStore``. Of a
        ``zarr.Group`` or a ``StorePath`` the objects below its path are wrapped.
    chunks_per_shard : int, tuple of int, "auto", mapping, optional
        Chunks per shard of new arrays. An int counts for every dimension. A tuple leaves alone
        arrays of another number of dimensions. ``"auto"`` makes shards of 10 to 100 MB, by the
        size of a chunk before compression. A mapping gives one of these, or ``None``, by array
        path or pattern (``"raw/*"``). Stored arrays keep their declaration. Without any metadata
        the option declares each array under ``data/root/``, and the arrays that a mapping names.
        ``None`` shards nothing. Nor does a store without the option: it says so by an
        `UnshardedWarning` when it creates its first array in a store that has none.

        A mapping from names of dimensions to whole numbers, ``{"time": 24, "y": 4}``, is for the
        arrays that have one of them; along all other dimensions a shard has one chunk. Where an
        array has the path of a key, that key counts alone, or there is an error if the dimensions
        say something else. ``{"raw/*": {"time": 24}}`` is by dimension for some arrays. The names
        are v3's ``dimension_names``, xarray's ``_ARRAY_DIMENSIONS``, or OME-Zarr's axes if the
        group has them before the array.

        New shards of more than 255 chunks are clipped to the grid, along the first dimension only
        those of more than 16,384: an array that grows by appends fills its last shard.
    shard_nbytes : int or str, optional
        Bytes that a shard of a new array has at most, before compression, if it has more than one
        chunk: ``64_000_000``, ``"64 MB"``, ``"64 MiB"``. It takes the place of `chunks_per_shard`.
    declaration : {"codec", "storage_transformers"}, optional
        How metadata of new v3 arrays says that they are sharded: by the ``sharding_indexed``
        codec, which every v3 reader reads (the default), or by the draft's storage
        transformer. Draft arrays have the transformer, v2 arrays a marker in their filters.
    storage_transformers : str, mapping, sequence of these, optional
        The stack of new arrays, nearest to the array first, as names or as metadata writes
        them: ``["crc32c", "sharding"]``. A ``"sharding"`` without a configuration takes
        `chunks_per_shard`, and is left out where that does not name the array.
    index_codecs, index_location : optional
        Form of the shard index of new arrays, as in ZEP 2: ``["bytes", "crc32c"]`` at the
        ``"end"``; in the draft's transformer ``["bytes"]`` at the ``"end"``.
    native : {"flat", "passthrough"}
        Treatment of arrays with a ``sharding_indexed`` codec, whichever program wrote them:
        their inner chunks appear as chunks, or the arrays pass through as they are.
    order : {"morton", "C", "F"}
        Order in which the entries of a shard are written.
    strategy : {"auto", "append", "rewrite"}
        How a shard is changed. ``"append"`` writes the chunk into a gap of the file, and its place
        into the index; it is for local files with ``locking="os"``. ``"rewrite"`` stores the whole
        shard again. ``"auto"`` appends where that is possible.
    locking : {"os", "lockfile", "none"}
        Protection of a shard on local files against a second process: a lock of the operating
        system on ``KEY.__lock``; that file alone, for network file systems without locks (a
        killed writer leaves it behind); or nothing. tensorstore has the same two modes; all
        writers of a store must use the same one.
    durability : {"process", "power"}
        A finished write on local files survives the end of its process, or a loss of power, too.
        For the latter the file and its directories are synced, some milliseconds a write. Object
        stores keep each acknowledged write.
    max_dead_bytes : int, optional
        Dead bytes that replaced and erased chunks may leave in a shard file with ``"append"``. A
        write that would leave more stores the shard again without them.
    max_dead_share : float
        Largest share of the data of a shard that may be dead when the shard is full, flushed or
        has no room; if more is dead it is stored again. 1 keeps every byte of a shard file until
        all its chunks are written in one call or erased, or `compact` is called.
    max_gap_bytes, max_coalesced_bytes : int, optional
        Largest gap between two entries that one request reads along (4 KiB), and largest request
        of several entries (16 MiB). Behind a network, if there are more requests than run
        concurrently, the gap may be 16 times as large.
    storage_options : mapping, optional
        If `store` is a URL: options of obstore (``access_key_id``, ``endpoint``), or those of
        fsspec (``key``, ``endpoint_url``). URLs of S3, GCS and Azure go through obstore if it is
        installed and all options can be spelled for it, otherwise through fsspec; ``repr`` shows
        which. Without keys those of the environment count, or of the AWS profile.
    static : bool
        Promise that nothing else changes shards while this store lives. Then indexes are cached
        also on remote base stores that tell no versions: fsspec's. Otherwise they are cached
        where an ETag or the state of a file shows that they are still valid.
    read_only : bool
        Refuse writes.

    Raises
    ------
    SpecError
        If an option is not valid.

    Notes
    -----
    Thread safety: threads and tasks of one process may read and write the same shards, also
    through several stores on the same base. So may processes on local files and, through obstore,
    on object stores. No update is lost. Through fsspec on object stores only one process may write
    a shard at a time.

    Cost in requests of the base store: a read takes two rounds, first the indexes that are not
    cached, then coalesced spans. A write of a whole shard takes one request. A write of a part
    takes one read and one write of the shard. The first use of an array reads its document, too.

    Examples
    --------
    >>> import zarr
    >>> base = {}
    >>> store = ShardingStore(base, chunks_per_shard=(2, 2))
    >>> z = zarr.create_array(store, name="z", shape=(4, 4), chunks=(1, 1), dtype="u1")
    >>> z[:] = 1
    >>> sum(key.startswith("z/c/") for key in base)
    4
    """

    def __init__(
        self,
        store: BaseStoreLike,
        chunks_per_shard: ChunksPerShard | EllipsisType = ...,
        *,
        shard_nbytes: int | str | None = None,
        declaration: V3Declaration | None = None,
        storage_transformers: Transformers = None,
        index_codecs: IndexCodecs = None,
        index_location: IndexLocation = None,
        native: Native = "flat",
        order: EntryOrder = "morton",
        strategy: Strategy = "auto",
        locking: Locking = "os",
        durability: Durability = "process",
        max_dead_bytes: int | None = None,
        max_dead_share: float = MAX_DEAD_SHARE,
        max_gap_bytes: int | None = None,
        max_coalesced_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        static: bool = False,
        read_only: bool = False,
    ) -> None:
        if isinstance(store, ShardingStore):
            raise SpecError("the store is a ShardingStore already: wrap its base store")
        options = ShardingOptions(
            chunks_per_shard=chunks_per_shard,
            shard_nbytes=shard_nbytes,
            declaration=declaration,
            storage_transformers=storage_transformers,
            index_codecs=index_codecs,
            index_location=index_location,
            native=native,
            order=order,
            strategy=strategy,
            locking=locking,
            durability=durability,
            max_dead_bytes=max_dead_bytes,
            max_dead_share=max_dead_share,
            max_gap_bytes=max_gap_bytes,
            max_coalesced_bytes=max_coalesced_bytes,
            static=static,
        )
        base = base_store_of(store, storage_options)
        if isinstance(base, ShardingStore):
            raise SpecError("the group is in a ShardingStore: wrap its base store")
        super().__init__(read_only=read_only or (isinstance(base, Store) and base.read_only))
        self._engine = ShardingEngine(base, options)
        make_default()

    @classmethod
    def _of(cls, engine: ShardingEngine, read_only: bool) -> Self:
        """Return a store, not open, on the engine of another one."""
        self = cls.__new__(cls)
        Store.__init__(self, read_only=read_only)
        self._engine = engine
        make_default()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._of, (self._engine, self.read_only)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardingStore)
            and self.read_only == other.read_only
            and self._engine == other._engine
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def base(self) -> BaseStore:
        """The zarr store or the mapping that has the shards."""
        return self._engine.base

    def __str__(self) -> str:
        return f"sharding+{self.base}" if isinstance(self.base, Store) else repr(self)

    def __repr__(self) -> str:
        mode = ", read_only=True" if self.read_only else ""
        options = "".join(f", {option}" for option in self._engine.options.describe())
        return f"ShardingStore({self._engine.driver.backend!r}{options}{mode})"

    if not TYPE_CHECKING:  # type checkers find these mistakes themselves

        def __getattr__(self, name: str) -> object:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OF_THE_DRAFT:
                message += (
                    ": it has the methods of zarr's Store, most of them async. The operations of "
                    f"the draft are those of a ShardingMapping: ShardingMapping(store).{name}(...)"
                )
            raise AttributeError(message, name=name, obj=self)

    def with_read_only(self, read_only: bool = False) -> ShardingStore:
        """Return the same store, not open, that takes writes or refuses them."""
        engine, base = self._engine, self.base
        if not read_only and isinstance(base, Store) and base.read_only:
            engine = ShardingEngine(base.with_read_only(False), engine.options)
        return type(self)._of(engine, read_only)

    def refresh(self) -> None:
        """Drop the cached metadata of arrays; it is read again when it is next needed.

        Call it when another process created, removed, moved or re-declared an array that this
        store has used. Call it also after a change of metadata in the base store. Writes through
        this store, and through any other `ShardingStore` or `ShardingMapping` of this process,
        count immediately. A resize by another process needs no call.
        """
        invalidate_documents()

    def stats(self) -> Stats:
        """Return counts of requests to the base store, bytes, rounds and cached indexes.

        Examples
        --------
        >>> store = ShardingStore({}, chunks_per_shard=4)
        >>> store.set_sync("data/root/a/c0", b"abc")
        >>> before = store.stats()
        >>> store.get_sync("data/root/a/c0").to_bytes()
        b'abc'
        >>> after = store.stats()  # two rounds: the index, the chunk
        >>> after.requests - before.requests, after.rounds - before.rounds
        (2, 2)
        """
        return self._engine.driver.counters.stats()

    async def flush(self) -> None:
        """Seal every shard file of this base store that this process has appended to.

        All writes are stored already. To seal a shard is to remove its journal and its gap for
        later chunks. A shard of which more than half is dead is compacted. `close` and the end of
        the process seal shards, too.
        """
        await seal_all_async(self._engine.driver.backend, self._engine.options.order)

    def flush_sync(self) -> None:
        """As `flush`, blocking."""
        seal_all(self._engine.driver.backend, self._engine.options.order)

    async def compact(self, prefix: str = "") -> None:
        """Store shards without dead bytes, those below a prefix that have any.

        Erased and replaced chunks, and indexes that were moved, leave dead bytes in a file. Other
        writers may write concurrently.

        Raises
        ------
        CorruptShardError
            If a shard is damaged; it stays unchanged, and all others are compacted.
        """
        self._check_writable()
        await self._run(self._engine.operations.flusher.flush_below(prefix))
        driver, flow = self._engine.compaction(prefix)
        await driver.run_async(flow)

    def compact_sync(self, prefix: str = "") -> None:
        """As `compact`, blocking."""
        self._check_writable()
        self._engine.driver.run(self._engine.operations.flusher.flush_below(prefix))
        driver, flow = self._engine.compaction(prefix)
        driver.run(flow)

    async def consolidate_index(self, path: str = "") -> list[str]:
        """Store a copy of the indexes of all shards, in one object for each array.

        A reader through an object store then reads that one object instead of an index for each
        shard. The object is never trusted: the version of each reply tells whether the shard has
        changed since, and such a shard is read by its own index. So the object may be written at
        any time, and again when many shards have changed.

        Parameters
        ----------
        path
            Path of an array or a group; ``""``: all sharded arrays of the store.

        Returns
        -------
        list of str
            Paths of the arrays. Left out are those without a stored shard, those that only
            ``chunks_per_shard`` declares, and those with storage transformers below the shards.

        Raises
        ------
        UnsupportedError
            If the base store is neither local files nor an obstore store with ETags.
        SpecError
            If there is no such array at or below a path that is not ``""``.

        Notes
        -----
        On local files the versions are size and time of last change, so that the directory
        profits when it is served by HTTP. The call waits two seconds for files that have changed
        just now. Reads of local files do not need it. Uploads do not keep these times:
        consolidate the copy, too.
        """
        self._check_writable()
        flow = self._engine.consolidation(path)
        await self.flush()
        return await self._run(flow)

    def consolidate_index_sync(self, path: str = "") -> list[str]:
        """As `consolidate_index`, blocking."""
        self._check_writable()
        flow = self._engine.consolidation(path)
        self.flush_sync()
        return self._engine.driver.run(flow)

    async def chunks_initialized(self, path: str, region: Region = None) -> npt.NDArray[np.bool_]:
        """Return a mask of the stored chunks of a sharded array.

        Parameters
        ----------
        path
            Path of the array.
        region : tuple of slice, optional
            In chunk coordinates; ``None``: the whole grid.

        Returns
        -------
        ndarray of bool
            The shape is that of the chunk grid, or of the region.

        Raises
        ------
        SpecError
            If there is no sharded array at `path`, or the region is not valid.
        CorruptShardError
            If the index of a shard is damaged.

        Notes
        -----
        Cost: a listing of the directory of the shards, and the indexes that are not cached; after
        `consolidate_index` a single object instead.

        Examples
        --------
        >>> import asyncio, zarr
        >>> store = ShardingStore({}, chunks_per_shard=(2, 2))
        >>> z = zarr.create_array(store, name="z", shape=(4, 6), chunks=(2, 2), dtype="u1")
        >>> z[:2, 2:] = 1
        >>> asyncio.run(store.chunks_initialized("z"))
        array([[False,  True,  True],
               [False, False, False]])
        """
        flow = chunks_initialized(self._engine.operations.flusher, path, region)
        return await self._run(flow, only_reads=True)

    def shard_shape(self, path: str) -> tuple[int, ...] | None:
        """Return the shape of the shards of an array, in elements. The call blocks.

        ``None`` if the array is not sharded: each chunk is an object of its own. Writes of regions
        that begin and end at multiples of this shape store each shard once. The shape is clipped
        to the grid: ask again after the array has grown. zarr's ``z.shards`` shows ``None`` here,
        because users of this store see plain chunks.

        Raises
        ------
        SpecError
            If there is no array at `path`.

        Examples
        --------
        >>> import zarr
        >>> store = ShardingStore({}, chunks_per_shard=(2, 3))
        >>> z = zarr.create_array(store, name="z", shape=(80, 80), chunks=(10, 10), dtype="u1")
        >>> store.shard_shape("z")
        (20, 30)
        """
        return self._engine.driver.run(shard_shape(self._engine.operations.arrays, path))

    # ------------------------------------------------------------ direct reads

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

    async def read_chunks_async(
        self, path: str, coords: npt.ArrayLike, *, out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """As `read_chunks`, in a thread; a cancelled call still ends there, and may fill `out`."""
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
        found = engine.driver.run(engine.operations.documents.of_array(node))
        if found is None:
            raise SpecError(f"there is no array at {path!r}: it was removed while it was opened")
        document, array = found
        reader = ChunkReader(self, node, document)
        engine.chunk_readers[path] = array, reader
        return reader

    # ------------------------------------------------------------------- batch

    def batch(self, *, max_nbytes: int | None = None) -> Batch:
        """Return a block that buffers writes of chunks, so that each shard is stored once.

        Use it by ``with`` or ``async with``. `Batch` documents reads while it is open, the end
        by an exception, and several batches of one store.

        Parameters
        ----------
        max_nbytes : int, optional
            When more is buffered, the shards with the most bytes are stored. 256 MiB.

        Raises
        ------
        SpecError
            If `max_nbytes` is no size, or the store is read-only.
        UnpublishedError
            When the block ends, if shards could not be stored; it names them.

        Examples
        --------
        >>> import zarr
        >>> base = {}
        >>> store = ShardingStore(base, chunks_per_shard=4)
        >>> z = zarr.create_array(store, name="z", shape=(8,), chunks=(1,), dtype="u1")
        >>> with store.batch():
        ...     for i in range(6):
        ...         z[i] = i + 1  # the first shard is stored when i is 3
        ...     len([key for key in base if key.startswith("z/c/")])
        1
        >>> len([key for key in base if key.startswith("z/c/")])
        2
        """
        self._check_writable()
        operations, run = self._engine.operations, self._engine.driver.run
        return Batch(operations.buffer, operations.flusher.flush, run, self._run, max_nbytes)

    # ------------------------------------------------------------------ frames

    def append_frames(
        self,
        path: str,
        frames: npt.ArrayLike | None = None,
        *,
        flush_s: float | None = None,
        flush_nbytes: int = DEFAULT_FLUSH_NBYTES,
        **create: Any,
    ) -> FrameWriter:
        """Return a writer that appends frames to an array, which others read while it grows.

        Parameters
        ----------
        path
            Path of the array. It is continued at its end, or created for the first frames.
        frames : n x shape of a frame, optional
            The first frames to append.
        flush_s : float, optional
            Seconds between two flushes while frames come; ``inf``: no flush by time. By default 1
            where chunks are appended to shards, and 10 where each flush stores a shard again.
        flush_nbytes : int
            Bytes of frames that are flushed before that time: whole shards, if there are such.
        **create
            Options of ``zarr.create_array`` for a new array. By default a frame is a chunk.

        Raises
        ------
        SpecError
            If an argument is not valid, the store is read-only, or the array cannot grow.
        ShardConflictError
            If another writer appends frames to the array: on local files one of any process, on
            other base stores one of this process.
        UnsupportedError
            If nothing can be replaced in the base store, as in a zip archive.

        Examples
        --------
        >>> import numpy as np, zarr
        >>> store = ShardingStore({}, chunks_per_shard=(8, 1, 1))
        >>> with store.append_frames("run") as writer:
        ...     for i in range(20):
        ...         writer.append(np.full((4, 4), i, "u2"))
        ...     writer.flush()
        ...     writer.n_durable, zarr.open_array(store, path="run").shape
        (20, (20, 4, 4))
        """
        self._check_writable()
        writer = FrameWriter(self, path, flush_s, flush_nbytes, create)
        try:
            if frames is not None:
                writer.extend(frames)
        except BaseException:
            writer.close()
            raise
        return writer

    # ----------------------------------------------------- open and capabilities

    async def _open(self) -> None:
        if self._is_open:
            raise ValueError("store is already open")
        await self._ensure_open()

    async def _ensure_open(self) -> None:
        if not self._is_open:
            base = self.base
            # That of a LocalStore to be written to makes its directory, even for a read.
            if isinstance(base, Store) and (base.read_only or type(base) is not LocalStore):
                try:
                    await base._ensure_open()
                except ValueError:
                    # "already open": another thread, in a loop of its own, was faster.
                    if not base._is_open:
                        raise
            self._is_open = True

    def close(self) -> None:
        """Seal shards, see `flush`, and close this store and the base store."""
        if not self.read_only:
            self.flush_sync()
            self._engine.operations.view.warn_of_names()
        if isinstance(self.base, Store):
            self.base.close()
        super().close()

    def _check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyError

    supports_writes = _as_base("supports_writes")
    supports_deletes = _as_base("supports_deletes")
    supports_listing = _as_base("supports_listing")
    supports_consolidated_metadata = _as_base("supports_consolidated_metadata")

    @property
    def _supports_sync_io(self) -> bool:
        # zarr's fused pipeline asks this. It writes one chunk a thread at a time: cheap where a
        # chunk is appended to its shard, a rewrite of the shard elsewhere.
        return self._engine.appends

    def _engine_for(self, value: Value | Modify | None) -> ShardingEngine:
        is_own = isinstance(value, Buffer) and type(value) is not cpu.Buffer
        return self._engine.of(type(value)) if is_own else self._engine  # type: ignore[arg-type]

    async def _run(self, flow: Flow[T], *, only_reads: bool = False) -> T:
        await self._ensure_open()
        # In a batch a read may flush. A commit must not wait for another one in the worker pool.
        only_reads = only_reads and not self._engine.operations.buffer.is_active
        return await self._engine.driver.run_async(flow, only_reads=only_reads)

    async def _write(self, flow: Flow[None], engine: ShardingEngine | None = None) -> None:
        self._check_writable()
        await self._ensure_open()
        await (engine or self._engine).driver.run_async(flow)

    # -------------------------------------------------------------------- reads

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        if not self._is_open:
            await self._ensure_open()
        engine = self._engine.of(buffer_class_of(prototype))
        value = await engine.get(key, range_of(byte_range))
        return to_buffer_of(value, prototype)

    def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]] = (),
    ) -> Coroutine[Any, Any, list[Buffer | None]]:
        """Return values, or ranges of them, ``None`` for missing keys, in at most two rounds."""
        if not isinstance(prototype, BufferPrototype):
            raise TypeError(
                "prototype is a BufferPrototype of zarr, got "
                f"{short(prototype)}; the draft's operation of this name is "
                "ShardingMapping(store).get_partial_values(key_ranges)"
            )
        return self._get_partial_values(prototype, key_ranges)

    async def _get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        ranges = [(key, range_of(byte_range)) for key, byte_range in key_ranges]
        await self._ensure_open()
        values = await self._engine.of(buffer_class_of(prototype)).get_many(ranges)
        return [to_buffer_of(value, prototype) for value in values]

    async def get_ranges(
        self,
        key: str,
        byte_ranges: Sequence[ByteRequest | None],
        *,
        prototype: BufferPrototype,
        **_: int,
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Yield many ranges of one value, in one batch; coalesced by the options of the store."""
        ranges = [(key, byte_range) for byte_range in byte_ranges]
        values = await self.get_partial_values(prototype, ranges)
        if any(value is None for value in values):
            raise BaseExceptionGroup("chunk read failed", [FileNotFoundError(key)])
        yield list(enumerate(values))

    async def get_many(
        self,
        requests: Sequence[str | tuple[str, ByteRequest | None]],
        *,
        prototype: BufferPrototype,
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Yield positions and values of many keys or ranges, in one batch of at most two rounds."""
        ranges = [(each, None) if isinstance(each, str) else each for each in requests]
        values = await self.get_partial_values(prototype, ranges)
        if values:
            yield list(enumerate(values))

    async def exists(self, key: str) -> bool:
        return await self._run(self._engine.operations.exists(key), only_reads=True)

    async def getsize(self, key: str) -> int:
        """Return the size of a value in bytes; the size of a chunk is in the index.

        Raises
        ------
        FileNotFoundError
            If the key is missing.
        """
        size = await self._run(self._engine.operations.get_size(key), only_reads=True)
        if size is None:
            raise FileNotFoundError(key)
        return size

    async def getsize_prefix(self, prefix: str) -> int:
        flow = self._engine.operations.get_total_size(as_directory(prefix))
        return await self._run(flow, only_reads=True)

    # ------------------------------------------------------------------- writes

    async def set(self, key: str, value: Value) -> None:
        operations = self._engine.operations
        await self._write(operations.set_many([(key, own_bytes(value))]), self._engine_for(value))
        if is_unsafe() and await self._run(operations.is_in_shard(key), only_reads=True):
            warn_of_other_pipeline()

    async def set_if_not_exists(self, key: str, value: Value) -> None:
        items = [(key, own_bytes(value))]
        flow = self._engine.operations.set_many(items, only_if_missing=True)
        await self._write(flow, self._engine_for(value))

    async def update(self, keys: Sequence[str], function: Function) -> None:
        """Replace values by what a function makes of them; no update of others is lost.

        Parameters
        ----------
        keys
            Keys of chunks, or of other values that are no metadata; each once.
        function
            Gets the values of all keys in their order, as bytes, ``None`` for a missing one, and
            returns the list of the new ones. ``None`` erases.

        Raises
        ------
        SpecError
            If a key is metadata or cannot be written, or the function returns something else.

        Notes
        -----
        Keys of one shard change together, at one instant. Shards change one after another. If a
        shard has changed since it was read, the function is called again with its values, and for
        keys of other shards with those that it saw before. A chunk that is not sharded is a shard
        of its own.

        The function may be called several times, in any thread, also while the shard is locked:
        it has no side effects, is quick, and does not use the store. Its exception reaches the
        caller; the shard stays as it is, and those that were changed before keep their changes.

        Of which base stores other processes are safe, too: those where no update of a shard is
        lost. In a batch, the update is stored immediately. On object stores, erasing a value that
        is no chunk of a shard is not protected against other processes.

        Examples
        --------
        >>> import asyncio
        >>> store = ShardingStore({}, chunks_per_shard=4)
        >>> store.set_sync("data/root/a/c0", b"abc")
        >>> def swap(old):
        ...     return [old[1], old[0]]
        >>> asyncio.run(store.update(["data/root/a/c0", "data/root/a/c1"], swap))
        >>> store.get_sync("data/root/a/c1").to_bytes()
        b'abc'
        """
        await self._write(self._engine.operations.update(items_of("keys", keys), function))

    def update_sync(self, keys: Sequence[str], function: Function) -> None:
        """As `update`, blocking."""
        self._check_writable()
        self._engine.driver.run(self._engine.operations.update(items_of("keys", keys), function))

    async def delete(self, key: str) -> None:
        # A resize of an array that was made with shards= deletes whole shards.
        if isinstance(key, str) and key.endswith(SHARD_MARK):
            await self._write(self._engine.operations.erase_shard(key.removesuffix(SHARD_MARK)))
            return
        await self._write(self._engine.operations.set_many([(key, None)]))

    async def delete_dir(self, prefix: str) -> None:
        await self._write(self._engine.operations.erase_prefix(as_directory(prefix)))

    async def clear(self) -> None:
        await self.delete_dir("")

    # ------------------------------------------------------------------ listing

    def list(self) -> AsyncIterator[str]:
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield all keys that start with `prefix`.

        On a base store that lists directories, the path of an array means its directory: zarr
        asks so for the chunks of ``lat``, and does not expect those of ``lat_bounds``. zarr's
        MemoryStore and mappings take each prefix as text.

        Cost: keys come in rounds of up to 64 shards, one round ahead of the caller; memory
        does not grow with their number. A caller that stops early closes the iterator.
        """
        is_path = isinstance(self.base, Store) and not isinstance(self.base, MemoryStore)
        begin = self._engine.operations.listing.stream(prefix, is_path=is_path)
        stream = await self._run(begin, only_reads=True)

        async def next_round() -> ListedKeys | None:
            if not stream.has_more:
                return None
            return await self._run(stream.next_round(), only_reads=True)

        n_left = _KEYS_BETWEEN_TURNS
        try:
            async with aclosing(one_ahead(next_round)) as rounds:
                async for listed in rounds:
                    for keys in listed.key_lists():
                        for key in keys:
                            yield key
                        n_left -= len(keys)
                        if n_left <= 0:
                            n_left = _KEYS_BETWEEN_TURNS
                            await asyncio.sleep(0)
        finally:
            if stream.has_more:
                await self._run(stream.close(), only_reads=True)
        raise_first(stream.errors)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of keys and of directories directly in a directory.

        Inside the chunk grid of a sharded array this reads the index of each shard below.
        """
        flow = self._engine.operations.listing.list_dir(prefix, is_exact=True)
        for name in await self._run(flow, only_reads=True):
            yield name

    # ----------------------------------------------------------------- blocking

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """As `get`, blocking."""
        engine = self._engine.of(buffer_class_of(prototype))
        value = engine.get_blocking(key, range_of(byte_range))
        return to_buffer_of(value, prototype)

    def set_sync(self, key: str, value: Value) -> None:
        """As `set`, blocking."""
        self._check_writable()
        run, operations = self._engine_for(value).driver.run, self._engine.operations
        run(operations.set_many([(key, as_view(value))]))
        if is_unsafe() and run(operations.is_in_shard(key)):
            warn_of_other_pipeline()

    def delete_sync(self, key: str) -> None:
        """As `delete`, blocking."""
        self._check_writable()
        self._engine.driver.run(self._engine.operations.set_many([(key, None)]))

    # --------------------------------------------------- for `ShardedCodecPipeline`

    async def _shard_ids(self, keys: Sequence[str]) -> Sequence[Hashable]:
        flow = shard_ids(self._engine.operations.catalog, keys)
        return await self._run(flow, only_reads=True)

    def _takes_shards(self, document: bytes) -> bool:
        return self._engine.operations.view.takes_shards(memoryview(document))

    async def _shards_of(self, keys: Sequence[str]) -> Sequence[ShardRef | None]:
        shards = await self._run(self._engine.operations.catalog.shards_of(keys), only_reads=True)
        raise_first([shard for shard in shards if isinstance(shard, ShardStoreError)])
        return [shard if isinstance(shard, ShardRef) else None for shard in shards]

    async def _get_values(
        self, keys: Sequence[str], prototype: BufferPrototype | None = None
    ) -> Sequence[bytes | memoryview | None]:
        await self._ensure_open()
        engine = self._engine.of(buffer_class_of(prototype))
        return await engine.get_many([(key, None) for key in keys])

    async def _set_or_erase(
        self,
        items: Iterable[tuple[str, Value | Modify | None]],
        prototype: BufferPrototype | None = None,
    ) -> None:
        owned = [
            (key, value if value is None or isinstance(value, Modify) else own_bytes(value))
            for key, value in items
        ]
        engine = self._engine.of(buffer_class_of(prototype))
        await self._write(engine.operations.set_many(owned), engine)

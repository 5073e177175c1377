"""`ShardingStore`: zarr ``Store`` that packs chunks into shards of the store it wraps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from zarr.abc.store import Store

from zarr_shardstore.arrays.policy import ChunksPerShard, V3Declaration
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import items_of
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.io.backends.base import Durability
from zarr_shardstore.io.backends.resolve import BaseStoreLike, base_store_of
from zarr_shardstore.io.local.locks import Locking
from zarr_shardstore.metadata.declaration import Native
from zarr_shardstore.operations.batch import Batch
from zarr_shardstore.operations.joint_update import Function
from zarr_shardstore.shards.append import MAX_DEAD_SHARE
from zarr_shardstore.shards.stack import Strategy
from zarr_shardstore.store.direct_reads import DirectReads
from zarr_shardstore.store.engine import ShardingEngine, twin_of
from zarr_shardstore.store.frame_writer import DEFAULT_FLUSH_NBYTES, FrameWriter
from zarr_shardstore.store.key_values import KeyValues
from zarr_shardstore.store.options import IndexCodecs, IndexLocation, ShardingOptions, Transformers
from zarr_shardstore.store.upkeep import Upkeep
from zarr_shardstore.zarr_hooks.pipeline import make_default

_OF_THE_DRAFT = ("set_partial_values", "erase", "erase_values", "erase_prefix")
"""Operations of the draft that zarr's ``Store`` does not have under these names."""


class ShardingStore(Upkeep, DirectReads, KeyValues):
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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._of, (self._engine, self.read_only)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardingStore)
            and self.read_only == other.read_only
            and self._engine == other._engine
        )

    __hash__ = None  # type: ignore[assignment]

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

    # ------------------------------------------------------------------- writes

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

    @twin_of(update, "blocking")
    def update_sync(self, keys: Sequence[str], function: Function) -> None:
        self._check_writable()
        self._engine.driver.run(self._engine.operations.update(items_of("keys", keys), function))

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

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
from zarr_shardstore.metadata.declaration import Native, View
from zarr_shardstore.operations.batch import Batch
from zarr_shardstore.operations.joint_update import Function
from zarr_shardstore.shards.append import MAX_DEAD_SHARE
from zarr_shardstore.shards.stack import Strategy
from zarr_shardstore.store.engine import ShardingEngine, documented_like, whole
from zarr_shardstore.store.growing.append_arrays import AppendArrays
from zarr_shardstore.store.growing.frame_writer import DEFAULT_FLUSH_NBYTES, FrameWriter
from zarr_shardstore.store.options import IndexCodecs, IndexLocation, ShardingOptions, Transformers
from zarr_shardstore.store.upkeep import Upkeep
from zarr_shardstore.zarr_hooks.pipeline import make_default

_OF_THE_DRAFT = ("set_partial_values", "erase", "erase_values", "erase_prefix")
"""Operations of the draft that are not in zarr's ``Store`` under these names."""


@whole
class ShardingStore(Upkeep, AppendArrays):
    """Zarr store that packs many chunks into one object of the store it wraps.

    You read and write chunks as in any zarr store. The wrapped store, the *base store*, holds
    shards: objects of many chunks each. Keys that are not chunks of a sharded array pass through.

    Parameters
    ----------
    store
        The base store: a zarr store, a local path, a URL, an fsspec file system or mapper, an
        obstore store, or a mapping from keys to bytes such as a dict. A path may also name a zip
        archive to read; to write one, pass a ``zarr.storage.ZipStore``. A ``zarr.Group`` or a
        ``StorePath`` stands for the objects below its path.
    chunks_per_shard : int, tuple of int, "auto", mapping, optional
        Chunks per shard of new arrays. Stored arrays keep their shards.

        - An int is the number for every dimension: ``4``.
        - A tuple has a number for each dimension, ``(1, 8, 8)``. It leaves arrays with another
          number of dimensions alone.
        - ``"auto"`` makes shards of 10 to 100 MB before compression.
        - A mapping from dimension names to numbers, ``{"time": 24, "y": 4}``, is for arrays that
          have one of these dimensions. Along other dimensions a shard has one chunk. The names are
          ``dimension_names`` of Zarr v3, ``_ARRAY_DIMENSIONS`` of xarray, or the axes of the
          OME-Zarr group. The group must have its axes before the array is made.
        - A mapping from paths or patterns has one of the above, or ``None``, for each path:
          ``{"raw/*": 8, "labels": None}``. The rule for the exact path of an array comes first.
        - ``None`` shards no array. Without the option no array is sharded either, and the first
          array of a new store gives an `UnshardedWarning`.

        A new shard of more than 255 chunks is cut to the size of the grid. The first dimension is
        cut only for more than 16,384 chunks, because arrays grow there. In a store without metadata
        the option declares each array under ``data/root/``, and each array that a mapping names.
    shard_nbytes : int or str, optional
        Largest size of a new shard before compression: ``64_000_000``, ``"64 MB"``, ``"64 MiB"``.
        It replaces `chunks_per_shard`. A shard has at least one chunk.
    declaration : {"codec", "storage_transformers"}, optional
        How the metadata of a new v3 array says that it is sharded. Every v3 reader reads the
        default, the ``sharding_indexed`` codec. The other is the draft's storage transformer.
    storage_transformers : str, mapping, sequence of these, optional
        The transformers of new arrays, nearest to the array first, by name or as in metadata:
        ``["crc32c", "sharding"]``. A ``"sharding"`` without a configuration takes
        `chunks_per_shard`, and skips arrays that `chunks_per_shard` does not shard.
    index_codecs, index_location : optional
        Form of the shard index of new arrays, as in ZEP 2. By default it has a checksum and is at
        the end: ``["bytes", "crc32c"]``, ``"end"``. The draft's index has no checksum.
    native : {"flat", "passthrough"}
        Whether arrays with a ``sharding_indexed`` codec, of any writer, show their inner chunks
        or pass through as they are.
    view : {"chunks", "shards"}
        How zarr sees sharded arrays of Zarr v3: by plain chunks, or with the ``sharding_indexed``
        codec, so that ``z.shards`` is the shape of their shards. See the notes.
    order : {"morton", "C", "F"}
        Order of the chunks in a shard that is written at once.
    strategy : {"auto", "append", "rewrite"}
        How a shard is changed. ``"append"`` writes the chunk into a gap of the file and updates
        the index; it needs local files and ``locking="os"``. ``"rewrite"`` stores the whole shard
        again. ``"auto"`` appends where it can.
    locking : {"os", "lockfile", "none"}
        How a shard on local files is protected against other processes: by an operating system
        lock on ``KEY.__lock``; by the existence of that file, for network file systems without
        locks; or not at all. A killed writer leaves a lock file behind. All writers of a store,
        including tensorstore, must use the same mode.
    durability : {"process", "power"}
        Whether a finished write on local files also survives a loss of power. ``"power"`` syncs
        the file and its directories, which takes some milliseconds a write. Object stores keep
        each acknowledged write.
    max_dead_bytes : int, optional
        Dead bytes that replaced and erased chunks may leave in a shard file. An append that would
        leave more stores the shard again without them.
    max_dead_share : float
        Largest dead share of the data of a shard that is full, flushed or out of room. Above it
        the shard is stored again. With 1 only `compact` and complete writes do that.
    max_gap_bytes, max_coalesced_bytes : int, optional
        Largest gap between two chunks that one request also reads (4 KiB), and largest request
        for several chunks (16 MiB). On remote stores a busy read takes gaps 16 times as large.
    storage_options : mapping, optional
        Options for a URL: obstore's (``access_key_id``, ``endpoint``) or fsspec's (``key``,
        ``endpoint_url``). S3, GCS and Azure go through obstore if it is installed and knows all
        options, otherwise through fsspec; ``repr`` shows which. Keys that you leave out come from
        the environment or the AWS profile.
    static : bool
        Promise that no other program changes shards while this store is open. Then indexes are
        cached even if the base store has no versions, as with fsspec. Otherwise a cached index
        counts only while an ETag or the state of the file shows that it is valid.
    read_only : bool
        Refuse writes.

    Raises
    ------
    SpecError
        If an option is not valid.

    Notes
    -----
    Thread safety: threads, tasks and other stores of one process may read and write the same
    shards. So may other processes, on local files and through obstore on object stores: every
    update is kept. Through fsspec on an object store, only one process may write a shard at a time.

    Cost in requests to the base store: a read takes two rounds, one for the indexes that are not
    cached and one for the chunks. A write of a whole shard takes one request, a write of a part
    one read and one write. The first use of an array also reads its metadata.

    With ``view="shards"`` an array that you open has ``z.shards``, and `ShardedCodecPipeline`
    turns its operations into operations on chunks. Guarantees and stored documents stay the same.
    A resize erases whole shards. Another pipeline, a wrapper such as ``LoggingStore``, and a copy
    of the document in another store raise `SpecError`. Arrays of v2 and the draft, and arrays with
    further storage transformers, show chunks. So does the object of a new array, unless it was
    made with ``shards=``: open it again.

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
        view: View = "chunks",
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
        options = ShardingOptions.among(locals())
        base = base_store_of(store, storage_options)
        if isinstance(base, ShardingStore):
            raise SpecError("the group is in a ShardingStore: wrap its base store")
        super().__init__(read_only=read_only or (isinstance(base, Store) and base.read_only))
        self._engine = ShardingEngine(base, options)
        make_default()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._of, (self._engine, self.read_only)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardingStore):
            return False
        return self.read_only == other.read_only and self._engine == other._engine

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
        """Replace values by the results of a function, without losing another writer's update.

        Parameters
        ----------
        keys
            Keys of chunks, or of other values except metadata, each once.
        function
            Takes the list of the values as bytes, ``None`` for each missing one, and returns the
            list of the new values. ``None`` erases.

        Raises
        ------
        SpecError
            If a key is metadata or cannot be written, or the function returns something else.

        Notes
        -----
        The keys of one shard change at one instant, and shards change one after another. A chunk
        that is not sharded counts as a shard. If a shard has changed since it was read, the
        function is called again, with new values for the keys of this shard and the same values
        for all others.

        The function may run several times, in any thread, and while the shard is locked. So it
        must be quick, have no side effects, and not use the store. If it raises, the shard stays
        as it is, earlier shards keep their changes, and you get the exception.

        Other processes may update the same values where they may write the same shards. The one
        exception, on object stores, is an erased value that is not a chunk of a shard. A batch does
        not delay an update.

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

    @documented_like(update, "blocking")
    def update_sync(self, keys: Sequence[str], function: Function) -> None:
        self._check_writable()
        self._engine.driver.run(self._engine.operations.update(items_of("keys", keys), function))

    def batch(self, *, max_nbytes: int | None = None) -> Batch:
        """Return a context manager that buffers writes of chunks, to store each shard once.

        Use it with ``with`` or ``async with``. `Batch` describes reads in the block, exceptions,
        and several batches of one store.

        Parameters
        ----------
        max_nbytes : int, optional
            Largest size of the buffer, by default 256 MiB. Above it the fullest shards are stored.

        Raises
        ------
        SpecError
            If `max_nbytes` is not a size, or the store is read-only.
        UnpublishedError
            If shards could not be stored when the block ends. The error names them.

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
            Path of the array. The writer appends at its end, or creates the array.
        frames : n x shape of a frame, optional
            The first frames to append.
        flush_s : float, optional
            Seconds between two flushes while frames arrive; ``inf`` means no flush by time. The
            default is 1 if chunks are appended to shards, and 10 if each flush rewrites a shard.
        flush_nbytes : int
            Bytes of buffered frames that cause an earlier flush, of whole shards if possible.
        **create
            Options of ``zarr.create_array`` for a new array. By default a frame is a chunk.

        Raises
        ------
        SpecError
            If an argument is not valid, the store is read-only, or the array cannot grow.
        ShardConflictError
            If the array has another writer of frames: on local files in any process, on other
            base stores in this process.
        UnsupportedError
            If the base store cannot replace objects, as in a zip archive.

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

"""`ShardedCodecPipeline`: codec pipeline that hands whole array operations to a sharding store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from operator import itemgetter
from random import SystemRandom
from threading import Lock
from typing import Any, Self, cast
from weakref import WeakValueDictionary

import numpy as np
import zarr
from zarr.abc.codec import ArrayArrayCodec, ArrayBytesCodec, BytesBytesCodec, Codec, CodecPipeline
from zarr.abc.store import ByteRequest, Store
from zarr.core.array import create_codec_pipeline
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, BufferPrototype, NDBuffer
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.core.metadata import ArrayMetadata
from zarr.registry import register_pipeline
from zarr.storage import FsspecStore, StorePath

from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.format.layout import ArrayLayout
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.io.buffers import own_bytes, to_buffer_of
from zarr_shardstore.io.driver import MAX_CONFLICT_S
from zarr_shardstore.metadata.documents import ArrayDocument
from zarr_shardstore.shards.requests import swap
from zarr_shardstore.telemetry import warn
from zarr_shardstore.zarr_hooks import array_jobs
from zarr_shardstore.zarr_hooks.array_jobs import Axes, Batch, TakesWholeOperations, statuses
from zarr_shardstore.zarr_hooks.box import MIN_CHUNKS, ArrayBox
from zarr_shardstore.zarr_hooks.box_jobs import BoxJob, SlabCodec
from zarr_shardstore.zarr_hooks.chunk_codec import ChunkCodec
from zarr_shardstore.zarr_hooks.opened_metadata import describes
from zarr_shardstore.zarr_hooks.shards_argument import (
    ShardsArgument,
    drop_copied_encoding,
    refuse_shards,
)

_LONGEST_PAUSE_S = 0.005
"""Pause before zarr's way of writing a part is repeated."""

_turns: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()
"""Locks by event loop and key: tasks of one loop write parts of a chunk one by one, which saves
repeated work."""


def _inner_store(store: Store) -> tuple[Store, str]:
    """Return the store of this package inside a file system ``shard``, and the path of `store` in
    it; otherwise the store itself."""
    inner = getattr(store.fs, "sharding_store", None) if type(store) is FsspecStore else None
    if not isinstance(inner, TakesWholeOperations):
        return store, ""
    path = cast(FsspecStore, store).path.strip("/")
    return cast(Store, inner), f"{path}/" if path else ""


def _inner_batch(batch_info: Iterable[Any], *, writes: bool = False) -> list[Any]:
    """Return the chunks of an operation, with their paths in the store of this package."""
    batch = list(batch_info)
    if not batch or type(batch[0][0]) is not StorePath:
        return batch
    store = batch[0][0].store
    inner, root = _inner_store(store)
    if inner is store:
        return batch
    if writes:  # the inner store does not know whether zarr's store is read-only
        store._check_writable()
    return [
        (StorePath(inner, root + path.path) if path.store is store else path, *rest)
        for path, *rest in batch
    ]


@dataclass(frozen=True)
class ShardedCodecPipeline(BatchedCodecPipeline):
    """A codec pipeline for zarr that writes each shard of an array operation once.

    zarr's own pipelines hand chunks over one by one. This pipeline reads all chunks of a selection
    in one operation of the store. It writes them in one operation for each 16 MiB of whole shards.
    Arrays in other stores get the pipeline that zarr would use without this package. Arrays whose
    ``sharding_indexed`` codec is left to zarr, and arrays with a codec that can only be awaited,
    get zarr's ``BatchedCodecPipeline``.

    Notes
    -----
    The first `ShardingStore` of a process, made or unpickled, sets ``codec_pipeline.path`` of
    zarr's configuration; an import does not. A pipeline that you configure, by
    ``zarr.config.set``, the environment or a YAML file, has priority, before and after. With such
    a pipeline the first write of a sharded array in a process warns, because concurrent writers of
    one chunk may lose a part. After ``zarr.config.reset()`` the next `ShardingStore` sets the path
    again.

    A store inside one of zarr's wrappers, such as ``LoggingStore``, counts as another store, so
    that the wrapper sees each operation.

    Memory: encoded and decoded chunks of 64 MiB (decoded), or of one shard if that is larger.

    Thread safety: as the store. Several writers may write parts of one chunk wherever they may
    write the same shard. If the chunk has changed since it was read, the part is merged again
    inside the commit.

    Examples
    --------
    >>> import zarr
    >>> from zarr_shardstore import ShardingStore
    >>> store = ShardingStore({}, chunks_per_shard=(4, 4))
    >>> zarr.config.get("codec_pipeline.path")
    'zarr_shardstore.store.pipeline.ShardedCodecPipeline'
    >>> z = zarr.create_array(store, shape=(8, 8), chunks=(1, 1), dtype="u1")
    >>> z[:] = 1  # 64 chunks, 4 writes
    """

    shards_argument: ShardsArgument | None = None
    """Set for an array that addresses shards; the pipeline then has the codecs of its chunks."""
    seen: list[ArrayDocument] = field(default_factory=list, compare=False, repr=False)
    """The document at the last operation."""
    opened: ArrayMetadata | None = field(default=None, compare=False, repr=False)
    """Metadata of the array object, which the first operation compares with the document."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "seen": []}

    @classmethod
    def from_array_metadata_and_store(cls, array_metadata: ArrayMetadata, store: Store) -> Self:
        """Return the pipeline of an array: ours in a sharding store, else the very object that zarr
        would have made without it.

        Raises
        ------
        NotImplementedError
            As the usual pipeline does; zarr then calls `from_codecs`.
        """
        drop_copied_encoding(array_metadata)
        if type(store) is FsspecStore:  # all other stores cost no call
            store, _ = _inner_store(store)
        if not isinstance(store, TakesWholeOperations):
            refuse_shards(array_metadata)
            usual: Any = usual_pipeline().from_array_metadata_and_store(array_metadata, store)
            return cast(Self, usual)
        usual_chain: Any = create_codec_pipeline(array_metadata)
        shards_argument = ShardsArgument.of(array_metadata, store, cls._of(usual_chain))
        if shards_argument is not None:
            chain = cls._of(shards_argument.codec.codecs)
            return replace(chain, shards_argument=shards_argument, opened=array_metadata)
        refuse_shards(array_metadata)
        return replace(cls._of(usual_chain), opened=array_metadata)

    @classmethod
    def from_codecs(cls, codecs: Iterable[Codec], *, batch_size: int | None = None) -> Self:
        """Return zarr's usual pipeline for codecs without a store, as in native shards."""
        options = {} if batch_size is None else {"batch_size": batch_size}
        return cast(Self, usual_pipeline().from_codecs(codecs, **options))

    @classmethod
    def _of(cls, codecs: Iterable[Codec]) -> Self:
        chain = list(codecs)
        filters = tuple(codec for codec in chain if isinstance(codec, ArrayArrayCodec))
        (serializer,) = (codec for codec in chain if isinstance(codec, ArrayBytesCodec))
        compressors = tuple(codec for codec in chain if isinstance(codec, BytesBytesCodec))
        batch_size = zarr.config.get("codec_pipeline.batch_size")
        return cls(filters, serializer, compressors, batch_size)

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:
        return replace(
            self._of([codec.evolve_from_array_spec(array_spec) for codec in self]),
            shards_argument=self.shards_argument,
            opened=self.opened,
        )

    async def read(self, batch_info: Iterable[Any], out: NDBuffer, drop_axes: Axes = ()) -> Any:
        """Read all chunks of a selection into `out`; return whether each is stored."""
        batch = _inner_batch(batch_info)
        if self.shards_argument is not None:
            chunks = replace(self, shards_argument=None)
            return await self.shards_argument.read(chunks, batch, out, drop_axes)
        store, codec = self._store_of(batch), ChunkCodec.of(list(self))
        layout = await self._checked_layout(store, batch, reads=True)
        if store is None or codec is None:
            return await super().read(batch, out, drop_axes)
        box = _box_of(store, codec, batch, out.as_ndarray_like(), drop_axes, layout)
        if box is not None:
            return statuses((await box.read()).ravel().tolist())
        return statuses(await array_jobs.read_parts(store, codec, batch, out, drop_axes))

    async def write(self, batch_info: Iterable[Any], value: NDBuffer, drop_axes: Axes = ()) -> None:
        """Write `value` into all chunks of a selection; each shard is committed once."""
        batch = _inner_batch(batch_info, writes=True)
        if self.shards_argument is not None:
            chunks = replace(self, shards_argument=None)
            await self.shards_argument.write(chunks, batch, value, drop_axes)
            return
        store, codec = self._store_of(batch), ChunkCodec.of(list(self))
        layout = await self._checked_layout(store, batch, reads=False)
        if store is None or codec is None:
            await super().write(batch, value, drop_axes)
            return
        box = _box_of(store, codec, batch, value.as_ndarray_like(), drop_axes, layout)
        if box is not None:
            is_complete = np.array(list(map(itemgetter(4), batch)))
            batch = [batch[i] for i in await box.write(is_complete)]
            if not batch:
                return
        await array_jobs.write_parts(store, codec, batch, value, drop_axes)

    async def write_batch(
        self, batch_info: Iterable[Any], value: NDBuffer, drop_axes: Axes = ()
    ) -> None:
        """Write in zarr's way, chunk by chunk. Repeat it if another writer has changed a chunk
        between the read and the write of a part."""
        batch = _inner_batch(batch_info, writes=True)
        end = time.monotonic() + MAX_CONFLICT_S
        scope = id(asyncio.get_running_loop()), getattr(batch[0][0], "path", "")
        turn = _turns.setdefault(scope, asyncio.Lock())
        while True:
            try:
                paths = [(self._part_path(path, spec), spec, *rest) for path, spec, *rest in batch]
                async with turn:
                    await super().write_batch(cast(Any, paths), value, drop_axes)
                return
            except _ChangedMeanwhileError as error:
                if time.monotonic() > end:
                    raise ShardConflictError(
                        f"other writers have changed {error.args[0]!r} again and again, for "
                        f"{MAX_CONFLICT_S:.0f} s; it was not written"
                    ) from None
            await asyncio.sleep(SystemRandom().uniform(0, _LONGEST_PAUSE_S))

    def _part_path(self, path: Any, spec: ArraySpec) -> Any:
        if type(path) is not StorePath or not isinstance(path.store, TakesWholeOperations):
            return path
        part_path = _PartPath(path.store, path.path)
        part_path.encode, part_path.spec = self.encode, spec
        return part_path

    def _store_of(self, batch: Batch) -> TakesWholeOperations | None:
        """Return the store of this package that has all chunks, or ``None``."""
        if self.supports_partial_decode or self.supports_partial_encode:
            return None  # native shards: the codec reads and writes parts of them itself
        if not batch or not isinstance(batch[0][0], StorePath):
            return None
        store = batch[0][0].store
        if not isinstance(store, TakesWholeOperations):
            return None
        is_one = all(type(path) is StorePath and path.store is store for path, *_ in batch)
        return store if is_one else None

    async def _checked_layout(
        self, store: TakesWholeOperations | None, batch: Batch, *, reads: bool
    ) -> ArrayLayout | None:
        """Return the layout of the array if it is sharded, and refuse another array."""
        if not hasattr(store, "_layout_of"):  # a draft hierarchy, which takes keys only
            return None
        key, takes_boxes = batch[0][0].path, cast(Any, store)
        layout: ArrayLayout | None = await takes_boxes._layout_of(key, reads=reads)
        if layout is not None:
            self.check(cast(ArrayDocument, layout.document))
            return layout
        node = self.seen[0].node if self.seen else None
        self.check(await takes_boxes._document_of(key, node))
        return None

    def check(self, document: ArrayDocument | None) -> None:
        """Refuse an array that was made anew since it was opened, or removed since its last use.

        Raises
        ------
        ShardConflictError
            If its chunks have another shape, data type, or codecs.
        """
        for before in self.seen:
            if before is document:
                return
            is_gone = document is None and before.declaration is not None
            if is_gone or (document and not before.has_same_chunks(document)):
                raise ShardConflictError.of_replaced(before.node.path)
        if document is not None:
            if self.opened and not (self.seen or describes(self.opened, document)):
                raise ShardConflictError.of_replaced(document.node.path)
            self.seen[:] = [document]


def _box_of(
    store: TakesWholeOperations,
    codec: ChunkCodec,
    batch: Batch,
    array: Any,
    drop_axes: Axes,
    layout: ArrayLayout | None,
) -> BoxJob | None:
    """Return the operation on the box that the chunks are, if they are one."""
    is_array = isinstance(array, np.ndarray) and not drop_axes
    if not is_array or len(batch) < MIN_CHUNKS or layout is None:
        return None
    box = ArrayBox.of_batch(batch, layout)
    return box and BoxJob.of(store, box, SlabCodec.of(codec, batch[0][1]), array)


class _ChangedMeanwhileError(Exception):
    """Another writer has changed a value since it was read; the argument is its key."""


class _PartPath(StorePath):
    """Path of a value that zarr reads, changes and writes: a compare and swap."""

    _seen: tuple[bytes | None] | None = None
    """The value that was read, if one was."""

    encode: Callable[..., Awaitable[Iterable[Buffer | None]]]
    spec: ArraySpec

    async def get(
        self, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        if byte_range is not None:
            return await super().get(prototype, byte_range)
        prototype = prototype or self.spec.prototype
        store = cast(TakesWholeOperations, self.store)
        (value,) = await store._get_values([self.path], prototype)
        self._seen = (None if value is None else own_bytes(value),)
        return to_buffer_of(value, prototype)

    async def set(self, value: Buffer) -> None:
        await self._swap(own_bytes(value))

    async def delete(self) -> None:
        """Remove the value; where a removal has no condition, store a chunk of fill values."""
        (empty,) = await self.encode([array_jobs.empty_chunk(self.spec)])
        await self._swap(None, None if empty is None else partial(own_bytes, empty))

    async def _swap(
        self, new: bytes | None, placeholder: Callable[[], bytes] | None = None
    ) -> None:
        store, seen = cast(TakesWholeOperations, self.store), self._seen

        def refuse(_: Bytes | None) -> Bytes | None:
            raise _ChangedMeanwhileError(self.path)

        item = new if seen is None else swap(self.path, seen[0], new, refuse, placeholder)
        await store._set_or_erase([(self.path, item)], self.spec.prototype)


_PATH = "zarr_shardstore.store.pipeline.ShardedCodecPipeline"
"""The name in users' configuration, and in pickled arrays."""
ShardedCodecPipeline.__module__ = _PATH.rpartition(".")[0]

_OPTION, _MARK = "codec_pipeline.path", "codec_pipeline.is_set_by_zarr_shardstore"

_warning = Lock()
"""Locked from the first warning on, so that a process warns once."""


def make_default() -> None:
    """Make `ShardedCodecPipeline` the pipeline of zarr's configuration, unless the user chose one.

    A choice is a string that is not zarr's default object: another text, or an equal text from
    code, the environment or a YAML file. The mark stays when the user later chooses the default;
    ``zarr.config.reset()`` removes it.
    """
    register_pipeline(ShardedCodecPipeline)  # a mere checkout has no entry point
    if zarr.config.get(_OPTION) is _usual_path() and not zarr.config.get(_MARK, False):
        zarr.config.set({_OPTION: _PATH, _MARK: True})


def is_unsafe() -> bool:
    """Whether another pipeline is configured, and no warning was given."""
    # Not `zarr.config.get`, which takes a microsecond.
    chosen = zarr.config.config.get("codec_pipeline", {}).get("path")
    return chosen != _PATH and not _warning.locked()


def warn_of_other_pipeline() -> None:
    """Warn, once in a process, that another pipeline writes a sharded array."""
    if _warning.acquire(blocking=False):
        warn(
            "another codec pipeline writes a sharded array: "
            f"{zarr.config.get(_OPTION)}. If several writers have parts of one chunk, or of one "
            "shard that was made with shards=, parts may be lost. ShardedCodecPipeline loses none: "
            "leave codec_pipeline.path as it is",
            stacklevel=3,
        )


def usual_pipeline() -> type[CodecPipeline]:
    """Return the class that zarr's defaults name."""
    module, _, name = _usual_path().rpartition(".")
    found: type[CodecPipeline] = getattr(import_module(module), name)
    return found


def _usual_path() -> str:
    """Return the path of the newest of zarr's defaults that does not name our pipeline."""
    groups: list[Mapping[str, str]] = [d.get("codec_pipeline", {}) for d in zarr.config.defaults]
    return [group["path"] for group in groups if group.get("path", _PATH) != _PATH][-1]

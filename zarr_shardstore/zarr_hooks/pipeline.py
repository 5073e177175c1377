"""`ShardedCodecPipeline`: codec pipeline that hands whole array operations to a sharding store.

A read fetches all chunks of a selection in one operation, decodes them in threads and puts each
into the result. A write encodes whole shards at a time; while one unit of shards is stored, the
next is encoded.

`make_default` makes it zarr's pipeline. zarr then asks it for the pipeline of every array: for one
in another store it returns the object that zarr would have made without it.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, cast, runtime_checkable
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.codec import (
    ArrayArrayCodec,
    ArrayBytesCodec,
    BytesBytesCodec,
    Codec,
    CodecPipeline,
)
from zarr.abc.store import ByteGetter, ByteRequest, ByteSetter, Store
from zarr.core.array import create_codec_pipeline
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, BufferPrototype, NDBuffer
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.core.metadata import ArrayMetadata
from zarr.registry import register_pipeline
from zarr.storage import FsspecStore, StorePath

from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.io.buffers import own_bytes, to_buffer_of
from zarr_shardstore.io.concurrency import map_in_threads, run_within
from zarr_shardstore.io.driver import MAX_CONFLICT_S
from zarr_shardstore.shards.requests import PartWrite
from zarr_shardstore.telemetry import warn
from zarr_shardstore.zarr_hooks.chunk_codec import ChunkCodec, PlainCodec
from zarr_shardstore.zarr_hooks.shards_argument import Unrolling, drop_copied_encoding

Value: TypeAlias = bytes | memoryview
ChunkValues: TypeAlias = NDBuffer | npt.NDArray[Any]

MIB = 1024 * 1024

_MAX_NBYTES_AT_ONCE = 64 * MIB
"""Decoded size of the chunks of one operation that are in memory at a time."""

_WRITE_NBYTES = 16 * MIB
"""Decoded size of the chunks in one write: the next are encoded while these are stored."""

_READ_NBYTES = 32 * MIB
"""Decoded size of the chunks in one read; more, because each read takes two round trips."""

_LONGEST_PAUSE_S = 0.005
"""Before zarr's way of writing a part is repeated."""

_turns: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()
"""By event loop and key: tasks of one loop write parts of a chunk in zarr's way one by one. Without
it nothing is lost, and most of the work is done again and again."""

_SMALL_NBYTES = 4 * 1024
"""Decoded size of a chunk that takes less time to be decoded than the Python around it."""


class ChunkPart(NamedTuple):
    """Part of one chunk that an array operation reads or writes."""

    key: str
    spec: ArraySpec
    inside: Any
    """Selection in the chunk."""
    outside: Any
    """Selection in the value of the operation."""
    is_complete: bool
    """Whether the part has all elements of the chunk that lie in the array."""

    def chunk_to_write(
        self, value: NDBuffer, old: NDBuffer | None, drop_axes: tuple[int, ...]
    ) -> NDBuffer | None:
        """Return the whole chunk with this part of `value` in it; ``None`` if it must be missing.

        The chunk has memory of its own: neither `value` nor `old` can change it afterwards.
        """
        spec, dtype = self.spec, self.spec.dtype.to_native_dtype()
        make = spec.prototype.nd_buffer
        part = value if value.shape == () or self.inside == () else value[self.outside]
        if old is not None:
            chunk = old.copy()
        elif self.is_complete and part.shape == spec.shape:
            chunk = make.empty(shape=spec.shape, dtype=dtype, order=spec.order)
        else:
            fill = fill_value_of(spec)
            chunk = make.create(shape=spec.shape, dtype=dtype, order=spec.order, fill_value=fill)
        if drop_axes and part is not value:
            axes = tuple(None if i in drop_axes else slice(None) for i in range(spec.ndim))
            part = part[axes]
        chunk[self.inside] = part
        return None if _is_empty(chunk, spec) else chunk

    def whole_chunk_in(self, values: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Return the values of the chunk, as a view, if the part is all of a chunk."""
        chunk = values[self.outside] if self.is_complete and values.shape else values
        return chunk if self.is_complete and chunk.shape == self.spec.shape else None

    def put(self, chunk: ChunkValues | None, out: ChunkValues, drop_axes: tuple[int, ...]) -> None:
        """Put this part of a chunk, or of the fill value, into the result of a read."""
        if chunk is None:
            out[self.outside] = fill_value_of(self.spec)
            return
        part = chunk[self.inside]
        out[self.outside] = part.squeeze(axis=drop_axes) if drop_axes else part


def fill_value_of(spec: ArraySpec) -> Any:
    """Return the value of missing elements; a document of Zarr v2 may leave it open."""
    return spec.dtype.default_scalar() if spec.fill_value is None else spec.fill_value


def _is_empty(chunk: ChunkValues, spec: ArraySpec) -> bool:
    """Whether a chunk is not stored, because the array stores no chunks of fill values."""
    if spec.config.write_empty_chunks:
        return False
    fill = fill_value_of(spec)
    array: Any = chunk.as_ndarray_like() if isinstance(chunk, NDBuffer) else chunk
    if isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and array.size:
        # Most chunks differ in their first element, and a look at all elements takes 20 µs.
        first = array[(0,) * array.ndim]
        is_nan = first != first
        if first != fill and not is_nan:
            return False
    return spec.prototype.nd_buffer.from_ndarray_like(array).all_equal(fill)


@runtime_checkable
class _TakesWholeOperations(Protocol):
    """Methods of the stores of this package; zarr's wrappers around them do not have these."""

    async def _shard_ids(self, keys: Sequence[str]) -> Sequence[Hashable]: ...

    async def _set_or_erase(
        self,
        items: Iterable[tuple[str, Buffer | bytes | PartWrite | None]],
        prototype: BufferPrototype | None = None,
    ) -> None: ...

    async def _get_values(
        self, keys: Sequence[str], prototype: BufferPrototype | None = None
    ) -> Sequence[Value | None]: ...


def _store_behind(store: Store) -> tuple[Store, str]:
    """Return the store of this package behind a file system ``shard``, and the path of `store` in
    it; otherwise the store itself."""
    inner = getattr(store.fs, "sharding_store", None) if type(store) is FsspecStore else None
    if not isinstance(inner, _TakesWholeOperations):
        return store, ""
    path = cast(FsspecStore, store).path.strip("/")
    return cast(Store, inner), f"{path}/" if path else ""


def _batch_behind(batch_info: Iterable[tuple[Any, ...]], *, writes: bool = False) -> list[Any]:
    """Return the chunks of an operation, with their paths in the store behind."""
    batch = list(batch_info)
    if not batch or type(batch[0][0]) is not StorePath:
        return batch
    store = batch[0][0].store
    inner, root = _store_behind(store)
    if inner is store:
        return batch
    if writes:  # of the store behind it is not known that zarr may only read
        store._check_writable()
    return [
        (StorePath(inner, root + path.path) if path.store is store else path, *rest)
        for path, *rest in batch
    ]


@dataclass(frozen=True)
class ShardedCodecPipeline(BatchedCodecPipeline):
    """A codec pipeline for zarr that writes each shard of an array operation once.

    zarr's own pipelines hand chunks over one by one. This one reads all chunks of a selection in
    one operation of the store. It writes them in one operation for each 16 MiB of whole shards.
    Arrays in other stores get the pipeline that zarr would use without this package. Arrays whose
    ``sharding_indexed`` codec is left to zarr, and those with a codec that can only be awaited, get
    zarr's ``BatchedCodecPipeline``.

    Notes
    -----
    The first `ShardingStore` of a process, made or unpickled, sets ``codec_pipeline.path`` of
    zarr's configuration to it. An import does not. Another pipeline that the user configures, by
    ``zarr.config.set``, the environment or a YAML file, wins, before and after. With such a
    pipeline a write of a sharded array warns, once in a process: writers of parts of one chunk may
    lose one of them. After ``zarr.config.reset()`` the next `ShardingStore` sets it again.

    A store inside one of zarr's wrappers, such as ``LoggingStore``, counts as another store:
    the wrapper would not see what is done.

    Memory: encoded and decoded chunks of 64 MiB (decoded), or of one shard if that is larger.

    Thread safety: that of the store. Parts of one chunk that several writers write are all there,
    where the store loses no update of a shard: a part is merged again inside the commit if the
    chunk has changed since it was read.

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

    unrolling: Unrolling | None = None
    """For arrays that address shards; the codecs of the pipeline are those of their chunks."""

    @classmethod
    def from_array_metadata_and_store(cls, array_metadata: ArrayMetadata, store: Store) -> Self:
        """Return the pipeline of an array: this one in a sharding store, else zarr's usual one.

        Raises
        ------
        NotImplementedError
            As the usual pipeline does; zarr then calls `from_codecs`.
        """
        drop_copied_encoding(array_metadata)
        if type(store) is FsspecStore:  # nothing else costs a call
            store, _ = _store_behind(store)
        if not isinstance(store, _TakesWholeOperations):
            usual: Any = usual_pipeline().from_array_metadata_and_store(array_metadata, store)
            return cast(Self, usual)
        usual_chain: Any = create_codec_pipeline(array_metadata)
        unrolling = Unrolling.of(array_metadata, store, cls._of(usual_chain))
        if unrolling is not None:
            return replace(cls._of(unrolling.codec.codecs), unrolling=unrolling)
        return cls._of(usual_chain)

    @classmethod
    def from_codecs(cls, codecs: Iterable[Codec], *, batch_size: int | None = None) -> Self:
        """Return zarr's usual pipeline: there is no store, as for the chunks in native shards."""
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
            unrolling=self.unrolling,
        )

    async def read(
        self,
        batch_info: Iterable[tuple[ByteGetter, ArraySpec, Any, Any, bool]],
        out: NDBuffer,
        drop_axes: tuple[int, ...] = (),
    ) -> Any:
        """Read all chunks of a selection into `out`; tell of each whether it is stored."""
        batch = _batch_behind(batch_info)
        if self.unrolling is not None:
            chunks = replace(self, unrolling=None)
            return await self.unrolling.read(chunks, batch, out, drop_axes)
        store, codec = self._store_of(batch), ChunkCodec.of(list(self))
        if store is None or codec is None:
            return await super().read(batch, out, drop_axes)
        is_present: dict[int, bool] = {}
        array: Any = out.as_ndarray_like()
        plain = codec.plain(batch[0][1]) if isinstance(array, np.ndarray) else None

        def put(items: Sequence[tuple[ChunkPart, Value | None]]) -> Sequence[None]:
            chunks: Iterator[ChunkValues]
            if plain is None:
                chunks = (
                    codec.decode(part.spec.prototype.buffer.from_bytes(value), part.spec)
                    for part, value in items
                    if value is not None
                )
            else:
                values = [value for _, value in items if value is not None]
                shapes = [part.spec.shape for part, value in items if value is not None]
                chunks = iter(plain.decode_many(values, shapes))
            target = out if plain is None else array
            for part, value in items:
                part.put(None if value is None else next(chunks), target, drop_axes)
            return [None] * len(items)

        async def read_some(positions: list[int], parts: list[ChunkPart]) -> None:
            keys = [part.key for part in parts]
            values = await store._get_values(keys, parts[0].spec.prototype)
            is_present.update((i, v is not None) for i, v in zip(positions, values, strict=True))
            nbytes = _nbytes(parts)
            are_small = plain is not None and nbytes < len(parts) * _SMALL_NBYTES
            items = list(zip(parts, values, strict=True))
            await map_in_threads(put, items, nbytes, are_small=are_small)

        await _in_units(store, batch, _READ_NBYTES, read_some)
        return tuple(
            {"status": "present" if is_present[i] else "missing"} for i in range(len(batch))
        )

    async def write(
        self,
        batch_info: Iterable[tuple[ByteSetter, ArraySpec, Any, Any, bool]],
        value: NDBuffer,
        drop_axes: tuple[int, ...] = (),
    ) -> None:
        """Write `value` into all chunks of a selection; each shard is committed once."""
        batch = _batch_behind(batch_info, writes=True)
        if self.unrolling is not None:
            chunks = replace(self, unrolling=None)
            await self.unrolling.write(chunks, batch, value, drop_axes)
            return
        store, codec = self._store_of(batch), ChunkCodec.of(list(self))
        if store is None or codec is None:
            await super().write(batch, value, drop_axes)
            return
        encoding = asyncio.Lock()  # one unit after another; the others are stored concurrently
        array: Any = value.as_ndarray_like()
        plain = codec.plain(batch[0][1]) if isinstance(array, np.ndarray) else None

        if len(batch) == 1 and plain is not None and plain.compress is not None:
            path, *rest = cast("tuple[Any, ...]", batch[0])
            if await _buffer_chunk(store, ChunkPart(path.path, *rest), array, plain):
                return

        def chunk_with(part: ChunkPart, old: Value | None) -> Buffer | bytes | None:
            if plain is not None and plain.compress is not None:
                values = part.whole_chunk_in(array)
                if values is not None:
                    return None if _is_empty(values, part.spec) else plain.encode(values)
            before = to_buffer_of(old, part.spec.prototype)
            old_chunk = None if before is None else codec.decode(before, part.spec)
            chunk = part.chunk_to_write(value, old_chunk, drop_axes)
            return None if chunk is None else codec.encode(chunk, part.spec)

        def encode(
            item: tuple[ChunkPart, Value | None],
        ) -> Buffer | bytes | PartWrite | None:
            part, old = item
            new = chunk_with(part, old)
            if part.is_complete:
                return new
            encoded = None if new is None else own_bytes(new)
            seen = None if old is None else own_bytes(old)

            def change(stored: Value | None) -> Value | None:
                """Return the chunk as encoded above, or again if another writer has changed it."""
                if (None if stored is None else own_bytes(stored)) == seen:
                    return encoded
                again = chunk_with(part, stored)
                return None if again is None else own_bytes(again)

            def fill() -> bytes:
                return own_bytes(codec.encode(*_empty_chunk(part.spec)) or b"")

            return PartWrite(change, fill)

        def encode_run(
            items: Sequence[tuple[ChunkPart, Value | None]],
        ) -> list[Buffer | bytes | PartWrite | None]:
            return list(map(encode, items))

        async def write_some(_: list[int], parts: list[ChunkPart]) -> None:
            partial = [part for part in parts if not part.is_complete]
            prototype = parts[0].spec.prototype
            seen = await store._get_values([p.key for p in partial], prototype) if partial else ()
            found = iter(seen)
            async with encoding:
                items = [(p, None if p.is_complete else next(found)) for p in parts]
                encoded = await map_in_threads(encode_run, items, _nbytes(parts))
            keys = [part.key for part in parts]
            await store._set_or_erase(zip(keys, encoded, strict=True), prototype)

        await _in_units(store, batch, _WRITE_NBYTES, write_some)

    async def write_batch(
        self,
        batch_info: Iterable[tuple[ByteSetter, ArraySpec, Any, Any, bool]],
        value: NDBuffer,
        drop_axes: tuple[int, ...] = (),
    ) -> None:
        """Write in zarr's way, chunk by chunk: again if another writer has changed a chunk since it
        was read to write a part of it."""
        batch = _batch_behind(batch_info, writes=True)
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
            await asyncio.sleep(random.uniform(0, _LONGEST_PAUSE_S))

    def _part_path(self, path: Any, spec: ArraySpec) -> Any:
        if type(path) is not StorePath or not isinstance(path.store, _TakesWholeOperations):
            return path
        part_path = _PartPath(path.store, path.path)
        part_path.encode, part_path.spec = self.encode, spec
        return part_path

    def _store_of(self, batch: Sequence[tuple[Any, ...]]) -> _TakesWholeOperations | None:
        """Return the store of this package that has all chunks; ``None``: it is another one."""
        if self.supports_partial_decode or self.supports_partial_encode:
            return None  # native shards: the codec reads and writes parts of them itself
        if not batch or not isinstance(batch[0][0], StorePath):
            return None
        store = batch[0][0].store
        if not isinstance(store, _TakesWholeOperations):
            return None
        is_one = all(type(path) is StorePath and path.store is store for path, *_ in batch)
        return store if is_one else None


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
        store = cast(_TakesWholeOperations, self.store)
        (value,) = await store._get_values([self.path], prototype)
        self._seen = (None if value is None else own_bytes(value),)
        return to_buffer_of(value, prototype)

    async def set(self, value: Buffer) -> None:
        await self._swap(own_bytes(value))

    async def delete(self) -> None:
        """Remove the value; where a removal has no condition, store a chunk of fill values."""
        (empty,) = await self.encode([_empty_chunk(self.spec)])
        await self._swap(None, None if empty is None else partial(own_bytes, empty))

    async def _swap(
        self, new: bytes | None, placeholder: Callable[[], bytes] | None = None
    ) -> None:
        store, seen = cast(_TakesWholeOperations, self.store), self._seen

        def change(stored: Value | None) -> Value | None:
            if seen is None or (None if stored is None else own_bytes(stored)) == seen[0]:
                return new
            raise _ChangedMeanwhileError(self.path)

        item = new if seen is None else PartWrite(change, placeholder)
        await store._set_or_erase([(self.path, item)], self.spec.prototype)


def _empty_chunk(spec: ArraySpec) -> tuple[NDBuffer, ArraySpec]:
    """Return a chunk of fill values, and a spec by which sharding codecs keep these."""
    make, dtype = spec.prototype.nd_buffer, spec.dtype.to_native_dtype()
    fill = make.create(
        shape=spec.shape, dtype=dtype, order=spec.order, fill_value=fill_value_of(spec)
    )
    return fill, replace(spec, config=replace(spec.config, write_empty_chunks=True))


async def _buffer_chunk(
    store: Any, part: ChunkPart, array: npt.NDArray[Any], plain: PlainCodec
) -> bool:
    """Buffer a whole chunk in a batch of the store; false if it must be stored otherwise."""
    engine = getattr(store, "_engine", None)
    if engine is None or not engine.is_buffering:
        return False
    values = part.whole_chunk_in(array)
    if values is None or _is_empty(values, part.spec):
        return False
    store._check_writable()
    copy = np.array(values, plain.dtype, order="C")  # the caller may change its values
    is_buffered: bool = await engine.buffer_chunk(part.key, copy, plain)
    return is_buffered


def _nbytes(parts: Sequence[ChunkPart]) -> int:
    """Return the size of decoded chunks of one array in bytes; of texts that of the pointers."""
    spec = parts[0].spec
    return len(parts) * math.prod(spec.shape) * spec.dtype.to_native_dtype().itemsize


async def _in_units(
    store: _TakesWholeOperations,
    batch: Sequence[tuple[Any, ...]],
    unit_nbytes: int,
    run: Callable[[list[int], list[ChunkPart]], Awaitable[None]],
) -> None:
    """Run for all parts together, or for some whole shards at a time if they are too large."""
    parts = [ChunkPart(path.path, *rest) for path, *rest in batch]
    if _nbytes(parts) <= unit_nbytes:
        await run(list(range(len(parts))), parts)
        return
    ids = await store._shard_ids([part.key for part in parts])
    shards: dict[Hashable, list[int]] = {}
    for i, shard_id in enumerate(ids):
        shards.setdefault(shard_id, []).append(i)

    def units() -> Iterator[tuple[int, list[int]]]:
        unit: list[int] = []
        unit_size = 0
        for shard in shards.values():
            size = _nbytes([parts[i] for i in shard])
            if unit and unit_size + size > unit_nbytes:
                yield unit_size, unit
                unit, unit_size = [], 0
            unit += shard
            unit_size += size
        yield unit_size, unit

    async def run_unit(positions: list[int]) -> None:
        await run(positions, [parts[i] for i in positions])

    await run_within(_MAX_NBYTES_AT_ONCE, units(), run_unit)


_PATH = "zarr_shardstore.store.pipeline.ShardedCodecPipeline"
"""It is in the configuration of users, and in pickled arrays."""
ShardedCodecPipeline.__module__ = _PATH.rpartition(".")[0]

_OPTION, _MARK = "codec_pipeline.path", "codec_pipeline.is_set_by_zarr_shardstore"

_warning = Lock()
"""The warning acquires it, and keeps it: there is one in a process."""


def make_default() -> None:
    """Make `ShardedCodecPipeline` the pipeline of zarr's configuration, unless the user chose one.

    A choice is another text than zarr's default, or an equal one from code, the environment or a
    YAML file: another object. The mark stays when the user goes back to the default later;
    ``zarr.config.reset()`` removes it.
    """
    register_pipeline(ShardedCodecPipeline)  # zarr knows no entry point of a mere checkout
    if zarr.config.get(_OPTION) is _usual_path() and not zarr.config.get(_MARK, False):
        zarr.config.set({_OPTION: _PATH, _MARK: True})


def is_unsafe() -> bool:
    """Whether another pipeline is configured, and no warning has said so."""
    # Not `zarr.config.get`, which takes a microsecond.
    chosen = zarr.config.config.get("codec_pipeline", {}).get("path")
    return chosen != _PATH and not _warning.locked()


def warn_of_other_pipeline() -> None:
    """Warn, once in a process, of a sharded array that another pipeline writes."""
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
    return _class_at(_usual_path())


def _usual_path() -> str:
    """Return the path in the newest of zarr's defaults that names another pipeline than ours."""
    groups: list[Mapping[str, str]] = [d.get("codec_pipeline", {}) for d in zarr.config.defaults]
    return [group["path"] for group in groups if group.get("path", _PATH) != _PATH][-1]


@cache
def _class_at(path: str) -> type[CodecPipeline]:
    module, _, name = path.rpartition(".")
    found: type[CodecPipeline] = getattr(import_module(module), name)
    return found

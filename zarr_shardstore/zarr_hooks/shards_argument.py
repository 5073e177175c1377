"""Arrays made with ``shards=`` in a sharding store: operations on shards become those on chunks.

zarr writes a document with a ``sharding_indexed`` codec, as the store itself would. So the store
addresses the array by its inner chunks. The array object that zarr has just made addresses shards,
by keys of the same spelling: ``c/3/0`` is a shard for zarr, and a chunk for the store. Three steps
keep these apart:

1. zarr asks for the pipeline before it stores the document. The metadata object then gets a
   `ShardKeyEncoding`, which marks the key of each shard (`MarkedKey`). An extra field marks the
   document. The store removes both. Without the mark, as from another pipeline, zarr shards the
   array.
   A store with ``view="shards"`` shows documents that have the encoding and the mark already.
2. `ShardsArgument` turns each shard of an array operation into an operation on its chunks.
3. The store erases a whole shard by its marked key, as for a resize. It refuses to read or write a
   marked key, because another pipeline then uses the array object.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from zarr.abc.codec import CodecPipeline
from zarr.abc.store import Store
from zarr.codecs import ShardingCodec
from zarr.core import chunk_grids, chunk_key_encodings
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import NDBuffer, default_buffer_prototype
from zarr.core.indexing import Indexer, get_indexer
from zarr.core.metadata import ArrayMetadata, ArrayV3Metadata
from zarr.registry import register_chunk_key_encoding
from zarr.storage import StorePath

from zarr_shardstore.errors import ShardConflictError, SpecError
from zarr_shardstore.format.box_grid import BoxGrid, Side
from zarr_shardstore.format.keys import SHARD_MARK, ChunkKeyEncoding, Coords, KnownSide, MarkedKey
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.io.concurrency import run_within
from zarr_shardstore.metadata.declaration import MARKER, marked
from zarr_shardstore.zarr_hooks.array_jobs import Axes, Batch, statuses
from zarr_shardstore.zarr_hooks.box import ArrayBox
from zarr_shardstore.zarr_hooks.box_jobs import MAX_NBYTES_AT_ONCE, BoxJob, SlabCodec
from zarr_shardstore.zarr_hooks.chunk_codec import ChunkCodec

_REFUSAL = (
    "this array addresses shards, which only ShardedCodecPipeline on its ShardingStore itself can "
    "read and write: leave zarr's codec_pipeline.path as it is, and put no wrapper around the "
    "store; otherwise open the store with view='chunks', and the array again"
)


class _ShardKey(str):
    """Marked key of a shard. It compares equal to each chunk key of the shard, because zarr counts
    stored shards by searching the listing for this key."""

    coords: Coords
    boxes: BoxGrid
    encoding: ChunkKeyEncoding

    def __eq__(self, other: object) -> bool:
        coords = self.encoding.decode(other, len(self.coords)) if isinstance(other, str) else None
        if coords is None:
            return False
        return self.coords == tuple(map(self.boxes.number, range(len(coords)), coords))

    __hash__ = str.__hash__


@dataclass(frozen=True)
class ShardKeyEncoding(chunk_key_encodings.ChunkKeyEncoding):
    """Chunk key encoding of an array object that addresses shards, in a store that addresses
    chunks. Every reader refuses a document with its unknown name."""

    name: ClassVar[str] = MARKER
    above: Any
    """Encoding of the chunks."""
    cps: tuple[Side, ...] | None = field(default=None, compare=False)
    """Chunks of a shard along each dimension; ``None`` until `ShardedCodecPipeline` has found the
    array in its store."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ShardKeyEncoding:
        """Parse the encoding that ``view="shards"`` shows. Any other pipeline gets no key of it."""
        return cls(chunk_key_encodings.parse_chunk_key_encoding(data["configuration"]["above"]))

    @cached_property
    def _boxes(self) -> BoxGrid:
        return BoxGrid(self.cps or ())

    def extend(self, layout: ArrayLayout) -> None:
        """Take the lengths of shards that were appended to a list, as by ``z.append``."""
        boxes, sides = layout.spec.boxes, list(self.cps or ())
        for dim, n in enumerate(boxes.shape(layout.grid_shape or ())):
            side = sides[dim]
            if isinstance(side, tuple) and n > len(side):
                later = [boxes.bounds(dim, i) for i in range(len(side), n)]
                sides[dim] = side + tuple([stop - start for start, stop in later])
        if sides != list(self.cps or ()):
            object.__setattr__(self, "cps", tuple(sides))
            self.__dict__.pop("_boxes", None)

    def encode_chunk_key(self, chunk_coords: tuple[int, ...]) -> str:
        if self.cps is None:
            raise SpecError(_REFUSAL)
        known: list[KnownSide] = []
        for dim, (i, side) in enumerate(zip(chunk_coords, self.cps, strict=True)):
            # zarr may have made a list longer since the last operation.
            if isinstance(side, tuple):
                number = min(i, len(side) - 1)
                side = (number, *self._boxes.bounds(dim, number))
            known.append(side)
        key = _ShardKey(MarkedKey(self.above.encode_chunk_key(chunk_coords), tuple(known)))
        key.coords, key.boxes = chunk_coords, self._boxes
        key.encoding = ChunkKeyEncoding(self.above.name, getattr(self.above, "separator", "/"))
        return key

    def decode_chunk_key(self, chunk_key: str) -> tuple[int, ...]:
        if chunk_key.endswith(SHARD_MARK):
            chunk_key = MarkedKey.parse(chunk_key).key
        coords: tuple[int, ...] = self.above.decode_chunk_key(chunk_key)
        return coords

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "configuration": {"above": self.above.to_dict()}}


def register_shard_keys() -> None:
    """Let zarr parse the documents of a store with ``view="shards"``."""
    register_chunk_key_encoding(MARKER, ShardKeyEncoding)


def refuse_shards(metadata: ArrayMetadata) -> None:
    """Refuse an array that addresses shards, in a store that does not translate its keys."""
    if isinstance(getattr(metadata, "chunk_key_encoding", None), ShardKeyEncoding):
        raise SpecError(_REFUSAL)


def drop_copied_encoding(metadata: ArrayMetadata) -> None:
    """Give a new array its own keys, if zarr made it like an array that addresses shards."""
    encoding = getattr(metadata, "chunk_key_encoding", None)
    is_ours = isinstance(encoding, ShardKeyEncoding) and encoding.cps is not None
    if is_ours and MARKER not in cast(Any, metadata).extra_fields:
        object.__setattr__(metadata, "chunk_key_encoding", cast(Any, encoding).above)


_N_REFERENCES = 12
"""References to the metadata object that zarr has made for one array, here, before Python 3.14."""


def _refuse_shared(metadata: ArrayMetadata) -> None:
    """Refuse the metadata object of an array object that there is, as a user may pass it to
    ``zarr.create_hierarchy``: that array would get the keys of this one."""
    if sys.version_info < (3, 14) and sys.getrefcount(metadata) <= _N_REFERENCES:
        return  # so that no creation of an array waits for a look at all objects
    for holder in gc.get_referrers(metadata):
        if "codec_pipeline" in (
            holder if isinstance(holder, dict) else getattr(holder, "__dict__", ())
        ):
            raise SpecError(
                "this metadata object is that of an array object, which would get other keys: "
                "pass a copy, type(metadata).from_dict(metadata.to_dict())"
            )


class _Shard(NamedTuple):
    """Part of one shard that an array operation reads or writes, and the parts of its chunks."""

    spec: ArraySpec
    outside: Any
    """Selection in the value of the operation."""
    indexer: Indexer
    chunks: list[tuple[StorePath, ArraySpec, Any, Any, bool]]
    """Parts of chunks, as zarr passes them to a pipeline."""
    position: int

    @property
    def nbytes(self) -> int:
        itemsize = self.spec.dtype.to_native_dtype().itemsize
        return len(self.chunks) * prod(self.chunks[0][1].shape) * itemsize if self.chunks else 0


class ShardsArgument(NamedTuple):
    """Operations on the shards of one array, as operations on its chunks."""

    codec: ShardingCodec
    encoding: ShardKeyEncoding
    usual: CodecPipeline
    """zarr's own pipeline, for a document that leaves sharding to zarr."""

    @classmethod
    def of(
        cls, metadata: ArrayMetadata, store: Store, usual: CodecPipeline
    ) -> ShardsArgument | None:
        """Return the operations of an array that the store addresses by its chunks, or ``None``."""
        if not isinstance(metadata, ArrayV3Metadata):
            return None
        codecs = metadata.codecs
        if len(codecs) != 1 or type(codecs[0]) is not ShardingCodec:
            return None
        (document,) = metadata.to_buffer_dict(default_buffer_prototype()).values()
        takes_shards = getattr(store, "_takes_shards", None)  # if it is a ShardingStore
        if takes_shards is None or not takes_shards(document.to_bytes()):
            return None
        encoding = metadata.chunk_key_encoding
        if not isinstance(encoding, ShardKeyEncoding):
            _refuse_shared(metadata)
            metadata.extra_fields.update(marked({}, "flat"))
            encoding = ShardKeyEncoding(encoding)
        if encoding.cps is None:
            encoding = replace(encoding, cps=_chunks_per_shard(metadata, codecs[0].chunk_shape))
            # zarr's constructor also sets its fields this way.
            object.__setattr__(metadata, "chunk_key_encoding", encoding)
        return cls(codecs[0], encoding, usual)

    async def read(
        self, pipeline: CodecPipeline, batch: Batch, out: NDBuffer, drop_axes: Axes
    ) -> Any:
        """Read all parts of shards, by the pipeline of the chunks."""
        refs = await self._refs(pipeline, batch)
        if None in refs:
            usual: Any = self.usual
            return await usual.read(_without_mark(batch), out, drop_axes)
        array: Any = out.as_ndarray_like()
        box = await self._box(pipeline, refs, batch, array, drop_axes, reads=True)
        if box is not None:
            there = await box.read()
            places = [box.box.slices_of(part.chunks) for part in box.box.shards()]
            return statuses(bool(there[place].any()) for place in places)
        shards = self._shards(refs, batch)
        is_present = [False] * len(batch)

        async def read_shard(shard: _Shard) -> None:
            spec, outside, indexer = shard.spec, shard.outside, shard.indexer
            slices = outside if isinstance(outside, tuple) else (outside,)
            is_view = slices and not drop_axes and all(isinstance(s, slice) for s in slices)
            part = out[outside]
            if not is_view or part.shape != indexer.shape:
                make = spec.prototype.nd_buffer.empty
                part, is_view = make(shape=indexer.shape, dtype=out.dtype, order=spec.order), False
            chunks: Any = pipeline  # in zarr 3.1 it has no type for the status of chunks
            found = await chunks.read(shard.chunks, part, indexer.drop_axes)
            is_present[shard.position] = any(chunk["status"] == "present" for chunk in found)
            if not is_view:
                part = part.reshape(getattr(indexer, "sel_shape", part.shape))
                out[outside] = part.squeeze(axis=drop_axes) if drop_axes else part

        await run_within(MAX_NBYTES_AT_ONCE, ((s.nbytes, s) for s in shards), read_shard)
        return statuses(is_present)

    async def write(
        self, pipeline: CodecPipeline, batch: Batch, value: NDBuffer, drop_axes: Axes
    ) -> None:
        """Write all parts of shards, by the pipeline of the chunks; each shard is one commit."""
        refs = await self._refs(pipeline, batch)
        if None in refs:
            await self.usual.write(_without_mark(batch), value, drop_axes)
            return
        array: Any = value.as_ndarray_like()
        is_whole = all(is_complete for *_, is_complete in batch)
        if is_whole and (
            box := await self._box(pipeline, refs, batch, array, drop_axes, reads=False)
        ):
            await box.write(~box.box.no_chunks())
            return
        shards = self._shards(refs, batch)

        async def write_shard(shard: _Shard) -> None:
            part = value
            if value.shape != ():
                part = value[shard.outside]
                if drop_axes:
                    ndim = len(shard.spec.shape)
                    part = part[tuple(None if i in drop_axes else slice(None) for i in range(ndim))]
                if hasattr(shard.indexer, "sel_shape"):
                    shape, array = shard.indexer.shape, cast(Any, part.as_ndarray_like())
                    if part.shape == (1,):
                        array = np.broadcast_to(array, shape)
                    part = shard.spec.prototype.nd_buffer.from_ndarray_like(array.reshape(shape))
            await pipeline.write(shard.chunks, part, shard.indexer.drop_axes)

        await run_within(MAX_NBYTES_AT_ONCE, ((s.nbytes, s) for s in shards), write_shard)

    async def _refs(self, pipeline: Any, batch: Batch) -> Sequence[ShardRef | None]:
        """Return the shards; a ``None`` if the stored document leaves sharding to zarr."""
        if not batch:
            return []
        store = batch[0][0].store
        refs: Sequence[ShardRef | None] = await store._shards_of(
            [MarkedKey.parse(path.path) for path, *_ in batch]
        )
        pipeline.check(None if refs[0] is None else refs[0].layout.document)
        sides = self.codec.chunk_shape
        for ref, (_, spec, *_) in zip(refs, batch, strict=True):
            cps = tuple([length // side for length, side in zip(spec.shape, sides, strict=True)])
            if ref is not None and cps != ref.spec.chunks_per_shard:
                raise ShardConflictError.of_replaced(ref.layout.path)
        if refs[0] is not None:
            self.encoding.extend(refs[0].layout)
        return refs

    def _shards(self, refs: Sequence[ShardRef | None], batch: Batch) -> Iterator[_Shard]:
        pairs = enumerate(zip(refs, batch, strict=True))
        return (self._shard(i, ref, item) for i, (ref, item) in pairs if ref is not None)

    async def _box(
        self,
        pipeline: CodecPipeline,
        refs: Sequence[ShardRef | None],
        batch: Batch,
        array: Any,
        drop_axes: Axes,
        *,
        reads: bool,
    ) -> BoxJob | None:
        """Return the box of the chunks of all shards, if the operation is on one."""
        codecs: Any = pipeline
        codec = ChunkCodec.of([*codecs])
        if not refs or refs[0] is None or codec is None or drop_axes:
            return None
        store, spec, layout = batch[0][0].store, batch[0][1], refs[0].layout
        boxes, sides = layout.spec.boxes, self.codec.chunk_shape
        if not isinstance(array, np.ndarray) or layout.grid_shape is None or not sides:
            return None
        if await store._layout_of(refs[0].chunk_key(0), reads=reads) is not layout:
            return None
        of_shards = replace(layout, grid_shape=boxes.shape(layout.grid_shape))
        found = ArrayBox.of_batch(_without_mark(batch), of_shards, boxes, sides)
        if found is None:
            return None
        box = found._replace(layout=layout, chunk_shape=sides)
        slabs = SlabCodec.of(codec, self.codec._get_chunk_spec(spec))
        return BoxJob.of(store, box, slabs, array)

    def _shard(self, position: int, ref: ShardRef, item: tuple[Any, ...]) -> _Shard:
        path, spec, inside, outside, is_complete = item
        chunk_shape, layout = self.codec.chunk_shape, ref.layout
        indexer = get_indexer(inside, spec.shape, _grid(spec.shape, chunk_shape))
        chunk_spec = self.codec._get_chunk_spec(spec)
        first = [start for start, _ in layout.spec.boxes.box(ref.coords)]
        chunks = []
        for coords, in_chunk, in_part, is_whole in indexer:
            at = tuple(a + b for a, b in zip(first, coords, strict=True))
            chunk = StorePath(path.store, layout.prefix + layout.encoding.encode(at))
            chunks.append((chunk, chunk_spec, in_chunk, in_part, is_complete or is_whole))
        return _Shard(spec, outside, indexer, chunks, position)


def _chunks_per_shard(metadata: ArrayV3Metadata, chunk_shape: Coords) -> tuple[Side, ...]:
    """Return the chunks of a shard along each dimension, or of each shard."""
    grid: Any = metadata.chunk_grid  # in zarr 3.1 always of one shape
    shards = grid.chunk_shape if hasattr(grid, "chunk_shape") else grid.chunk_shapes
    return tuple(
        [
            side // c if isinstance(side, int) else tuple([length // c for length in side])
            for side, c in zip(shards, chunk_shape, strict=True)
        ]
    )


def _grid(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> Any:
    """Return the grid of the chunks in a shard, as zarr's indexers take it."""
    grids: Any = chunk_grids
    if hasattr(grids, "RegularChunkGrid"):  # zarr 3.1
        return grids.RegularChunkGrid(chunk_shape=chunk_shape)
    return grids.ChunkGrid.from_sizes(shape, chunk_shape)


def _without_mark(batch: Batch) -> list[tuple[Any, ...]]:
    """Return the parts of shards under the keys that they have in the base store."""
    return [(StorePath(p.store, MarkedKey.parse(p.path).key), *rest) for p, *rest in batch]

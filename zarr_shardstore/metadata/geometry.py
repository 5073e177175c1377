"""Chunks of an array: their shape, the spelling of their keys, and what their bytes mean."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from zarr_shardstore.format.box_grid import BoxGrid, Side
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords

_MEMBERS_OF_CHUNKS = (
    "data_type", "codecs", "dtype", "compressor", "filters", "order", "chunk_memory_layout",
)  # fmt: skip
"""Members that say what the bytes of a chunk mean: of v3, v2 and the draft."""


class Geometry(NamedTuple):
    """Shape of an array and of its chunks, in elements, and the spelling of its chunk keys."""

    shape: Coords
    chunk_shape: Coords
    """Shape of the chunks; where they differ, of the largest."""
    encoding: ChunkKeyEncoding
    sides: tuple[Side, ...] | None = None
    """Lengths of the chunks along each dimension; ``None``: all chunks have one shape."""

    @property
    def chunks(self) -> BoxGrid:
        """Cut of the array into chunks."""
        return BoxGrid(self.sides or self.chunk_shape)

    @property
    def grid_shape(self) -> Coords:
        """Number of chunks along each dimension, the last one perhaps cut by the edge."""
        if self.sides is not None:
            return self.chunks.shape(self.shape)
        return tuple([-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True)])

    def in_boxes(self, boxes: BoxGrid) -> Geometry:
        """Return the geometry of boxes of these chunks, as of shards."""
        sides: list[Side] = []
        chunks = self.chunks
        for dim, n_chunks in enumerate(self.grid_shape):
            mine, theirs = chunks.sides[dim], boxes.sides[dim]
            if isinstance(mine, int):  # the grid may be long: it is not counted
                listed = (theirs,) if isinstance(theirs, int) else theirs
                sides.append(tuple([mine * n for n in listed]))
                continue
            last = boxes.number(dim, max(n_chunks, 1) - 1)
            ends = [boxes.bounds(dim, number)[1] for number in range(last + 1)]
            starts = [chunks.bounds(dim, end)[0] for end in (0, *ends)]
            sides.append(tuple([stop - start for start, stop in pairwise(starts)]))
        merged = BoxGrid(tuple(sides))
        return self._replace(chunk_shape=merged.largest, sides=merged.uneven)

    def has_same_chunks(self, other: Geometry | None, *, but_last: bool = False) -> bool:
        """Whether both cut the same chunks, where both arrays reach; or all `but_last` ones of
        lists, as of an array that two writers have made longer."""
        if other is None or self.encoding != other.encoding:
            return False
        if len(self.shape) != len(other.shape):
            return False
        both = [*map(min, self.shape, other.shape)]
        return self.chunks.has_same_boxes(other.chunks, both, but_last=but_last)


class ChunkMeaning(NamedTuple):
    """What the bytes of the chunks of an array mean."""

    geometry: Geometry
    members: Mapping[str, Any]
    """Members of the document by its chunks: data type and codecs."""

    @classmethod
    def of(cls, geometry: Geometry | None, doc: Mapping[str, Any]) -> ChunkMeaning | None:
        members = {name: doc[name] for name in _MEMBERS_OF_CHUNKS if name in doc}
        return None if geometry is None else cls(geometry, members)

    def agrees_with(self, other: ChunkMeaning) -> bool:
        """Whether the same bytes are the same elements. Writers may leave out defaults, so only
        what both documents have counts."""
        has_same = self.geometry.has_same_chunks(other.geometry, but_last=True)
        return has_same and _agree(self.members, other.members)


def _agree(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        return all(_agree(mine[name], theirs[name]) for name in mine.keys() & theirs.keys())
    if isinstance(mine, Mapping) and isinstance(theirs, str):
        return _agree(mine.get("name"), theirs)
    if isinstance(mine, str) and isinstance(theirs, Mapping):
        return _agree(theirs, mine)
    if mine and theirs and isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(_agree, mine, theirs))
    return (mine or None) == (theirs or None)

"""Layout of one sharded array: translation of chunk keys to shards and entries, and back.

Chunk coordinates, divided by chunks_per_shard and floored, are the coordinates of the shard. Its
key spells them as the array spells its chunk keys.

All shapes and coordinates are tuples of Python ints, which do not overflow.

Source: sharding storage transformer draft, "Key & value transformation" (floor division) and
"Binary shard format" (row-major order of entries).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.box_grid import Box
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.shard import ShardingSpec

T = TypeVar("T")


def chunk_grid_shape(shape: Sequence[int], chunk_shape: Sequence[int]) -> Coords:
    """Return the number of chunks along each dimension, the last one perhaps cut by the edge."""
    return tuple(-(-s // c) for s, c in zip(shape, chunk_shape, strict=True))


def is_inside(coords: Coords, grid_shape: Coords) -> bool:
    return all(c < n for c, n in zip(coords, grid_shape, strict=True))


class Document(Protocol):
    def has_same_chunks(self, other: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Keys of the chunks and the shards of one sharded array."""

    path: str
    """Path of the array, ``""`` for the root."""
    prefix: str
    """Text before the suffix in each key: ``""`` or a text that ends with ``/``."""
    encoding: ChunkKeyEncoding
    """Spelling of the coordinates of chunks and of shards."""
    grid_shape: Coords | None
    """Number of chunks along each dimension; ``None`` for an array without metadata."""
    spec: ShardingSpec
    index_key: str | None = field(default=None, compare=False)
    """Key of the consolidated index, if the metadata declares one."""
    chunk_nbytes: int | None = field(default=None, compare=False)
    """Bytes of a decoded chunk, if the data type has a fixed size."""
    n_adopted: int = field(default=0, compare=False)
    """Number of adopted shards along the first dimension, see `ShardRef.is_adopted`."""
    document: Document | None = field(default=None, compare=False)
    """The parsed document, which says what the bytes of a chunk mean."""
    document_key: str = field(default="", compare=False)
    """Key of the metadata document; ``""`` for an array without one."""

    def chunk(self, coords: Coords, key: str | None = None) -> ChunkRef:
        """Return the chunk at `coords`, given its key if the caller has it."""
        if key is None:
            key = self.prefix + self.encoding.encode(coords)
        if not coords:  # a 0-d array has one key, in either spelling
            return ChunkRef(key, self.shard((), key), 0)
        shard_coords, entry_id, boxes = [], 0, self.spec.boxes
        if boxes.uneven is None:
            for c, n in zip(coords, self.spec.chunks_per_shard, strict=True):
                shard_coords.append(c // n)
                entry_id = entry_id * n + c % n
            return ChunkRef(key, self.shard(tuple(shard_coords)), entry_id)
        for dim, c in enumerate(coords):
            number = boxes.number(dim, c)
            start, stop = boxes.bounds(dim, number)
            shard_coords.append(number)
            entry_id = entry_id * (stop - start) + c - start
        return ChunkRef(key, self.shard(tuple(shard_coords)), entry_id)

    def chunk_keys(self, box: Box) -> list[str]:
        """Return the keys of the chunks in a box, in C order."""
        first, *others = [list(map(str, range(*side))) for side in box]
        start = self.prefix + self.encoding.marker
        columns = [[start + text for text in first], *others]
        return list(map(self.encoding.separator.join, product(*columns)))

    def chunk_of_key(self, key: str) -> ChunkRef | None:
        """Return the chunk that a key spells, also outside the grid, or ``None``."""
        coords = self.coords_of(key)
        return None if coords is None else self.chunk(coords, key)

    def shard(self, coords: Coords, key: str | None = None) -> ShardRef:
        """Return the shard at `coords`, given its key if the caller has it."""
        if key is None:
            key = self.prefix + self.encoding.encode(coords)
        spec = self.spec if self.spec.sides is None else self.spec.of_shard(coords)
        return ShardRef(self, coords, key, spec)

    def coords_of(self, key: str) -> Coords | None:
        """Return the coordinates that a chunk key or a shard key spells, or ``None``."""
        if not key.startswith(self.prefix):
            return None
        return self.encoding.decode(key[len(self.prefix) :], self.spec.ndim)

    def shard_of_key(self, key: str) -> ShardRef | None:
        """Return the shard that a key of the base store names, or ``None``."""
        coords = self.coords_of(key)
        return None if coords is None else self.shard(coords, key)

    def has_same_entries(self, other: ArrayLayout) -> bool:
        """Whether both put each chunk into the same entry, perhaps of a grid that has grown, and
        its bytes mean the same."""
        if self is other:
            return True
        mine, theirs = (self.prefix, self.encoding), (other.prefix, other.encoding)
        if mine != theirs or self.spec.index != other.spec.index:
            return False
        if self.document and other.document and not self.document.has_same_chunks(other.document):
            return False
        if self.grid_shape is None or other.grid_shape is None:
            return self.spec == other.spec
        both = [*map(min, self.grid_shape, other.grid_shape)]
        return self.spec.boxes.has_same_boxes(other.spec.boxes, both)

    def has_chunk(self, coords: Coords) -> bool:
        return self.grid_shape is None or is_inside(coords, self.grid_shape)


@dataclass(frozen=True, slots=True)
class ShardRef:
    """Shard of an array: its coordinates, and its key in the base store."""

    layout: ArrayLayout
    coords: Coords
    key: str
    spec: ShardingSpec = field(compare=False)
    """Sharding of an array that has only shards like this one."""

    def __hash__(self) -> int:
        return hash(self.key)  # 3 µs less than a hash of all fields

    def chunk_key(self, entry_id: int) -> str:
        """Return the key of the chunk in an entry."""
        return self.chunk_keys(np.array([entry_id]))[0]

    def chunk_keys(self, entry_ids: npt.NDArray[np.intp]) -> list[str]:
        """Return the keys of the chunks in entries, in the order given."""
        layout = self.layout
        if layout.spec.ndim == 0:
            return [self.key] * len(entry_ids)
        if not len(entry_ids):
            return []
        columns = []
        inside = np.unravel_index(entry_ids, self.spec.chunks_per_shard)
        for column, (first, _) in zip(inside, layout.spec.boxes.box(self.coords), strict=True):
            low, high = int(column.min()), int(column.max())
            if high - low < len(entry_ids):  # numbers are repeated: spell each once
                texts = list(map(str, range(first + low, first + high + 1)))
                columns.append(map(texts.__getitem__, (column - low).tolist()))
            else:
                columns.append(map(str, (column + first).tolist()))
        start = layout.prefix + layout.encoding.marker
        join = layout.encoding.separator.join
        return [start + text for text in map(join, zip(*columns, strict=True))]

    @property
    def is_adopted(self) -> bool:
        """Whether the object is also a file of another format, whose bytes must stay."""
        first, *others = self.coords or (0,)
        return first < self.layout.n_adopted and not any(others)

    @property
    def n_grid_entries(self) -> int:
        """Number of entries in the array."""
        return self.layout.spec.boxes.n_in_box(self.coords, self.layout.grid_shape)

    def entries_of(self, leading: Coords = ()) -> npt.NDArray[np.intp]:
        """Return the ascending ids of the entries in the array with these leading coordinates."""
        return self.layout.spec.boxes.ids_in(self.coords, *self._boxes(leading, ""))

    def entries_with(self, prefix: str) -> npt.NDArray[np.intp]:
        """Return the ascending ids of the entries in the array whose key begins with `prefix`."""
        return self.layout.spec.boxes.ids_in(self.coords, *self.boxes_with(prefix))

    def ids_to_erase(self, prefix: str) -> Sequence[int]:
        """Return the entries below a prefix; of a whole array also those beyond its edge."""
        if self.layout.prefix.startswith(prefix):
            return range(self.spec.n_entries)
        found: list[int] = self.entries_with(prefix).tolist()
        return found

    def boxes_with(self, prefix: str) -> list[Box]:
        """Return ascending boxes of the chunks in the array whose key begins with `prefix`."""
        layout = self.layout
        if layout.spec.ndim == 0:  # the chunk has the key of the shard, in either spelling
            return [()] if self.key.startswith(prefix) else []
        if layout.prefix.startswith(prefix):
            return self._boxes((), "")
        found = None
        if prefix.startswith(layout.prefix):
            found = layout.encoding.decode_start(prefix[len(layout.prefix) :], layout.spec.ndim)
        return [] if found is None else self._boxes(*found)

    def _boxes(self, leading: Coords, digits: str) -> list[Box]:
        """Return boxes of the chunks in the array whose coordinates begin with `leading`, and the
        next number with `digits`. They ascend, and none is empty."""
        box, n = self.layout.spec.boxes.box(self.coords, self.layout.grid_shape), len(leading)
        pairs = zip(box[:n], leading, strict=True)
        head = tuple([(max(lo, c), min(hi, c + 1)) for (lo, hi), c in pairs])
        if any(lo >= hi for lo, hi in (*head, *box[n:])):
            return []
        if not digits:
            return [(*head, *box[n:])]
        (start, stop), low, high = box[n], int(digits), int(digits) + 1
        boxes: list[Box] = []
        while low < stop:  # the number itself, then those with one more digit, …
            if max(low, start) < min(high, stop):
                boxes.append((*head, (max(low, start), min(high, stop)), *box[n + 1 :]))
            if low == 0:  # longer numbers do not begin with a zero
                break
            low, high = low * 10, high * 10
        return boxes


class ChunkRef(NamedTuple):
    """One chunk: its key, its shard and its entry there."""

    key: str
    shard: ShardRef
    entry_id: int


# ------------------------------------------------------------------------ key table

_MAX_ITEMS = 65_536
"""Most rows, last coordinates, and shards. A full table is cleared."""


class KeyTable:
    """Cache of `ArrayLayout.chunk` for the keys of one array of at least one dimension.

    Keys of one row of chunks differ in their last coordinate only, so a key is cut there. The table
    has what each part adds to the shard key and to the entry id.

    Thread safety: may be used from any thread.
    """

    def __init__(self, layout: ArrayLayout) -> None:
        self.layout = layout
        self._cut = layout.encoding.separator
        self.spec = None if layout.spec.sides else layout.spec
        """Sharding of every shard, if they are alike."""
        self._rows: dict[str, tuple[str, int]] = {}
        self._last: dict[str, tuple[str, int, int]] = {}
        self._shards: dict[str, ShardRef] = {}

    def translate(self, key: str) -> tuple[str, int] | None:
        """Return shard key and entry id of a chunk key; ``None`` for any other key."""
        try:
            last = key.rpartition(self._cut)[2]
        except (AttributeError, TypeError):  # the key is no text
            return None
        row = key[: len(key) - len(last)]  # with its separator: a key may begin with one
        start, end = self._rows.get(row), self._last.get(last)
        if start is None or end is None:  # an exception would be slow for keys of other arrays
            return self._parse(key, row, last)
        return start[0] + end[0], start[1] * end[2] + end[1]

    def shard(self, key: str) -> ShardRef:
        """Return the shard whose key `translate` returned."""
        shard = self._shards.get(key)
        if shard is None:
            shard = self.layout.shard_of_key(key)
            assert shard is not None, "`translate` has spelled the key"
            _add(self._shards, key, shard)
        return shard

    def _parse(self, key: str, row: str, last: str) -> tuple[str, int] | None:
        """Translate a key of which a part is not in the table, and add its parts."""
        layout = self.layout
        coords = layout.coords_of(key)
        if coords is None or not layout.has_chunk(coords):
            return None
        chunk = layout.chunk(coords, key)
        shard_key, entry_id = chunk.shard.key, chunk.entry_id
        end = shard_key.rpartition(self._cut)[2]
        first, stop = layout.spec.boxes.bounds(-1, chunk.shard.coords[-1])
        start = shard_key[: len(shard_key) - len(end)]
        _add(self._rows, row, (start, entry_id // (stop - first)))
        _add(self._last, last, (end, coords[-1] - first, stop - first))
        return shard_key, entry_id


def _add(table: dict[str, T], text: str, meaning: T) -> None:
    if len(table) >= _MAX_ITEMS:
        table.clear()
    table[text] = meaning

"""Layout of one sharded array: translation of chunk keys to shards and entries, and back.

The coordinates of a shard are those of its chunks divided by chunks_per_shard and floored. Its
key spells them as the array spells its chunk keys.

All shapes and coordinates are tuples of Python ints, one per dimension: no overflow.

Source: sharding storage transformer draft, "Key & value transformation" (floor division) and
"Binary shard format" (row-major order of entries).
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.shard import ShardingSpec

T = TypeVar("T")

Box = tuple[tuple[int, int], ...]
"""A half-open range ``(start, stop)`` for each dimension."""


def chunk_grid_shape(shape: Sequence[int], chunk_shape: Sequence[int]) -> Coords:
    """Return the number of chunks along each dimension; the last may hang over the edge."""
    return tuple(-(-s // c) for s, c in zip(shape, chunk_shape, strict=True))


def is_inside(coords: Coords, grid_shape: Coords) -> bool:
    return all(c < n for c, n in zip(coords, grid_shape, strict=True))


def shard_coords_of(chunk_coords: Coords, chunks_per_shard: Coords) -> Coords:
    """Return the coordinates of the shard that holds a chunk."""
    return tuple(c // n for c, n in zip(chunk_coords, chunks_per_shard, strict=True))


def grid_box(shard_coords: Coords, chunks_per_shard: Coords, grid_shape: Coords | None) -> Box:
    """Return the chunk coordinates that one shard covers, clipped to the grid if it is known."""
    box = [(s * n, (s + 1) * n) for s, n in zip(shard_coords, chunks_per_shard, strict=True)]
    if grid_shape is not None:
        box = [(lo, max(lo, min(hi, n))) for (lo, hi), n in zip(box, grid_shape, strict=True)]
    return tuple(box)


def n_in_grid_box(
    shard_coords: Coords,
    chunks_per_shard: Coords,
    grid_shape: Coords | None,
    growing: Container[int] = (),
) -> int:
    """Count the chunks in a `grid_box` that is not clipped in the `growing` dimensions."""
    if grid_shape is None:
        return math.prod(chunks_per_shard)
    n_chunks = 1
    for dim, n in enumerate(chunks_per_shard):
        inside = grid_shape[dim] - shard_coords[dim] * n
        n_chunks *= n if dim in growing else max(0, min(n, inside))
    return n_chunks


def entries_in_box(
    box: Box, shard_coords: Coords, chunks_per_shard: Coords
) -> npt.NDArray[np.intp]:
    """Return ascending ids of the entries of one shard whose coordinates lie in `box`."""
    ids = np.zeros(1, dtype=np.intp)
    for (start, stop), s, n in zip(box, shard_coords, chunks_per_shard, strict=True):
        local = np.arange(max(start - s * n, 0), max(min(stop - s * n, n), 0), dtype=np.intp)
        ids = (ids[:, None] * n + local[None, :]).reshape(-1)
    return ids


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Keys of the chunks and the shards of one sharded array."""

    path: str
    """Path of the array, ``""`` for the root."""
    prefix: str
    """Text before the suffix in each of its keys: ``""`` or ends with ``/``."""
    encoding: ChunkKeyEncoding
    """Spelling of coordinates, the same for chunks and for shards."""
    grid_shape: Coords | None
    """Number of chunks along each dimension; ``None`` if no metadata tells it."""
    spec: ShardingSpec
    index_key: str | None = field(default=None, compare=False)
    """Key of the consolidated index, if the metadata declares one."""
    chunk_nbytes: int | None = field(default=None, compare=False)
    """Size of a decoded chunk in bytes, if the data type tells."""
    n_adopted: int = field(default=0, compare=False)
    """So many shards along the first dimension are adopted, see `ShardRef.is_adopted`."""

    def chunk(self, coords: Coords, key: str | None = None) -> ChunkRef:
        """Return the chunk at `coords`, given its key if the caller has it."""
        if key is None:
            key = self.prefix + self.encoding.encode(coords)
        # The only shard of a 0-d array has the key of its only chunk, as that is spelled.
        if not coords:
            return ChunkRef(key, ShardRef(self, (), key), 0)
        shard_coords, entry_id = [], 0
        for c, n in zip(coords, self.spec.chunks_per_shard, strict=True):
            shard_coords.append(c // n)
            entry_id = entry_id * n + c % n
        return ChunkRef(key, self.shard(tuple(shard_coords)), entry_id)

    def chunk_of_key(self, key: str) -> ChunkRef | None:
        """Return the chunk that a key spells, also outside the grid; ``None`` if none."""
        coords = self.coords_of(key)
        return None if coords is None else self.chunk(coords, key)

    def shard(self, coords: Coords) -> ShardRef:
        return ShardRef(self, coords, self.prefix + self.encoding.encode(coords))

    def coords_of(self, key: str) -> Coords | None:
        """Return the coordinates that a chunk key or a shard key spells; ``None`` if none."""
        if not key.startswith(self.prefix):
            return None
        return self.encoding.decode(key[len(self.prefix) :], self.spec.ndim)

    def shard_of_key(self, key: str) -> ShardRef | None:
        """Return the shard that a key of the base store names; ``None`` if it names none."""
        coords = self.coords_of(key)
        return None if coords is None else ShardRef(self, coords, key)

    def has_same_entries(self, other: ArrayLayout) -> bool:
        """Whether both put each chunk into the same entry: the grid may have grown."""
        return self is other or (
            (self.prefix, self.encoding, self.spec) == (other.prefix, other.encoding, other.spec)
        )

    def has_chunk(self, coords: Coords) -> bool:
        """Whether the chunk at `coords` lies in the array."""
        return self.grid_shape is None or is_inside(coords, self.grid_shape)


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One shard of one array: its coordinates, and its key in the base store."""

    layout: ArrayLayout
    coords: Coords
    key: str

    def __hash__(self) -> int:
        return hash(self.key)  # a hash of all fields takes 3 µs, for each chunk

    def chunk_key(self, entry_id: int) -> str:
        """Return the key of the chunk that is entry number `entry_id`."""
        return self.chunk_keys(np.array([entry_id]))[0]

    def chunk_keys(self, entry_ids: npt.NDArray[np.intp]) -> list[str]:
        """Return the keys of the chunks that are these entries, in the order given."""
        layout, cps = self.layout, self.layout.spec.chunks_per_shard
        if layout.spec.ndim == 0:
            return [self.key] * len(entry_ids)
        if not len(entry_ids):
            return []
        columns = []
        for column, s, n in zip(np.unravel_index(entry_ids, cps), self.coords, cps, strict=True):
            low, high = int(column.min()), int(column.max())
            if high - low < len(entry_ids):  # the same numbers again and again: spell each once
                texts = list(map(str, range(s * n + low, s * n + high + 1)))
                columns.append(map(texts.__getitem__, (column - low).tolist()))
            else:
                columns.append(map(str, (column + s * n).tolist()))
        start = layout.prefix + layout.encoding.marker
        join = layout.encoding.separator.join
        return [start + text for text in map(join, zip(*columns, strict=True))]

    @property
    def is_adopted(self) -> bool:
        """Whether the object is a file of another format, which must stay one: its bytes stay where
        they are, whether entries use them or not."""
        first, *others = self.coords or (0,)
        return first < self.layout.n_adopted and not any(others)

    @property
    def n_grid_entries(self) -> int:
        """Number of entries that lie in the array."""
        layout = self.layout
        return n_in_grid_box(self.coords, layout.spec.chunks_per_shard, layout.grid_shape)

    def entries_of(self, leading: Coords = ()) -> npt.NDArray[np.intp]:
        """Return ascending ids of the entries in the array with these leading coordinates."""
        return self._entries_in(self._boxes(leading, ""))

    def entries_with(self, prefix: str) -> npt.NDArray[np.intp]:
        """Return ascending ids of the entries in the array whose chunk key begins with `prefix`."""
        return self._entries_in(self.boxes_with(prefix))

    def boxes_with(self, prefix: str) -> list[Box]:
        """Return ascending boxes of the chunks in the array whose key begins with `prefix`."""
        layout = self.layout
        if layout.spec.ndim == 0:  # the only chunk has the key of the shard, in either spelling
            return [()] if self.key.startswith(prefix) else []
        if layout.prefix.startswith(prefix):
            return self._boxes((), "")
        found = None
        if prefix.startswith(layout.prefix):
            found = layout.encoding.decode_start(prefix[len(layout.prefix) :], layout.spec.ndim)
        return [] if found is None else self._boxes(*found)

    def _boxes(self, leading: Coords, digits: str) -> list[Box]:
        """Return ascending boxes of the chunks in the array whose coordinates begin with `leading`,
        and the next number with `digits`. None of them is empty."""
        box = grid_box(self.coords, self.layout.spec.chunks_per_shard, self.layout.grid_shape)
        n = len(leading)
        head = tuple(
            (max(lo, c), min(hi, c + 1)) for (lo, hi), c in zip(box, leading, strict=False)
        )
        if any(lo >= hi for lo, hi in (*head, *box[n:])):
            return []
        if not digits:
            return [(*head, *box[n:])]
        (start, stop), low, high = box[n], int(digits), int(digits) + 1
        boxes: list[Box] = []
        while low < stop:  # the number itself, then those with one more digit, …
            if max(low, start) < min(high, stop):
                boxes.append((*head, (max(low, start), min(high, stop)), *box[n + 1 :]))
            if low == 0:  # no number of more digits begins with a zero
                break
            low, high = low * 10, high * 10
        return boxes

    def _entries_in(self, boxes: Sequence[Box]) -> npt.NDArray[np.intp]:
        cps = self.layout.spec.chunks_per_shard
        ids = [entries_in_box(box, self.coords, cps) for box in boxes]
        return ids[0] if len(ids) == 1 else np.concatenate([np.zeros(0, np.intp), *ids])


class ChunkRef(NamedTuple):
    """One chunk: its key, its shard and its entry there."""

    key: str
    shard: ShardRef
    entry_id: int


# ------------------------------------------------------------------------ key table

_MAX_ITEMS = 65_536
"""Of rows, last coordinates, and shards. A full table is cleared."""


class KeyTable:
    """Cache of `ArrayLayout.chunk` for the keys of one array of at least one dimension.

    Keys of one row of chunks differ in their last coordinate only. So a key is cut there. The
    contributions of both parts to the shard key and to the entry id are looked up, for any number
    of dimensions: no number is parsed twice.

    Thread safety: may be used from any thread.
    """

    def __init__(self, layout: ArrayLayout) -> None:
        self.layout = layout
        self._prefix = layout.prefix + layout.encoding.marker
        self._cut = layout.encoding.separator
        self._row_length = layout.spec.chunks_per_shard[-1]
        self._rows: dict[str, tuple[str, int]] = {}
        self._last: dict[str, tuple[str, int]] = {}
        self._shards: dict[str, ShardRef] = {}
        self._of_rows: KeyTable | None = None
        if layout.spec.ndim > 1:  # a key without its last coordinate is a key with a dimension less
            grid_shape = None if layout.grid_shape is None else layout.grid_shape[:-1]
            spec = replace(layout.spec, chunks_per_shard=layout.spec.chunks_per_shard[:-1])
            self._of_rows = KeyTable(replace(layout, grid_shape=grid_shape, spec=spec))

    def translate(self, key: str) -> tuple[str, int] | None:
        """Return shard key and entry id of a chunk key; ``None`` if it is none of this array."""
        try:
            row, _, last = key.rpartition(self._cut)
        except (AttributeError, TypeError):  # it is no text
            return None
        start, end = self._rows.get(row), self._last.get(last)
        if start is None or end is None:  # no exception: keys of other arrays also come here
            return self._translate_new(key, row, last)
        return start[0] + end[0], start[1] + end[1]

    def shard(self, key: str) -> ShardRef:
        """Return the shard whose key `translate` returned."""
        shard = self._shards.get(key)
        if shard is None:
            shard = self.layout.shard_of_key(key)
            assert shard is not None, "it is spelled as the array spells its keys"
            _add(self._shards, key, shard)
        return shard

    def _translate_new(self, key: str, row: str, last: str) -> tuple[str, int] | None:
        """Translate a key whose parts are not both in the table, and add these."""
        if not key.startswith(self._prefix):
            return None
        end = self._last.get(last)
        if self._of_rows is None or end is None:
            return self._parse(key, row, last)
        place = self._of_rows.translate(row)
        if place is None:
            return None
        start, first_entry = place[0] + self._cut, place[1] * self._row_length
        _add(self._rows, row, (start, first_entry))
        return start + end[0], first_entry + end[1]

    def _parse(self, key: str, row: str, last: str) -> tuple[str, int] | None:
        layout = self.layout
        coords = layout.coords_of(key)
        if coords is None or not layout.has_chunk(coords):
            return None
        chunk = layout.chunk(coords, key)
        shard_key, entry_id = chunk.shard.key, chunk.entry_id
        end = shard_key.rpartition(self._cut)[2]
        n_entries = coords[-1] % self._row_length
        start = shard_key[: len(shard_key) - len(end)]
        _add(self._rows, row, (start, entry_id - n_entries))
        _add(self._last, last, (end, n_entries))
        return shard_key, entry_id


def _add(table: dict[str, T], text: str, meaning: T) -> None:
    if len(table) >= _MAX_ITEMS:
        table.clear()
    table[text] = meaning

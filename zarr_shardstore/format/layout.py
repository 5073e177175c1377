"""Key translation for one sharded array: chunk keys to shards and entries, and back.

Source: sharding storage transformer draft, "Key & value transformation": the shard key is
the chunk key divided by chunks_per_shard and floored per dimension, in the array's own
spelling.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.grid import (
    Box,
    coords_of_entries,
    entries_in_box,
    entry_id_of,
    grid_box,
    is_inside,
    n_in_grid_box,
    numbers_begun,
    shard_coords_of,
)
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.sharding_spec import ShardingSpec

_MANY_KEYS = 32
"""From so many on, spelling them together takes less time than one by one."""

_N_TAILS = 64
"""At least so many keys share the text of their leading coordinates: it takes about 1 µs."""


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Where the chunks and the shards of one sharded array are.

    Parameters
    ----------
    path : str
        Path of the array, ``""`` for the root.
    prefix : str
        What comes before the suffix in each of its keys: ``""`` or ends with ``/``.
    encoding : ChunkKeyEncoding
        Spelling of coordinates, the same for chunks and for shards.
    grid_shape : tuple of int, optional
        Number of chunks along each dimension; ``None`` if there is no metadata to tell.
    spec : ShardingSpec
        Its sharding.
    index_key : str, optional
        Where the indexes of all its shards may be found in one object.
    chunk_nbytes : int, optional
        Size of a decoded chunk in bytes, if the data type tells.

    Examples
    --------
    >>> from zarr_shardstore.format.index import DRAFT_INDEX
    >>> layout = ArrayLayout("foo/baz", "data/root/foo/baz/", ChunkKeyEncoding("draft", "/"),
    ...                      None, ShardingSpec((32, 2), DRAFT_INDEX))
    >>> chunk = layout.chunk((96, 18))
    >>> chunk.shard.key, chunk.entry_id
    ('data/root/foo/baz/c3/9', 0)
    """

    path: str
    prefix: str
    encoding: ChunkKeyEncoding
    grid_shape: Coords | None
    spec: ShardingSpec
    index_key: str | None = field(default=None, compare=False)
    chunk_nbytes: int | None = field(default=None, compare=False)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.spec.chunks_per_shard)

    def chunk(
        self,
        coords: Coords,
        key: str | None = None,
        shards: dict[tuple[int, Coords], ShardRef] | None = None,
    ) -> ChunkRef:
        """The chunk at `coords`.

        Parameters
        ----------
        key
            Its key, if the caller has it.
        shards
            Shards that were met before, by the identity of their layout and their coordinates;
            for a caller that asks for many chunks of few shards.
        """
        cps = self.spec.chunks_per_shard
        if key is None:
            key = self.prefix + self.encoding.encode(coords)
        # The only shard of a 0-d array has the key of its only chunk, as that is spelled.
        if not coords:
            return ChunkRef(key, ShardRef(self, (), key), 0)
        shard_coords = shard_coords_of(coords, cps)
        shard = None if shards is None else shards.get((id(self), shard_coords))
        if shard is None:
            shard = self.shard(shard_coords)
            if shards is not None:
                shards[id(self), shard_coords] = shard
        return ChunkRef(key, shard, entry_id_of(coords, cps))

    def shard(self, coords: Coords) -> ShardRef:
        """The shard at shard coordinates `coords`."""
        return ShardRef(self, coords, self.prefix + self.encoding.encode(coords))

    def coords_of(self, key: str) -> Coords | None:
        """Coordinates that a chunk key or a shard key spells; ``None`` if it spells none."""
        return self.encoding.decode(key[len(self.prefix) :], self.ndim)

    def shard_of_key(self, key: str) -> ShardRef | None:
        """The shard that a key of the base store names; ``None`` if it names none."""
        coords = self.coords_of(key)
        return None if coords is None else ShardRef(self, coords, key)

    def has_chunk(self, coords: Coords) -> bool:
        """Whether the chunk at `coords` lies in the array."""
        return self.grid_shape is None or is_inside(coords, self.grid_shape)


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One shard of one array: shard coordinates, and the key in the base store."""

    layout: ArrayLayout
    coords: Coords
    key: str

    def __hash__(self) -> int:
        return hash(self.key)  # that of all fields takes 3 µs, once for each chunk

    def chunk_key(self, entry_id: int) -> str:
        """Key of the chunk that is entry number `entry_id`."""
        return self.chunk_keys(np.array([entry_id]))[0]

    def chunk_keys(self, entry_ids: npt.NDArray[np.intp]) -> list[str]:
        """Keys of the chunks that are these entries, in the order given."""
        if self.layout.ndim == 0:
            return [self.key] * len(entry_ids)
        if len(entry_ids) >= _MANY_KEYS:
            return _spell_together(self, entry_ids)
        return _spell_one_by_one(self, entry_ids)

    @property
    def n_grid_entries(self) -> int:
        """Number of entries that lie in the array."""
        layout = self.layout
        return n_in_grid_box(self.coords, layout.spec.chunks_per_shard, layout.grid_shape)

    def grid_entries(self) -> npt.NDArray[np.intp]:
        """Ascending ids of the entries that lie in the array: those available to fill."""
        return self.entries_of(())

    def entries_of(self, leading: Coords) -> npt.NDArray[np.intp]:
        """Ascending ids of the entries in the array whose leading coordinates are `leading`."""
        return self._entries_in(self._boxes(leading, ""))

    def entries_with(self, prefix: str) -> npt.NDArray[np.intp]:
        """Ascending ids of the entries in the array whose chunk key starts with `prefix`."""
        return self._entries_in(self._boxes_with(prefix))

    def has_entries_with(self, prefix: str) -> bool:
        """Whether a chunk in the array that the shard may hold has a key with this prefix."""
        return bool(self._boxes_with(prefix))

    def _boxes_with(self, prefix: str) -> list[Box]:
        layout = self.layout
        if layout.ndim == 0:  # its only chunk may be spelled in two ways, and has the shard's key
            return [()] if self.key.startswith(prefix) else []
        if layout.prefix.startswith(prefix):
            return self._boxes((), "")
        found = None
        if prefix.startswith(layout.prefix):
            found = layout.encoding.decode_start(prefix[len(layout.prefix) :], layout.ndim)
        return [] if found is None else self._boxes(*found)

    def _boxes(self, leading: Coords, digits: str) -> list[Box]:
        """Chunks in the array that begin with `leading`, and whose next number with `digits`.

        Their boxes in ascending order, none of them empty.
        """
        box = grid_box(self.coords, self.layout.spec.chunks_per_shard, self.layout.grid_shape)
        n = len(leading)
        head = tuple(
            (max(lo, c), min(hi, c + 1)) for (lo, hi), c in zip(box, leading, strict=False)
        )
        if any(lo >= hi for lo, hi in (*head, *box[n:])):
            return []
        if not digits:
            return [(*head, *box[n:])]
        return [(*head, begun, *box[n + 1 :]) for begun in numbers_begun(digits, *box[n])]

    def _entries_in(self, boxes: Sequence[Box]) -> npt.NDArray[np.intp]:
        """Ids of the entries in boxes, box by box."""
        cps = self.layout.spec.chunks_per_shard
        ids = [entries_in_box(box, self.coords, cps) for box in boxes]
        return ids[0] if len(ids) == 1 else np.concatenate([np.zeros(0, np.intp), *ids])


class ChunkRef(NamedTuple):
    """One chunk: its key, and the entry of the shard that holds it."""

    key: str
    shard: ShardRef
    entry_id: int


def _spell_one_by_one(shard: ShardRef, entry_ids: npt.NDArray[np.intp]) -> list[str]:
    prefix, encode = shard.layout.prefix, shard.layout.encoding.encode
    cps = shard.layout.spec.chunks_per_shard
    return [prefix + encode(c) for c in coords_of_entries(entry_ids, shard.coords, cps)]


def _spell_together(shard: ShardRef, entry_ids: npt.NDArray[np.intp]) -> list[str]:
    """Keys of entries in the order given: 0.1 µs each, where one by one takes 1 µs.

    A key is a *head*, up to its leading coordinates, and a *tail*, the others. The tails are
    spelled once for the shard; entries in a row that have one head are spelled by adding it.
    """
    layout, cps = shard.layout, shard.layout.spec.chunks_per_shard
    n_heads = _n_head_dims(cps)
    n_tails = math.prod(cps[n_heads:])
    head_ids, tail_ids = np.divmod(entry_ids, n_tails)
    box = [(s * n, (s + 1) * n) for s, n in zip(shard.coords, cps, strict=True)]
    if len(cps) - n_heads == 1:  # the only dimension of the tails may be a long one
        low, high = int(tail_ids.min()), int(tail_ids.max())
        tail_ids, n_tails = tail_ids - low, high - low + 1
        box[-1] = box[-1][0] + low, box[-1][0] + high + 1
    if n_tails > 4 * len(entry_ids):
        return _spell_one_by_one(shard, entry_ids)
    separator = layout.encoding.separator
    tails = [""]
    for dim in reversed(range(n_heads, len(cps))):
        numbers = map(str, range(*box[dim]))
        marked = map(separator.__add__, numbers) if dim else numbers
        tails = [number + tail for number in marked for tail in tails]
    runs = [0, *(np.flatnonzero(np.diff(head_ids)) + 1).tolist(), len(entry_ids)]
    heads = coords_of_entries(head_ids[runs[:-1]], shard.coords[:n_heads], cps[:n_heads])
    is_ascending = bool((np.diff(entry_ids) > 0).all())
    start = layout.prefix + layout.encoding.marker
    picked: list[int] = tail_ids.tolist()
    keys: list[str] = []
    for head, (i, j) in zip(heads, itertools.pairwise(runs), strict=True):
        text = start + separator.join(map(str, head))
        first, stop = picked[i], picked[j - 1] + 1
        if is_ascending and stop - first == j - i:  # without a gap
            keys += map(text.__add__, tails[first:stop])
        else:
            keys += [text + tails[tail_id] for tail_id in picked[i:j]]
    return keys


def _n_head_dims(cps: Coords) -> int:
    """How many leading dimensions are not needed to have enough tails."""
    n_tails = 1
    for dim in reversed(range(len(cps))):
        n_tails *= cps[dim]
        if n_tails >= _N_TAILS:
            return dim
    return 0

"""Layout of one sharded array: translation of chunk keys to shards and entries, and back.

The coordinates of a shard are those of its chunks divided by chunks_per_shard and floored. Its
key spells them as the array spells its chunk keys.

Source: sharding storage transformer draft, "Key & value transformation".
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
"""Fewer keys are spelled faster one by one than together."""

_N_TAILS = 64
"""Least number of keys that share the text of their leading coordinates, which takes 1 µs."""


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Keys of the chunks and the shards of one sharded array.

    Parameters
    ----------
    path : str
        Path of the array, ``""`` for the root.
    prefix : str
        Text before the suffix in each of its keys: ``""`` or ends with ``/``.
    encoding : ChunkKeyEncoding
        Spelling of coordinates, the same for chunks and for shards.
    grid_shape : tuple of int, optional
        Number of chunks along each dimension; ``None`` if no metadata tells it.
    spec : ShardingSpec
        Sharding of the array.
    index_key : str, optional
        Key of the consolidated index, if the metadata declares one.
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
        """Return the chunk at `coords`.

        Parameters
        ----------
        key
            Key of the chunk, if the caller has it.
        shards
            Cache of shards by the identity of their layout and their coordinates, for a caller
            that asks for many chunks of few shards.
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
        """Return the shard at shard coordinates `coords`."""
        return ShardRef(self, coords, self.prefix + self.encoding.encode(coords))

    def coords_of(self, key: str) -> Coords | None:
        """Return the coordinates that a chunk key or a shard key spells; ``None`` if none."""
        return self.encoding.decode(key[len(self.prefix) :], self.ndim)

    def shard_of_key(self, key: str) -> ShardRef | None:
        """Return the shard that a key of the base store names; ``None`` if it names none."""
        coords = self.coords_of(key)
        return None if coords is None else ShardRef(self, coords, key)

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
        """Return ascending ids of the entries that lie in the array."""
        return self.entries_of(())

    def entries_of(self, leading: Coords) -> npt.NDArray[np.intp]:
        """Return ascending ids of the entries in the array with these leading coordinates."""
        return self._entries_in(self._boxes(leading, ""))

    def entries_with(self, prefix: str) -> npt.NDArray[np.intp]:
        """Return ascending ids of the entries in the array whose chunk key begins with `prefix`."""
        return self._entries_in(self._boxes_with(prefix))

    def has_entries_with(self, prefix: str) -> bool:
        """Whether the key of a chunk of the shard, in the array, may begin with `prefix`."""
        return bool(self._boxes_with(prefix))

    def _boxes_with(self, prefix: str) -> list[Box]:
        layout = self.layout
        if layout.ndim == 0:  # the only chunk has the key of the shard, which has two spellings
            return [()] if self.key.startswith(prefix) else []
        if layout.prefix.startswith(prefix):
            return self._boxes((), "")
        found = None
        if prefix.startswith(layout.prefix):
            found = layout.encoding.decode_start(prefix[len(layout.prefix) :], layout.ndim)
        return [] if found is None else self._boxes(*found)

    def _boxes(self, leading: Coords, digits: str) -> list[Box]:
        """Return ascending boxes, none of them empty, of chunks in the array.

        Their coordinates begin with `leading`, and the next number with `digits`.
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
        """Return ids of the entries in boxes, box by box."""
        cps = self.layout.spec.chunks_per_shard
        ids = [entries_in_box(box, self.coords, cps) for box in boxes]
        return ids[0] if len(ids) == 1 else np.concatenate([np.zeros(0, np.intp), *ids])


class ChunkRef(NamedTuple):
    """One chunk: its key, its shard and its entry there."""

    key: str
    shard: ShardRef
    entry_id: int


def _spell_one_by_one(shard: ShardRef, entry_ids: npt.NDArray[np.intp]) -> list[str]:
    prefix, encode = shard.layout.prefix, shard.layout.encoding.encode
    cps = shard.layout.spec.chunks_per_shard
    return [prefix + encode(c) for c in coords_of_entries(entry_ids, shard.coords, cps)]


def _spell_together(shard: ShardRef, entry_ids: npt.NDArray[np.intp]) -> list[str]:
    """Return keys of entries in the order given; faster for many keys.

    A key is a *head* with its leading coordinates, and a *tail* with the others. The tails are
    spelled once for the shard. Consecutive entries with the same head get it added in one step.
    """
    layout, cps = shard.layout, shard.layout.spec.chunks_per_shard
    n_heads = _n_head_dims(cps)
    n_tails = math.prod(cps[n_heads:])
    head_ids, tail_ids = np.divmod(entry_ids, n_tails)
    box = [(s * n, (s + 1) * n) for s, n in zip(shard.coords, cps, strict=True)]
    if len(cps) - n_heads == 1:  # the only dimension of the tails may be long
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
    """Return the number of leading dimensions that are not needed to have enough tails."""
    n_tails = 1
    for dim in reversed(range(len(cps))):
        n_tails *= cps[dim]
        if n_tails >= _N_TAILS:
            return dim
    return 0

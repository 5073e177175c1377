"""Cache of translated keys for one sharded array: a chunk key to a shard key and an entry.

Keys of one row of chunks differ in their last coordinate only. So a key is cut there. The
contributions of both parts to the shard key and to the entry id are looked up, for any number of
dimensions: no number is parsed twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from zarr_shardstore.format.layout import ArrayLayout, ShardRef

T = TypeVar("T")

_MAX_ITEMS = 65_536
"""Of rows, last coordinates, and shards. A full table is cleared."""


class KeyTable:
    """Translation of chunk keys with the results of `ArrayLayout.chunk`.

    Thread safety: may be used from any thread.

    The array has at least one dimension.

    >>> from zarr_shardstore.format.index import DRAFT_INDEX
    >>> from zarr_shardstore.format.keys import ChunkKeyEncoding
    >>> from zarr_shardstore.format.index import ShardingSpec
    >>> layout = ArrayLayout("a", "a/", ChunkKeyEncoding("default", "/"), (100, 100),
    ...                      ShardingSpec((32, 2), DRAFT_INDEX))
    >>> translate = KeyTable(layout).translate
    >>> translate("a/c/96/18"), translate("a/c/96/018"), translate("a/c/96/100")
    (('a/c/3/9', 0), None, None)
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
        if layout.ndim > 1:  # a key without its last coordinate is a key with a dimension less
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

"""Fast key translation for one sharded array: a chunk key to a shard key and an entry.

Keys of one row of chunks differ in their last coordinate only. So a key is cut there, and what
the two parts contribute to the shard key and to the entry id is looked up, for any number of
dimensions: no number is parsed twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from zarr_shardstore.format.layout import ArrayLayout, ShardRef

T = TypeVar("T")

_MAX_REMEMBERED = 65_536
"""Rows, last coordinates, and shards; more are forgotten all at once."""


class KeyTable:
    """Says as `ArrayLayout.chunk` which shard and which entry a key names.

    Thread safety: may be used from any thread.

    Parameters
    ----------
    layout : ArrayLayout
        Of an array with at least one dimension.

    Examples
    --------
    >>> from zarr_shardstore.format.index import DRAFT_INDEX
    >>> from zarr_shardstore.format.keys import ChunkKeyEncoding
    >>> from zarr_shardstore.format.sharding_spec import ShardingSpec
    >>> layout = ArrayLayout("a", "a/", ChunkKeyEncoding("default", "/"), (100, 100),
    ...                      ShardingSpec((32, 2), DRAFT_INDEX))
    >>> translate = KeyTable(layout).translate
    >>> translate("a/c/96/18"), translate("a/c/96/018"), translate("a/c/96/100")
    (('a/c/3/9', 0), None, None)
    """

    __slots__ = (
        "_cut",
        "_last",
        "_of_rows",
        "_prefix",
        "_row_length",
        "_rows",
        "_shards",
        "layout",
    )

    def __init__(self, layout: ArrayLayout) -> None:
        self.layout = layout
        zeros = layout.encoding.encode((0,) * layout.ndim)
        self._prefix = layout.prefix + zeros[: zeros.index("0")]
        self._cut = layout.encoding.separator
        self._row_length = layout.spec.chunks_per_shard[-1]
        self._rows: dict[str, tuple[str, int]] = {}
        self._last: dict[str, tuple[str, int]] = {}
        self._shards: dict[str, ShardRef] = {}
        # What is left of a key without its last coordinate is a key with a dimension less.
        self._of_rows = KeyTable(_without_last(layout)) if layout.ndim > 1 else None

    def translate(self, key: str) -> tuple[str, int] | None:
        """Shard key and entry id of a chunk key; ``None`` if it is none of this array."""
        try:
            row, _, last = key.rpartition(self._cut)
        except (AttributeError, TypeError):  # it is no text
            return None
        start, end = self._rows.get(row), self._last.get(last)
        if start is None or end is None:  # no exception: keys of other arrays come here, too
            return self._translate_new(key, row, last)
        return start[0] + end[0], start[1] + end[1]

    def shard(self, key: str) -> ShardRef:
        """The shard whose key `translate` said."""
        shard = self._shards.get(key)
        if shard is None:
            shard = self.layout.shard_of_key(key)
            assert shard is not None, "it is spelled as the array spells its keys"
            _remember(self._shards, key, shard)
        return shard

    def _translate_new(self, key: str, row: str, last: str) -> tuple[str, int] | None:
        """As `translate`, and remember the parts of the key."""
        if not key.startswith(self._prefix):
            return None
        end = self._last.get(last)
        if self._of_rows is None or end is None:
            return self._parse(key, row, last)
        place = self._of_rows.translate(row)
        if place is None:
            return None
        start, first_entry = place[0] + self._cut, place[1] * self._row_length
        _remember(self._rows, row, (start, first_entry))
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
        _remember(self._rows, row, (start, entry_id - n_entries))
        _remember(self._last, last, (end, n_entries))
        return shard_key, entry_id


def _remember(known: dict[str, T], text: str, meaning: T) -> None:
    if len(known) >= _MAX_REMEMBERED:
        known.clear()
    known[text] = meaning


def _without_last(layout: ArrayLayout) -> ArrayLayout:
    """A layout with a dimension less, for its keys only."""
    grid_shape = None if layout.grid_shape is None else layout.grid_shape[:-1]
    spec = replace(layout.spec, chunks_per_shard=layout.spec.chunks_per_shard[:-1])
    return replace(layout, grid_shape=grid_shape, spec=spec)

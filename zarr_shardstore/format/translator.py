"""Fast key translation for one sharded array: a chunk key to a shard key and an entry.

Keys of one row of chunks differ in their last coordinate only. So a key is cut there, and what
the two parts contribute to the shard key and to the entry id is looked up, for any number of
dimensions: no number is parsed twice.
"""

from __future__ import annotations

from zarr_shardstore.format.layout import ArrayLayout

__all__ = ["KeyTranslator"]

_MAX_REMEMBERED = 65_536
"""Rows, and last coordinates; more are forgotten all at once."""


class KeyTranslator:
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
    >>> from zarr_shardstore.format.spec import ShardingSpec
    >>> layout = ArrayLayout("a", "a/", ChunkKeyEncoding("default", "/"), (100, 100),
    ...                      ShardingSpec((32, 2), DRAFT_INDEX))
    >>> translate = KeyTranslator(layout).translate
    >>> translate("a/c/96/18"), translate("a/c/96/018"), translate("a/c/96/100")
    (('a/c/3/9', 0), None, None)
    """

    __slots__ = ("_cut", "_last", "_prefix", "_rows", "layout")

    def __init__(self, layout: ArrayLayout) -> None:
        self.layout = layout
        zeros = layout.encoding.encode((0,) * layout.ndim)
        self._prefix = layout.prefix + zeros[: zeros.index("0")]
        self._cut = layout.encoding.separator
        self._rows: dict[str, tuple[str, int]] = {}
        self._last: dict[str, tuple[str, int]] = {}

    def translate(self, key: str) -> tuple[str, int] | None:
        """Shard key and entry id of a chunk key; ``None`` if it is none of this array."""
        row, _, last = key.rpartition(self._cut)
        try:
            start, first_entry = self._rows[row]
            end, n_entries = self._last[last]
        except KeyError:
            return self._translate_new(key)
        return start + end, first_entry + n_entries

    def _translate_new(self, key: str) -> tuple[str, int] | None:
        """As `translate`, and remember the parts of the key."""
        if not key.startswith(self._prefix):
            return None
        layout = self.layout
        coords = layout.coords_of(key)
        if coords is None or not layout.has_chunk(coords):
            return None
        chunk = layout.chunk(coords, key)
        shard_key, entry_id = chunk.shard.key, chunk.entry_id
        row, _, last = key.rpartition(self._cut)
        end = shard_key.rpartition(self._cut)[2]
        n_entries = coords[-1] % layout.spec.chunks_per_shard[-1]
        for remembered in (self._rows, self._last):
            if len(remembered) >= _MAX_REMEMBERED:
                remembered.clear()
        self._rows[row] = shard_key[: len(shard_key) - len(end)], entry_id - n_entries
        self._last[last] = end, n_entries
        return shard_key, entry_id

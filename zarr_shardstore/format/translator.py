"""Fast key translation for one sharded array: a chunk key to a shard key and an entry.

For each dimension it remembers what a coordinate, as text, contributes to the shard key and to
the entry id. So a key is cut, looked up, and put together again: no number is parsed twice.
"""

from __future__ import annotations

from zarr_shardstore.format.layout import ArrayLayout

__all__ = ["KeyTranslator"]

_MAX_REMEMBERED = 65_536
"""Coordinates of one dimension; more are forgotten all at once."""


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

    __slots__ = (
        "_cps",
        "_entries_below",
        "_grid",
        "_n_skipped",
        "_ndim",
        "_prefix",
        "_remembered",
        "_separator",
        "layout",
    )

    def __init__(self, layout: ArrayLayout) -> None:
        self.layout = layout
        zeros = layout.encoding.encode((0,) * layout.ndim)
        self._prefix = layout.prefix + zeros[: zeros.index("0")]
        self._n_skipped = len(self._prefix)
        self._separator = layout.encoding.separator
        self._ndim = layout.ndim
        self._cps = layout.spec.chunks_per_shard
        self._grid = layout.grid_shape
        self._entries_below = [1] * layout.ndim
        for dim in range(layout.ndim - 1, 0, -1):
            self._entries_below[dim - 1] = self._entries_below[dim] * self._cps[dim]
        self._remembered: list[dict[str, tuple[str, int]]] = [{} for _ in self._cps]

    def translate(self, key: str) -> tuple[str, int] | None:
        """Shard key and entry id of a chunk key; ``None`` if it is none of this array."""
        if not key.startswith(self._prefix):
            return None
        numbers = key[self._n_skipped :].split(self._separator)
        if len(numbers) != self._ndim:
            return None
        entry_id = 0
        parts = []
        try:
            for text, remembered in zip(numbers, self._remembered):  # noqa: B905  it takes time
                part, n_entries = remembered[text]
                parts.append(part)
                entry_id += n_entries
        except KeyError:
            if not all(self._remember(dim, text) for dim, text in enumerate(numbers)):
                return None
            return self.translate(key)
        return self._prefix + self._separator.join(parts), entry_id

    def _remember(self, dim: int, text: str) -> bool:
        """Remember a coordinate; false if it is none of this array."""
        if not (text.isascii() and text.isdecimal()) or (text[0] == "0" and text != "0"):
            return False
        coord = int(text)
        if self._grid is not None and coord >= self._grid[dim]:
            return False
        shard_coord, rest = divmod(coord, self._cps[dim])
        remembered = self._remembered[dim]
        if len(remembered) >= _MAX_REMEMBERED:
            remembered = {}
            self._remembered[dim] = remembered
        remembered[text] = str(shard_coord), rest * self._entries_below[dim]
        return True

"""Arrays that were met last: their keys are translated without a look at documents.

A key that differs from one of an array only in the numbers after the array's path names a chunk
of it, too, as long as nothing was learned of any other array: those on the way to it are known
not to own it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zarr_shardstore.format.layout import ArrayLayout, ChunkRef
from zarr_shardstore.format.translator import KeyTranslator
from zarr_shardstore.plan.ranges import ByteRange
from zarr_shardstore.plan.read import ShardReads
from zarr_shardstore.store.known_arrays import Knowledge, KnownArrays

__all__ = ["RecentArrays"]

_MAX_ARRAYS = 8
"""Each is tried in turn."""


class RecentArrays:
    """The arrays of one store that were met last.

    Thread safety: may be used from any thread.
    """

    def __init__(self, known: KnownArrays) -> None:
        self._known = known
        # One tuple: another thread sees the old one or the new one.
        self._arrays: tuple[Knowledge | None, int, tuple[KeyTranslator, ...]] = None, 0, ()

    def translators(self) -> tuple[KeyTranslator, ...]:
        """Translations that hold now."""
        knowledge, n_arrays, translators = self._arrays
        if knowledge is self._known.now() and n_arrays == len(knowledge.arrays):
            return translators
        return ()

    def met(self, layout: ArrayLayout | None, knowledge: Knowledge) -> None:
        """A chunk of this array was found with that knowledge."""
        if layout is None or not layout.ndim:
            return
        if layout.grid_shape is None and layout.encoding.style != "draft":
            return  # without a document its keys are not known by their spelling alone
        others = self.translators()
        if any(translator.layout is layout for translator in others):
            return
        kept = others[: _MAX_ARRAYS - 1]
        self._arrays = knowledge, len(knowledge.arrays), (KeyTranslator(layout), *kept)

    def chunks_of(self, keys: Sequence[str]) -> list[ChunkRef | None]:
        """The chunks of these arrays that keys name; ``None``: look elsewhere."""
        chunks: list[ChunkRef | None] = [None] * len(keys)
        for i, translator, shard_key, entry_id in self._places(keys):
            chunks[i] = ChunkRef(keys[i], translator.shard(shard_key), entry_id)
        return chunks

    def by_shard(
        self, keys: Sequence[str], byte_ranges: Sequence[ByteRange | None] | None = None
    ) -> list[ShardReads]:
        """Reads of chunks of these arrays, those of a shard together; other keys are left out.

        Parameters
        ----------
        byte_ranges
            What of each value is wanted; ``None``: all.
        """
        groups: dict[str, ShardReads] = {}
        for i, translator, shard_key, entry_id in self._places(keys):
            group = groups.get(shard_key)
            if group is None:
                group = ShardReads.of(translator.shard(shard_key), byte_ranges)
                groups[shard_key] = group
            group.add(i, entry_id, None if byte_ranges is None else byte_ranges[i])
        return list(groups.values())

    def _places(self, keys: Sequence[str]) -> Iterator[tuple[int, KeyTranslator, str, int]]:
        """Position of a key, who translates it, its shard key and entry id; of other keys none."""
        translators = self.translators()
        if not translators:
            return
        for i, key in enumerate(keys):
            for translator in translators:
                place = translator.translate(key)
                if place is not None:
                    yield i, translator, *place
                    break

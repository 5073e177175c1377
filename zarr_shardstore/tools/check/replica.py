"""Another store, from which a repair fetches lost chunks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from zarr_shardstore.access import StoreLike, chunk_keys, layouts, open_base, requests, stacks
from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.tools.check.chunks import transcoder
from zarr_shardstore.tools.check.objects import ArrayChecker, coords_of_entry
from zarr_shardstore.tools.check.tasks import checker_of
from zarr_shardstore.tools.inspect.find import arrays_at


class Replica:
    """The arrays of a replica."""

    def __init__(self, source: StoreLike) -> None:
        self.base = open_base(source)
        self._checkers_at = cache(
            lambda path: [checker_of(self.base, a.node, a.doc) for a in arrays_at(self.base, path)]
        )

    def chunk(self, checker: ArrayChecker, key: str, coords: chunk_keys.Coords) -> bytes | None:
        """Return a chunk as the damaged array stores it; ``None`` if the replica has none, or a
        damaged one, or another kind of array. Errors of the client pass: it may be there."""
        shape, chunks = checker.geometry.shape, checker.geometry.chunks
        for theirs in filter(None, self._checkers_at(checker.path)):
            array, other, value = theirs.array, theirs.geometry, None
            if other.shape != shape or not chunks.has_same_boxes(other.chunks, shape):
                continue
            get = requests.Get(array.node.chunk_prefix + other.encoding.encode(coords))
            with suppress(ShardStoreError):  # its shard is damaged
                value = self.base.run(stacks.ask_through(array.stack, [get]))[0].value
            if value is None:
                continue
            try:
                new = transcoder(theirs.view, checker.view, other.chunks.lengths(coords))(value)
                for each in checker.above:
                    new = bytes(each.encode(key, new))
            except MemoryError:
                raise
            except Exception:  # it is damaged: codecs raise errors of many types
                continue
            if checker.problem_of(key, new) is None:
                return new
        return None

    def chunks(
        self, checker: ArrayChecker, shard: layouts.ShardRef, entry_ids: Iterable[int]
    ) -> dict[int, memoryview]:
        """Return the chunks of the replica for entries of a shard, as `chunk` does."""
        keys = {i: (shard.chunk_key(i), coords_of_entry(shard, i)) for i in entry_ids}
        found = {i: self.chunk(checker, *at) for i, at in keys.items()}
        return {i: memoryview(value) for i, value in found.items() if value is not None}

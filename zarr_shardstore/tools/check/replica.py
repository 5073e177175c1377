"""Replica: another store, from which a repair fetches lost chunks."""

from __future__ import annotations

from contextlib import suppress

from zarr_shardstore.access import StoreLike, chunk_keys, open_base, requests, stacks
from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.tools.check.chunks import transcoder
from zarr_shardstore.tools.check.objects import ArrayChecker
from zarr_shardstore.tools.inspect.find import arrays_at


class Replica:
    """A store from which lost chunks are fetched."""

    def __init__(self, source: StoreLike) -> None:
        self.base = open_base(source)
        self._arrays: dict[str, list[ArrayChecker]] = {}

    def chunk(self, checker: ArrayChecker, key: str, coords: chunk_keys.Coords) -> bytes | None:
        """Return a chunk as the damaged array stores it; ``None`` if the replica has none, or a
        damaged one, or another kind of array. Errors of the client pass: it may be there."""
        geometry = checker.array.document.geometry
        assert geometry is not None
        for theirs in self._arrays_at(checker.path):
            array, other = theirs.array, theirs.array.document.geometry
            if other is None or other.shape != geometry.shape:
                continue
            if other.chunk_shape != geometry.chunk_shape:
                continue
            there = array.node.chunk_prefix + other.encoding.encode(coords)
            value = None
            with suppress(ShardStoreError):  # its shard is damaged
                value = self.base.run(stacks.ask_through(array.stack, [requests.Get(there)]))[
                    0
                ].value
            if value is None:
                continue
            try:
                new = transcoder(theirs.view, checker.view, other.chunk_shape)(value)
                for each in checker.above:
                    new = bytes(each.encode(key, new))
            except Exception:  # it is damaged: codecs raise errors of many types
                continue
            if checker.problem_of(key, new) is None:
                return new
        return None

    def _arrays_at(self, path: str) -> list[ArrayChecker]:
        if path not in self._arrays:
            self._arrays[path] = []
            for found in arrays_at(self.base, path):
                with suppress(ShardStoreError):
                    self._arrays[path].append(ArrayChecker(found.node, found.doc, "decode"))
        return self._arrays[path]

"""Flushes: store the buffered updates of shards that are due, of arrays, or of all.

To flush a shard is to commit no update of it: each commit takes along what is buffered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zarr_shardstore.arrays.array_cache import ArrayCache
from zarr_shardstore.arrays.catalog import Catalog, TransformedKey
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardConflictError, ShardStoreError
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.metadata.documents import Node, document_key
from zarr_shardstore.operations.write_buffer import BufferedShard, WriteBuffer, has_same_entries
from zarr_shardstore.shards.requests import Flow, UpdateShard
from zarr_shardstore.shards.sharding import split_at_sharding
from zarr_shardstore.shards.updates import SetEntry

_SHARDS_AT_ONCE = 64
"""Shards that are handed to the driver together."""


class Flusher:
    """Flows that flush the write buffer of one store."""

    def __init__(self, catalog: Catalog, arrays: ArrayCache, buffer: WriteBuffer) -> None:
        self.catalog = catalog
        self.arrays = arrays
        self.buffer = buffer

    def flush(self, shard_keys: Sequence[str]) -> Flow[dict[str, Exception]]:
        """Store the buffered updates of shards; a failure stops no other shard.

        Returns
        -------
        dict
            Errors by the keys of the shards that are not stored; these stay buffered.
        """
        failures: dict[str, Exception] = {}
        left = yield from self._commits(shard_keys, failures)
        while left:
            part, left = left[:_SHARDS_AT_ONCE], left[_SHARDS_AT_ONCE:]
            first: Exception | None = None
            try:
                yield [*part]
            except Exception as error:
                first = error
            # After a failure the driver may not have begun others of this part.
            not_begun: list[UpdateShard] = []
            for commit in part:
                buffered = self.buffer.get(commit.shard.key)
                if buffered is not None and buffered.error is not None:
                    failures[commit.shard.key] = buffered.error
                elif buffered is not None and first is not None:
                    not_begun.append(commit)
            if first is not None and len(not_begun) == len(part):
                failures[not_begun.pop(0).shard.key] = first
            left = not_begun + left
        return failures

    def flush_due(self) -> Flow[None]:
        """Flush full shards, and the largest if the buffer is larger than its limit.

        Raises
        ------
        Exception
            Of the base store. The shard stays buffered.
        """
        due = self.buffer.due()
        if due:
            try:
                yield from self._flush_or_raise(due)
            finally:
                self.buffer.release(due)

    def flush_below(self, prefix: str) -> Flow[None]:
        """Flush the arrays that may have chunk keys that start with `prefix`.

        Raises
        ------
        Exception
            As `flush_due`.
        """
        yield from self._flush_arrays(
            lambda layout: layout.prefix.startswith(prefix) or prefix.startswith(layout.prefix)
        )

    def flush_array(self, node: Node) -> Flow[None]:
        """Flush an array, before its document changes.

        Raises
        ------
        Exception
            As `flush_due`.
        """
        yield from self._flush_arrays(lambda layout: layout.prefix == node.chunk_prefix)

    def flush_changed(
        self, node: Node, stored: bytes | memoryview | None, array: StoredArray | None
    ) -> Flow[None]:
        """Flush an array, unless its new document only resizes it."""
        if self.buffer.is_active:
            try:
                old = self.arrays.read(node, stored)
            except ShardStoreError:
                old = None
            if not _is_resized(old, array):
                yield from self.flush_array(node)

    def flush_orphans(self, prefix: str) -> Flow[None]:
        """Flush arrays whose documents start with `prefix`, but not their chunks.

        In the draft hierarchy documents are apart from chunks.
        """
        yield from self._flush_arrays(
            lambda layout: (
                layout.encoding.style == "draft"
                and not layout.prefix.startswith(prefix)
                and document_key(Node("draft", layout.path)).startswith(prefix)
            )
        )

    # -------------------------------------------------------------- details

    def _flush_arrays(self, is_wanted: Callable[[ArrayLayout], bool]) -> Flow[None]:
        if self.buffer.is_active:
            layouts = self.buffer.layouts()
            keys = [key for key, layout in layouts.items() if is_wanted(layout)]
            if keys:
                yield from self._flush_or_raise(keys)

    def _flush_or_raise(self, shard_keys: Sequence[str]) -> Flow[None]:
        failures = yield from self.flush(shard_keys)
        for key, error in failures.items():
            others = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            error.add_note(
                f"when the batch stored the shard {key!r}{others}; their values are still "
                "buffered, and are tried again when the batch ends"
            )
            raise error

    def _commits(
        self, shard_keys: Sequence[str], failures: dict[str, Exception]
    ) -> Flow[list[UpdateShard]]:
        """Return commits of shards as their arrays are declared now."""
        try:
            found = yield from self.catalog.shards_of(shard_keys)
        except Exception as error:
            failures |= dict.fromkeys(shard_keys, error)
            return []
        commits: list[UpdateShard] = []
        for key, now in zip(shard_keys, found, strict=True):
            buffered = self.buffer.get(key)
            if buffered is None:
                continue
            buffered.error = None
            commit = now if isinstance(now, ShardStoreError) else _commit_of(buffered, now)
            if isinstance(commit, UpdateShard):
                commits.append(commit)
            else:
                failures[key] = commit
        return commits


def _commit_of(
    buffered: BufferedShard, now: ShardRef | TransformedKey | None
) -> UpdateShard | ShardConflictError:
    """Return the commit of a shard if its array is still declared as it was."""
    layout = buffered.shard.layout
    if isinstance(now, ShardRef):
        if has_same_entries(now.layout, layout):
            return UpdateShard(now, ())
    elif isinstance(now, TransformedKey):
        split = split_at_sharding(now.array.stack)
        if split is not None and has_same_entries(split[0].layout, layout):
            return UpdateShard(buffered.shard, (), split[1])
    else:
        updates = (buffered.snapshot | buffered.updates).values()
        if not any(isinstance(update, SetEntry) for update in updates):
            # The array was removed, and the updates only delete entries.
            return UpdateShard(buffered.shard, (), buffered.below)
    return ShardConflictError(
        f"shard {buffered.shard.key!r}: another store removed the array {layout.path!r}, or "
        "declared it anew, while a batch buffered values of it; write them again if they are "
        "still wanted"
    )


def _is_resized(old: StoredArray | None, new: StoredArray | None) -> bool:
    """Whether both say the same, but for the shape."""
    if old is None or new is None:
        return False
    before, after = old.document.geometry, new.document.geometry
    return (
        before is not None
        and after is not None
        and after.has_same_chunks(before)
        and old.document.transformers == new.document.transformers
    )

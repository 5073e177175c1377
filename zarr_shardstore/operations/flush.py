"""Publish what a batch holds: shards that are due, those of one array, or all."""

from __future__ import annotations

from collections.abc import Sequence

from zarr_shardstore.arrays.array_cache import ArrayCache
from zarr_shardstore.arrays.catalog import Catalog, TransformedKey
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardConflictError, ShardStoreError
from zarr_shardstore.format.keys import DRAFT_DATA_ROOT
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.metadata.documents import Node, document_key
from zarr_shardstore.shards.chunks import split_at_sharding
from zarr_shardstore.shards.pending import Pending, PendingShards, has_same_entries
from zarr_shardstore.shards.requests import Flow, UpdateShard

_SHARDS_AT_ONCE = 64
"""Shards that are handed to the driver together."""


class Flusher:
    """Flows that publish the held values of one store.

    To publish a shard is to commit no update of it: whoever commits takes along what is held.
    """

    def __init__(self, catalog: Catalog, arrays: ArrayCache, pending: PendingShards) -> None:
        self._catalog = catalog
        self._arrays = arrays
        self._pending = pending

    def publish(self, shard_keys: Sequence[str]) -> Flow[dict[str, Exception]]:
        """Publish shards; each is tried, whatever becomes of the others.

        Returns
        -------
        dict
            Why shards are not published, by their keys; their values are still held.
        """
        failures: dict[str, Exception] = {}
        left = yield from self._updates(shard_keys, failures)
        while left:
            attempt, left = left[:_SHARDS_AT_ONCE], left[_SHARDS_AT_ONCE:]
            self._pending.forget_errors([update.shard.key for update in attempt])
            first: Exception | None = None
            try:
                yield list(attempt)
            except Exception as error:
                first = error
            again: list[UpdateShard] = []
            for update in attempt:
                key = update.shard.key
                own = self._pending.error_of(key)
                if own is not None:
                    failures[key] = own
                elif first is not None and self._pending.get(key) is not None:
                    again.append(update)
            if first is not None and len(again) == len(attempt):
                # None of them was begun, and the first of them is why.
                failures[again.pop(0).shard.key] = first
            left = again + left
        return failures

    def publish_due(self) -> Flow[None]:
        """Publish full shards, and the largest if too much is held.

        Raises
        ------
        Exception
            Of the base store; what could not be published is still held.
        """
        due = self._pending.due()
        if not due:
            return
        try:
            self._raise_first((yield from self.publish(due)))
        finally:
            self._pending.release(due)

    def publish_array(self, node: Node) -> Flow[None]:
        """Publish all that is held of an array, before its document changes.

        Raises
        ------
        Exception
            As `publish_due`.
        """
        keys = self._pending.keys_of_array(node.chunk_prefix) if self._pending else []
        if keys:
            self._raise_first((yield from self.publish(keys)))

    def publish_changed(
        self, node: Node, stored: bytes | memoryview | None, array: StoredArray | None
    ) -> Flow[None]:
        """Publish all that is held of an array, unless its new document only resizes it."""
        if not self._pending or not self._pending.keys_of_array(node.chunk_prefix):
            return
        try:
            old = self._arrays.read(node, stored)
        except ShardStoreError:
            old = None
        if not _is_resized(old, array):
            yield from self.publish_array(node)

    def publish_orphans(self, prefix: str) -> Flow[None]:
        """Publish what is held of arrays whose documents start with `prefix`, but not chunks.

        So it is in the draft hierarchy, where documents are apart from chunks.
        """
        keys = [
            p.shard.key
            for p in (self._pending.pending(DRAFT_DATA_ROOT) if self._pending else ())
            if not p.shard.key.startswith(prefix)
            and document_key(Node("draft", p.shard.layout.path)).startswith(prefix)
        ]
        if keys:
            self._raise_first((yield from self.publish(keys)))

    # -------------------------------------------------------------- details

    def _updates(
        self, shard_keys: Sequence[str], failures: dict[str, Exception]
    ) -> Flow[list[UpdateShard]]:
        """Commits of shards as their arrays are declared now."""
        try:
            found = yield from self._catalog.shards_of(shard_keys)
        except Exception as error:
            failures |= dict.fromkeys(shard_keys, error)
            return []
        updates: list[UpdateShard] = []
        for key, now in zip(shard_keys, found, strict=True):
            held = self._pending.get(key)
            if held is None:
                continue
            update = now if isinstance(now, ShardStoreError) else _update(held, now)
            if isinstance(update, UpdateShard):
                updates.append(update)
            else:
                failures[key] = update
        return updates

    def _raise_first(self, failures: dict[str, Exception]) -> None:
        for key, error in failures.items():
            others = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            error.add_note(
                f"when the batch published the shard {key!r}{others}; their values are still "
                "held, and are tried again when the batch ends"
            )
            raise error


def _update(held: Pending, now: ShardRef | TransformedKey | None) -> UpdateShard | ShardStoreError:
    layout, below = held.shard.layout, held.below
    if isinstance(now, ShardRef):
        if has_same_entries(now.layout, layout):
            return UpdateShard(now, ())
    elif isinstance(now, TransformedKey):
        split = split_at_sharding(now.array.stack)
        if split is not None and has_same_entries(split[0].layout, layout):
            return UpdateShard(held.shard, (), split[1])
    elif not held.has_values:
        return UpdateShard(held.shard, (), below)  # the array is gone, and so shall be these
    return ShardConflictError(
        f"shard {held.shard.key!r}: somebody else removed the array {layout.path!r}, or declared "
        "it anew, while a batch held values of it; write them again if they are still wanted"
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

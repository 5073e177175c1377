"""Keys of the base store, a page at a time: however many there are, few are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from zarr_shardstore.plan.pending import PendingShards
from zarr_shardstore.plan.requests import CloseListing, Flow, KeyCursor, ListPage

__all__ = ["KEYS_PER_PAGE", "KeyPages", "VersionedKeys", "list_keys"]

KEYS_PER_PAGE = 1024
"""Keys of the base store that are listed at once. With fewer, the hop to a thread and back that
local files take, 150 µs, would tell; object stores reply with 1,000 at a time."""


class VersionedKeys(list[str]):
    """Keys with the versions that their objects had when they were listed, in the same order;
    ``None`` for one that is not known."""

    def __init__(self, keys: Sequence[str] = (), versions: Sequence[object] = ()) -> None:
        super().__init__(keys)
        self.versions = list(versions) or [None] * len(self)


class KeyPages:
    """Keys of the base store in directories, page by page, and of shards that so far are only
    held: each once, also of a shard that is published meanwhile.

    Parameters
    ----------
    directories
        None of them inside another one.
    """

    def __init__(self, directories: Sequence[str], pending: PendingShards) -> None:
        self._held = {
            p.shard.key: None for d in directories for p in pending.pending(d) if p.has_values
        }
        self._cursors = [KeyCursor(directory) for directory in directories]

    @property
    def has_more(self) -> bool:
        """Whether another page is to be asked for."""
        return bool(self._cursors or self._held)

    def next_page(self) -> Flow[VersionedKeys]:
        """The next keys; there may be none."""
        if self._cursors:
            page: list[str]
            (page,) = yield [ListPage(self._cursors[0], KEYS_PER_PAGE)]
            if len(page) < KEYS_PER_PAGE:
                del self._cursors[0]
        else:
            page = list(islice(self._held, KEYS_PER_PAGE))
        if self._held:
            for key in page:
                self._held.pop(key, None)
        return page if isinstance(page, VersionedKeys) else VersionedKeys(page)

    def close(self) -> Flow[None]:
        """Let go of what the base store has open for this."""
        if self._cursors:
            yield [CloseListing(cursor) for cursor in self._cursors]


def list_keys(directories: Sequence[str], pending: PendingShards) -> Flow[list[str]]:
    """All keys that `KeyPages` has, as one list."""
    pages = KeyPages(directories, pending)
    keys: list[str] = []
    while pages.has_more:
        keys += yield from pages.next_page()
    return keys

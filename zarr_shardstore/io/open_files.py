"""How many files this process keeps open, and what happens when it may open no more.

A process has a limit: 1,024 on most Linux, 256 on macOS. Shares of it::

    1/8     shard files that are kept for reads (`zarr_shardstore.io.warm_files`)
    3/16    shards that are kept for writes, three files each (`zarr_shardstore.io.open_shards`)
    1/4     files of the reads that are under way, of all threads
    3/16    of one asynchronous write: shards that it changes at a time, three files each

The rest is for the user's own. The limit is asked for whenever a share is needed: it may change.
If there are too many nevertheless, all that is kept without being used is closed.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import TypeVar

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = [
    "close_when_short",
    "max_files_of_a_read",
    "max_shards_of_a_read",
    "max_shards_of_a_write",
    "max_shards_of_writers",
    "max_warm_files",
    "opening",
]

T = TypeVar("T")

_LIMIT_ELSEWHERE = 512
"""Of the C library of Windows."""

_when_short: list[Callable[[], None]] = []


def max_warm_files() -> int:
    """Files that are kept open for reads."""
    return min(128, _limit() // 8)


def max_shards_of_writers() -> int:
    """Shards whose files are kept open for writes."""
    return min(64, _limit() // 16)


def max_shards_of_a_write() -> int:
    """Shards that one call changes concurrently; each is in memory meanwhile."""
    return max(1, min(16, _limit() // 16))


def max_files_of_a_read() -> int:
    """Files that one read has open; all threads may read at a time."""
    return max(2, min(160, _limit() // 4 // threading.active_count()))


def max_shards_of_a_read() -> int:
    """Shards that one read touches at a time: fewer, as it may have other files open, too."""
    return max_files_of_a_read() * 4 // 5


def _limit() -> int:
    if resource is None:
        return _LIMIT_ELSEWHERE
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def close_when_short(close_some: Callable[[], None]) -> None:
    """Let a function close files that are kept, whenever no more can be opened."""
    _when_short.append(close_some)


def opening(open_one: Callable[[], T]) -> T:
    """Open files; if there are too many open, close those that are kept, and try once more."""
    try:
        return open_one()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    for close_some in _when_short:
        close_some()
    return open_one()

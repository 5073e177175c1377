"""Which state of an object a reply came from, where the base store does not tell.

Every write of this process announces itself here before and after. Two reads of one object
between which no write was under way saw the same state; the read flow retries otherwise.
Writes of other processes are not seen: they need a base store that has versions.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from zarr_shardstore.synchronized import synchronized

_N_BUCKETS = 1 << 14
"""Objects share a bucket by their hash. A write in the same bucket costs a reader one more
look, never a wrong byte; so the memory is fixed, however many shards are written."""


class _Unstable:
    """Equals nothing, not even itself: the object was being written."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


UNSTABLE = _Unstable()

_synchronized = synchronized()
_n_finished = [0] * _N_BUCKETS
_under_way: dict[int, dict[object, asyncio.AbstractEventLoop | None]] = {}
"""By bucket: each write that goes on, and its event loop; ``None`` for one that blocks."""


def version_of(scope: Hashable) -> object:
    """Version of an object now; read it before and after a request, and compare."""
    bucket = hash(scope) % _N_BUCKETS
    # In this order: a write that ends in between has counted itself before it leaves.
    return UNSTABLE if bucket in _under_way and _is_under_way(bucket) else _n_finished[bucket]


@_synchronized
def _is_under_way(bucket: int) -> bool:
    """Whether a write goes on. One whose event loop was closed never says that it ended."""
    for write, loop in list(_under_way.get(bucket, {}).items()):
        if loop is not None and loop.is_closed():
            _end(bucket, write)
    return bucket in _under_way


@_synchronized
def _begin(bucket: int, write: object, loop: asyncio.AbstractEventLoop | None) -> None:
    _under_way.setdefault(bucket, {})[write] = loop


@_synchronized
def _end(bucket: int, write: object) -> None:
    """Count a write as finished, unless that was done for it."""
    writes = _under_way.get(bucket, {})
    if write in writes:
        _n_finished[bucket] += 1
        del writes[write]
        if not writes:
            del _under_way[bucket]


@contextmanager
def publishing(
    scopes: list[Hashable], loop: asyncio.AbstractEventLoop | None = None
) -> Iterator[None]:
    """Announce a write of objects for as long as the block runs.

    Parameters
    ----------
    loop
        The event loop that the block waits in, if it does.

    Thread safety: any number of writers, of any objects, may be under way.
    """
    write = object()
    buckets = [hash(scope) % _N_BUCKETS for scope in scopes]
    try:
        for bucket in buckets:
            _begin(bucket, write, loop)
        yield
    finally:
        for bucket in buckets:
            _end(bucket, write)


def _reset_after_fork() -> None:
    """The child has none of the parent's writers."""
    _under_way.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)

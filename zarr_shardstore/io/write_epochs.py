"""Write epochs: versions of objects for base stores without versions (a seqlock).

Every write of this process announces itself before and after. Two reads of one object with no
write in between saw the same state; otherwise the flow reads again. Other processes may write only
if the base store has versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from zarr_shardstore.synchronized import in_forked_child, synchronized

_N_BUCKETS = 1 << 14
"""Objects share a bucket by their hash, so the memory is fixed. A write in the same bucket costs a
reader one more look, never a wrong byte."""


UNSTABLE: object = float("nan")
"""Version of an object that was being written: it does not even equal itself."""


_Loop: TypeAlias = asyncio.AbstractEventLoop

_synchronized = synchronized()
_n_finished = [0] * _N_BUCKETS
_under_way: dict[int, dict[object, _Loop | None]] = {}
"""By bucket: each write under way, and its event loop; ``None`` for a write that blocks."""


def version_of(scope: Hashable) -> object:
    """Return the version of an object now. Read it before and after a request, and compare."""
    bucket = hash(scope) % _N_BUCKETS
    # In this order: a write that ends in between has counted itself before it leaves.
    return UNSTABLE if bucket in _under_way and _is_under_way(bucket) else _n_finished[bucket]


def of_place(scope: Hashable) -> Hashable:
    """Return the scope to announce for a write that removes objects of the same base store by a
    prefix."""
    return "objects below a prefix", scope[0] if isinstance(scope, tuple) else scope


def lasting_version_of(scope: Hashable) -> object:
    """Return the version of an object until this process writes it; during a write, one that equals
    no other."""
    versions = version_of(scope), version_of(of_place(scope))
    return object() if UNSTABLE in versions else versions


@_synchronized
def _is_under_way(bucket: int) -> bool:
    """Return whether a write is under way; end one whose event loop was closed."""
    for write, loop in list(_under_way.get(bucket, {}).items()):
        if loop is not None and loop.is_closed():
            _end([bucket], write)
    return bucket in _under_way


@_synchronized
def _begin(buckets: list[int], write: object, loop: _Loop | None) -> None:
    for bucket in buckets:
        _under_way.setdefault(bucket, {})[write] = loop


@_synchronized
def _end(buckets: list[int], write: object) -> None:
    """Count a write as finished, once."""
    for bucket in buckets:
        writes = _under_way.get(bucket, {})
        if write in writes:
            _n_finished[bucket] += 1
            del writes[write]
            if not writes:
                del _under_way[bucket]


@contextmanager
def announced(scopes: list[Hashable], loop: _Loop | None = None) -> Iterator[None]:
    """Announce a write of objects for as long as the block runs, which may wait in `loop`."""
    write = object()
    buckets = [hash(scope) % _N_BUCKETS for scope in scopes]
    try:
        _begin(buckets, write, loop)
        yield
    finally:
        _end(buckets, write)


in_forked_child(_under_way.clear)  # the child has none of its parent's writers

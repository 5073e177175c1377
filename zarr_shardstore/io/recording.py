"""Indexes of shard files with a version that others can compare: size, and time of last change.

A web server tells both of a file that it serves. It tells whole seconds, so a file counts only
when it is so old that no change to come can have the same time.
"""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

from zarr_shardstore.format.index_collection import CollectedIndex
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.io.file_states import state_of
from zarr_shardstore.io.shard_files import JOURNAL_SUFFIX
from zarr_shardstore.plan.requests import FoundIndex, GetIndex, Recorded, Request

__all__ = ["record_index"]

_MIN_AGE_NS = 2_100_000_000
"""Some file systems know times to two seconds, the clock may be a little off."""


class _Backend(Protocol):
    """What is needed of the backend."""

    def path_of(self, key: str) -> str: ...

    def perform(self, batch: list[Request]) -> list[Any]: ...


def record_index(backend: _Backend, shard: ShardRef, *, waits: bool) -> Recorded:
    """The reply to `RecordIndex`, blocking.

    A file with a journal is being changed, or was left by a killed writer: not what it will be.
    """
    if waits:
        time.sleep(_MIN_AGE_NS / 1e9)
    path = backend.path_of(shard.key)
    before = state_of(path)
    found: FoundIndex
    (found,) = backend.perform([GetIndex(shard, settled=True)])
    if before is None or found.decoded is None or os.path.exists(path + JOURNAL_SUFFIX):
        return None
    _, size, mtime_ns = before
    if time.time_ns() - mtime_ns < _MIN_AGE_NS or state_of(path) != before:
        return "young"
    return CollectedIndex(found.decoded, mtime_ns // 1_000_000_000, size)

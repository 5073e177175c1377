"""Which state of a local file a reply came from, where the store that read it does not tell.

Whatever another process renames to its name, or writes into it, gives it another inode, size
or time. A time that is younger than the clock of the file system is fine proves nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from zarr.abc.store import Store

from zarr_shardstore.io.kinds_of_store import path_of_file
from zarr_shardstore.plan.requests import Found, Get, Request

__all__ = ["MIN_AGE_NS", "FileState", "state_of", "state_of_open", "states_before", "with_states"]

FileState: TypeAlias = tuple[int, int, int] | None
"""Inode, size, and time of the last write of a file; ``None``: there is none."""

MIN_AGE_NS = 20_000_000
"""Linux takes the time of files from a clock that ticks every 1 to 10 ms."""


def state_of(path: str) -> FileState:
    """State of a file now."""
    try:
        return _state(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def state_of_open(fd: int) -> FileState:
    """State of an open file now, by its descriptor."""
    return _state(os.fstat(fd))


def _state(status: os.stat_result) -> FileState:
    return status.st_ino, status.st_size, status.st_mtime_ns


def states_before(store: Store, batch: Sequence[Request]) -> list[tuple[str, object] | None]:
    """For each `Get` of a local file its path, and its state before it is read."""
    states: list[tuple[str, object] | None] = []
    for request in batch:
        path = path_of_file(store, request.key) if isinstance(request, Get) else None
        states.append(None if path is None else (path, _proven_state_of(path)))
    return states


def with_states(replies: list[Any], before: Sequence[tuple[str, object] | None]) -> list[Any]:
    """Give replies that have no version the state of the file they came from."""
    for i, known in enumerate(before):
        reply = replies[i]
        if known is not None and isinstance(reply, Found) and reply.version is None:
            path, state = known
            version = state if state == _proven_state_of(path) else object()
            replies[i] = reply._replace(version=version)
    return replies


def _proven_state_of(path: str) -> object:
    """The state of a file; what equals nothing else if the file is too young."""
    state = state_of(path)
    if state is not None and time.time_ns() - state[2] < MIN_AGE_NS:
        return object()
    return state

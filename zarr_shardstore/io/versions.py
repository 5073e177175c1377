"""Which state of an object a reply came from, where the base store does not tell.

Every write of this process announces itself here before and after. Two reads of one object
between which no write was under way saw the same state; the read flow retries otherwise.
Writes of other processes are not seen: they need a base store that has versions.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

__all__ = ["UNSTABLE", "publishing", "version_of"]

_MAX_REMEMBERED = 4096
"""Finished writes that are remembered; older ones share one version, the floor."""


class _Unstable:
    """Equals nothing, not even itself: the object was being written."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


UNSTABLE = _Unstable()

_lock = threading.Lock()
_numbers = itertools.count(1)
_finished: dict[Hashable, int] = {}
_under_way: dict[Hashable, int] = {}
_floor = 0


def version_of(scope: Hashable) -> object:
    """Version of an object now; read it before and after a request, and compare."""
    if scope in _under_way:
        return UNSTABLE
    return _finished.get(scope, _floor)


@contextmanager
def publishing(scopes: list[Hashable]) -> Iterator[None]:
    """Announce a write of objects for as long as the block runs.

    Thread safety: any number of writers, of any objects, may be under way.
    """
    global _floor
    with _lock:
        for scope in scopes:
            _under_way[scope] = _under_way.get(scope, 0) + 1
    try:
        yield
    finally:
        with _lock:
            for scope in scopes:
                _finished.pop(scope, None)
                _finished[scope] = next(_numbers)
                _under_way[scope] -= 1
                if not _under_way[scope]:
                    del _under_way[scope]
            while len(_finished) > _MAX_REMEMBERED:
                _floor = max(_floor, _finished.pop(next(iter(_finished))))


def _reset_after_fork() -> None:
    """The child has none of the parent's writers."""
    global _lock
    _lock = threading.Lock()
    _under_way.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)

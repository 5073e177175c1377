"""A lock for short sections of code that is released at whatever line an exception comes."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["SafeLock"]


class SafeLock:
    """A lock that no interrupted thread keeps.

    ``with lock:`` releases a `threading.Lock` by a call that is made after the last line of the
    section. An exception that comes just before that call leaves it locked for ever. Here each
    section has an object of its own, which releases the lock when it is dropped, at the latest.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()  # it knows which thread has it

    def held(self) -> AbstractContextManager[None]:
        """Hold the lock for a ``with`` section, which may be within another one."""
        return nullcontext() if self._lock._is_owned() else _Section(self._lock)


class _Section(AbstractContextManager[None]):
    __slots__ = ("_is_over", "_lock")

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._is_over = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._is_over = True

    def __del__(self) -> None:
        if not self._is_over and self._lock._is_owned():
            self._lock.release()

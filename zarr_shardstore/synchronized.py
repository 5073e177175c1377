"""Functions that one thread executes at a time."""

from __future__ import annotations

import os
import threading
from contextlib import ContextDecorator
from typing import Any


def synchronized() -> ContextDecorator:
    """Make a decorator: of all functions that have it, one thread at a time executes one.

    They may call each other. Whatever exception ends such a function at whatever line, the lock is
    released: taking and releasing it are single calls of C in a frame of the standard library. A
    forked child begins without the lock.
    """
    lock: Any = threading.RLock()

    class Synchronized(ContextDecorator):
        __enter__ = staticmethod(lock.__enter__)
        __exit__ = staticmethod(lock.__exit__)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)
    return Synchronized()

"""Functions that one thread executes at a time, and functions that a forked child executes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[[], None])


def in_forked_child(function: F) -> F:
    """Call a function in each child process that `os.fork` makes, before anything else."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


def synchronized() -> ContextDecorator:
    """Make a decorator: one thread at a time executes one of the functions that have it.

    The functions may call each other. An exception at any line releases the lock: taking and
    releasing it are single calls of C in a frame of the standard library. A forked child begins
    without the lock.
    """
    lock: Any = threading.RLock()

    class Synchronized(ContextDecorator):
        __enter__ = staticmethod(lock.__enter__)
        __exit__ = staticmethod(lock.__exit__)

    in_forked_child(lock._at_fork_reinit)
    return Synchronized()

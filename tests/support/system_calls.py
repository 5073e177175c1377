"""What happens between two system calls of this process, in any of its threads."""

from __future__ import annotations

import builtins
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["between_calls"]

_NAMES = (
    *("open", "stat", "lstat", "fstat", "replace", "rename", "unlink", "remove", "mkdir", "rmdir"),
    *("pread", "preadv", "read", "readv", "pwrite", "pwritev", "write", "writev"),
    *("ftruncate", "truncate", "fsync", "utime", "link", "listdir", "scandir", "access"),
)


@contextmanager
def between_calls(root: Path, call: Callable[[str], None]) -> Iterator[None]:
    """Call a function before each system call of this process about files below a directory.

    Whatever the function does itself is not counted.
    """
    is_inside = threading.local()

    def concerns(file: Any) -> bool:
        if isinstance(file, int):
            try:
                file = os.readlink(f"/proc/self/fd/{file}")
            except OSError:
                return False
        return isinstance(file, str | os.PathLike) and str(file).startswith(str(root))

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if args and not getattr(is_inside, "yes", False):
                is_inside.yes = True
                try:
                    if concerns(args[0]):
                        call(name)
                finally:
                    is_inside.yes = False
            return real(*args, **options)

        return run

    with ExitStack() as patches:
        calls: dict[str, Any] = {name: wrapped(name, getattr(os, name)) for name in _NAMES}
        patches.enter_context(mock.patch.multiple(os, **calls))
        for module, name in (
            (builtins, "open"),
            (fcntl, "flock"),
            (fcntl, "lockf"),
            (fcntl, "fcntl"),
        ):
            patches.enter_context(
                mock.patch.object(module, name, wrapped(name, getattr(module, name)))
            )
        yield

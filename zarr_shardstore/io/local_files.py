"""Files and directories of a local disk, looked at and read. A disk that fails is an error, never
a file that is missing."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress

from zarr_shardstore.io.settled import NO_FILE, is_hidden, is_side_file

__all__ = [
    "holds_a_file",
    "is_directory",
    "names_in",
    "raise_if_broken",
    "read_files",
    "size_of_file",
    "tidy",
]

_FIRST_READ_NBYTES = 1 << 16
_MORE_NBYTES = 1 << 22
"""Bytes of a file that are asked for by one call: of the first one, and of large ones."""


def read_files(root: str, keys: Sequence[str]) -> list[bytes | None]:
    """Whole files. The size that is asked for is that of the largest so far, and one byte: a
    read that returns less has reached the end, so no file costs more than three system calls.
    """
    values: list[bytes | None] = []
    add, open_file, read, close = values.append, os.open, os.read, os.close
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
    n_asked = _FIRST_READ_NBYTES
    for key in keys:
        try:
            fd = open_file(root + key, flags)
        except NO_FILE:
            add(None)
            continue
        try:
            data = read(fd, n_asked)
            if len(data) == n_asked:
                parts = [data, *iter(lambda fd=fd: read(fd, _MORE_NBYTES), b"")]  # type: ignore[misc]
                data = b"".join(parts)
                n_asked = min(len(data) + 1, _MORE_NBYTES)
            add(data)
        except IsADirectoryError:
            add(None)
        finally:
            close(fd)
    return values


def tidy(top: str) -> None:
    """Temporary files, and directories that are empty without them; `top` itself stays."""
    for directory, _, names in os.walk(top, topdown=False):
        for name in filter(is_side_file, names):
            with suppress(OSError):
                os.unlink(os.path.join(directory, name))
        if directory.rstrip(os.sep) != top.rstrip(os.sep):
            with suppress(OSError):
                os.rmdir(directory)


def names_in(directory: str) -> list[str]:
    """Names of files and directories, without directories that hold no file: no key has them."""
    try:
        with os.scandir(directory) as entries:
            return [
                entry.name
                for entry in entries
                if not is_hidden(entry.name) and (not entry.is_dir() or holds_a_file(entry.path))
            ]
    except NO_FILE:
        return []


def holds_a_file(directory: str) -> bool:
    """Whether a file is in it, however deep, that is not a temporary one."""
    return any(
        any(not is_hidden(name) for name in names)
        for _, _, names in os.walk(directory, onerror=raise_if_broken)
    )


def _status(path: str) -> os.stat_result | None:
    """Not ``os.path.isfile``: to that a file is missing if the disk fails."""
    try:
        return os.stat(path)
    except NO_FILE:
        return None


def size_of_file(path: str) -> int | None:
    """Size of a file in bytes; ``None`` if there is none."""
    status = _status(path)
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


def is_directory(path: str) -> bool:
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def raise_if_broken(error: OSError) -> None:
    """Of a directory that cannot be listed: it may be gone, or not be for us; else it fails."""
    if not isinstance(error, (*NO_FILE, PermissionError)):
        raise error

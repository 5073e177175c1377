"""Objects stored in pieces, and local files that are published by a rename.

No more than a few pieces are in memory.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from zarr_shardstore.io.local import fs

PART_NBYTES = 8 * 1024 * 1024
"""Size of a part of an upload; S3 takes 10,000 of them, 80 GB."""


class LocalUpload:
    """Temporary file in the directory of the target, which `finish` renames to the target.

    The temporary name ends as that of zarr's ``LocalStore`` and is short, because the name of the
    target may be as long as possible. The file that a killed process leaves is not listed.

    If a directory above is given as `durable_below`, the file and the directories between the two
    survive a loss of power when `finish` returns.
    """

    def __init__(self, path: str, durable_below: str | None = None) -> None:
        self._path = path
        self._durable_below = durable_below
        directory = os.path.dirname(path)
        self._temporary = os.path.join(directory, f".{uuid.uuid4().hex}.partial")
        self._is_open = False
        self._nbytes = 0
        try:
            try:
                self.fd = fs.open_new(self._temporary)
            except FileNotFoundError:
                os.makedirs(directory, exist_ok=True)
                self.fd = fs.open_new(self._temporary)
            self._is_open = True
        except BaseException:
            self.abort()
            raise

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Append pieces."""
        fs.write_at(self.fd, pieces, self._nbytes)
        self._nbytes += sum(map(len, pieces))

    def skip_to(self, offset: int) -> None:
        """Continue at `offset`, behind a hole that takes no room on the disk."""
        self._nbytes = offset

    def copy_mode(self, fd: int) -> None:
        """Copy the mode of an open file."""
        os.fchmod(self.fd, stat.S_IMODE(os.fstat(fd).st_mode))

    def finish(self) -> None:
        """Rename the file."""
        fs.renew_time(self.fd, _time_of(self._path))
        if self._durable_below is not None:
            fs.sync(self.fd)  # first: otherwise the name may survive, and the bytes not
        self._close()
        fs.replace(self._temporary, self._path)
        if self._durable_below is not None:
            sync_directories(self._path, self._durable_below)

    def abort(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            os.unlink(self._temporary)

    def _close(self) -> None:
        """Close once: afterwards the number may be that of another thread's file."""
        if self._is_open:
            self._is_open = False
            os.close(self.fd)


def _time_of(path: str) -> int:
    """Return the time of the last write, in ns; 0 if there is no file."""
    try:
        return os.lstat(path).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return 0


def sync_file(path: str) -> None:
    """Wait until a file, but not its name, survives a loss of power."""
    fd = fs.open_to_read(path)
    try:
        fs.sync(fd)
    finally:
        os.close(fd)


def sync_directories(path: str, top: str) -> None:
    """Wait until the name of a file survives a loss of power, and the directories up to `top`."""
    top = os.path.normpath(top)
    directory = os.path.dirname(os.path.normpath(path))
    while True:
        sync_file(directory)
        if directory == top:
            return
        directory = os.path.dirname(directory)


def write_stream(
    stream: Any, discard: Callable[[], object], parts: Iterable[Sequence[bytes | memoryview]]
) -> None:
    """Store an object by a file-like object of a client, which publishes it when it is closed.

    After an error the stream is given up by `discard`, as far as the client can.
    """
    try:
        for pieces in parts:
            data: list[bytes | memoryview] = []
            nbytes = 0
            for piece in pieces:
                data.append(piece)
                nbytes += len(piece)
                if nbytes >= PART_NBYTES:
                    stream.write(b"".join(data))
                    data, nbytes = [], 0
            if data:
                stream.write(b"".join(data))
        stream.close()
    except BaseException:
        with suppress(Exception):
            discard()
        raise

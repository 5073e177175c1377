"""Backend for zarr's ``LocalStore``: positioned reads on the local file system.

Within one flow a file is opened once. Its index and its entries then come from the same
file, whatever other threads and processes rename over its name meanwhile.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from zarr.core.sync import sync
from zarr.storage import LocalStore

from zarr_shardstore.io.backend import Mode, Perform
from zarr_shardstore.io.buffers import to_buffer
from zarr_shardstore.io.file_options import DEFAULT_FILE_OPTIONS, FileOptions
from zarr_shardstore.io.locks import LOCK_SUFFIX, held
from zarr_shardstore.io.uploads import LocalUpload, Upload, sync_directories, sync_file
from zarr_shardstore.plan.ranges import ByteRange, resolve_range
from zarr_shardstore.plan.requests import (
    Delete,
    DeleteMany,
    DeletePrefix,
    Exists,
    Found,
    Get,
    GetMany,
    GetSize,
    ListDir,
    ListPrefix,
    Move,
    Persist,
    Request,
    Set,
    SetIfNotExists,
    Tidy,
)

__all__ = ["MAX_SHARDS_AT_ONCE", "LocalBackend", "holds_a_file"]

# What LocalStore calls a file that it has not renamed yet, and locks. A killed writer leaves
# them behind.
_TEMPORARY = re.compile(rf"\.[0-9a-f]{{32}}\.partial$|{re.escape(LOCK_SUFFIX)}$")

MAX_SHARDS_AT_ONCE = 128
"""Shards whose files one read holds open; a process may have 1,024, which its threads share."""

_MAX_OPEN_FILES = MAX_SHARDS_AT_ONCE + 32
"""With those of other keys of the same read; the oldest is closed first."""

_FIRST_READ_NBYTES = 1 << 16
_MORE_NBYTES = 1 << 22
"""Bytes of a file that are asked for by one call: of the first one, and of large ones."""

_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class _OpenFile:
    """A file open for reading; two replies from one of them are of one state."""

    __slots__ = ("fd", "size")

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            status = os.fstat(self.fd)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(path)
        except OSError:
            os.close(self.fd)
            raise
        self.size = status.st_size

    def read(self, byte_range: ByteRange | None) -> memoryview:
        start, stop = resolve_range(byte_range, self.size)
        data = os.pread(self.fd, stop - start, start)
        while len(data) < stop - start:  # a signal, a huge read, or a file cut short
            more = os.pread(self.fd, stop - start - len(data), start + len(data))
            if not more:
                break
            data += more
        return memoryview(data)


class LocalBackend:
    """Reads files by itself; writes as ``LocalStore`` does (temporary file and rename)."""

    def __init__(self, store: LocalStore, options: FileOptions = DEFAULT_FILE_OPTIONS) -> None:
        self.store = store
        self._options = options
        self._root = os.path.join(os.path.abspath(store.root), "")
        # Absolute: the working directory may change.
        self._files = LocalStore(self._root, read_only=store.read_only)
        # Open already: threads that open it when they first write would collide in zarr 3.1.
        self._files._is_open = True
        # The same files may be reached by several names.
        self._real_root = os.path.join(os.path.realpath(store.root), "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalBackend) and self._root == other._root

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.store)

    @property
    def mode(self) -> Mode:
        return "thread"

    @property
    def can_block(self) -> bool:
        return True

    @property
    def max_shards_at_once(self) -> int | None:
        return MAX_SHARDS_AT_ONCE

    @property
    def replaces_at_once(self) -> bool:
        return True

    def scope(self, key: str) -> Hashable:
        return ("file", self._real_root + key)

    def hold(self, key: str) -> AbstractContextManager[None]:
        return held(self._root + key, self._options.locking)

    def optimistic(self) -> None:
        return None

    def path_of(self, key: str) -> str:
        """Path of a file or a directory."""
        return self._root + key

    @contextmanager
    def session(self) -> Iterator[Perform]:
        files: dict[str, _OpenFile] = {}
        try:
            yield lambda batch: [self._perform_one(request, files) for request in batch]
        finally:
            for file in files.values():
                os.close(file.fd)

    def perform(self, batch: list[Request]) -> list[Any]:
        with self.session() as perform:
            return perform(batch)

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        return self.perform(batch)

    def _perform_one(self, request: Request, files: dict[str, _OpenFile]) -> Any:
        match request:
            case Get(key, byte_range):
                file = files.get(key)
                if file is None:
                    if len(files) >= _MAX_OPEN_FILES:
                        self._forget(next(iter(files)), files)
                    try:
                        file = files[key] = _OpenFile(self._root + key)
                    except _NO_FILE:
                        return Found(None, None)
                return Found(file.read(byte_range), file, file.size)
            case GetMany(keys):
                return _read_files(self._root, keys)
            case Exists(key):
                return _size_of_file(self._root + key) is not None
            case GetSize(key):
                return _size_of_file(self._root + key)
            case Set(key, value):
                self._set(key, value)
                self._forget(key, files)
            case SetIfNotExists(key, value):
                sync(self._files.set_if_not_exists(key, to_buffer(value)))
                if self._is_durable:
                    sync_file(self._root + key)
                    sync_directories(self._root + key, self._root)
                self._forget(key, files)
            case Delete(key):
                self._delete(key, files)
            case DeleteMany(keys):
                for key in keys:
                    self._delete(key, files)
            case DeletePrefix(prefix):
                self._delete_directory(prefix)
            case Move(key, to):
                self._move(key, to)
                self._forget(key, files)
                self._forget(to, files)
            case Persist():
                os.sync()
            case Tidy(directory):
                _tidy(self._root + directory)
            case ListPrefix(prefix):
                return self._list_files(prefix)
            case ListDir(prefix):
                return _names_in(self._root + prefix)
            case _:
                raise TypeError(f"a backend does not perform {request!r}")
        return None

    def _forget(self, key: str, files: dict[str, _OpenFile]) -> None:
        """After a write the name belongs to another file."""
        file = files.pop(key, None)
        if file is not None:
            os.close(file.fd)

    @property
    def _is_durable(self) -> bool:
        return self._options.durability == "power"

    def upload(self, key: str) -> Upload:
        return LocalUpload(self._root + key, self._root if self._is_durable else None)

    def _set(self, key: str, value: bytes | memoryview) -> None:
        upload = self.upload(key)
        try:
            upload.write([value])
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    def _delete(self, key: str, files: dict[str, _OpenFile]) -> None:
        # Not LocalStore.delete: it removes a whole directory if the key names one.
        if _size_of_file(self._root + key) is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._root + key)
            if self._is_durable:
                sync_directories(self._root + key, self._root)
        self._forget(key, files)

    def _move(self, key: str, to: str) -> None:
        source, target = self._root + key, self._root + to
        if _size_of_file(source) is not None:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(source, target)

    def _delete_directory(self, prefix: str) -> None:
        path = self._root + prefix
        if not prefix:
            for name in os.listdir(path) if _is_directory(path) else []:
                child = os.path.join(path, name)
                if os.path.isdir(child) and not os.path.islink(child):
                    shutil.rmtree(child)
                else:
                    os.unlink(child)
        elif _is_directory(path):
            shutil.rmtree(path)

    def _list_files(self, prefix: str) -> list[str]:
        top = self._root + prefix
        keys = []
        for directory, _, names in os.walk(top, onerror=_raise_if_broken):
            key_prefix = os.path.join(directory, "")[len(self._root) :].replace(os.sep, "/")
            keys += [key_prefix + name for name in names if not _TEMPORARY.search(name)]
        return keys


def _status(path: str) -> os.stat_result | None:
    """Not ``os.path.isfile``: to that a file is missing if the disk fails."""
    try:
        return os.stat(path)
    except _NO_FILE:
        return None


def _size_of_file(path: str) -> int | None:
    """Size of a file in bytes; ``None`` if there is none."""
    status = _status(path)
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


def _is_directory(path: str) -> bool:
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _raise_if_broken(error: OSError) -> None:
    """Of a directory that cannot be listed: it may be gone, or not be for us; else it fails."""
    if not isinstance(error, (*_NO_FILE, PermissionError)):
        raise error


def _read_files(root: str, keys: Sequence[str]) -> list[bytes | None]:
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
        except _NO_FILE:
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


def _tidy(top: str) -> None:
    """Temporary files, and directories that are empty without them; `top` itself stays."""
    for directory, _, names in os.walk(top, topdown=False):
        for name in filter(_TEMPORARY.search, names):
            with suppress(OSError):
                os.unlink(os.path.join(directory, name))
        if directory.rstrip(os.sep) != top.rstrip(os.sep):
            with suppress(OSError):
                os.rmdir(directory)


def _names_in(directory: str) -> list[str]:
    """Names of files and directories, without directories that hold no file: no key has them."""
    try:
        with os.scandir(directory) as entries:
            return [
                entry.name
                for entry in entries
                if not _TEMPORARY.search(entry.name)
                and (not entry.is_dir() or holds_a_file(entry.path))
            ]
    except _NO_FILE:
        return []


def holds_a_file(directory: str) -> bool:
    """Whether a file is in it, however deep, that is not a temporary one."""
    return any(
        any(not _TEMPORARY.search(name) for name in names)
        for _, _, names in os.walk(directory, onerror=_raise_if_broken)
    )

"""Backend for zarr's ``LocalStore``: positioned reads on the local file system.

Within one flow a file is opened once. Its index and its entries then come from the same
file, whatever other threads and processes rename over its name meanwhile.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from zarr.core.sync import sync
from zarr.storage import LocalStore

from zarr_shardstore.io import file_calls
from zarr_shardstore.io.backend import Mode, Perform
from zarr_shardstore.io.buffers import to_buffer
from zarr_shardstore.io.file_options import DEFAULT_FILE_OPTIONS, FileOptions
from zarr_shardstore.io.settled import (
    NO_FILE,
    FindRepair,
    OpenFile,
    hold_to_replace,
    is_side_file,
    when_settled,
)
from zarr_shardstore.io.shard_files import FIXED, open_shards
from zarr_shardstore.io.uploads import LocalUpload, sync_directories, sync_file
from zarr_shardstore.plan.ranges import ByteRange
from zarr_shardstore.plan.requests import (
    ChangeShard,
    CloseShard,
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
    OpenShard,
    Persist,
    Request,
    Set,
    SetIfNotExists,
    SetWithGaps,
    Tidy,
)

__all__ = ["MAX_SHARDS_AT_ONCE", "LocalBackend", "holds_a_file"]

MAX_SHARDS_AT_ONCE = 128
"""Shards whose files one read holds open; a process may have 1,024, which its threads share."""

_MAX_OPEN_FILES = MAX_SHARDS_AT_ONCE + 32
"""With those of other keys of the same read; the oldest is closed first."""

_FIRST_READ_NBYTES = 1 << 16
_MORE_NBYTES = 1 << 22
"""Bytes of a file that are asked for by one call: of the first one, and of large ones."""


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
        # The same files may be reached by several names: this one is their identity.
        self.real_root = os.path.join(os.path.realpath(store.root), "")

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
        return ("file", self.real_root + key)

    def hold(self, key: str) -> AbstractContextManager[None]:
        if self.can_append:
            return open_shards.holding(self.real_root + key)
        return hold_to_replace(self.real_root + key, self._options.locking)

    has_versions = True

    @property
    def can_append(self) -> bool:
        return self._options.locking == "os"

    def optimistic(self) -> None:
        return None

    def path_of(self, key: str) -> str:
        """Path of a file or a directory."""
        return self._root + key

    @contextmanager
    def session(self) -> Iterator[Perform]:
        files: dict[str, OpenFile] = {}
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

    def _perform_one(self, request: Request, files: dict[str, OpenFile]) -> Any:
        match request:
            case Get(key, byte_range, is_settled):
                if is_settled:
                    return self._get_settled(key, byte_range, files)
                file = files.get(key) or self._open(key, files)
                if file is None:
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
            case SetWithGaps():
                self._set_with_gaps(request)
                self._forget(request.key, files)
            case OpenShard(shard, data_end):
                opened = open_shards[self.real_root + shard.key]
                opened.owner = self
                return opened.open(shard, data_end)
            case ChangeShard(key, steps):
                opened = open_shards[self.real_root + key]
                opened.take(steps, durable_below=self.real_root if self._is_durable else None)
                self._forget(key, files)  # it has another size now
            case CloseShard(key):
                open_shards[self.real_root + key].end_journal()
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

    def _open(self, key: str, files: dict[str, OpenFile]) -> OpenFile | None:
        if len(files) >= _MAX_OPEN_FILES:
            self._forget(next(iter(files)), files)
        try:
            is_held = open_shards.is_used_here(self.real_root + key)
            file = files[key] = OpenFile(self._root + key, is_held=is_held)
        except NO_FILE:
            return None
        return file

    def _get_settled(
        self, key: str, byte_range: ByteRange | None, files: dict[str, OpenFile]
    ) -> Found:
        self._forget(key, files)  # another file may have its name
        file = self._open(key, files)
        if file is not None and file.is_fixed:
            return Found(file.read(byte_range), file, file.size)

        def read(find_repair: FindRepair) -> Found:
            self._forget(key, files)
            file = self._open(key, files)
            if file is None:
                return Found(None, None)
            return Found(file.read(byte_range, find_repair(file.fd)), file, file.size)

        return when_settled(self.real_root + key, read)

    def _forget(self, key: str, files: dict[str, OpenFile]) -> None:
        """After a write the name belongs to another file."""
        file = files.pop(key, None)
        if file is not None:
            os.close(file.fd)

    @property
    def _is_durable(self) -> bool:
        return self._options.durability == "power"

    @property
    def _durable_below(self) -> str | None:
        return self._root if self._is_durable else None

    def upload(self, key: str) -> LocalUpload:
        return LocalUpload(self._root + key, self._durable_below)

    def _set(self, key: str, value: bytes | memoryview) -> None:
        self._set_with_gaps(SetWithGaps(key, [(0, [value])]))

    def _set_with_gaps(self, request: SetWithGaps) -> None:
        upload = self.upload(request.key)
        try:
            for offset, pieces in request.parts:
                upload.skip_to(offset)
                upload.write(pieces)
            if request.is_fixed:
                upload.set_mode_bits(FIXED)
            self._end_journal(request.key)
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    def _end_journal(self, key: str) -> None:
        """The file of a shard is about to be another one, or none."""
        file = open_shards.get(self.real_root + key)
        if file is not None:
            file.end_journal(is_durable=self._is_durable)

    def _delete(self, key: str, files: dict[str, OpenFile]) -> None:
        self._end_journal(key)
        # Not LocalStore.delete: it removes a whole directory if the key names one.
        if _size_of_file(self._root + key) is not None:
            with suppress(FileNotFoundError):
                file_calls.unlink(self._root + key)
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
            keys += [key_prefix + name for name in names if not is_side_file(name)]
        return keys


def _status(path: str) -> os.stat_result | None:
    """Not ``os.path.isfile``: to that a file is missing if the disk fails."""
    try:
        return os.stat(path)
    except NO_FILE:
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
    if not isinstance(error, (*NO_FILE, PermissionError)):
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


def _tidy(top: str) -> None:
    """Temporary files, and directories that are empty without them; `top` itself stays."""
    for directory, _, names in os.walk(top, topdown=False):
        for name in filter(is_side_file, names):
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
                if not is_side_file(entry.name) and (not entry.is_dir() or holds_a_file(entry.path))
            ]
    except NO_FILE:
        return []


def holds_a_file(directory: str) -> bool:
    """Whether a file is in it, however deep, that is not a temporary one."""
    return any(
        any(not is_side_file(name) for name in names)
        for _, _, names in os.walk(directory, onerror=_raise_if_broken)
    )

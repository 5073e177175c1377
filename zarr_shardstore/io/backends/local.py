"""Backend for local files, whichever store has them: ``LocalStore``, fsspec or obstore.

Within one flow a file is opened once. Its index and its entries then come from the same
file, whatever other threads and processes rename over its name meanwhile.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, suppress
from typing import Any

from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import LocalStore

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import ByteRange
from zarr_shardstore.io.backends.base import DEFAULT_FILE_OPTIONS, Backend, FileOptions, Session
from zarr_shardstore.io.backends.key_pages import KeyPages, keys_below
from zarr_shardstore.io.backends.store_traits import directory_of
from zarr_shardstore.io.buffers import to_buffer
from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.cached_files import (
    CachedShardFile,
    forget,
    forget_below,
    remember,
    reopened,
    warm_file,
)
from zarr_shardstore.io.local.consistent import (
    NO_FILE,
    OpenFile,
    hold_to_replace,
    when_settled,
)
from zarr_shardstore.io.local.files import (
    link_below,
    link_on_way,
    names_in,
    read_files,
    refuse_links,
    remove_directory,
    size_of_file,
    tidy,
)
from zarr_shardstore.io.local.fs import max_files_of_a_read, max_shards_of_a_read, opening
from zarr_shardstore.io.local.open_shards import open_shards
from zarr_shardstore.io.local.shard_files import record_index
from zarr_shardstore.io.uploads import LocalUpload, sync_directories, sync_file
from zarr_shardstore.shards.index_reads import found_index, index_get
from zarr_shardstore.shards.requests import (
    ChangeShard,
    CloseListing,
    CloseShard,
    Delete,
    DeleteMany,
    DeletePrefix,
    Exists,
    Found,
    FoundIndex,
    Get,
    GetIndex,
    GetMany,
    GetSize,
    ListDir,
    ListPage,
    ListPrefix,
    Move,
    OpenShard,
    RecordIndex,
    Request,
    Set,
    SetIfNotExists,
    SetWithGaps,
)
from zarr_shardstore.shards.shard_writer import ShardWriter


class LocalBackend(Backend):
    """Reads files by itself; writes as ``LocalStore`` does (temporary file and rename)."""

    mode = "thread"
    has_versions = True
    has_lasting_versions = True

    def __init__(self, store: Store, options: FileOptions = DEFAULT_FILE_OPTIONS) -> None:
        directory = directory_of(store)
        assert directory is not None, "the objects of the store are local files"
        self.store = store
        self._options = options
        self.can_append = options.locking == "os"
        self.max_shards_at_once = max_shards_of_a_read
        self._root = os.path.join(os.path.abspath(directory), "")
        # Absolute: the working directory may change.
        self._files = LocalStore(self._root, read_only=store.read_only)
        # Open already: threads that open it when they first write would collide in zarr 3.1.
        self._files._is_open = True
        # The same files may be reached by several names: this one is their identity.
        self.real_root = os.path.join(os.path.realpath(directory), "")

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LocalBackend)
            and type(self.store) is type(other.store)
            and self._root == other._root
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.store)

    def scope(self, key: str) -> Hashable:
        return ("file", self.real_root + key)

    def lock(self, key: str) -> AbstractContextManager[None]:
        if self.can_append:
            return open_shards.holding(self.real_root + key)
        path, locking = self.real_root + key, self._options.locking
        return hold_to_replace(path, locking, in_this_thread=True)

    def try_lock(
        self, key: str, fits: Callable[[ShardWriter], bool]
    ) -> AbstractContextManager[None] | None:
        if not self.can_append or self._is_durable:
            return None
        return open_shards.try_lock(self.real_root + key, fits)

    def path_of(self, key: str) -> str:
        """Path of a file or a directory."""
        return self._root + key

    def refuse_links(self, key: str) -> None:
        refuse_links(self._root, key)

    def linked_directory(self, prefix: str) -> str | None:
        return link_on_way(self._root, prefix) or link_below(self._root + prefix)

    def session(self) -> Session:
        return _Session(self)

    def perform(self, batch: list[Request]) -> list[Any]:
        session = _Session(self)
        try:
            return session.perform(batch)
        finally:
            session.let_go()

    def perform_one(self, request: Request, files: dict[str, OpenFile]) -> Any:
        """Perform a request, with the files that its flow has open."""
        match request:
            case Get(key, byte_range, opened=True):
                return Found(open_shards[self.real_root + key].read(byte_range), None)
            case Get(key, byte_range, is_settled):
                if is_settled:
                    return self._get_settled(key, byte_range, files)
                file = files.get(key) or self._open(key, files)
                if file is None:
                    return Found(None, None)
                value = file.read(byte_range)
                return Found(value, file.version_now(), file.size)
            case GetIndex():
                return self._get_index(request, files)
            case RecordIndex(shard, waits):
                return record_index(self, shard, waits=waits)
            case OpenShard(shard, data_end):
                opened = open_shards[self.real_root + shard.key]
                opened.owner = self
                return opened.open(shard, data_end)
            case ChangeShard(key, steps):
                opened = open_shards[self.real_root + key]
                opened.take(steps, durable_below=self.real_root if self._is_durable else None)
                self._forget(key, files)  # it has another size now
            case GetMany(keys):
                return read_files(self._root, keys)
            case Exists(key):
                return size_of_file(self._root + key) is not None
            case GetSize(key):
                return size_of_file(self._root + key)
            case Set(key, value):
                self._set(key, value)
                self._forget(key, files)
            case SetIfNotExists(key, value):
                buffer = to_buffer(value)
                opening(lambda: sync(self._files.set_if_not_exists(key, buffer)))
                if self._is_durable:
                    sync_file(self._root + key)
                    sync_directories(self._root + key, self._root)
                self._forget(key, files)
            case SetWithGaps():
                self._set_with_gaps(request)
                self._forget(request.key, files)
            case CloseShard(key):
                open_shards[self.real_root + key].end_journal()
            case Delete(key):
                self._delete(key, files)
            case DeleteMany(keys):
                for key in keys:
                    self._delete(key, files)
            case DeletePrefix(prefix):
                forget_below(self._root + prefix)
                remove_directory(self._root, prefix)
            case Move(key, to):
                self._move(key, to)
                self._forget(key, files)
                self._forget(to, files)
            case ListPrefix(prefix):
                return list(keys_below(self._root, prefix))
            case ListPage(cursor, n_keys):
                cursor.pages = cursor.pages or KeyPages(keys_below(self._root, cursor.prefix))
                return cursor.pages.next_page(n_keys)
            case CloseListing(cursor):
                if cursor.pages:
                    cursor.pages.close()
            case ListDir(prefix):
                return names_in(self._root, prefix)
            case _:
                raise TypeError(f"a backend does not perform {request!r}")
        return None

    def _open(self, key: str, files: dict[str, OpenFile]) -> OpenFile | None:
        if len(files) > 1 and len(files) >= max_files_of_a_read():  # the oldest is closed first
            self._forget(next(iter(files)), files)
        try:
            file = files[key] = OpenFile(self._root + key)
        except NO_FILE:
            return None
        return file

    def _get_index(self, request: GetIndex, files: dict[str, OpenFile]) -> FoundIndex:
        shard, key = request.shard, request.key
        known = self._known_index(shard, files)
        if known is not None:
            return known
        get = index_get(request)
        found = found_index(request, self.perform_one(get, files))
        file = files.get(key)
        if file is not None and found.decoded is not None and request.cache:
            warm = CachedShardFile(found.decoded, shard.layout.spec, file.handle, file.status)
            remember(self._root + key, warm, file.opened_ns)
        return found

    def _known_index(self, shard: ShardRef, files: dict[str, OpenFile]) -> FoundIndex | None:
        """The index of a shard that is the same as when it was read before."""
        path = self._root + shard.key
        warm = warm_file(path)
        if warm is None or warm.spec != shard.layout.spec:
            return None
        handle = warm.handle if self.keeps_handles else None
        file = None
        if handle is not None:
            with suppress(OSError):
                file = OpenFile.of(handle, os.stat(path))
        else:
            file = self._open(shard.key, files)
        if file is None or not warm.is_same(file.status):
            forget(path)
            self._forget(shard.key, files)
            return None
        if handle is None and self.keeps_handles:
            reopened(path, warm, file.handle)
        warm.was_used = True
        file.known = warm
        files[shard.key] = file
        return FoundIndex(warm.index, file.version, file.size, was_requested=False)

    @property
    def keeps_handles(self) -> bool:
        """Whether what is known of a file that is kept open is true. On a network file system,
        for which there are lock files, only who opens a file learns of writers elsewhere."""
        return self._options.locking != "lockfile"

    def _get_settled(
        self, key: str, byte_range: ByteRange | None, files: dict[str, OpenFile]
    ) -> Found:
        def open_anew() -> OpenFile | None:
            self._forget(key, files)  # another file may have its name
            return self._open(key, files)

        return when_settled(self.real_root + key, open_anew, byte_range)

    def _forget(self, key: str, files: dict[str, OpenFile]) -> None:
        """After a write the name belongs to another file."""
        file = files.pop(key, None)
        if file is not None:
            file.close()

    @property
    def _is_durable(self) -> bool:
        return self._options.durability == "power"

    @property
    def _durable_below(self) -> str | None:
        return self._root if self._is_durable else None

    def persist(self) -> None:
        os.sync()

    def tidy(self, directory: str) -> None:
        tidy(self._root + directory)

    def upload(self, key: str) -> LocalUpload:
        return LocalUpload(self._root + key, self._durable_below)

    def _set(self, key: str, value: bytes | memoryview) -> None:
        self._set_with_gaps(SetWithGaps(key, [(0, [value])]))

    def _set_with_gaps(self, request: SetWithGaps) -> None:
        upload = None
        try:
            upload = self.upload(request.key)
            for offset, pieces in request.parts:
                upload.skip_to(offset)
                upload.write(pieces)
            self._end_journal(request.key)
            forget(self._root + request.key)
            upload.finish()
        except BaseException:
            if upload is not None:
                upload.abort()
            raise

    def _end_journal(self, key: str) -> None:
        """The file of a shard is about to be another one, or none."""
        file = open_shards.get(self.real_root + key)
        if file is not None:
            file.end_journal(is_durable=self._is_durable)

    def _delete(self, key: str, files: dict[str, OpenFile]) -> None:
        self._end_journal(key)
        forget(self._root + key)
        # Not LocalStore.delete: it removes a whole directory if the key names one.
        if size_of_file(self._root + key) is not None:
            with suppress(FileNotFoundError):
                fs.unlink(self._root + key)
            if self._is_durable:
                sync_directories(self._root + key, self._root)
        self._forget(key, files)

    def _move(self, key: str, to: str) -> None:
        source, target = self._root + key, self._root + to
        forget(source)
        if size_of_file(source) is not None:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(source, target)


class _Session:
    """The files that one flow has open. As a generator it would take longer than a small write."""

    __slots__ = ("_backend", "_files")

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._files: dict[str, OpenFile] = {}

    def perform(self, batch: list[Request]) -> list[Any]:
        try:
            return [self._backend.perform_one(request, self._files) for request in batch]
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise SpecError(
                f"{error.filename!r} has a name or a path that is longer than the file system takes"
            ) from error

    def let_go(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

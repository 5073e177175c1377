"""Backend for local files, whichever store has them: ``LocalStore``, fsspec or obstore."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal, TypeAlias

from zarr.abc.store import Store

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.consolidated_index import IndexCopy
from zarr_shardstore.format.ranges import ByteRange
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.io.backends import base
from zarr_shardstore.io.backends.store_traits import directory_of
from zarr_shardstore.io.local import cached_files, files, fs
from zarr_shardstore.io.local.cached_files import CachedShardFile, ShardFileReader, index_cache
from zarr_shardstore.io.local.locks import LOCK_SUFFIX, beside, shared
from zarr_shardstore.io.local.open_shards import ShardLock, lock_to_replace, open_shards
from zarr_shardstore.io.local.shard_files import JOURNAL_SUFFIX, find_repair_of
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.index_reads import found_index, index_get
from zarr_shardstore.shards.requests import Found, FoundIndex, Recorded, Request
from zarr_shardstore.shards.shard_writer import ShardWriter

_Disturbed: TypeAlias = Literal["disturbed"] | None


class LocalBackend(base.BlockingBackend):
    """Reads files by itself; writes a temporary file and renames it, as ``LocalStore`` does."""

    has_versions = True
    has_lasting_versions = True
    root: str

    def __init__(self, store: Store, options: base.BackendOptions = base.DEFAULT_OPTIONS) -> None:
        directory = directory_of(store)
        assert directory is not None, "the objects of the store are local files"
        directory = fs.plain_path(directory)
        self.store = store
        self._locking = options.locking
        self.max_dead_share = options.max_dead_share
        self.can_append = options.locking == "os" and fs.IS_POSIX
        self.locks_whole_writes = not fs.IS_POSIX  # a lock file may stay there
        # With lock files they are on a network file system, see `cached_files`.
        self.keeps_handles = options.locking != "lockfile" and fs.IS_POSIX
        self._is_durable = options.durability == "power"
        self._root_survives = not self._is_durable
        self.max_shards_at_once = fs.max_shards_of_a_read
        # Resolved once: the working directory may change, and links on the way.
        self.root = os.path.join(os.path.realpath(directory), "")

    def __repr__(self) -> str:
        return repr(self.store)

    def scope(self, key: str) -> Hashable:
        return ("file", self.root + key)

    def lock(self, key: str) -> base.Lock:
        if self.can_append:
            return ShardLock(self.root + key)
        return lock_to_replace(self.root + key, self._locking, in_this_thread=True)

    def path_of(self, key: str) -> str:
        return self.root + key

    def state_of(self, key: str) -> object:
        return fs.state_of(self.root + key) or "missing"

    def perform(self, batch: list[Request], opened: base.OpenFiles | None = None) -> list[Any]:
        readers = base.OpenFiles() if opened is None else opened
        try:
            if not fs.IS_POSIX:
                for request in batch:
                    _check_name(request)
            return [self.replies[type(request)](self, request, readers) for request in batch]
        except OSError as error:
            fs.refuse_long(error)
            raise
        finally:
            if opened is None:
                readers.close()

    # --------------------------------------------------------------- reads

    def get(self, request: requests.Get, opened: base.OpenFiles) -> Found:
        key, byte_range = request.key, request.byte_range
        if not fs.IS_POSIX and fs.is_reserved(key):
            return Found(None, None)
        if request.opened:
            return Found(open_shards.files[self.root + key].read(byte_range), None)
        if request.consistent:
            return self._get_consistent(key, byte_range, opened)
        if byte_range is None and key in opened:
            opened.close_one(key)  # a document is read again because another file has its name
        reader = opened.get(key) or self._open(key, opened)
        if reader is None:
            return Found(None, None)
        value, status = reader.read(byte_range), reader.status
        state = (status.st_ino, status.st_size, status.st_mtime_ns) if byte_range is None else None
        return Found(value, reader.version_now(), reader.size, state)

    def exists(self, request: requests.Exists, _: base.OpenFiles) -> bool:
        return files.size_of_file(self.root + request.key) is not None

    def get_size(self, request: requests.GetSize, _: base.OpenFiles) -> int | None:
        return files.size_of_file(self.root + request.key)

    def keys(self, prefix: str, *, shows_all: bool = False) -> Iterator[str]:
        return files.keys_below(self.root, prefix, shows_all)

    def list_dir(self, request: requests.ListDir, _: base.OpenFiles) -> list[str]:
        return files.names_in(self.root, request.prefix)

    def _open(
        self, key: str, opened: base.OpenFiles, cached: CachedShardFile | None = None
    ) -> ShardFileReader | None:
        if len(opened) > 1 and len(opened) >= fs.max_files_of_a_read():
            opened.close_one(next(iter(opened)))  # the oldest
        try:
            reader = opened[key] = ShardFileReader(self.root + key, cached)
        except fs.NO_FILE:
            return None
        return reader

    def get_index(self, request: requests.GetIndex, opened: base.OpenFiles) -> FoundIndex:
        shard, path = request.shard, self.root + request.shard.key
        cached = cached_files.find_file(path)
        if cached is not None and cached.is_of(shard.spec, shard.layout.document):
            reader = self._open(shard.key, opened, cached)
            if reader is not None and cached.is_current(reader.handle.fd):
                if cached.handle is None and self.keeps_handles:
                    cached.handle = reader.handle
                    cached_files.keep_open(path)
                return FoundIndex(cached.index, reader.version, reader.size, was_requested=False)
            index_cache.forget(path)  # it is stale
            opened.close_one(shard.key)
        read = found_index(request, self.get(index_get(request), opened))
        reader = opened.get(shard.key)
        if reader is not None and read.decoded is not None and request.cache:
            keeps = self.keeps_handles
            cached_files.cache_file(path, read.decoded, shard, reader, keeps_handle=keeps)
        return read

    def _get_consistent(
        self, key: str, byte_range: ByteRange | None, opened: base.OpenFiles
    ) -> Found:
        """Read a shard file while writers are kept from changing its index."""
        path = self.root + key
        # With lock files all shards are replaced: one that is open is of one state.
        needs_no_lock = self._locking == "lockfile" or open_shards.is_locked_by_me(path)
        while True:
            before = fs.state_of(path)
            opened.close_one(key)  # another file may have the path
            if not fs.IS_POSIX:
                opened.close()  # the writer that is waited for may wait for these files
            with nullcontext(True) if needs_no_lock else shared(path) as is_locked:
                reader = self._open(key, opened)
                found = Found(None, None)
                if reader is not None:
                    value = reader.read(byte_range, find_repair_of(path, reader.handle.fd))
                    found = Found(value, reader.version, reader.size)
            # Without a lock a writer may have come before the bytes were read. If it is also gone,
            # it has replaced the file, or made it longer: a shard without a journal has no gap.
            if is_locked:
                return found
            if not os.path.exists(beside(path, LOCK_SUFFIX)) and fs.state_of(path) == before:
                return found

    def record_index(self, request: requests.RecordIndex, _: base.OpenFiles) -> Recorded:
        if request.waits:
            time.sleep(base.MIN_AGE_ON_WEB_SERVERS_S)
        path = self.root + request.shard.key
        before = fs.state_of(path)
        found: FoundIndex
        (found,) = self.perform([requests.GetIndex(request.shard, consistent=True)])
        # A file with a journal is being changed, or was left by a killed writer.
        if before is None or found.decoded is None or os.path.exists(beside(path, JOURNAL_SUFFIX)):
            return None
        size, mtime_ns = before[1:]
        is_young = time.time() - mtime_ns / 1e9 < base.MIN_AGE_ON_WEB_SERVERS_S
        if is_young or fs.state_of(path) != before:
            return "young"
        return IndexCopy(found.decoded, mtime_ns // 1_000_000_000, size)

    # -------------------------------------------------------------- writes

    def open_shard(self, request: requests.OpenShard, _: base.OpenFiles) -> ShardWriter | None:
        file = open_shards.files[self.root + request.shard.key]
        file.owner = self
        return file.open(*request)

    def change_shard(self, request: requests.ChangeShard, opened: base.OpenFiles) -> None:
        file = open_shards.files[self.root + request.key]
        if request.steps or not request.closes:
            file.take(request.steps, durable_below=self.root if self._is_durable else None)
        if request.closes:
            file.end_journal()
        if opened:
            opened.close_one(request.key)  # it has another size now

    def set(self, request: requests.Set, opened: base.OpenFiles) -> _Disturbed:
        opened.close_one(request.key)  # now: Windows replaces and removes no file that is open
        return self._disturbed(request.key, self._store(request.key, [(0, [request.value])]))

    def set_with_gaps(self, request: requests.SetWithGaps, opened: base.OpenFiles) -> None:
        opened.close_one(request.key)
        self._store(request.key, request.parts)

    def set_if_not_exists(self, request: requests.SetIfNotExists, opened: base.OpenFiles) -> None:
        opened.close_one(request.key)
        try:
            self._store(request.key, [(0, [request.value])], fs.give_new_name)
        except FileExistsError:
            if self.get_size(requests.GetSize(request.key), opened) is None:
                path = self.root + request.key
                raise SpecError(f"{path!r} is a directory, or a link to nothing") from None

    def delete(self, request: requests.Delete, opened: base.OpenFiles) -> _Disturbed:
        key, path = request.key, self.root + request.key
        opened.close_one(key)
        self._end_journal(key)
        index_cache.forget(path)
        # Not LocalStore.delete: it removes a whole directory if the key names one.
        if files.size_of_file(path) is None:
            return None
        with suppress(FileNotFoundError):
            fs.unlink(path)
        if self._is_durable:
            fs.sync_directories(path, self.root)
        return self._disturbed(key, None)

    def delete_prefix(self, request: requests.DeletePrefix, opened: base.OpenFiles) -> None:
        opened.close()
        below = self.root + request.prefix  # so that their room is free
        index_cache.forget_if(lambda path: isinstance(path, str) and path.startswith(below))
        files.remove_directory(self.root, request.prefix)
        if self._is_durable:
            with suppress(*fs.NO_FILE):  # there was none
                fs.sync_directories(below.rstrip("/") if request.prefix else below + "x", self.root)

    def move(self, request: requests.Move, opened: base.OpenFiles) -> None:
        source, target = self.root + request.key, self.root + request.to
        opened.close_one(request.key)
        opened.close_one(request.to)
        index_cache.forget(source)
        if files.size_of_file(source) is not None:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            fs.replace(source, target)

    def persist(self) -> None:
        fs.sync_all(self.root + key for key in files.keys_below(self.root, ""))

    def tidy(self, directory: str) -> None:
        files.tidy(self.root + directory)

    def upload(self, key: str, parts: base.Parts) -> None:
        self._store(key, ((None, pieces) for pieces in parts))

    def _store(
        self,
        key: str,
        parts: Iterable[tuple[int | None, Sequence[Bytes]]],
        give_name: Callable[[str, str], None] | None = None,
    ) -> fs.FileState:
        """Store pieces at offsets, or one after the other; return the state of the file."""
        durable_below, written = self.root if self._is_durable else None, list[fs.FileState]()
        with fs.new_file(self.root + key, durable_below, written, give_name) as fd:
            end = 0
            for offset, pieces in parts:
                end = end if offset is None else offset  # holes take no room
                for some in fs.in_small_writes(pieces):
                    fs.write_at(fd, some, end)
                    end += sum(map(len, some))
            self._end_journal(key)
            index_cache.forget(self.root + key)
        if not self._root_survives:  # it, or directories above it, may be new
            with suppress(PermissionError):
                fs.sync_directories(self.root, os.sep)
            self._root_survives = True
        return written[0]

    def _disturbed(self, key: str, written: fs.FileState) -> _Disturbed:
        """Return whether an update of another process may have undone a write without the lock.

        Such an update has its lock file until its file has the name. Then the state is another.
        """
        path = self.root + key
        if open_shards.is_locked_by_me(path):
            return None
        is_alone = not os.path.lexists(beside(path, LOCK_SUFFIX)) and fs.state_of(path) == written
        return None if is_alone else "disturbed"

    def _end_journal(self, key: str) -> None:
        """Remove the journal of a shard that is about to be replaced or removed."""
        path = self.root + key
        if path in open_shards.files and open_shards.is_locked_by_me(path):
            open_shards.files[path].end_journal(is_durable=self._is_durable)


def _check_name(request: Any) -> None:
    if isinstance(request, requests.Get):  # it replies that there is none
        return
    # The last name of a prefix may be the beginning of another one.
    directory = getattr(request, "prefix", "").rpartition("/")[0]
    if fs.is_reserved(key := getattr(request, "key", directory)):
        raise SpecError(f"key {key!r} is refused: Windows has no file of such a name")

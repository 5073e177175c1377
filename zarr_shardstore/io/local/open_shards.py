"""Registry of the shard files that this process is appending to, or replaces.

All stores of the process share it. There is one `ShardFile` for a path. One thread at a time has
the lock of a shard (`zarr_shardstore.io.update_queue` sees to that) and uses its `ShardFile`.

A shard is registered while it is locked, and afterwards as long as it has a journal. Of more than
`_MAX_UNSEALED` shards with a journal, one of the oldest is sealed in a thread. A shard that is
replaced as a whole is locked by other means. It is named here, so that the readers of this process
know that no change in its place is under way.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice

from zarr_shardstore.io.local.fs import close_when_short, max_shards_of_writers
from zarr_shardstore.io.local.locks import Locking, locked
from zarr_shardstore.io.local.shard_files import ShardFile, end_journal, repair
from zarr_shardstore.synchronized import in_forked_child, synchronized

_MAX_UNSEALED = 1024  # shards with a journal and a lock file: two more files each on the disk
_MAX_LOOKED_AT = 64  # of them, to find one to seal

_synchronized = synchronized()


class _OpenShards:
    def __init__(self) -> None:
        self.files: dict[str, ShardFile] = {}
        """By path; the one opened first comes first."""
        self._recent: OrderedDict[str, None] = OrderedDict()
        """Paths of the shards whose files may be open; the one used last comes last."""
        self._locked: dict[str, tuple[object, int]] = {}
        """By path: the token of the lock, and its thread."""
        self.replaced: dict[str, int | None] = {}
        """By path: the thread that replaces a shard, if only that thread reads the shard for it."""
        self.being_sealed: set[str] = set()
        """Paths of shards whose seal is under way, or waits."""
        self.n_overwrites = 0
        """Begins and ends of writes of this process that put another shard into the same file."""
        self.seal_later: Callable[[ShardFile], None] | None = None

    @_synchronized
    def forget(self, file: ShardFile) -> None:
        """Drop a shard whose file is gone or another one, unless it is locked."""
        if file.path not in self._locked and self.files.get(file.path) is file:
            self._drop(file.path)
            file.close_all()

    @_synchronized
    def below(self, directory: str) -> list[ShardFile]:
        """Return the files of shards below a directory, a path that ends with a slash."""
        return [file for path, file in self.files.items() if path.startswith(directory)]

    @_synchronized
    def count_overwrite(self, n: int) -> None:
        self.n_overwrites += n

    def is_locked_by_me(self, path: str) -> bool:
        _, thread = self._locked.get(path, (None, None))
        return threading.get_ident() in (thread, self.replaced.get(path))

    def is_locked_with(self, path: str, token: object) -> bool:
        """Whether a shard is locked by the lock with that token, and by no later one."""
        found, _ = self._locked.get(path, (None, None))
        return found is token

    @_synchronized
    def begin_use(self, path: str, token: object) -> ShardFile:
        """Register a shard as locked by this thread; return its file."""
        file = self.files.get(path)
        if file is None:
            file = self.files[path] = ShardFile(path)
        self._locked[path] = token, threading.get_ident()
        is_more = path not in self._recent
        self._recent[path] = None
        self._recent.move_to_end(path)
        if is_more:
            self.close_idle(max_shards_of_writers())
        return file

    @_synchronized
    def end_use(self, path: str) -> None:
        """Register that a shard is locked no more; drop it unless it has a journal."""
        self._locked.pop(path, None)
        file = self.files.get(path)
        if file is None or not file.has_journal:
            self._drop(path)

    @_synchronized
    def one_to_seal(self) -> ShardFile | None:
        """Return a shard to seal, one of those that were opened first."""
        for path in islice(self.files, _MAX_LOOKED_AT):
            if path not in self._locked and path not in self.being_sealed:
                self.being_sealed.add(path)
                return self.files[path]
        return None

    @_synchronized
    def give_up(self, path: str, token: object) -> None:
        """End the use of a shard whose lock may be taken; close its files."""
        if self.is_locked_with(path, token):
            with suppress(OSError):  # the caller learns of the first error
                self.files[path].close_all()
            self.end_use(path)

    def _drop(self, path: str) -> None:
        self.files.pop(path, None)
        self._recent.pop(path, None)
        self.being_sealed.discard(path)

    @_synchronized
    def close_idle(self, n_kept: int = 0) -> None:
        """Close the files of shards that are not locked, the oldest first."""
        while len(self._recent) > n_kept:
            oldest = next((p for p in self._recent if p not in self._locked), None)
            if oldest is None:
                break
            del self._recent[oldest]
            with suppress(OSError):  # of another shard than the caller's
                self.files[oldest].close_all()

    def reset_after_fork(self) -> None:
        """Forget all: the files are the parent's, and its locks would count as the child's."""
        for file in self.files.values():
            file.close_all()
        for known in (self.files, self._recent, self._locked, self.replaced, self.being_sealed):
            known.clear()


open_shards = _OpenShards()
close_when_short(open_shards.close_idle)
in_forked_child(open_shards.reset_after_fork)


class ShardLock(AbstractContextManager[None]):
    """The lock of one shard.

    An exception may come at any line of `__exit__`, or just before it. `__exit__` then ends the
    lock again, because the traceback of the exception keeps this object. Otherwise the finalizer
    ends it, so the registry has only a token of this object.
    """

    __slots__ = ("_file", "_path", "_token")

    def __init__(self, path: str) -> None:
        self._path = path
        self._token = object()
        self._file: ShardFile | None = None

    def __enter__(self) -> None:
        try:
            self._file = open_shards.begin_use(self._path, self._token)
            self._file.acquire()
        except BaseException:
            # Not by the finalizer: as long as the exception is kept, it keeps this object.
            open_shards.give_up(self._path, self._token)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            if self._file is not None:
                self._file.release()
                open_shards.end_use(self._path)
                self._file = None
                if len(open_shards.files) > _MAX_UNSEALED and open_shards.seal_later is not None:
                    idle = open_shards.one_to_seal()
                    if idle is not None:
                        open_shards.seal_later(idle)
        except BaseException:
            self.__del__()
            raise

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None and open_shards.is_locked_with(self._path, self._token):
            try:
                file.release()
            finally:
                open_shards.end_use(self._path)


@contextmanager
def lock_to_replace(
    path: str, locking: Locking, *, in_this_thread: bool = False, overwrites: bool = False
) -> Iterator[None]:
    """Lock a shard file that is replaced as a whole.

    `in_this_thread`: only this thread reads the shard for that. `overwrites`: the new shard is
    written into the same file.
    """
    with locked(path, locking):
        if repair(path):
            end_journal(path, is_durable=False)
        try:
            # Not before: a repair changes the file in its place.
            open_shards.replaced[path] = threading.get_ident() if in_this_thread else None
            open_shards.count_overwrite(overwrites)
            yield
        finally:
            open_shards.replaced.pop(path, None)
            open_shards.count_overwrite(overwrites)

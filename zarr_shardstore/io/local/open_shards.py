"""The shard files that this process has open, one record for each path.

All stores of the process share them; whoever uses one holds the shard
(`zarr_shardstore.io.update_queue` lets one thread at a time).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice

from zarr_shardstore.io.local.fs import close_when_short, max_shards_of_writers
from zarr_shardstore.io.local.shard_files import ShardFile
from zarr_shardstore.shards.shard_writer import ShardWriter
from zarr_shardstore.synchronized import synchronized

_MAX_UNSEALED = 1024
"""Shards that have a journal and a lock beside them: two more files each on the disk."""

_MAX_LOOKED_AT = 64
"""Of them, when one is to be sealed."""


_synchronized = synchronized()


class _OpenShards:
    """The shard files of this process that are being changed, or have a journal of it."""

    def __init__(self) -> None:
        self._files: dict[str, ShardFile] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._in_use: dict[str, tuple[object, int]] = {}
        """By path: the token of whoever uses a shard, and its thread."""
        self._being_replaced: dict[str, int | None] = {}
        self._being_sealed: set[str] = set()
        self.n_overwrites = 0
        """Begins and ends of writes of this process that put another shard into the same file."""
        self.seal_later: Callable[[ShardFile], None] | None = None
        """Seals a shard that was not used for long, in another thread."""

    def __getitem__(self, path: str) -> ShardFile:
        """The record of a shard that this thread holds."""
        return self._files[path]

    def get(self, path: str) -> ShardFile | None:
        """The record of a shard, if this thread holds it."""
        return self._files.get(path) if self.is_used_here(path) else None

    @_synchronized
    def forget(self, file: ShardFile) -> None:
        """Drop the record of a shard that is not there any more."""
        if file.path not in self._in_use and self._files.get(file.path) is file:
            del self._files[file.path]
            self._recent.pop(file.path, None)
            self._being_sealed.discard(file.path)
            file.close_all()

    @_synchronized
    def below(self, directory: str) -> list[ShardFile]:
        """Records of shards below a directory, a path that ends with a slash."""
        return [file for path, file in self._files.items() if path.startswith(directory)]

    def holding(self, path: str) -> AbstractContextManager[None]:
        """Hold a shard to replace it, or to change it in its place."""
        return _Holding(self, path)

    def try_lock(
        self, path: str, fits: Callable[[ShardWriter], bool]
    ) -> AbstractContextManager[None] | None:
        """As `holding`, already entered; ``None`` if the shard is not open, if another writer has
        locked or changed it, or if its writer does not fit."""
        if path not in self._files:
            return None
        holding = _Holding(self, path)
        return holding if holding.enter_at_once(fits) else None

    @contextmanager
    def being_replaced(
        self, path: str, *, by_this_thread: bool, overwrites: bool
    ) -> Iterator[None]:
        """Say that this process holds a shard by other means, and does not change it in its
        place; whether only this thread reads it for that, and whether the file stays the same."""
        try:
            self._being_replaced[path] = threading.get_ident() if by_this_thread else None
            self._count_overwrite(overwrites)
            yield
        finally:
            self._being_replaced.pop(path, None)
            self._count_overwrite(overwrites)

    @_synchronized
    def _count_overwrite(self, n: int) -> None:
        self.n_overwrites += n

    def is_used_here(self, path: str) -> bool:
        """Whether this thread holds a shard."""
        _, user = self._in_use.get(path, (None, None))
        return threading.get_ident() in (user, self._being_replaced.get(path))

    def is_replaced(self, path: str) -> bool:
        """Whether this process holds a shard, and does not change it in its place."""
        return path in self._being_replaced

    @_synchronized
    def begin_use(self, path: str, token: object) -> ShardFile:
        """Make a record of a shard, or take the one there is, for this thread."""
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = ShardFile(path)
        self._in_use[path] = token, threading.get_ident()
        is_more = path not in self._recent
        self._recent[path] = None
        self._recent.move_to_end(path)
        if is_more:
            self._close_idle(max_shards_of_writers())
        return file

    @_synchronized
    def close_idle(self) -> None:
        """Close the files of all shards that nobody uses."""
        self._close_idle(0)

    def _close_idle(self, n_kept: int) -> None:
        while len(self._recent) > n_kept:
            oldest = next((p for p in self._recent if p not in self._in_use), None)
            if oldest is None:
                break
            del self._recent[oldest]
            with suppress(OSError):  # of another shard than the caller's
                self._files[oldest].close_all()

    def is_used_by(self, path: str, token: object) -> bool:
        """Whether a shard is in use by the holder of a token: nobody has taken it over since."""
        user, _ = self._in_use.get(path, (None, None))
        return user is token

    @_synchronized
    def give_up(self, path: str, token: object) -> None:
        """End the use of a shard whose lock may be held; its files are closed."""
        if self.is_used_by(path, token):
            with suppress(OSError):  # the caller learns of the first error
                self._files[path].close_all()
            self._end_use(path)

    def end_use(self, path: str) -> None:
        """Keep the record as long as the shard has a journal."""
        idle = self._end_use(path)
        if idle is not None and self.seal_later is not None:
            self.seal_later(idle)

    @_synchronized
    def _end_use(self, path: str) -> ShardFile | None:
        """End the use of a shard; return another one to seal, if too many are not."""
        self._in_use.pop(path, None)
        file = self._files.get(path)
        if file is None or not file.has_journal:
            self._files.pop(path, None)
            self._recent.pop(path, None)
            self._being_sealed.discard(path)
        return self._idlest() if len(self._files) > _MAX_UNSEALED else None

    def _idlest(self) -> ShardFile | None:
        """One of the shards that were opened first, and that nobody uses or seals."""
        for path in islice(self._files, _MAX_LOOKED_AT):
            if path not in self._in_use and path not in self._being_sealed:
                self._being_sealed.add(path)
                return self._files[path]
        return None

    def reset_after_fork(self) -> None:
        """The files are the parent's, and its locks would count as ours."""
        for file in self._files.values():
            file.close_all()
        self._files.clear()
        self._recent.clear()
        self._in_use.clear()
        self._being_replaced.clear()
        self._being_sealed.clear()


class _Holding(AbstractContextManager[None]):
    """A shard that is held. As a generator it would take 3 µs more, for each write.

    It is let go at the latest when nothing refers to it any more: an exception may come at any
    line of `__exit__`, or just before it.
    """

    __slots__ = ("_file", "_path", "_shards", "_token")

    def __init__(self, shards: _OpenShards, path: str) -> None:
        self._shards = shards
        self._path = path
        self._token = object()

    def __enter__(self) -> None:
        if not self._is_in_use:
            self._enter(ShardFile.acquire)

    def enter_at_once(self, fits: Callable[[ShardWriter], bool]) -> bool:
        """Enter, if the shard is open and free, and its writer fits."""
        return self._enter(lambda file: file.acquire_at_once(fits))

    def _enter(self, acquire: Callable[[ShardFile], bool]) -> bool:
        try:
            self._file = self._shards.begin_use(self._path, self._token)
            is_entered = acquire(self._file)
            if not is_entered:
                self._shards.end_use(self._path)
            return is_entered
        except BaseException:
            # Not by the finalizer: as long as the exception is kept, it keeps this object.
            self._shards.give_up(self._path, self._token)
            raise

    @property
    def _is_in_use(self) -> bool:
        return self._shards.is_used_by(self._path, self._token)

    def __exit__(self, *_: object) -> None:
        self._file.release()
        self._shards.end_use(self._path)

    def __del__(self) -> None:
        if hasattr(self, "_token") and self._is_in_use:
            try:
                self._file.release()
            finally:
                self._shards.end_use(self._path)


open_shards = _OpenShards()
close_when_short(open_shards.close_idle)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=open_shards.reset_after_fork)

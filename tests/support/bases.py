"""Base stores for tests, one of each kind, and a way to look at what they hold."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from zarr_shardstore.io import update_queue
from zarr_shardstore.io.local.open_shards import _synchronized as one_thread_at_a_time
from zarr_shardstore.io.local.open_shards import open_shards
from zarr_shardstore.io.local.shard_files import ShardFile


class OtherMapping(MutableMapping[str, bytes]):
    """A mapping that is no dict, as zict's and others' are."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def __getitem__(self, key: str) -> bytes:
        return self.data[key]

    def __setitem__(self, key: str, value: bytes) -> None:
        assert type(value) is bytes, "values of mappings are plain bytes"
        self.data[key] = value

    def __delitem__(self, key: str) -> None:
        del self.data[key]

    def __iter__(self) -> Any:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


def fsspec_memory() -> FsspecStore:
    fs = AsyncFileSystemWrapper(fsspec.filesystem("memory"), asynchronous=True)
    return FsspecStore(fs, path=f"/test-{uuid.uuid4().hex}")


def fsspec_local(path: Path | None = None) -> FsspecStore:
    """Writes in place: a reader beside a writer sees half a file."""
    fs = AsyncFileSystemWrapper(fsspec.filesystem("file", auto_mkdir=True), asynchronous=True)
    return FsspecStore(fs, path=str(path or temporary_directory()))


def temporary_directory() -> Path:
    """Removed when the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="zarr-shardstore-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


BASES: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "mapping": OtherMapping,
    "memory": MemoryStore,
    "local": lambda: LocalStore(temporary_directory()),
    "fsspec": fsspec_memory,
    "fsspec local": fsspec_local,
}


def put(base: Any, key: str, value: bytes) -> None:
    """Store an object in a base store, past any `ShardingStore`."""
    if isinstance(base, Store):
        sync(base.set(key, default_buffer_prototype().buffer.from_bytes(value)))
    else:
        base[key] = value


def forget_open_shards(directory: Path | str = "/") -> None:
    """As if this process had ended: the shards below are closed as they are, and unknown. Of other
    directories shards may be sealed meanwhile, in threads."""
    root = os.path.join(os.path.realpath(directory), "")
    while (files := _forget_unless_in_use(root)) is None:
        time.sleep(0.001)
    for file in files:
        file.close_all()


@one_thread_at_a_time
def _forget_unless_in_use(root: str) -> list[ShardFile] | None:
    paths = [path for path in open_shards.files if path.startswith(root)]
    if not open_shards._locked.keys().isdisjoint(paths):
        return None
    for path in paths:
        open_shards._recent.pop(path, None)
        open_shards._being_sealed.discard(path)
    return [open_shards.files.pop(path) for path in paths]


def wait_until_free() -> None:
    """See that no shard stays held. A leader tells its callers first and leaves then, and a
    shard of an earlier test may be sealed just now: a moment is enough, or it never ends."""
    for _ in range(5000):
        if not update_queue._queues:
            return
        time.sleep(0.001)
    raise AssertionError(f"still held: {list(update_queue._queues)}")

"""Base stores for tests, one of each kind, and a way to look at what they hold."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import uuid
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore


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
    "memory": MemoryStore,
    "local": lambda: LocalStore(temporary_directory()),
    "fsspec": fsspec_memory,
}
"""One of each kind that this package treats in a way of its own."""

ALL_BASES = BASES | {"mapping": OtherMapping, "fsspec local": fsspec_local}
"""With those that it serves as it serves another: a mapping as a dict, files as local files."""


def put(base: Any, key: str, value: bytes) -> None:
    """Store an object in a base store, past any `ShardingStore`."""
    if isinstance(base, Store):
        sync(base.set(key, default_buffer_prototype().buffer.from_bytes(value)))
    else:
        base[key] = value


def s3_through_fsspec(where: dict[str, Any]) -> FsspecStore:
    pytest.importorskip("s3fs", minversion="2025.10")
    return FsspecStore.from_url(
        f"s3://bucket/{where['prefix']}",
        storage_options={
            "key": "test",
            "secret": "test",
            "client_kwargs": {"endpoint_url": where["endpoint"], "region_name": "us-east-1"},
        },
    )

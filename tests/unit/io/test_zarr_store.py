"""The backend for zarr stores copes with what stores of other people cannot do."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import AsyncIterator, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, cpu, default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, WrapperStore

from zarr_shardstore import ShardingMapping, ShardingStore
from zarr_shardstore.format.ranges import Range, StartFrom, Suffix
from zarr_shardstore.io.backends import fsspec_store
from zarr_shardstore.io.backends.fsspec_store import FsspecBackend
from zarr_shardstore.io.backends.resolve import backend_of
from zarr_shardstore.io.backends.store_traits import scope_of_store
from zarr_shardstore.io.backends.zarr_store import ZarrBackend, unless_missing
from zarr_shardstore.shards.requests import (
    Delete,
    DeletePrefix,
    Exists,
    Get,
    GetSize,
    KeyCursor,
    ListDir,
    ListPage,
    Request,
)


class Refusing(WrapperStore[MemoryStore]):
    """No suffix ranges (Azure), and an error for a range behind the end (obstore)."""

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        if key == "forbidden":
            raise PermissionError(key)
        if isinstance(byte_range, SuffixByteRequest):
            raise NotImplementedError("suffix ranges are not supported")
        value = await self._store.get(key, prototype)
        if isinstance(byte_range, RangeByteRequest) and value and byte_range.start >= len(value):
            raise RuntimeError("range starts behind the end")
        return await self._store.get(key, prototype, byte_range)


@pytest.fixture
def store() -> Refusing:
    return Refusing(MemoryStore({"a": cpu.Buffer.from_bytes(b"0123456789")}))


async def read(store: Refusing, *gets: Get) -> list[bytes | None]:
    replies = await ZarrBackend(store).perform_async(list(gets))
    return [None if r.value is None else bytes(r.value) for r in replies]


async def test_a_store_without_suffix_ranges(store: Refusing) -> None:
    """The size is asked for, then bounded bytes."""
    assert await read(store, Get("a", Suffix(3))) == [b"789"]
    assert await read(store, Get("a", Suffix(99))) == [b"0123456789"]
    assert await read(store, Get("missing", Suffix(3))) == [None]


async def test_a_range_behind_the_end_is_empty(store: Refusing) -> None:
    """As of a value in memory."""
    assert await read(store, Get("a", Range(10, 12))) == [b""]
    assert await read(store, Get("a", StartFrom(4))) == [b"456789"]


async def test_the_first_error_of_a_batch_is_raised(store: Refusing) -> None:
    """Not a group of errors, and nothing runs on."""
    with pytest.raises(PermissionError):
        await ZarrBackend(store).perform_async([Get("forbidden"), Exists("a")])


async def test_sizes_and_existence(store: Refusing) -> None:
    """Of what is there and what is not."""
    requests: list[Request] = [GetSize("a"), GetSize("b"), Exists("a"), Exists("b")]
    assert await ZarrBackend(store).perform_async(requests) == [10, None, True, False]


class Remote(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Stands for an object store that fsspec reaches."""

    protocol = "remote"


def test_a_store_that_nothing_protects_warns_once() -> None:
    """Who updates shards through fsspec is told to be alone, unless he says that he knows."""
    fsspec_store._warn_of_other_writers.cache_clear()
    store = FsspecStore(AsyncFileSystemWrapper(Remote(), asynchronous=True), path="/warns-once")
    ShardingMapping(store, chunks_per_shard=2, locking="none")["data/root/a/c0"] = b"0"
    m = ShardingMapping(store, chunks_per_shard=2)
    with pytest.warns(UserWarning, match="one writer"):
        m["data/root/a/c1"] = b"1"
    m["data/root/a/c2"] = b"2"  # warnings are errors here
    assert len(m) == 3


class Keeping(Remote):
    """It keeps its listings until they are dropped, as s3fs does."""

    protocol = "keeping"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, Any] = {}

    def _keep(self, method: str, path: str, options: dict[str, Any]) -> Any:
        key = (method, path, *options.items())
        if key not in self.kept:
            self.kept[key] = getattr(super(), method)(path, **options)
        return self.kept[key]

    def ls(self, path: str, **options: Any) -> Any:
        return self._keep("ls", path, options)

    def find(self, path: str, **options: Any) -> Any:
        return self._keep("find", path, options)

    def info(self, path: str, **options: Any) -> Any:
        return self._keep("info", path, options)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.kept.clear()


async def test_listings_that_a_client_keeps_are_dropped() -> None:
    """Another process stores objects between two listings."""
    fs = Keeping()
    store = FsspecStore(AsyncFileSystemWrapper(fs, asynchronous=True), path="/keeps")
    backend = FsspecBackend(store)
    fs.pipe_file("/keeps/g/a", b"0")
    asked: list[Request] = [ListDir("g/"), ListPage(KeyCursor("g/"))]
    assert await backend.perform_async(asked) == [["a"], ["g/a"]]
    assert await backend.perform_async([GetSize("g/a")]) == [1]
    Remote().pipe_file("/keeps/g/a", b"0123")
    Remote().pipe_file("/keeps/g/b", b"0")
    asked[-1] = ListPage(KeyCursor("g/"))
    names, keys = await backend.perform_async(asked)
    assert (sorted(names), sorted(keys)) == (["a", "b"], ["g/a", "g/b"])
    assert await backend.perform_async([GetSize("g/a")]) == [4]
    Remote().pipe_file("/keeps/g/a", b"01")
    assert await backend.perform_async([GetSize("g/a")]) == [2], "sizes alone, too"


class Listing(Remote):
    """It looks for objects in listings, as the client of ``ftp://`` does."""

    protocol = "listing"
    n_listed = 0

    def info(self, path: str, **_: Any) -> Any:
        parent = self._parent(path)
        if parent not in self.dircache:
            self.n_listed += 1
            self.dircache[parent] = super().ls(parent, detail=True)
        for found in self.dircache[parent]:
            if found["name"] == path:
                return found
        raise FileNotFoundError(path)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        size = self.info(path)["size"]
        data: bytes = super().cat_file(path)[:size][start:end]
        return data

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


async def test_a_listing_serves_many_reads_of_parts() -> None:
    """It is dropped before reads that a former size changes, and where bytes are missing."""
    fs = Listing()
    backend = FsspecBackend(FsspecStore(AsyncFileSystemWrapper(fs, asynchronous=True), path="/l"))
    for i in range(9):
        fs.pipe_file(f"/l/{i}", b"01")
    for i in range(9):
        (found,) = await backend.perform_async([Get(f"{i}", Range(1, 2))])
        assert bytes(found.value) == b"1"
    assert fs.n_listed == 1
    Remote().pipe_file("/l/9", b"01")
    for i in range(4, 9):
        Remote().pipe_file(f"/l/{i}", b"0123")
    for key, byte_range, value in [
        ("9", Range(0, 2), b"01"),
        ("8", None, b"0123"),
        ("7", Range(1, 3), b"12"),
        ("6", Suffix(1), b"3"),
        ("5", StartFrom(1), b"123"),
    ]:
        (found,) = await backend.perform_async([Get(key, byte_range)])
        assert bytes(found.value) == value
        fs.dircache["/l"] = [{"name": f"/l/{i}", "size": 2, "type": "file"} for i in range(9)]
    assert (await backend.perform_async([Get("4", Range(1, 2))]))[0].value == b"1"
    assert len(fs.dircache["/l"]) == 9, "which is a listing of before"


def test_file_systems_of_two_threads_are_one() -> None:
    """fsspec's own are equal within a thread: writers in two would not exclude each other."""
    both = threading.Barrier(2)

    def scopes(path: str) -> list[Hashable]:
        store = FsspecStore.from_url(f"memory://{path}")
        behind = DirFileSystem(path, MemoryFileSystem())
        both.wait(60)  # both threads are there: an id of a thread that has ended is used again
        stores = [store, FsspecStore(AsyncFileSystemWrapper(behind, asynchronous=True), path="x")]
        return [scope_of_store(store) for store in stores]

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(scopes, ["/a", "/a"])
        assert first == second
        first, second = threads.map(scopes, ["/a", "/b"])
    assert not set(first) & set(second)


async def test_an_error_does_not_mean_that_an_object_is_missing() -> None:
    """To fsspec's `exists` it would; a shard is then replaced without looking at it."""
    fs = Remote()
    store = FsspecStore(AsyncFileSystemWrapper(fs, asynchronous=True), path="/fails")
    fs.pipe_file("/fails/a", b"0")
    backend = FsspecBackend(store)
    assert await backend.perform_async([Exists("a"), Exists("b")]) == [True, False]
    broken = OSError(errno.EIO, "broken")
    with mock.patch.object(store.fs, "_info", mock.AsyncMock(side_effect=broken)):
        with pytest.raises(OSError, match="broken") as raised:
            await backend.perform_async([Exists("a")])
        assert raised.value is broken


class SilentDeletes(AsyncFileSystem):  # type: ignore[misc]
    """Deletes many objects like s3fs: of those that the server refuses, it says nothing."""

    cachable = False
    protocol = "silent"

    def __init__(self) -> None:
        super().__init__(asynchronous=True)
        self.objects: dict[str, bytes] = {}

    async def _info(self, path: str, **_: Any) -> Any:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": len(self.objects[path])}

    async def _find(self, path: str, **_: Any) -> Any:
        return [key for key in self.objects if key.startswith(f"{path.rstrip('/')}/")]

    async def _rm_file(self, path: str, **_: Any) -> None:
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)

    async def _rm(self, path: Any, recursive: bool = False, **_: Any) -> None:
        pass


async def test_an_object_that_is_deleted_is_gone() -> None:
    """S3 replies with status 200 and a list of the objects that it has not deleted."""
    fs = SilentDeletes()
    fs.objects = {f"b/{key}": b"0" for key in ("a/0", "a/1", "a/2", "c/0")}
    backend = FsspecBackend(FsspecStore(fs, path="b"))
    await backend.perform_async([Delete("a/0"), Delete("a/9")])
    assert [*fs.objects] == ["b/a/1", "b/a/2", "b/c/0"]
    await backend.perform_async([DeletePrefix("a/")])
    assert [*fs.objects] == ["b/c/0"]


async def test_a_read_that_fails_is_not_tried_for_ever() -> None:
    """Suffix ranges may not be supported; but each time-out takes a minute."""
    store = MemoryStore({"a": cpu.Buffer.from_bytes(b"0123456789")})
    n_failed = 0

    async def get(key: str, prototype: BufferPrototype, byte_range: Any = None) -> Buffer | None:
        nonlocal n_failed
        if byte_range is not None:
            n_failed += 1
            raise TimeoutError
        return await real(key, prototype)

    real = store.get
    with mock.patch.object(store, "get", get), pytest.raises(TimeoutError):
        await ZarrBackend(store).perform_async([Get("a", Suffix(3))])
    assert n_failed <= 3


def test_what_is_near_by(tmp_path: Path) -> None:
    """Memory and files, however they are reached: a second round costs next to nothing there."""
    obstore_stores = pytest.importorskip("obstore.store")
    near: list[Store] = [
        MemoryStore(),
        LocalStore(tmp_path),
        WrapperStore(LocalStore(tmp_path)),
        WrapperStore(MemoryStore()),
        FsspecStore.from_url("memory://near"),
        FsspecStore.from_url(f"file://{tmp_path}", storage_options={"auto_mkdir": True}),
        ObjectStore(obstore_stores.MemoryStore()),
        ObjectStore(obstore_stores.LocalStore(tmp_path)),
    ]
    assert [backend_of(store).max_requests_at_once for store in near] == [None] * len(near)
    s3 = obstore_stores.S3Store("bucket", endpoint="http://127.0.0.1:9", skip_signature=True)
    far = [ObjectStore(s3), FsspecStore.from_url("http://127.0.0.1:9/bucket")]
    assert [backend_of(store).max_requests_at_once for store in far] == [64, 64]


class Counting(WrapperStore[LocalStore]):
    """Counts reads; its methods are async, as those of remote stores."""

    _supports_sync_io = False
    n_reads = 0

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        self.n_reads += 1
        return await super().get(key, prototype, byte_range)


async def test_static_indexes_of_wrapped_files_are_read_once(tmp_path: Path) -> None:
    """An index from the cache has the version of the file, as its entries have."""
    key = "data/root/a/c0"
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    m[key] = b"value"
    m.flush()
    time.sleep(0.1)  # a younger file tells no version
    base = Counting(LocalStore(tmp_path))
    store = ShardingStore(base, chunks_per_shard=4, static=True)
    prototype = default_buffer_prototype()
    await store.get(key, prototype)
    n_before = base.n_reads
    value = await store.get(key, prototype)
    assert value is not None
    assert value.to_bytes() == b"value"
    assert base.n_reads == n_before + 1


async def test_a_listing_with_slashes_after_directories() -> None:
    """Some clients list directories so; a name has none."""

    class Slashes(WrapperStore[MemoryStore]):
        async def list_dir(self, prefix: str) -> AsyncIterator[str]:
            async for name in self._store.list_dir(prefix):
                yield f"{name}/" if name == "d" else name

    base = Slashes(MemoryStore({"d/a": cpu.Buffer.from_bytes(b"1")}))
    assert await ZarrBackend(base).perform_async([ListDir("")]) == [["d"]]


@pytest.mark.parametrize(
    "cause", [ConnectionError("down"), TimeoutError(), FileNotFoundError(), None]
)
async def test_a_failure_that_fsspec_calls_a_missing_file(cause: Exception | None) -> None:
    """Its web client does so for the size of a file, whatever the server has answered."""

    async def size() -> int:
        raise FileNotFoundError("x") from cause

    if cause is None or isinstance(cause, FileNotFoundError):
        assert await unless_missing(size(), None) is None
    else:
        with pytest.raises(type(cause)):
            await unless_missing(size(), None)

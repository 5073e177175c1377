"""Whole writes of values that are no entries of shards, beside changes of a part of them.

A change reads, computes and writes. A whole write that comes between is not lost, although it
takes no lock. Each test makes the moment in which it would be.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import obstore
import pytest
import zarr
from obstore.store import MemoryStore as ObstoreMemory
from zarr.codecs import BytesCodec, GzipCodec, ShardingCodec
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore, MemoryStore, ObjectStore, WrapperStore

from tests.support.kit import lock_shard, system_calls
from zarr_shardstore import ShardingMapping, ShardingStore

KEY = "a/c/0"


def adds_one(old: list[bytes | None]) -> list[bytes | None]:
    return [(value or b"") + b"1" for value in old]


def in_a_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def wait_for(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("locking", ["os", "lockfile"])
@pytest.mark.parametrize("write", ["set", "erase"])
@pytest.mark.parametrize("kind", ["LocalStore", "wrapped"])
def test_of_another_process_that_has_the_lock(
    kind: str, write: str, locking: Any, tmp_path: Path
) -> None:
    """It has read the value before the write and stores it after: the write waits and repeats."""
    base: Any = LocalStore(tmp_path)
    m = ShardingMapping(WrapperStore(base) if kind == "wrapped" else base, locking=locking)
    m[KEY] = b"old"
    path = tmp_path / KEY
    with lock_shard(path, locking):
        writer = in_a_thread(lambda: m.erase(KEY) if write == "erase" else m.set(KEY, b"new"))
        if kind == "LocalStore":  # it writes first and then looks; a wrapper waits for the lock
            is_erased = write == "erase"
            wait_for(lambda: not path.exists() if is_erased else path.read_bytes() == b"new")
        writer.join(0.2)
        path.write_bytes(b"old1")
        assert writer.is_alive()
    writer.join(60)
    assert m.get(KEY) == (None if write == "erase" else b"new")


@pytest.mark.parametrize("write", ["set", "erase"])
def test_of_another_process_that_has_ended(write: str, tmp_path: Path) -> None:
    """Between the write and its look at the lock file: another file has the name."""
    m = ShardingMapping(tmp_path)
    m[KEY] = b"old"
    n_writes = 0

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any) -> Any:
            nonlocal n_writes
            found = call(*args)
            if name in ("replace", "unlink") and str(args[-1]) == str(tmp_path / KEY):
                n_writes += 1
                if n_writes == 1:
                    (tmp_path / "other").write_bytes(b"old1")
                    (tmp_path / "other").rename(tmp_path / KEY)
            return found

        return changed

    with system_calls(wrap):
        if write == "set":
            m[KEY] = b"new"
        else:
            m.erase(KEY)
    assert m.get(KEY) == (b"new" if write == "set" else None)
    assert n_writes == 2


def test_a_write_alone_is_written_once(tmp_path: Path) -> None:
    """No lock file is made, and no file twice."""
    m = ShardingMapping(tmp_path)
    made: list[str] = []

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            made.append(name)
            return call(*args)

        return noted

    m[KEY] = b"old"
    with mock.patch("os.open", side_effect=AssertionError), system_calls(wrap):
        m.erase(KEY)
    with system_calls(wrap):
        m[KEY] = b"new"
    assert [name for name in made if name in ("replace", "unlink", "open_new")] == [
        *("unlink", "open_new", "replace")
    ]


class Pausing(MemoryStore):
    """Stores a value that ends with 1 only after the `pause`."""

    pause: Callable[[], Any] | None = None

    async def set(self, key: str, value: Buffer, byte_range: Any = None) -> None:
        if self.pause is not None and value.to_bytes().endswith(b"1"):
            pause, self.pause = self.pause, None
            await asyncio.to_thread(pause)
        await super().set(key, value, byte_range)

    _supports_sync_io = False  # its blocking methods would pass `set` by


@pytest.mark.parametrize("write", ["set", "erase"])
def test_of_this_process(write: str) -> None:
    """The change has read and not stored yet, when the write is stored and looks at the queue."""
    base = Pausing()
    m = ShardingMapping(base)
    m[KEY] = b"old"
    writers: list[threading.Thread] = []

    def pause() -> None:
        writers.append(in_a_thread(lambda: m.erase(KEY) if write == "erase" else m.set(KEY, b"n")))
        wait_for(lambda: ShardingMapping(base).get(KEY) != b"old")

    base.pause = pause
    m.update_values([KEY], adds_one)
    writers[0].join(60)
    assert m.get(KEY) == (None if write == "erase" else b"n")


@contextmanager
def before_a_conditional_put(change: Callable[[], Any]) -> Iterator[None]:
    """Change something before the first."""
    put_async, todo = obstore.put_async, [change]

    async def put(store: Any, key: str, value: Any, mode: Any = None, **options: Any) -> Any:
        if mode is not None and todo:
            todo.pop()()
        return await put_async(store, key, value, mode=mode, **options)

    with mock.patch.object(obstore, "put_async", put):
        yield


@pytest.mark.parametrize("old", [None, b"old"])
@pytest.mark.parametrize("new", [None, b"new"])
def test_of_another_host(old: bytes | None, new: bytes | None) -> None:
    """On an object store: the change is applied again, to what was written."""
    store = ObstoreMemory()
    m = ShardingMapping(ObjectStore(store))
    obstore.put(store, KEY, old or b"")
    if old is None:
        obstore.delete(store, KEY)

    def write() -> None:
        if new is not None:
            obstore.put(store, KEY, new)
        elif old is not None:
            obstore.delete(store, KEY)

    with before_a_conditional_put(write):
        m.update_values([KEY], adds_one)
    assert m[KEY] == (new or b"") + b"1"


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed`")
@pytest.mark.parametrize("shards", ["none", "under another codec", "of shards"])
def test_an_emptied_chunk_of_an_object_store_keeps_a_value(shards: str) -> None:
    """A removal has no condition: a chunk of fill values takes the place of none. So do shards that
    zarr writes."""
    store, inner = ObstoreMemory(), ShardingCodec(chunk_shape=(2,), codecs=[BytesCodec()])
    codecs: dict[str, Any] = {
        "none": {},
        "under another codec": {"serializer": inner, "compressors": [GzipCodec()]},
        "of shards": {
            "serializer": ShardingCodec(chunk_shape=(4,), codecs=[inner]),
            "compressors": None,
        },
    }
    options: Any = {"shape": (8,), "chunks": (8,), "dtype": "u1", **codecs[shards]}
    z: Any = zarr.create_array(ShardingStore(ObjectStore(store)), name="a", **options)
    z[:4] = 1
    z[:4] = 0
    assert obstore.head(store, KEY)["size"] > 0
    np.testing.assert_array_equal(zarr.open_array(ObjectStore(store), path="a")[:], np.zeros(8))
    z[:4] = 1
    assert z[:].tolist() == [1] * 4 + [0] * 4
    z[:] = 0  # a whole chunk is removed
    if shards == "none":
        with pytest.raises(FileNotFoundError):
            obstore.head(store, KEY)


def test_a_lock_file_of_a_killed_process_is_no_obstacle(tmp_path: Path) -> None:
    """Of the system's locks: the write finds the file, takes the lock, and removes the file."""
    m = ShardingMapping(tmp_path)
    (tmp_path / "a/c").mkdir(parents=True)
    (tmp_path / "a/c/0.__lock").touch()
    m[KEY] = b"new"
    m.update_values([KEY], adds_one)
    assert m[KEY] == b"new1"
    assert [path.name for path in (tmp_path / "a/c").iterdir()] == ["0"]

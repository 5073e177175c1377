"""The number of functions of the package that a call passes: each one is to be understood."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import LocalStore

import zarr_shardstore
from zarr_shardstore import ShardingMapping, ShardingStore
from zarr_shardstore.io.concurrency import worker_pool
from zarr_shardstore.io.local.cached_files import index_cache

PACKAGE = f"{Path(zarr_shardstore.__file__).parent}/"

INNER = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"}
"""No functions since Python 3.12."""

Function = tuple[str, str]

APPEND = 82
APPEND_ASYNC = 93
"""Most functions of a write of one chunk into a shard that is open. Four look whether another
process has converted the array."""

WARM_READ: list[Function] = [
    ("store/sharding_mapping.py", "ShardingMapping.__getitem__"),
    ("store/engine.py", "ShardingEngine.get_blocking"),
    ("store/engine.py", "ShardingEngine._get_cached"),
    ("arrays/array_cache.py", "ArrayCache.current"),
    ("format/layout.py", "KeyTable.translate"),
    ("io/local/cached_files.py", "CachedShardFile.read"),
    ("io/local/cached_files.py", "CachedShardFile._read"),
    ("io/local/cached_files.py", "CachedShardFile.is_current"),
]
"""All that is called, in this order."""


@contextmanager
def calls() -> Iterator[list[Function]]:
    """File and name of each function of the package that is called, in all threads that matter:
    this one, new ones, and the thread of zarr's event loop."""
    seen: list[Function] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(PACKAGE) and code.co_name not in INNER
        if event == "call" and is_ours:
            seen.append((code.co_filename.removeprefix(PACKAGE), code.co_qualname))

    async def profile_loop(function: Any) -> None:
        sys.setprofile(function)

    gc.collect()
    gc.disable()  # or it calls what earlier tests have left
    worker_pool.cache_clear()  # its threads begin below
    sync(profile_loop(note))
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield seen
    finally:
        gc.enable()
        sys.setprofile(None)
        threading.setprofile(None)
        sync(profile_loop(None))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An array of 256 chunks in 16 shards; the process has read it, but not the last shard."""
    store = ShardingStore(tmp_path, chunks_per_shard=4)
    options: Any = {"shape": (16, 16), "chunks": (1, 1), "dtype": "u1", "compressors": None}
    array = zarr.create_array(store, name="a", fill_value=0, **options)
    array[...] = 1
    mapping = ShardingMapping(tmp_path, chunks_per_shard=4)
    mapping.flush()
    time.sleep(0.05)  # files that are younger are read again
    assert mapping["a/c/0/0"] == b"\x01"
    return tmp_path


def read_mapping(root: Path) -> Callable[[], Any]:
    mapping = ShardingMapping(LocalStore(root), chunks_per_shard=4)
    return lambda: mapping["a/c/15/15"]


def n_functions(seen: list[Function]) -> tuple[int, int]:
    """Number of functions, and of files."""
    return len(set(seen)), len({file for file, _ in seen})


def test_a_cold_read(root: Path) -> None:
    """Array and index are not known."""
    read = read_mapping(root)
    with calls() as seen:
        assert read() == b"\x01"
    functions, files = n_functions(seen)
    assert functions <= 100
    assert files <= 20


def test_a_listing(root: Path) -> None:
    """The array is known, no index is. Five functions see whether it was converted meanwhile."""
    mapping = ShardingMapping(LocalStore(root), chunks_per_shard=4)
    mapping["a/c/0/0"]
    index_cache.forget_if(lambda _: True)
    with calls() as seen:
        assert len([*mapping]) == 256 + 2
    functions, files = n_functions(seen)
    assert functions <= 94
    assert files <= 20


def test_a_warm_read(root: Path) -> None:
    """One function more is slower, and one more to read."""
    read = read_mapping(root)
    read()
    read()
    with calls() as seen:
        assert read() == b"\x01"
    assert seen == WARM_READ


def test_an_append(root: Path) -> None:
    """To a shard that is open, of a chunk that was written before."""
    mapping = ShardingMapping(LocalStore(root), chunks_per_shard=4)
    mapping["a/c/15/15"] = b"\x02"
    mapping["a/c/15/15"] = b"\x03"
    with calls() as seen:
        mapping["a/c/15/15"] = b"\x04"
    functions, files = n_functions(seen)
    assert functions <= APPEND
    assert files <= 20


async def test_an_async_append(root: Path) -> None:
    store = await ShardingStore.open(root, chunks_per_shard=4)
    for value in (b"\x02", b"\x03"):
        await store.set("a/c/15/15", cpu.Buffer.from_bytes(value))
    with calls() as seen:
        await store.set("a/c/15/15", cpu.Buffer.from_bytes(b"\x04"))
    assert len(set(seen)) <= APPEND_ASYNC


@pytest.mark.parametrize(("compressors", "limit"), [(None, 17.2), ("auto", 18.2)])
def test_a_bulk_write_and_read(compressors: Any, limit: float, tmp_path: Path) -> None:
    """Calls a chunk, of 256 chunks in 16 shards; the store knows nothing of the new array."""
    array = zarr.create_array(
        ShardingStore(tmp_path, chunks_per_shard=4),
        name="a",
        shape=(64, 64),
        chunks=(4, 4),
        dtype="u2",
        compressors=compressors,
    )
    values = np.arange(1, 64 * 64 + 1, dtype="u2").reshape(64, 64)
    with calls() as seen:
        array[:] = values
    assert len(seen) <= limit * 256
    with calls() as seen:
        found = np.asarray(array[:])
    assert len(seen) <= 9 * 256
    np.testing.assert_array_equal(found, values)

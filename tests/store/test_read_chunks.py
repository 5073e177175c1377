"""`read_chunks`: the same values as zarr's, chunk by chunk; and nothing old after a change."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import zarr
from numcodecs import Delta, Zlib
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from tests.support.bases import fsspec_memory
from tests.support.pipeline_arrays import CHUNKS, KINDS, SHAPE, make_array, make_store
from zarr_shardstore import ShardingMapping, ShardingStore, SpecError

GRID = (6, 3)
ALL = [(i, j) for i in range(GRID[0]) for j in range(GRID[1])]
VALUES = np.arange(1, 78, dtype="i2").reshape(SHAPE)

ARRAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS if kind != "draft"},
    "gzip": ("v3", {"compressors": GzipCodec()}),
    "blosc": ("v3", {"compressors": BloscCodec()}),
    "two codecs": ("v3", {"compressors": [ZstdCodec(), Crc32cCodec()]}),
    "text": ("v3", {"dtype": str, "fill_value": "none"}),
    "dates": ("v3", {"dtype": "M8[s]", "fill_value": 7}),
    "nan": ("v3", {"dtype": "f4", "fill_value": np.nan}),
    "v2 zlib": (
        "v2",
        {"compressors": Zlib(), "filters": [Delta("<i2")]},
    ),
    "v2 without a fill value": ("v2", {"fill_value": None}),
    "inner chunks of shards=": ("plain chunks", {"shards": (6, 6)}),
}
BASES: dict[str, Callable[[Path], Any]] = {
    "dict": lambda path: {},
    "local": lambda path: path / "s",
    "fsspec": lambda path: fsspec_memory(),
}


def expected(z: Any, at: tuple[int, int]) -> Any:
    """As zarr reads it, in a chunk of full size."""
    whole = np.full(CHUNKS, z[:1, :1].ravel()[0], z.dtype)
    part = z[tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, CHUNKS, strict=True))]
    whole[tuple(map(slice, part.shape))] = part
    return whole, tuple(map(slice, part.shape))


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ARRAYS)
def test_as_zarr_reads(name: str, base: str, tmp_path: Path) -> None:
    """Edges of the array, missing chunks and missing shards; coordinates in any order, repeated."""
    kind, options = ARRAYS[name]
    store = make_store(kind, BASES[base](tmp_path))
    z = make_array(store, kind, **options)
    z[2:, 1:] = VALUES[2:, 1:].astype(z.dtype)
    z = zarr.open_array(store, path="a")
    reader = (
        store if name != "text" else pickle.loads(pickle.dumps(store)) if base == "local" else store
    )
    rng = np.random.default_rng(1)
    for coords in (ALL, rng.permutation(ALL * 3), ALL[4:5], np.array(ALL, "u1"), []):
        found = reader.read_chunks("a", coords)
        assert found.shape == (len(coords), *CHUNKS)
        assert found.dtype == z.dtype
        for chunk, at in zip(found, np.asarray(coords).tolist(), strict=True):
            whole, there = expected(z, tuple(at))
            np.testing.assert_array_equal(chunk[there], whole[there])
    out = np.empty((2, *CHUNKS), z.dtype)
    assert store.read_chunks("/a/", ALL[5:7], out=out) is out
    np.testing.assert_array_equal(out, store.read_chunks("a", ALL[5:7]))
    twin = asyncio.run(store.read_chunks_async("a", ALL))
    np.testing.assert_array_equal(twin, store.read_chunks("a", ALL))
    keys = [z.metadata.encode_chunk_key(at) for at in ALL]
    values = ShardingMapping(store).get_partial_values([(f"a/{key}", (0, None)) for key in keys])
    assert store.read_encoded("a", ALL) == values


def test_shards_that_are_left_to_zarr() -> None:
    """Their grid is that of the shards."""
    base: dict[str, bytes] = {}
    z = make_array(ShardingStore(base), shards=(6, 6), shape=(12, 12), chunks=(2, 3))
    z[:] = np.arange(144).reshape(12, 12)
    store = ShardingStore(base, native="passthrough")
    found = store.read_chunks("a", [(1, 0), (0, 1)])
    np.testing.assert_array_equal(found, [z[6:, :6], z[:6, 6:]])


def test_arguments() -> None:
    store = make_store("v3", {})
    z = make_array(store)
    z[:] = VALUES
    for wrong in ([1, 2], [(1, 2, 3)], [(0.5, 1)], [("a", "b")]):
        with pytest.raises(SpecError, match="n x 2 integers"):
            store.read_chunks("a", wrong)
    for outside in ((6, 0), (-1, 0), (0, 3)):
        with pytest.raises(IndexError, match=r"grid \(6, 3\)"):
            store.read_chunks("a", [(0, 0), outside])
    wrong_out: list[tuple[Any, str]] = [
        (np.empty((2, 2, 3)), "out has the shape"),
        (np.empty((1, 2, 3), "u1"), "type uint8, the values take .* and have int16"),
        (np.broadcast_to(np.int16(0), (1, 2, 3)), "can be written"),
        ([[[0]]], "an array of numpy"),
    ]
    for out, match in wrong_out:
        with pytest.raises(SpecError, match=match):
            store.read_chunks("a", [(0, 0)], out=out)
    wide = np.zeros((4, 2, 3, 2), ">f8")[..., 0]
    np.testing.assert_array_equal(
        store.read_chunks("a", [(1, 0)] * 4, out=wide), [VALUES[2:4, :3]] * 4
    )
    with pytest.raises(SpecError, match="no array"):
        store.read_chunks("b", [(0, 0)])


def test_a_number(tmp_path: Path) -> None:
    """An array without dimensions has one chunk, without coordinates."""
    store = ShardingStore(tmp_path, chunks_per_shard=2)
    zarr.create_array(store, name="a", shape=(), dtype="f8")[...] = 1.5
    assert store.read_chunks("a", [()]).tolist() == [1.5]
    assert store.read_chunks("a", [(), ()]).shape == (2,)
    assert store.read_chunks("a", []).shape == (0,)


@pytest.mark.parametrize("base", BASES)
def test_costs(base: str, tmp_path: Path) -> None:
    """A second read asks for the chunks alone, also after the array was opened by zarr."""
    store = make_store("v3", BASES[base](tmp_path))
    make_array(store)[:] = VALUES
    for _ in range(2):
        zarr.open_array(store, path="a", mode="r")
        store.read_chunks("a", ALL)
        for coords in (ALL[:1], ALL[:9], ALL):
            before = store.stats()
            store.read_chunks("a", coords)
            after = store.stats()
            n_shards = len({(i // 3, j // 2) for i, j in coords})
            assert after.rounds - before.rounds <= 2
            assert after.requests - before.requests <= 2 * n_shards


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    """The error is that of the codec, with the key of the chunk."""
    store = ShardingStore(tmp_path, chunks_per_shard=2)
    zarr.create_array(store, name="a", shape=(40,), chunks=(1,), dtype="u1")[:] = 1
    store.set_sync("a/c/33", b"no frame")
    with pytest.raises(RuntimeError) as caught:
        store.read_chunks("a", np.arange(40)[:, None])
    assert "a/c/33" in str(caught.value.__notes__)


def test_nothing_old_is_read(tmp_path: Path) -> None:
    """After a write, a resize and another array of that name: of this store and of others."""
    store, other = make_store("v3", tmp_path), make_store("v3", tmp_path)
    z = make_array(store)
    z[:] = VALUES
    assert other.read_chunks("a", [(0, 0)])[0, 0, 0] == 1
    z[0, 0] = 5
    assert other.read_chunks("a", [(0, 0)])[0, 0, 0] == 5
    z.resize((20, 7))
    z[19, 0] = 6
    assert other.read_chunks("a", [(9, 0)])[0, 1, 0] == 6
    make_array(store, dtype="f8", compressors=None, chunks=(3, 3), overwrite=True)[:] = 0.5
    for each in (store, other):
        np.testing.assert_array_equal(each.read_chunks("a", [(0, 0)]), np.full((1, 3, 3), 0.5))
    in_process = "import zarr; from zarr_shardstore import ShardingStore as S; "
    in_process += f"zarr.create_array(S({str(tmp_path)!r}, (3, 2)), name='a', shape=(20, 7), "
    in_process += "chunks=(1, 9), dtype='f8', compressors=None, overwrite=True)[:] = 0.25"
    assert subprocess.run([sys.executable, "-c", in_process], check=False).returncode == 0
    for each in (store, other):
        np.testing.assert_array_equal(each.read_chunks("a", [(0, 0)])[0, 0, :7], np.full(7, 0.25))
    make_array(store, dtype="f8", compressors=None, chunks=(3, 3), overwrite=True)[:] = 0.5
    with store.batch():
        zarr.open_array(store, path="a")[:] = 1.5
        assert store.read_chunks("a", [(1, 1)])[0, 0, 0] == 1.5


def read_first(store: Any) -> Any:
    return store.read_chunks("a", ALL[:1])[0, 0, 0], len(store.read_chunks("a", ALL * 3))


def test_workers(tmp_path: Path) -> None:
    """Threads that share a store; processes that get it by pickle, in any way of starting them;
    and children of a process that reads in other threads at that moment."""
    store = make_store("v3", tmp_path)
    make_array(store)[:] = VALUES
    whole = store.read_chunks("a", ALL)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: store.read_chunks("a", ALL), range(32)):
            np.testing.assert_array_equal(found, whole)
    with multiprocessing.get_context("spawn").Pool(1) as workers:
        assert workers.map_async(read_first, [store]).get(60) == [(1, 3 * len(ALL))]
    stop = Event()

    def read_on() -> None:
        while not stop.is_set():
            store.read_chunks("a", ALL)

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read_on) for _ in range(2)]
        for _ in range(10):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
                child = os.fork()
            if child == 0:
                signal.alarm(30)
                is_right = np.array_equal(store.read_chunks("a", ALL), whole)
                os._exit(0 if is_right else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stop.set()
        for each in reading:
            each.result()


def test_many_large_chunks(tmp_path: Path) -> None:
    """More than are decoded by one thread at a time, and more than are in memory at a time."""
    store = ShardingStore(tmp_path, chunks_per_shard=(8, 8))
    z = zarr.create_array(store, name="a", shape=(6400, 1600), chunks=(200, 200), dtype="u4")
    data = np.arange(6400 * 1600, dtype="u4").reshape(6400, 1600)
    z[:] = data
    coords = np.random.default_rng(0).integers(0, (32, 8), (300, 2))
    for chunk, (i, j) in zip(store.read_chunks("a", coords), coords.tolist(), strict=True):
        part = data[200 * i : 200 * (i + 1), 200 * j : 200 * (j + 1)]
        np.testing.assert_array_equal(chunk, part)

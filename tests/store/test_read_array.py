"""`read_array` and `write_array` do what zarr's selections do."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import obstore.store
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.core.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, ObjectStore

from tests.support.kit import system_calls
from zarr_shardstore import ShardingStore, SpecError

SHAPE = (13, 11)


def filled(base: Any, **options: Any) -> tuple[ShardingStore, zarr.Array[Any], npt.NDArray[Any]]:
    store = ShardingStore(base, chunks_per_shard=(2, 3))
    given: Any = {"chunks": (3, 2), "dtype": "<i4", "fill_value": -1} | options
    z = zarr.create_array(store, name="g/z", shape=SHAPE, **given)
    values = np.arange(143).reshape(SHAPE).astype("<i4")
    values[6:] = -1
    z[...] = values
    return store, z, values


def items(n: int) -> st.SearchStrategy[Any]:
    ends = st.none() | st.integers(-n - 2, n + 2)
    steps = st.sampled_from([None, 1, 1, 2, -1])
    slices = st.builds(slice, ends, ends, steps)
    return st.one_of(st.integers(-n - 1, n), slices, st.just(slice(None)))


selections = st.one_of(
    st.just(...),
    st.tuples(items(13), items(11)),
    items(13),
    st.tuples(st.just(...), items(11)),
    st.tuples(items(13), st.just(...)),
    st.sampled_from([(..., ...), (0, 0, 0), [1, 2], None, (True, 0), "x", ([0, 5], [1, 1])]),
)


def outcome(call: Any) -> Any:
    try:
        result = call()
    except Exception as error:
        return type(error), str(error)
    result = np.asarray(result)
    return result.shape, result.dtype, result.tolist()


@given(selections, st.sampled_from([None, "zstd"]), st.sampled_from("CF"))
def test_a_read(selection: Any, compressor: Any, order: str) -> None:
    options: Any = {} if compressor else {"compressors": None}
    store, z, _ = filled({}, config={"order": order}, **options)
    expected = outcome(lambda: z[selection])
    assert outcome(lambda: store.read_array("g/z", selection)) == expected
    if isinstance(expected[0], tuple):
        out = np.zeros(expected[0], "f8")
        assert store.read_array("g/z", selection, out=out) is out
        assert out.tolist() == expected[2]


@given(selections, st.sampled_from(["array", "scalar", "f4", "list", "wrong"]))
def test_a_write(selection: Any, kind: str) -> None:
    stored = []
    for is_direct in (True, False):
        base: dict[str, bytes] = {}
        store, z, _ = filled(base)
        part = outcome(lambda z=z: z[selection])
        shape = part[0] if isinstance(part[0], tuple) else (2,)
        values: Any = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype("<i4")
        value = {
            "array": values,
            "scalar": 5,
            "f4": values.astype("f4"),
            "list": values.tolist(),
            "wrong": np.zeros((*shape, 3), "<i4"),
        }[kind]

        def write(
            store: Any = store, z: Any = z, value: Any = value, is_direct: bool = is_direct
        ) -> int:
            if is_direct:
                store.write_array("g/z", selection, value)
            else:
                z[selection] = value
            return 0

        stored.append((outcome(write), dict(base)))
    assert stored[0] == stored[1]


def test_other_arguments() -> None:
    store, z, values = filled({})
    for out in (np.zeros(SHAPE, "u1"), np.zeros(3, "<i4"), [1]):
        with pytest.raises(SpecError, match="out"):
            store.read_array("g/z", out=out)  # type: ignore[arg-type]
    frozen = np.zeros(SHAPE, "<i4")
    frozen.flags.writeable = False
    with pytest.raises(SpecError, match="can be written"):
        store.read_array("g/z", out=frozen)
    with pytest.raises(SpecError):
        store.read_array("g/y")
    with pytest.raises(SpecError):
        store.write_array("g/y", ..., values)
    with pytest.raises(ValueError, match="read-only"):
        store.with_read_only(True).write_array("g/z", ..., values)
    assert np.array_equal(store.with_read_only(True).read_array("g/z"), values)
    assert np.array_equal(z[...], values)


@pytest.mark.parametrize("base", ["memory", "dict", "local", "async"])
def test_in_a_batch(base: str, tmp_path: Path) -> None:
    where: Any = {"memory": MemoryStore(), "dict": {}, "local": tmp_path}.get(base)
    store, _, values = filled(ObjectStore(obstore.store.MemoryStore()) if where is None else where)
    with store.batch():
        store.write_array("g/z", (slice(0, 3), slice(0, 2)), values[:3, :2] + 1000)
        assert store.read_array("g/z", (0, 0)) == 1000
        values[:3, :2] += 1000
        assert np.array_equal(store.read_array("g/z"), values)
    assert np.array_equal(store.read_array("g/z"), values)


def test_nothing_old_is_read(tmp_path: Path) -> None:
    """Other stores write chunks, and resize the array."""
    store, _, values = filled(tmp_path)
    other = ShardingStore(tmp_path, chunks_per_shard=(2, 3))
    assert np.array_equal(store.read_array("g/z"), values)
    z = zarr.open_array(other, path="g/z")
    z[0:3] = 7
    assert (store.read_array("g/z", slice(0, 3)) == 7).all()
    z.resize((20, 11))
    z[13:] = 8
    assert store.read_array("g/z").shape == (20, 11)
    assert (store.read_array("g/z", slice(13, 20)) == 8).all()


def test_a_document_is_read_again_if_its_file_has_changed(tmp_path: Path) -> None:
    store, _, values = filled(tmp_path)
    time.sleep(0.05)  # younger files are always read again
    document = tmp_path / "g/z/zarr.json"

    def n_requests() -> int:
        before = store.stats().requests
        assert np.array_equal(store.read_array("g/z", (0, slice(0, 3))), values[0, :3])
        return store.stats().requests - before

    n_requests()
    n_requests()
    assert n_requests() == 0
    os.utime(document, ns=(0, 10**18))
    assert n_requests() == 1
    assert n_requests() == 0
    # Other documents of the same size, in one tick of a slow clock, and perhaps of the same inode.
    plain = LocalStore(tmp_path)
    text = document.read_bytes()
    assert b"13" in text
    for i in range(200):
        length = [b"11", b"12", b"13"][i % 3]
        sync(plain.set("g/z/zarr.json", cpu.Buffer.from_bytes(text.replace(b"13", length))))
        tick = time.time_ns() // 10**7 * 10**7
        os.utime(document, ns=(tick, tick))
        if i % 2:
            assert store.read_array("g/z", (slice(None), 0)).shape == (int(length),)


def in_another_process(code: str, path: Path) -> None:
    """Run code with the array ``z`` of a store in another process."""
    head = "import sys, numpy as np, zarr\nfrom zarr_shardstore import ShardingStore\n"
    head += "store = ShardingStore(sys.argv[1], chunks_per_shard=(2, 3))\n"
    head += "z = zarr.open_array(store, path='g/z')\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", head + code, str(path)], capture_output=True
    )
    assert done.returncode == 0, done.stderr


CHANGES = {
    "grown": "z.resize((23, 11)); z[13:] = 5",
    "cut": "z.resize((7, 11))",
    "removed": "import shutil; shutil.rmtree(sys.argv[1] + '/g/z')",
    "other chunks": "zarr.create_array(store, name='g/z', shape=(13, 11), chunks=(2, 2), "
    "dtype='i4', overwrite=True)[...] = 3",
    "other type": "zarr.create_array(store, name='g/z', shape=(13, 11), chunks=(3, 2), "
    "dtype='f4', overwrite=True)[...] = 3",
    "other codec": "zarr.create_array(store, name='g/z', shape=(13, 11), chunks=(3, 2), "
    "dtype='i4', compressors=None, overwrite=True)[...] = 3",
    "other format": "zarr.create_array(store, name='g/z', shape=(13, 11), chunks=(3, 2), "
    "dtype='i4', zarr_format=2, overwrite=True)[...] = 3",
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_processes_change_the_array(change: str, tmp_path: Path) -> None:
    """What is read and written is the array that is there now."""
    outcomes = []
    for is_direct in (True, False):
        path = tmp_path / str(is_direct)
        path.mkdir()
        store, _, _ = filled(path)
        store.read_array("g/z")
        in_another_process(CHANGES[change], path)
        values = np.arange(143).reshape(SHAPE).astype("<i4")

        def read(store: Any = store, is_direct: bool = is_direct) -> Any:
            return store.read_array("g/z") if is_direct else zarr.open_array(store, path="g/z")[...]

        def write(store: Any = store, values: Any = values, is_direct: bool = is_direct) -> int:
            part = slice(0, 13), slice(None)
            if is_direct:
                store.write_array("g/z", part, values)
            else:
                zarr.open_array(store, path="g/z")[part] = values
            return 0

        found = [outcome(read), outcome(write), outcome(read)]
        outcomes.append([each[0] if isinstance(each[0], type) else each for each in found])
    if change == "removed":
        assert outcomes[0] == [SpecError] * 3
    elif change == "cut":  # zarr refuses, or takes, a value that is too large
        assert outcomes[0][0] == outcomes[1][0]
    else:
        assert outcomes[0] == outcomes[1]


def test_an_array_that_another_process_makes(tmp_path: Path) -> None:
    store = ShardingStore(tmp_path, chunks_per_shard=2)
    with pytest.raises(SpecError):
        store.read_array("g/z")
    _, _, values = filled(tmp_path)
    assert np.array_equal(store.read_array("g/z"), values)
    shutil.rmtree(tmp_path / "g")
    with pytest.raises(SpecError):
        store.read_array("g/z")


def test_in_an_event_loop(tmp_path: Path) -> None:
    store, _, values = filled(tmp_path)

    async def run() -> Any:
        await store.write_array_async("g/z", ..., values + 1)
        return await store.read_array_async("g/z")

    assert np.array_equal(asyncio.run(run()), values + 1)
    assert np.array_equal(sync(run()), values + 1)


def test_the_configuration_of_each_call_counts() -> None:
    """zarr's, as `zarr.open_array` takes it, also after a call with another one."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=2)
    zarr.create_array(store, name="z", shape=(8,), chunks=(2,), dtype="i4")
    zeros = np.zeros(8, "i4")
    for writes in (False, True, False):
        with zarr.config.set({"array.write_empty_chunks": writes}):
            store.write_array("z", ..., zeros)
            assert len([key for key in base if "/c/" in key]) == (2 if writes else 0)
    for is_fortran in (False, True, False):
        with zarr.config.set({"array.order": "F" if is_fortran else "C"}):
            zarr.create_array(
                store, name="y", shape=(4, 4), chunks=(2, 2), dtype="i4", overwrite=True
            )
            assert store.read_array("y").flags.f_contiguous == is_fortran


def test_missing_chunks_that_must_be_there() -> None:
    pytest.importorskip("zarr", minversion="3.2")
    with zarr.config.set({"array.read_missing_chunks": False}):
        store, z, _ = filled({})
        expected = outcome(lambda: z[...])
        assert expected[0].__name__ == "ChunkNotFoundError"
        assert outcome(lambda: store.read_array("g/z")) == expected


@pytest.mark.parametrize("options", [{"zarr_format": 2}, {"shape": ()}, {"dtype": "?"}])
def test_other_arrays(options: dict[str, Any]) -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    shape = options.pop("shape", (12,))
    given = {"dtype": "<i4", "chunks": tuple(3 for _ in shape)} | options
    z = zarr.create_array(store, name="z", shape=shape, **given)
    values: Any = np.full(shape, 7, z.dtype)
    store.write_array("z", ..., values)
    assert np.array_equal(z[...], values)
    assert np.array_equal(store.read_array("z"), values)


def test_a_write_that_was_cancelled_stores_nothing_later(tmp_path: Path) -> None:
    """The cancelled call waits for its end: a write that follows has the last word."""
    store = ShardingStore(tmp_path, (2, 1))
    shape, chunks = (64, 20_000), (1, 20_000)
    z = zarr.create_array(store, name="a", shape=shape, chunks=chunks, dtype="u2")
    values = np.random.default_rng(0).integers(0, 9, shape, "u2")
    is_storing, go_on = threading.Event(), threading.Event()

    def hold(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **options: Any) -> Any:
            is_storing.set()
            assert go_on.wait(60)
            return call(*args, **options)

        return held if name == "replace" else call

    async def run() -> Any:
        writing = asyncio.create_task(store.write_array_async("a", ..., values))
        assert await asyncio.to_thread(is_storing.wait, 60)
        writing.cancel()
        asyncio.get_running_loop().call_later(0.3, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert go_on.is_set(), "it has waited for what it stores"
        await z._async_array.setitem(slice(None), 9)
        await asyncio.sleep(0.3)

    with system_calls(hold):
        asyncio.run(run())
    assert (np.asarray(z[:]) == 9).all()

"""`ShardLoader`: every sample once, in an order that only options decide, and with its values."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from contextlib import nullcontext, suppress
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.storage import LocalStore, MemoryStore, ObjectStore

from tests.support.counting_server import counting_server
from tests.support.kit import CountingStore, FailingStore, Faults, forget, objects_of
from tests.support.processes import s3_server
from tests.support.rounds import rounds
from zarr_shardstore import (
    CorruptShardError,
    CorruptValueError,
    ShardConflictError,
    ShardingMapping,
    ShardingStore,
    ShardLoader,
    SpecError,
    UnsupportedError,
    reshard,
    shard_store,
)

SHUFFLES: list[Any] = [False, "shards", "full"]

SMALL = 2**24
"""Limit of bytes that has room for small chunks only."""


def filled(shape: tuple[int, ...], dtype: str = "i4") -> Any:
    return (np.arange(np.prod(shape, dtype=int)) % 251).reshape(shape).astype(dtype)


def array(store: Any, shape: Any, chunks: Any, name: str = "x", **options: Any) -> Any:
    values = filled(shape)
    z = zarr.create_array(store, name=name, shape=shape, chunks=chunks, dtype="i4", **options)
    z[...] = values
    return values


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if "loader" in t.name]


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _ends_all_threads() -> Any:
    yield
    gc.collect()
    end = time.monotonic() + 60
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == []


# ---------------------------------------------------------------- every sample once


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    """An array, its chunks, shards and samples, and the options of a loader."""
    ndim = draw(st.integers(0, 4))
    shape = [draw(st.integers(0, 9)) for _ in range(ndim)]
    chunks = [draw(st.integers(1, 5)) for _ in range(ndim)]
    n_window = draw(st.integers(0, ndim))
    is_window = draw(st.booleans()) or not ndim
    window = [draw(st.integers(1, 6)) for _ in range(n_window)] if is_window else None
    n_axes = len(window) if window is not None else 1
    return {
        "shape": tuple(shape),
        "chunks": tuple(chunks),
        "cps": tuple(draw(st.integers(1, 3)) for _ in range(ndim)),
        "is_flat": draw(st.booleans()),
        "zarr_format": draw(st.sampled_from([2, 3])),
        "window": window,
        "axes": draw(st.permutations(range(ndim)))[:n_axes],
        "stride": draw(st.none() | st.lists(st.integers(1, 4), min_size=n_axes, max_size=n_axes)),
        "edges": draw(st.sampled_from(["drop", "shift"])),
        "shuffle": draw(st.sampled_from([False, "shards", "full"])),
        "seed": draw(st.integers(0, 3)),
        "batch_size": draw(st.integers(1, 7)),
        "world_size": draw(st.integers(1, 4)),
        "drop_last": draw(st.booleans()),
        "pool_nbytes": draw(st.sampled_from([0, 500, 5_000, None])),
        "cuts": draw(st.integers(0, 50)),
    }


def places(program: dict[str, Any]) -> list[tuple[int, ...]]:
    """All starts of samples, along the sampled axes, one by one."""
    axes, n = program["axes"], [1] if program["window"] is None else program["window"]
    strides = program["stride"] or n
    lists = []
    for axis, length, stride in zip(axes, n, strides, strict=True):
        size = program["shape"][axis]
        starts = [s for s in range(0, size, stride) if s + length <= size]
        if program["edges"] == "shift" and starts and starts[-1] + length < size:
            starts.append(size - length)
        lists.append(starts)
    return (
        [()]
        if not lists
        else [
            tuple(p)
            for p in np.array(np.meshgrid(*lists, indexing="ij")).reshape(len(lists), -1).T.tolist()
        ]
    )


def sample(values: Any, program: dict[str, Any], start: tuple[int, ...]) -> Any:
    index: list[Any] = [slice(None)] * values.ndim
    for i, axis in enumerate(program["axes"]):
        n = program["window"]
        index[axis] = start[i] if n is None else slice(start[i], start[i] + n[i])
    return values[tuple(index)]


def loaders(store: Any, program: dict[str, Any], **more: Any) -> list[ShardLoader]:
    names = ("window", "axes", "stride", "edges", "shuffle", "seed", "batch_size", "world_size")
    options = {name: program[name] for name in (*names, "drop_last", "pool_nbytes")}
    options |= {"n_threads": 2, "prefetch_nbytes": SMALL * 2, **more}
    return [ShardLoader(store, "x", rank=rank, **options) for rank in range(program["world_size"])]


def store_of(program: dict[str, Any]) -> tuple[Any, Any]:
    cps = None if program["is_flat"] else program["cps"]
    store = ShardingStore(MemoryStore(), cps)
    zarr_format = program["zarr_format"]
    return store, array(store, program["shape"], program["chunks"], zarr_format=zarr_format)


@settings(max_examples=rounds(1000))
@given(programs())
def test_each_sample_comes_once_and_has_its_values(program: dict[str, Any]) -> None:
    store, values = store_of(program)
    expected = places(program)
    found: list[bytes] = []
    n_batches = set()
    for loader in loaders(store, program):
        batches = list(loader)
        n_batches.add(len(batches))
        assert len(batches) == len(loader)
        assert all(len(batch) <= program["batch_size"] for batch in batches)
        found += [row.tobytes() for batch in batches for row in batch]
        if program["drop_last"]:
            assert all(len(batch) == program["batch_size"] for batch in batches)
        plan = loader.plan()
        assert (plan.n_batches, plan.n_samples) == (len(batches), sum(map(len, batches)))
    wanted = [sample(values, program, start).tobytes() for start in expected]
    assert len(n_batches) == 1
    if program["drop_last"]:
        whole = program["batch_size"] * program["world_size"]
        assert len(found) == len(wanted) // whole * whole
        assert not Counter(found) - Counter(wanted)
    elif program["shuffle"] or program["world_size"] > 1:
        assert Counter(found) == Counter(wanted)
    else:
        assert found == wanted


def test_the_plan_of_samples_of_many_parts_is_small(tmp_path: Path) -> None:
    """Of each part it takes at most `PART_NBYTES`; few samples are planned at a time."""
    store = ShardingStore(str(tmp_path), chunks_per_shard=8)
    zarr.create_array(store, name="x", shape=(5000, 128, 128), chunks=(1, 4, 4), dtype="u1")
    loader = ShardLoader(store, "x", batch_size=4, shuffle="shards", prefetch_nbytes=SMALL * 4)
    tracemalloc.start()
    try:
        batches = iter(loader)
        next(batches)
        peak = tracemalloc.get_traced_memory()[1]
        loader.close()
    finally:
        tracemalloc.stop()
    assert peak < SMALL * 4


@settings(max_examples=rounds(300))
@given(programs())
def test_a_resumed_loader_continues_as_one_that_was_not_interrupted(
    program: dict[str, Any],
) -> None:
    store, _ = store_of(program)
    for rank, loader in enumerate(loaders(store, program)):
        loader.set_epoch(2)
        whole = [*loader, *loader]
        cut = program["cuts"] % (2 * len(loader) + 1)
        interrupted, resumed = (loaders(store, program)[rank] for _ in range(2))
        interrupted.set_epoch(2)
        first: list[Any] = []
        while len(first) < cut:
            for batch in interrupted:
                first.append(batch)
                if len(first) == cut:
                    break
        resumed.load_state_dict(interrupted.state_dict())
        interrupted.close()
        both = [*first, *resumed, *resumed]
        assert len(both) >= len(whole)
        for one, two in zip(whole, both, strict=False):
            assert np.array_equal(one, two)


def test_a_resumed_loader_continues_at_each_batch() -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    array(store, (53, 3), (4, 3))
    options: dict[str, Any] = {"batch_size": 5, "shuffle": "shards", "seed": 7}
    whole = list(ShardLoader(store, "x", **options))
    for cut in range(len(whole)):
        loader = ShardLoader(store, "x", **options)
        batches = iter(loader)
        for _ in range(cut):
            next(batches)
        again = ShardLoader(store, "x", **options)
        again.load_state_dict(loader.state_dict())
        loader.close()
        rest = [batch.tolist() for batch in again]
        assert rest == [batch.tolist() for batch in whole[cut:]]


def test_the_order_does_not_depend_on_threads() -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    array(store, (400, 2), (4, 2))

    def order(**options: Any) -> list[Any]:
        loader = ShardLoader(store, "x", batch_size=7, **options)
        return [batch.tolist() for batch in [*loader, *loader]]

    for shuffle in SHUFFLES[1:]:
        one = order(shuffle=shuffle, n_threads=1)
        assert one == order(shuffle=shuffle, n_threads=5)
        assert one != order(shuffle=shuffle, seed=1)
        assert one[:58] != one[58:]

    array(store, (400_000,), (1000,), name="many")
    loaders = (
        ShardLoader(store, "many", batch_size=7, prefetch_nbytes=SMALL * 3, n_threads=n)
        for n in (1, 5)
    )
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1]


def test_a_state_of_another_order_is_refused() -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    array(store, (40, 2), (4, 2))
    state = ShardLoader(store, "x", batch_size=7).state_dict()
    others: list[dict[str, Any]] = [{"seed": 1}, {"world_size": 2}, {"drop_last": True}]
    for options in others:
        with pytest.raises(SpecError, match="another order: "):
            ShardLoader(store, "x", batch_size=7, **options).load_state_dict(state)


def test_a_state_of_other_samples_or_shards_is_refused(tmp_path: Path) -> None:
    """Of as many samples. A state survives JSON, and holds for all ranks."""
    store = ShardingStore(str(tmp_path), chunks_per_shard=4)
    array(store, (40, 8), (4, 4))
    array(store, (40, 9), (4, 4), name="wide")
    array(store, (40, 8), (5, 4), name="coarse")
    base: dict[str, Any] = {"arrays": "x", "batch_size": 5, "shuffle": "shards"}

    def refused(state: Any, **options: Any) -> str:
        with pytest.raises(SpecError, match="another order: ") as error:
            ShardLoader(store, **base | options).load_state_dict(state)
        return str(error.value)

    ranks = [ShardLoader(store, **base, world_size=2, rank=rank) for rank in range(2)]
    assert ranks[0].state_dict() == ranks[1].state_dict()
    state = json.loads(json.dumps(ShardLoader(store, **base).state_dict()))
    ShardLoader(store, **base).load_state_dict(state)
    assert "positions" in refused(state, positions=[*range(39), 0])
    assert "shape of samples was [[[0], [1, 8]]], and is [[[0], [1, 9]]]" in refused(
        state, arrays="wide"
    )
    assert "chunks and shards" in refused(state, arrays="coarse")
    reshard(store, 2)
    store = ShardingStore(str(tmp_path))
    assert "chunks and shards" in refused(state)

    base |= {"window": (4, 4), "shuffle": False}
    state = ShardLoader(store, **base, stride=(4, 4)).state_dict()
    assert "positions" in refused(state, positions=[(0, 0)] * 20)
    assert "shape of samples" in refused(state, window=(4, 3), stride=(4, 4))
    square: dict[str, Any] = {"positions": [(0, 1), (2, 3)]}
    state = ShardLoader(store, **base, **square).state_dict()
    assert "axes and shape of samples was" in refused(state, axes=(1, 0), **square)


def test_a_state_is_json_whatever_numbers_are_given() -> None:
    store = ShardingStore({}, 2)
    array(store, 100, 5)
    sizes: dict[str, Any] = {"prefetch_nbytes": np.int64(2**28), "pool_nbytes": np.int64(2**21)}
    others: dict[str, Any] = {
        "world_size": np.int64(1),
        "drop_last": np.True_,
        "shuffle": np.False_,
    }
    loader = ShardLoader(store, "x", batch_size=4, **sizes, **others)
    loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_a_batch_counts_as_delivered_only_if_the_consumer_has_it(kind: Any) -> None:
    """An error at any line of the loader loses no batch of a loader that is resumed."""
    store, seen = ShardingStore({}, chunks_per_shard=(1,)), set[Any]()
    array(store, 12, 1)
    while True:
        lines, got = set[Any](), list[Any]()

        def trace(frame: Any, event: str, _: Any, lines: set[Any] = lines) -> Any:
            code, line = frame.f_code, (frame.f_code, frame.f_lineno)
            if not code.co_filename.endswith("loader/engine.py"):
                return None
            is_generator = code.co_flags & inspect.CO_GENERATOR  # its `yield` delivers
            if event == "line" and not is_generator and line not in seen and not lines:
                lines.add(line)
                raise kind
            return trace

        loader = ShardLoader(store, "x", batch_size=2, n_threads=1, prefetch_nbytes=2**25)
        batches = iter(loader)
        got.append(next(batches))
        before = sys.gettrace()
        with suppress(kind):
            sys.settrace(trace)
            for batch in islice(batches, 2):
                got.append(batch)
        sys.settrace(before)
        assert loader.state_dict()["batch"] == len(got), lines
        loader.close()
        if not lines:
            break
        seen.update(lines)
    assert len(seen) > 10


def test_an_epoch_without_a_batch_is_begun_again() -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    array(store, (40, 2), (4, 2))
    loader = ShardLoader(store, "x", batch_size=7, shuffle="full")
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    loader.set_epoch(0)
    for batches in (first, second):
        iter(loader)
        assert loader.state_dict()["batch"] == 0
        assert [batch.tolist() for batch in loader] == batches
    loader.set_epoch(1)
    next(iter(loader))
    again = ShardLoader(store, "x", batch_size=7, shuffle="full")
    again.load_state_dict(loader.state_dict())
    loader.close()
    iter(again)
    assert [batch.tolist() for batch in again] == second[1:]


# ------------------------------------------------------------------- reads and memory


@pytest.mark.parametrize("n_in_chunk", [1, 4, 7])
@pytest.mark.parametrize("chunk_nbytes", [64, 100_000])
def test_each_chunk_is_decoded_once(n_in_chunk: int, chunk_nbytes: int) -> None:
    """Shuffled by shards, and in order."""
    width = chunk_nbytes // 4 // n_in_chunk
    base = CountingStore()
    store = ShardingStore(base, chunks_per_shard=(4, 1))
    array(store, (97, width), (n_in_chunk, width))
    n_chunks = -(-97 // n_in_chunk)
    for shuffle in SHUFFLES[:2]:
        loader = ShardLoader(
            store,
            "x",
            batch_size=5,
            shuffle=shuffle,
            pool_nbytes=20 * chunk_nbytes,
        )
        list(loader)
        stats = loader.stats()
        assert stats.n_chunks == n_chunks == loader.plan().n_chunks
        assert stats.nbytes_delivered == 97 * width * 4
        assert stats.n_samples == 97
        assert loader.plan().nbytes_read == stats.nbytes_read


@pytest.mark.parametrize("is_remote", [False, True])
def test_requests_are_those_of_the_plan(is_remote: bool) -> None:
    """Neighbours in a shard share a request. Over a network longer gaps are read along."""
    with s3_server() if is_remote else nullcontext() as where:
        for rows_in_chunk, shuffle in product((1, 8), SHUFFLES):
            name = f"x{rows_in_chunk}-{shuffle}"
            base: Any = ObjectStore(obstore.store.MemoryStore())
            options: dict[str, Any] = {}
            if where:
                keys = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
                options["storage_options"] = {**keys, "endpoint": where["endpoint"]}
                base = "s3://bucket/v.zarr"
            store = ShardingStore(base, chunks_per_shard=(64, 1), **options)
            array(store, (1024, 256), (rows_in_chunk, 256), name)
            loader = ShardLoader(store, name, batch_size=48, shuffle=shuffle)
            plan = loader.plan()  # reads the indexes
            before = store.stats().requests
            list(loader)
            assert store.stats().requests - before == plan.n_requests


def test_shards_that_are_not_stored_are_requests_too() -> None:
    base = ObjectStore(obstore.store.MemoryStore())
    store = ShardingStore(base, chunks_per_shard=(4, 1))
    z: Any = zarr.create_array(store, name="x", shape=(80, 64), chunks=(1, 64), dtype="f4")
    z[:8] = 1  # 2 of 20 shards
    loader = ShardLoader(store, "x", batch_size=16)
    plan = loader.plan()
    before = store.stats().requests
    list(loader)
    assert store.stats().requests - before == plan.n_requests == 20


def test_shards_share_a_batch() -> None:
    """The pool mixes the samples of as many shards as it has room for."""
    store = ShardingStore({}, chunks_per_shard=(4, 1))
    z = zarr.create_array(store, name="x", shape=(640, 100), chunks=(4, 100), dtype="i4")
    z[...] = np.arange(640)[:, None]
    loader = ShardLoader(store, "x", batch_size=20, shuffle="shards", pool_nbytes=160 * 500)
    n_shards = [len({row[0] // 16 for row in batch.tolist()}) for batch in loader]
    plan = loader.plan()
    assert plan.pool_shards > 8
    k = 10  # shards whose samples and plan fit
    expected = k * (1 - (1 - 1 / k) ** 20)
    assert abs(np.mean(n_shards) - expected) < 1


RSS = """
def rss(name):  # not ru_maxrss, which begins with the memory of the parent
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
"""


@pytest.mark.parametrize("shuffle", [False, "shards", "full"])
@pytest.mark.parametrize("window", [None, (20, 40)])
def test_memory_stays_within_the_limit(tmp_path: Path, shuffle: Any, window: Any) -> None:
    """As the loader counts it, and as the operating system does: plus two batches."""
    code = f"""
import sys, tracemalloc
import numpy as np, zarr
from zarr_shardstore import ShardingStore, ShardLoader
{RSS}
store = ShardingStore({str(tmp_path)!r}, chunks_per_shard=(4, 4))
if sys.argv[1] == "write":
    z = zarr.create_array(store, name="x", shape=(4096, 4096), chunks=(64, 256), dtype="f4")
    z[...] = np.random.default_rng(0).random((4096, 4096), dtype="f4")
    sys.exit()
limit = 48 * 2**20
options = {{"window": {window!r}, "shuffle": {shuffle!r}, "prefetch_nbytes": limit}}
loader = ShardLoader(store, "x", batch_size=64, n_threads=2, **options)
next(iter(loader)); loader.close()
before = rss("VmRSS")
tracemalloc.start()
for batch in loader:
    pass
stats = loader.stats()
assert 0 < stats.most_nbytes <= limit, stats
bound = limit + 2 * batch.nbytes
peak = tracemalloc.get_traced_memory()[1]
assert peak <= bound, (peak, bound)
grown = rss("VmHWM") - before
assert grown <= bound + 8 * 2**20, (grown, bound)
"""
    for step in ("write", "read"):
        done = subprocess.run(
            [sys.executable, "-c", code, step], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_freed_batches_go_back_to_the_system(tmp_path: Path) -> None:
    """A slow consumer of chunks that compress well: the arenas of malloc would keep them."""
    code = f"""
import sys, time
from itertools import chain
import zarr
from zarr_shardstore import ShardingStore, ShardLoader
{RSS}
store = ShardingStore({str(tmp_path)!r}, chunks_per_shard=(96, 1, 1))
if sys.argv[1] == "write":
    z = zarr.create_array(
        store, name="x", shape=(96, 1024, 1024), chunks=(1, 1024, 1024), dtype="f4"
    )
    for i in range(96):
        z[i] = i
    sys.exit()
limit = 184 * 2**20
options = {{"batch_size": 4, "shuffle": "shards", "n_threads": 2, "prefetch_nbytes": limit}}
loader = ShardLoader(store, "x", **options)
next(iter(loader)); loader.close()
before = rss("VmRSS")
for batch in chain(loader, loader):
    time.sleep(0.02)
grown = rss("VmHWM") - before
assert grown <= limit + 2 * batch.nbytes, grown
"""
    for step in ("write", "read"):
        done = subprocess.run(
            [sys.executable, "-c", code, step], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_a_limit_that_is_too_small_is_refused_with_a_number() -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    array(store, (40, 2), (4, 2))
    with pytest.raises(SpecError, match=r"prefetch_nbytes is at least (\d+)") as error:
        ShardLoader(store, "x", batch_size=7, prefetch_nbytes=1000, n_threads=1)
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert len(list(ShardLoader(store, "x", batch_size=7, prefetch_nbytes=least, n_threads=1))) == 6


@pytest.mark.parametrize(
    ("shape", "rows", "n_chunks"), [((2000, 16), 100, 20), ((32, 2**17), 8, 4)]
)
def test_the_least_limit_has_a_pool_of_chunks(
    shape: tuple[int, int], rows: int, n_chunks: int
) -> None:
    """No chunk is read for each of its samples."""
    store = ShardingStore({}, chunks_per_shard=(10, 1))
    array(store, shape, (rows, shape[1]))
    options: dict[str, Any] = {"batch_size": 50, "shuffle": "shards"}
    with pytest.raises(SpecError, match="at least") as error:
        ShardLoader(store, "x", **options, prefetch_nbytes=1)
    least = int(str(error.value).split("at least ")[1].split()[0])
    loader = ShardLoader(store, "x", **options, prefetch_nbytes=least)
    assert loader.plan().read_amplification == 1
    list(loader)
    assert loader.stats().n_chunks == n_chunks


def test_many_rows_in_a_chunk_of_the_first_array() -> None:
    """Labels in one chunk, and large images: a pool of all of them needs no room."""
    store = ShardingStore({})
    zarr.create_array(store, name="y", shape=(20_000,), chunks=(20_000,), dtype="i8")
    zarr.create_array(store, name="x", shape=(20_000, 100_000), chunks=(1, 100_000), dtype="u1")
    batches = ShardLoader(store, {"y": "y", "x": "x"}, batch_size=32)
    assert next(iter(batches))["x"].shape == (32, 100_000)


def test_threads_do_not_change_the_order() -> None:
    """Machines have different numbers of cores. With little memory fewer threads run."""
    store = ShardingStore({}, chunks_per_shard=2)
    array(store, (40, 2), (4, 2))
    options: dict[str, Any] = {"batch_size": 7, "shuffle": "shards", "prefetch_nbytes": 2**26}
    loaders = [ShardLoader(store, "x", n_threads=n, **options) for n in (1, 8, 64)]
    assert loaders[0].state_dict() == loaders[1].state_dict() == loaders[2].state_dict()
    batches = [np.concatenate(list(loader)) for loader in loaders]
    assert np.array_equal(batches[0], batches[2])


# -------------------------------------------------------------------- stores and views


def every_kind(tmp_path: Path) -> dict[str, Any]:
    paths = {name: str(tmp_path / name) for name in ("v3", "v2", "native", "flat", "draftlike")}
    array(ShardingStore(paths["v3"], chunks_per_shard=(2, 2)), (30, 10), (4, 5))
    array(ShardingStore(paths["v2"], (2, 2)), (30, 10), (4, 5), zarr_format=2)
    array(LocalStore(paths["native"]), (30, 10), (4, 5), shards=(8, 10))
    array(LocalStore(paths["flat"]), (30, 10), (4, 5))
    stacked = ShardingStore(
        paths["draftlike"], chunks_per_shard=(2, 2), storage_transformers=["crc32c", "sharding"]
    )
    array(stacked, (30, 10), (4, 5))
    return paths


def test_every_store_and_view(tmp_path: Path) -> None:
    values = filled((30, 10))
    paths = every_kind(tmp_path)
    stores: list[Any] = [ShardingStore(path) for path in paths.values()]
    stores += [
        f"shard::{paths['v3']}",
        f"shard::file://{paths['v2']}",
        paths["flat"],
        ShardingMapping(paths["native"]),
        ShardingStore(paths["v3"], view="shards"),
        ShardingStore(paths["native"], native="passthrough"),
        objects_of(LocalStore(paths["v3"])),
        FailingStore(LocalStore(paths["v3"]), Faults()),
    ]
    for store in stores:
        loader = ShardLoader(store, "x", batch_size=4, window=(4, 3), shuffle="shards")
        for shuffle in SHUFFLES:
            got = np.concatenate(list(ShardLoader(store, "x", batch_size=4, shuffle=shuffle)))
            assert np.array_equal(np.sort(got, axis=0), np.sort(values, axis=0))
        assert sum(map(len, loader)) == 21
        assert loader.plan().n_samples == 21


@pytest.mark.parametrize("client", ["fsspec", "obstore"])
def test_http(client: str) -> None:
    """A whole shard takes one request. With versions no later epoch requests an index."""
    base = MemoryStore()
    values = array(ShardingStore(base, chunks_per_shard=(4, 1)), (64, 500), (2, 500))
    with counting_server(objects_of(base)) as server:
        url: Any = server.url
        if client == "obstore":
            stores = pytest.importorskip("obstore.store")
            url = stores.HTTPStore(server.url, client_options={"allow_http": True})
        loader = ShardLoader(
            ShardingStore(url, read_only=True), "x", batch_size=8, shuffle="shards"
        )
        for epoch in range(2):
            server.forget()
            got = np.concatenate(list(loader))
            assert np.array_equal(np.sort(got, axis=0), np.sort(values, axis=0))
            assert len(server.asked) == 8
            assert loader.stats().index_requests == (0 if epoch and client == "obstore" else 8)


def test_shards_of_several_lengths() -> None:
    base = MemoryStore()
    values = array(base, (30, 4), (2, 4))
    shard_store(base, shards={0: [6, 4, 10, 10]})
    store = ShardingStore(base)
    for shuffle in SHUFFLES:
        loader = ShardLoader(store, "x", batch_size=4, shuffle=shuffle)
        got = np.concatenate(list(loader))
        assert np.array_equal(np.sort(got, axis=0), np.sort(values, axis=0))
        assert loader.plan().n_shards == 4


def test_arrays_side_by_side() -> None:
    store = ShardingStore({}, chunks_per_shard={"x": (2, 1), "y": 4, "t": None})
    values = array(store, (50, 6), (5, 6))
    y = zarr.create_array(store, name="y", shape=50, chunks=(3,), dtype="i8")
    y[:] = np.arange(50)
    t = zarr.create_array(store, name="t", shape=(4, 50), chunks=(4, 7), dtype=">f8", fill_value=2)
    t[:, :30] = np.arange(120).reshape(4, 30)
    loader = ShardLoader(
        store,
        {"image": "x", "label": "y", "time": "t"},
        axes={"time": 1},
        batch_size=6,
        shuffle="shards",
        transform=lambda batch: {**batch, "sum": batch["image"].sum(axis=1)},
    )
    seen = []
    for batch in loader:
        rows = batch["label"]
        seen += rows.tolist()
        assert np.array_equal(batch["image"], values[rows])
        assert np.array_equal(batch["sum"], values[rows].sum(axis=1))
        assert np.array_equal(batch["time"], np.asarray(t[:, :]).T[rows])
        assert batch["time"].dtype == np.dtype("f8")
    assert sorted(seen) == [*range(50)]
    short = zarr.create_array(store, name="short", shape=49, chunks=(3,), dtype="i8")
    assert short.shape == (49,)
    with pytest.raises(SpecError, match="equally long"):
        ShardLoader(store, {"x": "x", "short": "short"}, batch_size=4)


def test_positions_and_strings() -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    values = array(store, (50, 6), (5, 6))
    rows = [3, 49, 0, 3]
    (batch,) = ShardLoader(store, "x", batch_size=9, positions=rows)
    assert np.array_equal(batch, values[rows])
    (batch,) = ShardLoader(store, "x", batch_size=9, window=(2, 3), positions=[(1, 2), (48, 3)])
    assert np.array_equal(batch, [values[1:3, 2:5], values[48:50, 3:6]])
    names = zarr.create_array(store, name="s", shape=7, chunks=(2,), dtype=str)
    names[:] = np.array(list("abcdefg"))
    assert np.concatenate(list(ShardLoader(store, "s", batch_size=3))).tolist() == list("abcdefg")
    wrong: list[dict[str, Any]] = [{"positions": [50]}, {"positions": [0.5]}, {"stride": (1, 1)}]
    for options in wrong:
        with pytest.raises(SpecError):
            ShardLoader(store, "x", batch_size=1, **options)
    assert list(ShardLoader(store, "x", batch_size=1, window=(51, 1))) == []
    assert list(ShardLoader(store, "x", batch_size=1, positions=[])) == []


def test_axes_of_an_unknown_array_are_refused() -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    array(store, (6, 6), (2, 2))
    for arrays in ({"image": "x"}, "x"):
        with pytest.raises(SpecError, match="axes are of the arrays"):
            ShardLoader(store, arrays, batch_size=2, axes={"x": 1})


@st.composite
def sparse_programs(draw: st.DrawFn) -> dict[str, Any]:
    """Rows of a sparse matrix, with chunks of its data and of its columns, and options."""
    return {
        "rows": draw(st.lists(st.lists(st.integers(0, 6), max_size=7, unique=True), max_size=40)),
        "chunks": draw(st.tuples(st.integers(1, 9), st.integers(1, 9))),
        "cps": draw(st.none() | st.integers(1, 3)),
        "batch_size": draw(st.integers(1, 7)),
        "shuffle": draw(st.sampled_from(SHUFFLES)),
        "seed": draw(st.integers(0, 3)),
        "world_size": draw(st.integers(1, 3)),
        "drop_last": draw(st.booleans()),
        "pool_nbytes": draw(st.sampled_from([0, 500, 3000, None])),
        "prefetch_nbytes": SMALL * 2,
        "n_threads": 2,
    }


def sparse_matrix(store: Any, rows: list[list[int]], chunks: tuple[int, int]) -> Any:
    """Store a matrix as anndata does, and its row numbers; return its dense values."""
    elements = [(i, column) for i, row in enumerate(rows) for column in sorted(row)]
    expected = np.zeros((len(rows), 7), "f4")
    for number, place in enumerate(elements):
        expected[place] = number + 1
    attributes = {"encoding-type": "csr_matrix", "shape": [len(rows), 7]}
    group = zarr.create_group(store, path="X", attributes=attributes)
    arrays = {
        "data": (np.arange(len(elements), dtype="f4") + 1, chunks[0]),
        "indices": (np.array([column for _, column in elements], "i4"), chunks[1]),
        "indptr": (np.cumsum([0, *map(len, rows)]).astype("i4"), 100),
    }
    for name, (values, chunk) in arrays.items():
        group.create_array(name, data=values, chunks=(chunk,))
    zarr.create_array(store, name="y", data=np.arange(len(rows)), chunks=(4,))
    return expected


@settings(max_examples=rounds(400))
@given(sparse_programs(), st.integers(0, 60))
def test_rows_of_a_sparse_matrix(program: dict[str, Any], cut: int) -> None:
    store = ShardingStore({}, chunks_per_shard=program.pop("cps"))
    expected = sparse_matrix(store, program.pop("rows"), program.pop("chunks"))
    rows: list[int] = []
    for rank in range(program["world_size"]):
        loader = ShardLoader(store, {"x": "X", "y": "y"}, rank=rank, **program)
        batches = [*loader]
        plan = loader.plan()
        assert plan.n_samples == sum(len(batch["y"]) for batch in batches)
        assert plan.nbytes_delivered == loader.stats().nbytes_delivered
        for batch in batches:
            assert batch["x"].shape == (len(batch["y"]), 7)
            assert (batch["x"].toarray() == expected[batch["y"]]).all()
            rows += batch["y"].tolist()
        resumed = ShardLoader(store, {"x": "X", "y": "y"}, rank=rank, **program)
        at = cut % (len(batches) + 1)
        resumed.load_state_dict({**loader.state_dict(), "epoch": 0, "batch": at})
        for one, two in zip(batches[at:], resumed, strict=at < len(batches)):
            assert (one["x"] != two["x"]).nnz == 0
    n = len(expected)
    if program["drop_last"]:
        whole = program["batch_size"] * program["world_size"]
        assert len({*rows}) == len(rows) == n // whole * whole
    else:
        assert sorted(rows) == [*range(n)]
        assert program["shuffle"] or rows == sorted(rows)


def test_a_state_of_sparse_rows_holds_for_one_pool() -> None:
    """Rows have different sizes, so a few bytes more may change the groups of an epoch."""
    store = ShardingStore({}, chunks_per_shard=2)
    sparse_matrix(store, [[1, 2], [3], [], [0, 4, 5]] * 15, (8, 8))
    options: dict[str, Any] = {"batch_size": 4, "shuffle": "shards"}
    state = ShardLoader(store, "X", **options, pool_nbytes=2**20).state_dict()
    ShardLoader(store, "X", **options, pool_nbytes=2**20).load_state_dict(state)
    with pytest.raises(SpecError, match="pool_nbytes"):
        ShardLoader(store, "X", **options, pool_nbytes=2**20 + 1).load_state_dict(state)


@pytest.mark.filterwarnings("ignore::Warning")
def test_sparse_rows_of_anndata(tmp_path: Path) -> None:
    anndata = pytest.importorskip("anndata")
    sparse = pytest.importorskip("scipy.sparse")
    store = ShardingStore(str(tmp_path / "a.zarr"), shard_nbytes="64 KB")
    x = sparse.random(3000, 50, 0.2, "csr", "f4", random_state=1)
    label = np.arange(3000) % 7
    made = anndata.AnnData(x, {"label": label})
    anndata.io.write_zarr(store, made)
    arrays = {"x": "X", "y": "obs/label"}
    options: dict[str, Any] = {"batch_size": 64, "shuffle": "shards", "pool_nbytes": 2**16}
    with ShardLoader(store, arrays, **options) as loader:
        batches = [*loader]
        plan, stats = loader.plan(), loader.stats()
    assert sum(len(batch["y"]) for batch in batches) == 3000
    assert np.isclose(sum(batch["x"].sum() for batch in batches), x.sum(), rtol=1e-4)
    assert stats.nbytes_delivered == plan.nbytes_delivered >= x.data.nbytes * 2
    assert plan.n_chunks == stats.n_chunks
    chosen = ShardLoader(store, "X", batch_size=4, positions=[7, 7, 2999, 0], transform=abs)
    (batch,) = chosen
    assert (batch.toarray() == abs(x[[7, 7, 2999, 0]]).toarray()).all()


def test_memory_of_uneven_sparse_rows_stays_within_the_limit() -> None:
    """The pool has rows by their bytes: a few rows have most of the elements."""
    store = ShardingStore({}, chunks_per_shard=4)
    lengths = np.where(np.arange(2200) < 2000, 10, 50_000)
    n = int(lengths.sum())
    attributes = {"encoding-type": "csr_matrix", "shape": [2200, 50_000]}
    group = zarr.create_group(store, path="X", attributes=attributes)
    ends = np.append(0, np.cumsum(lengths))
    columns = (np.arange(n) - np.repeat(ends[:-1], lengths)).astype("i4")
    group.create_array("data", data=np.ones(n, "f4"), chunks=(30_000,))
    group.create_array("indices", data=columns, chunks=(30_000,))
    group.create_array("indptr", data=ends, chunks=(2201,))
    limit = 48 * 2**20
    options: dict[str, Any] = {"batch_size": 8, "n_threads": 2, "prefetch_nbytes": limit}
    with ShardLoader(store, "X", shuffle="shards", pool_nbytes=2**22, **options) as loader:
        most = loader.plan().peak_nbytes
        tracemalloc.start()
        try:
            for i, batch in enumerate(loader):
                assert batch.shape == (len(batch.indptr) - 1, 50_000)
                assert batch.indices.dtype == batch.indptr.dtype == np.int32
                if i % 50 == 0:
                    time.sleep(0.2)  # as many batches as the limit allows are finished
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert loader.stats().most_nbytes <= limit
    assert peak <= most


@pytest.mark.parametrize("length", [20_000, 1000])
def test_memory_of_texts_stays_within_the_limit(length: int) -> None:
    """Texts count by the sizes of some chunks, not by the size of an element of the data type."""
    store = ShardingStore({}, chunks_per_shard=16)
    texts = np.array([f"{i:05}" * (length // 5) for i in range(100)], object)
    n = 80_000_000 // length // 100 * 100
    z: Any = zarr.create_array(store, name="t", shape=(n,), chunks=(100,), dtype=str)
    for start in range(0, n, 100):
        z[start : start + 100] = texts
    limit = 48 * 2**20
    options: dict[str, Any] = {"batch_size": 16, "n_threads": 2, "prefetch_nbytes": limit}
    with ShardLoader(store, "t", shuffle="shards", **options) as loader:
        assert loader.plan().nbytes_delivered >= n * length
        tracemalloc.start()
        try:
            for i, batch in enumerate(loader):
                if i % (len(loader) // 4) == 0:
                    time.sleep(0.2)  # as many batches as the limit allows are finished
                assert len(batch[0]) == length
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak <= loader.plan().peak_nbytes


@pytest.mark.parametrize("index", ["u1", "u4", "<i8", "u8"])
def test_columns_of_any_type_are_no_copies(index: str) -> None:
    """Frameworks take 32 and 64 bits with a sign: the loader decodes into these."""
    store = ShardingStore({}, chunks_per_shard=4)
    attributes = {"encoding-type": "csr_matrix", "shape": [6, 7]}
    group = zarr.create_group(store, path="X", attributes=attributes)
    group.create_array("data", data=np.arange(12, dtype="f2"), chunks=(5,))
    group.create_array("indices", data=(np.arange(12) % 7).astype(index), chunks=(5,))
    group.create_array("indptr", data=np.arange(0, 13, 2), chunks=(7,))
    (batch,) = ShardLoader(store, "X", batch_size=6)
    assert batch.indices.dtype == (np.int64 if index[-1] == "8" else np.int32)
    assert batch.indptr.dtype == batch.indices.dtype
    assert not batch.indices.flags.owndata
    assert batch.indices.tolist() == [i % 7 for i in range(12)]
    assert batch.data.tolist() == [*range(12)]


def test_a_transform_may_close_its_loader() -> None:
    """In all threads at the same time: none waits for another."""
    store = ShardingStore({}, chunks_per_shard=2)
    array(store, (400, 3), (4, 3))
    ready = threading.Barrier(2)

    def close(batch: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            ready.wait(0.5)
        loader.close()
        return batch

    loader = ShardLoader(store, "x", batch_size=4, n_threads=2, transform=close)
    assert len(list(loader)) <= 2


def test_wrong_numbers_are_refused() -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    array(store, (8,), (2,))
    wrong: list[dict[str, Any]] = [{"n_threads": -1}, {"batch_size": 2.5}, {"batch_size": 0}]
    wrong += [{"seed": -1}, {"prefetch_nbytes": "1GB"}, {"pool_nbytes": -2}]
    for options in wrong:
        with pytest.raises(SpecError, match="is a whole number of at least"):
            ShardLoader(store, "x", **{"batch_size": 2, **options})
    sequences: list[Any] = [("stride", (1.5,)), ("window", (2.9,)), ("window", 2), ("stride", 2)]
    for name, sequence in sequences:
        with pytest.raises(SpecError, match=f"{name} is a sequence of whole numbers"):
            ShardLoader(store, "x", batch_size=2, **{name: sequence})
    with pytest.raises(SpecError, match="axes of 'x' are whole numbers"):
        ShardLoader(store, "x", batch_size=2, axes=0.7)  # type: ignore[arg-type]
    loader = ShardLoader(store, "x", batch_size=2)
    epoch: Any = np.int64(3)
    loader.set_epoch(epoch)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(SpecError, match="rank is a whole number"):
        ShardLoader(store, "x", batch_size=2, rank=0.5)  # type: ignore[arg-type]
    states: list[Any] = [{}, {"epoch": -1, "batch": 0, "order": {}}, {"epoch": 0, "batch": 99}]
    for state in [*states, {**ShardLoader(store, "x", batch_size=2).state_dict(), "batch": 5}]:
        with pytest.raises(SpecError, match="a state is a result of state_dict"):
            ShardLoader(store, "x", batch_size=2).load_state_dict(state)
    of_numpy: Any = {"batch_size": np.int64(4), "seed": np.int64(3), "axes": np.int64(0)}
    loader = ShardLoader(store, "x", shuffle="full", **of_numpy)
    assert sum(len(batch) for batch in loader) == 8


def test_chunks_of_several_lengths_are_refused() -> None:
    if "rectilinear_chunks" not in zarr.config.get("array"):
        pytest.skip("zarr before 3.2 has no lists")
    store = ShardingStore({}, chunks_per_shard=2)
    lists: Any = [[2, 5, 1]]
    with zarr.config.set({"array.rectilinear_chunks": True}):
        zarr.create_array(store, name="x", shape=(8,), chunks=lists, dtype="u1")[:] = 1
        with pytest.raises(UnsupportedError, match="several lengths"):
            ShardLoader(store, "x", batch_size=2)


def test_a_matrix_without_rows_one_by_one_is_refused() -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    sparse_matrix(store, [[1], [2, 3]], (2, 2))
    with pytest.raises(SpecError, match="samples of 'X' are its rows"):
        ShardLoader(store, "X", batch_size=2, window=(2,))
    array(store, (3, 2), (2, 2), name="z")
    with pytest.raises(SpecError, match="equally long"):
        ShardLoader(store, {"x": "X", "z": "z"}, batch_size=2)
    columns = zarr.open_array(store, path="X/indices")
    columns[2] = 7
    with pytest.raises(CorruptValueError, match="outside of its 7"):
        list(ShardLoader(store, "X", batch_size=2))
    columns[2] = 3
    matrix = zarr.open_group(store, path="X")
    for shape in ([2, 7, 1], "2", [3, 7]):
        matrix.attrs["shape"] = shape
        with pytest.raises(SpecError, match="indptr does not fit"):
            ShardLoader(store, "X", batch_size=2)
    matrix.attrs["shape"] = [2, 7]
    zarr.open_array(store, path="X/indptr")[1] = 9
    with pytest.raises(SpecError, match="indptr does not fit"):
        ShardLoader(store, "X", batch_size=2)
    zarr.open_group(store, path="X").attrs["encoding-type"] = "csc_matrix"
    with pytest.raises(UnsupportedError, match=r"'X' is a sparse matrix.*csr_matrix"):
        ShardLoader(store, "X", batch_size=2)
    with pytest.raises(SpecError, match="no array at 'missing'"):
        ShardLoader(store, "missing", batch_size=2)


# ----------------------------------------------------------------- faults and ends


class Slow(CountingStore):
    """Each read of a shard takes a while."""

    pause_s = 0.05

    async def _turn(self) -> None:
        import asyncio

        await asyncio.sleep(self.pause_s)


class Busy(Slow):
    """Counts the reads that are under way, and the most at a time."""

    n = most = 0

    async def _turn(self) -> None:
        self.n += 1
        self.most = max(self.most, self.n)
        await super()._turn()
        self.n -= 1


def test_the_first_batch_shares_the_network_with_few_others() -> None:
    """An epoch of 512 MB fits the limit of 1 GiB, and is not requested at once."""
    base, n, nbytes = Busy(), 64, 8 * 2**20
    base.pause_s = 0
    store = ShardingStore(base, chunks_per_shard=1)
    zarr.create_array(
        store, name="x", shape=(n, nbytes), chunks=(1, nbytes), dtype="u1", fill_value=1
    )
    zarr.open_array(store, path="x")[0] = 7
    chunks = ShardingMapping(store)
    for i in range(1, n):
        chunks[f"x/c/{i}/0"] = chunks["x/c/0/0"]
    base.most, base.pause_s = 0, 0.05
    with ShardLoader(base, "x", batch_size=1) as loader:
        assert (next(iter(loader)) == 7).all()
    assert 16 <= base.most <= 32


def test_a_failed_read_names_shard_and_samples() -> None:
    base = MemoryStore()
    array(ShardingStore(base, chunks_per_shard=2), (40, 3), (4, 3))
    faults = Faults()
    store = ShardingStore(FailingStore(base, faults))
    loader = ShardLoader(store, "x", batch_size=3)
    list(loader)
    faults.at = range(faults.n_calls, 10**6)
    with pytest.raises(OSError, match="failed") as error:
        list(loader)
    (note,) = [each for each in error.value.__notes__ if "samples" in each]
    assert "x/c/0/0" in note
    assert "[0, 1, 2" in note
    faults.at = ()
    assert len(list(loader)) == 14  # the next epoch


def test_a_damaged_shard_and_a_failing_transform() -> None:
    base = MemoryStore()
    array(ShardingStore(base, chunks_per_shard=2), (40, 3), (4, 3))
    objects = objects_of(base)
    objects["x/c/1/0"] = objects["x/c/1/0"][:-9] + b"damaged !"
    with pytest.raises(CorruptShardError) as error:
        list(ShardLoader(ShardingStore(objects), "x", batch_size=3))
    assert any("samples" in note for note in error.value.__notes__)
    loader = ShardLoader(base, "x", batch_size=3, transform=lambda batch: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        list(loader)


@pytest.mark.parametrize("is_local", [False, True])
def test_an_end_at_any_time_leaves_no_thread_and_no_descriptor(
    tmp_path: Path, is_local: bool
) -> None:
    base: Any = LocalStore(tmp_path) if is_local else Slow()
    array(ShardingStore(base, chunks_per_shard=2), (200, 30), (4, 30))
    store = ShardingStore(base)
    options: dict[str, Any] = {"batch_size": 3, "n_threads": 2}
    list(ShardLoader(store, "x", **options))
    forget()
    before = n_descriptors()
    for n in (0, 1, 5):
        loader = ShardLoader(store, "x", shuffle="full", **options)
        batches = iter(loader)
        for _ in range(n):
            next(batches)
        closing = threading.Thread(target=loader.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
        assert threads() == []
        assert next(batches, None) is None
        for batch in loader:  # dropped in the middle
            del batch
            break
        loader.close()
    batches = iter(ShardLoader(store, "x", **options))
    next(batches)
    del batches
    forget()  # the store caches some open files
    assert n_descriptors() <= before


@pytest.mark.parametrize("after_s", [0.01, 0.5])
def test_an_interrupted_consumer_ends_at_once(tmp_path: Path, after_s: float) -> None:
    """Ctrl-C while the consumer begins, and while it waits: the process ends, with its threads."""
    array(ShardingStore(str(tmp_path), chunks_per_shard=2), (4000, 30), (1, 30))
    code = f"""
import os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from zarr_shardstore import ShardingStore, ShardLoader
def transform(batch):
    time.sleep(0.2)
    return batch
loader = ShardLoader({str(tmp_path)!r}, "x", batch_size=3, transform=transform)
try:
    threading.Timer({after_s}, os.kill, (os.getpid(), signal.SIGINT)).start()
    for batch in loader:
        pass
except KeyboardInterrupt:
    assert not [t for t in threading.enumerate() if "loader" in t.name]
    print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_consumer_that_leaves(tmp_path: Path, how: str) -> None:
    array(ShardingStore(str(tmp_path), chunks_per_shard=2), (400, 30), (1, 30))
    end = "os._exit(3)" if how == "kill" else "sys.exit(3)"
    code = f"""
import os, sys
from zarr_shardstore import ShardingStore, ShardLoader
batches = iter(ShardLoader({str(tmp_path)!r}, "x", batch_size=3))
next(batches)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=60, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (3, b"")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_is_refused_and_a_new_iterator_works(tmp_path: Path) -> None:
    array(ShardingStore(str(tmp_path), chunks_per_shard=2), (400, 30), (1, 30))
    code = f"""
import os, warnings
warnings.simplefilter("ignore")
from zarr_shardstore import ShardingStore, ShardLoader, UnsupportedError
loader = ShardLoader({str(tmp_path)!r}, "x", batch_size=3)
batches = iter(loader)
next(batches)
if os.fork() == 0:
    try:
        next(batches)
    except UnsupportedError as error:
        assert "fork" in str(error)
        os._exit(len(list(loader)) % 100)
    os._exit(99)
_, status = os.wait()
assert len(list(batches)) == 133
os._exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 34, done.stderr


# ------------------------------------------------------------------------ frameworks


def test_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    store = ShardingStore({}, chunks_per_shard=2)
    values = array(store, (40, 3), (4, 3))
    loader = ShardLoader(store, "x", batch_size=6, to="torch")
    got = torch.cat(list(torch.utils.data.DataLoader(loader.torch(), batch_size=None)))
    assert np.array_equal(got.numpy(), values)
    dataset = ShardLoader(store, "x", batch_size=6).torch()
    with pytest.raises(UnsupportedError, match="num_workers=0"):
        list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdata_continues_with_the_epoch_of_its_state() -> None:
    """Also at the end of an epoch: torchdata calls ``iter`` twice."""
    pytest.importorskip("torch")
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    store = ShardingStore({}, chunks_per_shard=2)
    array(store, (40, 3), (4, 3))

    def data() -> Any:
        loader = ShardLoader(store, "x", batch_size=6, shuffle="full", to="torch")
        return loaders.StatefulDataLoader(loader.torch(), batch_size=None, num_workers=0)

    for n in (0, 3, 7, 8):  # 8: the iterator has ended
        one, two = data(), data()
        batches = iter(one)
        first = [batch.tolist() for batch in islice(batches, n)]
        two.load_state_dict(one.state_dict())
        rest = [batch.tolist() for _ in range(2) for batch in two]
        whole = [batch.tolist() for each in [data()] for _ in range(3) for batch in each]
        assert [*first, *rest] == whole[: len(first) + len(rest)]
        del batches


def test_jax(tmp_path: Path) -> None:
    """In a process of its own: jax warns of all later forks."""
    pytest.importorskip("jax")
    values = array(ShardingStore(str(tmp_path), chunks_per_shard=2), (40, 300), (4, 300))
    code = f"""
import jax, numpy as np
from zarr_shardstore import ShardLoader
got = list(ShardLoader({str(tmp_path)!r}, "x", batch_size=6, to="jax"))
assert all(isinstance(batch, jax.Array) for batch in got)
print(int(np.concatenate(got).sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == values.sum()


def test_jax_keeps_64_bits_or_refuses(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    store = ShardingStore(str(tmp_path), chunks_per_shard=2)
    for dtype in ("i8", "u8", "f8", "c16"):
        zarr.create_array(store, name=dtype, shape=9, chunks=(2,), dtype=dtype)[:] = 2**40 + 5
    code = f"""
import jax
from zarr_shardstore import ShardLoader, SpecError
for name in ("i8", "u8", "f8", "c16"):
    new = lambda: ShardLoader({str(tmp_path)!r}, name, batch_size=6, to="jax")
    try:
        new()
    except SpecError as error:
        assert "jax_enable_x64" in str(error)
    else:
        raise AssertionError(name)
    with jax.enable_x64(True):  # for this thread only
        local = new()
        try:
            next(iter(local))
        except SpecError as error:
            assert "jax_enable_x64" in str(error)
        else:
            raise AssertionError(name)
jax.config.update("jax_enable_x64", True)
for name in ("i8", "u8", "f8", "c16"):
    assert next(iter(new()))[0] == 2**40 + 5
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_xarray() -> None:
    xr = pytest.importorskip("xarray")
    store = ShardingStore({}, chunks_per_shard=2)
    values = filled((20, 6, 4)).astype("f4")
    ds = xr.Dataset(
        {"t": (("time", "lat", "lon"), values), "mean": (("time",), values.mean(axis=(1, 2)))}
    )
    ds.to_zarr(store, encoding={"t": {"chunks": (4, 6, 4)}}, consolidated=False)
    opened = xr.open_zarr(store, chunks=None, consolidated=False)
    rows = list(ShardLoader.from_xarray(opened, dims="time", batch_size=8))
    assert np.array_equal(np.concatenate([batch["t"] for batch in rows]), values)
    assert np.array_equal(np.concatenate([b["mean"] for b in rows]), values.mean(axis=(1, 2)))
    loader = ShardLoader.from_xarray(opened[["t"]], dims={"lat": 3, "time": 5}, batch_size=3)
    got = np.concatenate([batch["t"] for batch in loader])
    assert got.shape == (8, 5, 3, 4)
    assert np.array_equal(got[5], values[5:10, 3:6])
    for bad in (ds, opened.isel(time=slice(3))):
        with pytest.raises((UnsupportedError, SpecError)):
            ShardLoader.from_xarray(bad, dims="time", batch_size=2)
    with pytest.raises(SpecError, match="mean"):
        ShardLoader.from_xarray(opened, dims={"lat": 3}, batch_size=2)


def test_xarray_with_other_values_than_the_store_is_refused() -> None:
    """Each accepted dataset is delivered with its own values."""
    xr = pytest.importorskip("xarray")
    store = ShardingStore({}, chunks_per_shard=2)
    values = filled((8, 8)).astype("f4")
    attributes: dict[str, dict[str, Any]] = {
        "plain": {},
        "offset": {"add_offset": np.float32(100)},
        "scaled": {"scale_factor": np.float32(2)},
        "masked": {"missing_value": np.float32(7)},
        "dates": {"units": "days since 2000-01-01"},
    }
    ds = xr.Dataset({n: (("y", "x"), values, of) for n, of in attributes.items()})
    ds["unsigned"] = (("y", "x"), values.astype("i1"), {"_Unsigned": "true"})
    ds.to_zarr(store, consolidated=False)
    options: dict[str, Any] = {"consolidated": False, "chunks": None}

    def plain() -> Any:
        return xr.open_zarr(store, **options)[["plain"]]

    before = plain()
    plain().to_zarr(store, append_dim="y", consolidated=False)
    with pytest.raises(UnsupportedError, match="is stored with"):
        ShardLoader.from_xarray(before, dims="y", batch_size=2)
    zarr.open_array(store, path="plain").resize((8, 8))
    decoded = xr.open_zarr(store, **options)
    numbered = plain().assign_coords(y=np.arange(8))
    backwards = slice(None, None, -1)
    others = [
        *[decoded[[name]] for name in decoded.data_vars if name != "plain"],
        plain().assign_coords(y=np.arange(8)[::-1]).sortby("y"),
        numbered.reindex(y=np.arange(8)[::-1]),
        plain().isel(y=backwards),
        plain().isel(x=backwards),
        plain().isel(y=backwards).isel(y=[0, 1, 2, 3, 4, 5, 7, 6]),
        plain().isel(y=xr.Variable("y", np.arange(8)[::-1])),
        plain().transpose("x", "y"),
        plain().roll(y=1),
        plain().load(),
    ]
    for other in others:
        with pytest.raises(UnsupportedError, match="pass the whole dataset"):
            ShardLoader.from_xarray(other, dims="y", batch_size=3)
    raw = xr.open_zarr(store, **options, decode_cf=False)
    same = (plain(), raw, plain().isel(), numbered, plain().head(y=8), plain().rename(y="x", x="y"))
    for each in same:
        for dim in ("y", "x"):
            batches = list(ShardLoader.from_xarray(each, dims=dim, batch_size=3))
            for name, variable in each.data_vars.items():
                got = np.concatenate([batch[name] for batch in batches])
                assert np.array_equal(got, variable.transpose(dim, ...).values)


def test_an_array_that_became_shorter_is_refused() -> None:
    """Its last samples would be fill values. A longer one has the samples of before."""
    store = ShardingStore({}, 2)
    z = zarr.create_array(store, name="x", shape=(10, 2), chunks=(1, 2), dtype="u1")
    z[:] = 1
    loader = ShardLoader(store, "x", batch_size=5)
    z.resize((12, 2))
    assert sum(len(batch) for batch in loader) == 10
    z.resize((8, 2))
    with pytest.raises(SpecError, match=r"'x' has the shape of the loader, \(10, 2\), or more"):
        list(loader)


@pytest.mark.parametrize("chunks_per_shard", [None, 2])
def test_an_array_that_another_program_made_shorter_is_refused(
    tmp_path: Path, chunks_per_shard: int | None
) -> None:
    store = ShardingStore(str(tmp_path), chunks_per_shard)
    array(store, (10, 2), (1, 2))
    loader = ShardLoader(store, "x", batch_size=5)
    assert len(list(loader)) == 2
    document = tmp_path / "x/zarr.json"
    members = json.loads(document.read_text())
    document.write_text(json.dumps({**members, "shape": [8, 2]}))
    with pytest.raises(SpecError, match="has the shape of the loader"):
        list(loader)


@pytest.mark.parametrize("base", ["dict", "obstore", "flat", "local"])
def test_an_array_that_was_made_anew_is_refused(tmp_path: Path, base: str) -> None:
    """Its floats would be read as integers. So is one that was sharded anew."""
    bases: dict[str, Any] = {"dict": {}, "obstore": ObjectStore(obstore.store.MemoryStore())}
    store = ShardingStore(bases.get(base, str(tmp_path)), None if base == "flat" else 4)
    options: dict[str, Any] = {"name": "x", "shape": 64, "chunks": 8, "overwrite": True}
    for dtype in ("f4", "i4"):
        zarr.create_array(store, dtype="i4", **options)[:] = 7
        loader = ShardLoader(store, "x", batch_size=64)
        assert (next(iter(loader)) == 7).all()
        zarr.create_array(store, dtype=dtype, **options)[:] = 7
        if dtype == "i4" and base != "flat":
            reshard(store, 2)
        with (
            nullcontext()
            if base == "flat" and dtype == "i4"
            else pytest.raises(ShardConflictError, match="'x' was converted, replaced or removed")
        ):
            assert (next(iter(loader)) == 7).all()


@pytest.mark.parametrize("base", ["dict", "obstore", "local"])
def test_an_epoch_ends_when_its_array_is_made_anew(tmp_path: Path, base: str) -> None:
    """It has more than what is read ahead."""
    bases: dict[str, Any] = {"dict": {}, "obstore": ObjectStore(obstore.store.MemoryStore())}
    store = ShardingStore(bases.get(base, str(tmp_path)), (4, 1))
    options: dict[str, Any] = {"shape": (1280, 20480), "chunks": (4, 20480), "compressors": None}
    zarr.create_array(store, name="x", dtype="i4", **options)[:] = 7
    memory: dict[str, Any] = {"prefetch_nbytes": 2**25, "pool_nbytes": 2**21, "n_threads": 1}
    batches = iter(ShardLoader(store, "x", batch_size=8, **memory))
    assert (next(batches) == 7).all()
    zarr.create_array(store, name="x", dtype="f4", overwrite=True, **options)[:] = 3.5
    with pytest.raises(ShardConflictError, match="'x' was converted, replaced or removed"):
        assert all((batch == 7).all() for batch in batches)


def test_a_chunk_of_another_size_is_no_other_chunk(tmp_path: Path) -> None:
    """A full disk left an empty chunk file, which a conversion has packed."""
    values = array(LocalStore(tmp_path), (32, 2048), (2, 2048), compressors=None)
    (tmp_path / "x/c/3/0").write_bytes(b"")
    shard_store(tmp_path, chunks_per_shard=4)
    time.sleep(0.05)  # younger files are read again
    loader = ShardLoader(str(tmp_path), "x", batch_size=4, positions=[*range(6), *range(8, 32)])
    for _ in range(2):
        got = np.concatenate(list(loader))
        assert np.array_equal(got, np.delete(values, [6, 7], axis=0))
    for _ in range(3):
        with pytest.raises(ValueError, match="size 0"):
            list(ShardLoader(str(tmp_path), "x", batch_size=4))


def test_an_event_loop_that_ends_is_an_error() -> None:
    code = """
import numpy as np, obstore, zarr
from zarr.core.sync import cleanup_resources
from zarr.storage import ObjectStore
from zarr_shardstore import ShardingStore, ShardLoader
store = ShardingStore(ObjectStore(obstore.store.MemoryStore()), chunks_per_shard=(8, 1))
z = zarr.create_array(store, name="x", shape=(4000, 64), chunks=(2, 64), dtype="i4")
z[:] = 1
options = {"batch_size": 7, "pool_nbytes": 5000, "prefetch_nbytes": 2**25}
loader = ShardLoader(store, "x", **options)
batches = iter(loader)
next(batches)
cleanup_resources()
try:
    list(batches)
except RuntimeError as error:
    assert "loop" in str(error), error
    print(sum(map(len, ShardLoader(store, "x", **options))))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "4000\n", done.stderr


@pytest.mark.parametrize("view", ["chunks", "shards"])
@pytest.mark.parametrize("base", [dict, MemoryStore, Path])
def test_a_loader_sees_what_a_batch_has_buffered(view: Any, base: Any, tmp_path: Path) -> None:
    """Also one that was made before the batch began."""
    store = ShardingStore(tmp_path if base is Path else base(), chunks_per_shard=4, view=view)
    z = zarr.create_array(store, name="x", shape=(16,), chunks=(2,), dtype="u1")
    z[:] = 1
    loader = ShardLoader(store, "x", batch_size=16)
    assert next(iter(loader)).sum() == 16
    with store.batch():
        z[:2] = 7
        np.testing.assert_array_equal(next(iter(loader)), z[:])

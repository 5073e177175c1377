"""The strategy that changes shard files: what is written, and what is left behind."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, ShardingCodec
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from tests.support.any_size import INDEX_CODECS, Location, declare
from tests.support.bases import temporary_directory
from tests.support.kit import forget, system_calls, tuned
from tests.support.rounds import rounds
from tests.support.stops import files_in
from zarr_shardstore import CorruptShardError, ShardingMapping, ShardingStore, SpecError, reshard

ROOT = "data/root/a/c"
WriteStrategy: TypeAlias = Literal["append", "rewrite"]
STRATEGIES: list[WriteStrategy] = ["append", "append", "rewrite"]
INDEX_NBYTES = 8 * 16


def mapping(path: Path, strategy: Any = "append", n: int = 8) -> ShardingMapping:
    return ShardingMapping(path, chunks_per_shard=n, strategy=strategy)


def shard_of(path: Path) -> Path:
    return path / "data/root/a/c0"


def chunks(values: dict[int, bytes]) -> dict[str, bytes]:
    return {f"{ROOT}{i}": value for i, value in values.items()}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each write of a file."""
    sizes: list[int] = []

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(fd: int, pieces: Any, offset: int) -> None:
            sizes.append(sum(map(len, pieces)))
            call(fd, pieces, offset)

        return count if name == "write_at" else call

    with system_calls(counting):
        yield sizes


# ------------------------------------------------------------------ append


@pytest.mark.parametrize("n", [512, 32_768])
def test_a_write_costs_its_chunk(n: int, tmp_path: Path) -> None:
    """And some 80 bytes, at any size of the shard."""
    m = mapping(tmp_path, n=n)
    m[f"{ROOT}0"] = bytes(1000)
    with counted() as sizes:
        for i in range(1, 101):
            m[f"{ROOT}{i}"] = bytes(1000)
    assert sum(sizes) < 100 * 1100
    with counted() as sizes:
        m.erase(f"{ROOT}3")
    assert sum(sizes) < 100


def test_a_shard_is_sealed_when_it_is_full(tmp_path: Path) -> None:
    """Without a gap, a journal, a lock."""
    m = mapping(tmp_path)
    for i in range(8):
        assert bool(list(shard_of(tmp_path).parent.glob("*.__journal"))) == (i > 0)
        m[f"{ROOT}{i}"] = bytes([i]) * 1000
    assert list(files_in(tmp_path)) == ["data/root/a/c0"]
    assert shard_of(tmp_path).stat().st_size == 8 * 1000 + INDEX_NBYTES


def close(m: ShardingMapping) -> None:
    ShardingStore(m.base).close()


def flush_async(m: ShardingMapping) -> None:
    asyncio.run(ShardingStore(m.base).flush())


@pytest.mark.parametrize("seal", [ShardingMapping.flush, close, flush_async])
def test_flush_and_close_trim(seal: Any, tmp_path: Path) -> None:
    """Nothing is left beside the shard, and no gap in it."""
    m = mapping(tmp_path)
    m.update(chunks({1: b"1" * 1000}))
    m.update(chunks({2: b"2" * 1000}))
    assert len(files_in(tmp_path)) == 3
    seal(m)
    assert list(files_in(tmp_path)) == ["data/root/a/c0"]
    assert shard_of(tmp_path).stat().st_size == 2 * 1000 + INDEX_NBYTES
    m.update(chunks({3: b"3"}))
    assert dict(m) == chunks({1: b"1" * 1000, 2: b"2" * 1000, 3: b"3"})


CHILD = """
import sys, multiprocessing
from zarr_shardstore import ShardingMapping

def write(path):
    ShardingMapping(path, chunks_per_shard=8)["data/root/a/c1"] = b"1"

if __name__ == "__main__":
    if sys.argv[2] == "itself":
        write(sys.argv[1])
    else:
        child = multiprocessing.get_context(sys.argv[2]).Process(target=write, args=sys.argv[1:2])
        child.start()
        child.join(60)
"""


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("how", ["itself", "fork", "spawn"])
def test_the_end_of_a_process_seals(how: str, tmp_path: Path) -> None:
    """Also that of a child of multiprocessing, which ends in another way."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    subprocess.run([sys.executable, script, tmp_path / "store", how], check=True, timeout=120)
    assert list(files_in(tmp_path / "store")) == ["data/root/a/c0"]


def test_a_child_does_not_seal_what_its_parent_writes(tmp_path: Path) -> None:
    """Neither does its end give up the parent's locks."""
    m = mapping(tmp_path)
    m.update(chunks({1: b"1"}))
    child = multiprocessing.get_context("fork").Process(target=list, args=(m,))
    child.start()
    child.join(60)
    assert len(files_in(tmp_path)) == 3
    m.update(chunks({2: b"2"}))
    assert dict(m) == chunks({1: b"1", 2: b"2"})


def test_dead_bytes_stay_bounded(tmp_path: Path) -> None:
    """A chunk that is overwritten again and again: the shard is compacted instead of growing."""
    m = mapping(tmp_path)
    m.update(chunks({i: bytes([i]) * 1000 for i in range(8)}))
    largest = 0
    for n in range(200):
        value = os.urandom(1000 + n)
        m[f"{ROOT}3"] = value
        largest = max(largest, shard_of(tmp_path).stat().st_blocks * 512)
    assert largest < 40_000
    assert m[f"{ROOT}3"] == value
    m.flush()
    assert shard_of(tmp_path).stat().st_size < 2 * 8200 + 2 * INDEX_NBYTES


def test_compact_leaves_no_dead_byte(tmp_path: Path) -> None:
    """And puts the entries in order."""
    m = mapping(tmp_path)
    for i in (5, 2, 7, 2):
        m[f"{ROOT}{i}"] = bytes([i]) * 10
    m.compact()
    parts = [bytes([i]) * 10 for i in (2, 5, 7)]
    assert shard_of(tmp_path).read_bytes()[:30] == b"".join(parts)
    assert shard_of(tmp_path).stat().st_size == 30 + INDEX_NBYTES


@pytest.mark.parametrize("base", [dict, MemoryStore])
def test_compact_on_other_base_stores(base: Any) -> None:
    """Shards with dead bytes that somebody else has made; a damaged one stops no other."""
    m = ShardingMapping(base(), chunks_per_shard=2)
    m.update(chunks({0: b"0", 2: b"22", 4: b"444"}))
    raw = ShardingMapping(m.base)
    compact = raw["data/root/a/c1"]
    raw["data/root/a/c0"] = b"x"
    raw["data/root/a/c1"] = compact[:2] + b"dead bytes" + compact[2:]
    raw["data/root/a/c2"] = b"yyy" + raw["data/root/a/c2"][3:]
    with pytest.raises(CorruptShardError, match="c0"):
        m.compact()
    assert raw["data/root/a/c1"] == compact
    assert m[f"{ROOT}4"] == b"yyy"


def test_many_shards_do_not_exhaust_files(tmp_path: Path) -> None:
    """Files are closed, and opened again; sealing finds all."""
    m = mapping(tmp_path, n=4)
    values = {i: bytes([i % 251]) for i in range(0, 4 * 400, 2)}
    order = list(values)
    random.Random(1).shuffle(order)
    before = len(os.listdir("/proc/self/fd"))
    for i in order:
        m[f"{ROOT}{i}"] = values[i]
        assert len(os.listdir("/proc/self/fd")) < before + 300
    assert dict(m) == chunks(values)
    m.flush()
    assert len(files_in(tmp_path)) == 400


@pytest.mark.parametrize("n_gone", [0, 64])
def test_shards_that_are_never_full_are_sealed_in_time(n_gone: int, tmp_path: Path) -> None:
    """Those that were opened first, so that not each keeps two more files beside it; one with
    each write, if only to see that it is gone."""
    forget()  # those of other tests
    gone = mapping(tmp_path / "gone", n=4)
    gone.update({f"{ROOT}{i}": b"1" for i in range(0, 4 * n_gone, 4)})
    shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    m = mapping(tmp_path, n=4)
    n = 60 + n_gone
    values = {i: bytes([i % 256]) for i in range(0, 4 * n, 4)}
    n_left = 20 + n_gone
    with tuned(unsealed_shards=8):
        for i, value in values.items():
            m[f"{ROOT}{i}"] = value
        deadline = time.monotonic() + 60
        while len(list(tmp_path.rglob("*.__journal"))) > n_left and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(list(tmp_path.rglob("*.__journal"))) <= n_left
    assert dict(m) == chunks(values)
    m.flush()
    assert len(files_in(tmp_path)) == n


def test_a_lock_that_fails_keeps_no_other_shard_unsealed(tmp_path: Path) -> None:
    """The end of its use is no reason to choose a shard that is then not sealed."""
    forget()  # those of other tests
    m = mapping(tmp_path, n=4)
    for i in range(0, 40, 4):
        m[f"{ROOT}{i}"] = b"1"
    first = shard_of(tmp_path)
    with tuned(unsealed_shards=8):
        with (
            mock.patch.object(fcntl, "fcntl", side_effect=OSError("no locks")),
            pytest.raises(OSError, match="no locks"),
        ):
            m[f"{ROOT}37"] = b"2"
        m[f"{ROOT}37"] = b"3"
        deadline = time.monotonic() + 60
        while os.path.exists(f"{first}.__journal") and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not os.path.exists(f"{first}.__journal")
    assert dict(m) == chunks({**dict.fromkeys(range(0, 40, 4), b"1"), 37: b"3"})


def test_a_shard_with_a_damaged_chunk_is_left_as_it_is(tmp_path: Path) -> None:
    """Its other chunks are read. Nothing is written beside it, because bytes that come later could
    take the place that its entry points to, until it is overwritten or erased."""
    m = mapping(tmp_path, "rewrite")
    m.update(chunks({0: b"0", 1: b"1"}))
    shard = shard_of(tmp_path)
    data = bytearray(shard.read_bytes())
    data[-INDEX_NBYTES : -INDEX_NBYTES + 8] = (2**40).to_bytes(8, "little")
    shard.write_bytes(data)
    m = mapping(tmp_path)
    changes: list[Any] = [
        lambda: m.set(f"{ROOT}2", bytes(500)),
        lambda: m.erase(f"{ROOT}1"),
        m.compact,
    ]
    for change in changes:
        with pytest.raises(CorruptShardError, match="erase or overwrite this chunk"):
            change()
    m.flush()
    assert shard.read_bytes() == data
    assert m[f"{ROOT}1"] == b"1"
    with pytest.raises(CorruptShardError):
        m[f"{ROOT}0"]
    m.update(chunks({0: b"again", 2: bytes(500)}))
    m.compact()
    assert dict(m) == chunks({0: b"again", 1: b"1", 2: bytes(500)})


def test_conversions_of_shards_that_are_open(tmp_path: Path) -> None:
    """They are sealed first; what this process had open is then another file."""
    store = ShardingStore(tmp_path, chunks_per_shard=(8,))
    z = zarr.create_array(store, shape=(32,), chunks=(2,), dtype="u2")
    z[:11] = np.arange(1, 12)
    assert [key for key in files_in(tmp_path) if key.endswith("__journal")]
    reshard(tmp_path, chunks_per_shard=4)
    assert sorted(files_in(tmp_path)) == ["c/0", "c/1", "zarr.json"]
    z = zarr.open_array(ShardingStore(tmp_path), mode="r+")
    z[11] = 12
    ShardingMapping(tmp_path).flush()
    np.testing.assert_array_equal(z[:13], [*range(1, 13), 0])
    native: Any = zarr.open_array(LocalStore(tmp_path), mode="r")[:13]
    np.testing.assert_array_equal(native, [*range(1, 13), 0])


def test_a_deleted_directory_is_not_made_again(tmp_path: Path) -> None:
    """Neither by flush nor by the end of the process."""
    m = mapping(tmp_path)
    m.update(chunks({1: b"1"}))
    m.erase_prefix("data/")
    m.flush()
    assert not (tmp_path / "data").exists()


def test_a_directory_that_others_made_anew_is_theirs(tmp_path: Path) -> None:
    """What this process has open is the files that were there before."""
    m = mapping(tmp_path / "here")
    m.update(chunks({0: b"old", 1: b"old"}))
    shutil.rmtree(tmp_path / "here/data")
    other = mapping(tmp_path / "there")
    other.update(chunks({0: b"new"}))
    other.flush()
    shutil.copytree(tmp_path / "there/data", tmp_path / "here/data")
    m[f"{ROOT}2"] = b"mine"
    assert dict(m) == chunks({0: b"new", 2: b"mine"})


@pytest.mark.parametrize("nth", range(1, 5))
def test_flush_seals_also_after_a_write_that_failed(nth: int, tmp_path: Path) -> None:
    """It was taken back, or finished, which changed the file once more."""
    declare(tmp_path, "z", 4, 4, checksum="crc32c")
    m = ShardingMapping(tmp_path)
    m.update({"z/c/0": b"0" * 30, "z/c/1": b"1" * 30})
    m["z/c/0"] = b"new" * 11
    n_calls = itertools.count(1)

    def failing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def fail(fd: int, pieces: Any, offset: int) -> None:
            n = next(n_calls)
            if n == nth:
                raise OSError(errno.ENOSPC, "no room")
            call(fd, pieces, offset)

        return fail if name == "write_at" else call

    with system_calls(failing), pytest.raises(OSError, match="no room"):
        m["z/c/2"] = b"2" * 30
    m.flush()
    assert sorted(files_in(tmp_path)) == ["z/c/0", "z/zarr.json"]
    assert (m["z/c/0"], m["z/c/1"]) == (b"new" * 11, b"1" * 30)
    assert m.get("z/c/2") in (None, b"2" * 30)


def test_flush_leaves_an_array_alone_that_others_made_anew(tmp_path: Path) -> None:
    """It has other shards, and without a checksum nothing in them says so."""
    store = ShardingStore(tmp_path, chunks_per_shard=2, index_codecs=["bytes"])
    z = zarr.create_array(store, shape=(6,), chunks=(1,), dtype="u1", compressors=None)
    z[0] = 1
    codec = ShardingCodec(
        chunk_shape=(1,), codecs=[BytesCodec()], index_codecs=[BytesCodec(endian="little")]
    )
    new: Any = zarr.create_array(
        tmp_path,
        shape=(9,),
        chunks=(8,),
        dtype="u1",
        compressors=None,
        serializer=codec,
        overwrite=True,
    )
    data = np.arange(1, 10, dtype="u1")
    new[:] = data
    for _ in range(2):
        ShardingMapping(store).flush()
        np.testing.assert_array_equal(zarr.open_array(tmp_path, mode="r")[:], data)


@settings(deadline=None, max_examples=rounds(300))
@given(
    location=st.sampled_from(["end", "start"]),
    checksum=st.sampled_from(list(INDEX_CODECS)),
    changes=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(0, 12) | st.sampled_from([200, 5000, None, "flush", "compact"]),
            st.sampled_from(STRATEGIES),
            st.booleans(),
        ),
        max_size=12,
    ),
)
def test_entries_of_any_size_survive_each_other(
    location: Location,
    checksum: str,
    changes: list[tuple[int, int | str | None, WriteStrategy, bool]],
) -> None:
    """Where an entry finds its place depends on the sizes of all that were there before."""
    path = temporary_directory()
    declare(path, "z", 5, 3, checksum=checksum, location=location)
    stores = {name: ShardingMapping(path, strategy=name) for name in STRATEGIES}
    model: dict[str, bytes] = {}
    for number, (i, nbytes, strategy, is_elsewhere) in enumerate(changes, start=1):
        if is_elsewhere:
            forget(path)  # as if by another process
        m, key = stores[strategy], f"z/c/{i}"
        match nbytes:
            case "flush":
                m.flush()
            case "compact":
                m.compact()
            case int():
                m[key] = model[key] = bytes([number]) * nbytes
            case _:
                model.pop(key, None)
                m.erase(key)
        found = dict(stores["append"])
        del found["z/zarr.json"]
        assert found == model
    forget(path)


@pytest.mark.parametrize("limit", [0, 3000, 10_000])
def test_dead_bytes_stay_below_a_limit(limit: int, tmp_path: Path) -> None:
    """At any time, whatever is replaced and erased; and every chunk is there."""
    m = ShardingMapping(tmp_path, chunks_per_shard=8, max_dead_bytes=limit)
    model: dict[int, bytes] = {}
    rng = random.Random(5)
    for _ in range(150):
        i = rng.randrange(8)
        if rng.random() < 0.2:
            model.pop(i, None)
            m.erase(f"{ROOT}{i}")
        else:
            model[i] = rng.randbytes(rng.choice([10, 900, 1100]))
            m[f"{ROOT}{i}"] = model[i]
        if model:
            data = b"".join(model.values())
            on_disk = shard_of(tmp_path).read_bytes().rstrip(b"\0")
            assert sum(map(bool, on_disk)) <= len(data) + limit + 2 * INDEX_NBYTES
    assert dict(m) == chunks(model)


# ------------------------------------------------------------- growing arrays


@pytest.mark.parametrize("side", [2, 64])
def test_a_growing_array_keeps_its_files_and_offsets(side: int, tmp_path: Path) -> None:
    """`append` of an array writes into the file that is there. So a reader that has read an index
    finds each chunk where the index says, and a shard is sealed when it is full."""
    store = ShardingStore(tmp_path, chunks_per_shard=(16, 1, 1))
    z = zarr.create_array(
        store, shape=(0, side, side), chunks=(1, side, side), dtype="u2", compressors=None
    )
    places: dict[tuple[int, int], Any] = {}
    n_replaced = n_resized = 0
    before = os.stat(tmp_path)
    for i in range(64):
        z.append(np.full((1, side, side), i + 1, "u2"))
        path = tmp_path / f"c/{i // 16}/0/0"
        status = path.stat()
        if i % 16:
            n_replaced += status.st_ino != before.st_ino
            n_resized += status.st_size != before.st_size
        before = status
        index = np.frombuffer(path.read_bytes()[-16 * 16 - 4 : -4], "<u8").reshape(16, 2)
        for k in range(i % 16 + 1):
            place = index[k].tolist()
            assert places.setdefault((i // 16, k), place) == place
        native: Any = zarr.open_array(LocalStore(tmp_path), mode="r")[i]
        assert (native == i + 1).all()
    assert n_replaced == 0
    assert n_resized <= 3 * 4
    assert sorted(files_in(tmp_path)) == [*(f"c/{i}/0/0" for i in range(4)), "zarr.json"]


# ----------------------------------------------------------------- options


def wrapped(path: Path) -> Any:
    return WrapperStore(LocalStore(path))


@pytest.mark.parametrize("base", [lambda _: {}, lambda _: MemoryStore(), wrapped])
def test_base_stores_that_cannot(base: Any, tmp_path: Path) -> None:
    """An error that says what can."""
    with pytest.raises(SpecError, match="rewrite"):
        ShardingStore(base(tmp_path), strategy="append")


@pytest.mark.parametrize("locking", ["none", "lockfile"])
def test_without_locks_of_the_system_shards_are_rewritten(locking: Any, tmp_path: Path) -> None:
    """There, what is written and what is read cannot be kept apart."""
    with pytest.raises(SpecError, match="locking='os'"):
        ShardingStore(tmp_path, strategy="append", locking=locking)
    m = ShardingMapping(tmp_path, chunks_per_shard=8, locking=locking)
    m.update(chunks({1: b"1"}))
    m.update(chunks({2: b"2"}))
    assert shard_of(tmp_path).stat().st_size == 2 + INDEX_NBYTES


@pytest.mark.parametrize("strategy", ["in_place", "fast"])
def test_no_such_strategy(strategy: Any, tmp_path: Path) -> None:
    """The error names those that there are."""
    with pytest.raises(SpecError, match="'append'"):
        ShardingStore(tmp_path, strategy=strategy)
